"""RLPD: online reinforcement learning with prior data, after Ball, Smith, Kostrikov and Levine, "Efficient Online
Reinforcement Learning with Offline Data", ICML 2023 (arXiv 2302.02948), algorithm 1.

It is soft actor-critic (Haarnoja et al. 2018, learned temperature) with three changes: batches are half demonstrations
and half online experience (the replay's business, not this file's), critics have layer norm, and there are E of them,
of which a random subset of Z makes the target:

    y        = r + gamma (1 - terminated) min_{i in Z} Q_theta'_i(s', a'),   a' ~ pi_phi(.|s')
    L(theta) = sum_i w (y - Q_theta_i(s, a))^2
    L(phi)   = alpha log pi_phi(a|s) - mean_i Q_theta_i(s, a),               a ~ pi_phi(.|s)
    L(alpha) = -alpha (log pi_phi(a|s) + target entropy)
    theta'  <- theta' + rho (theta - theta')

Over n steps r is their discounted sum, and gamma^n stands for gamma; the batch holds both, and the weights w, which are
1 unless its sampler corrects for what it prefers. The entropy term is left out of y by default, as the paper advises
for sparse rewards. G, the number of critic updates for each update of the actor, is `actor_period`. Actions are scaled
to [-1, 1] and observations to their spec's bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hal.spec import Array, ArraySpec, RobotSpec
from user_sys.algorithms.algorithm import Algorithm, Transitions
from user_sys.algorithms.rlpd_config import RlpdConfig
from user_sys.errors import WireError
from user_sys.policies.mlp import (
    INPUT_CLIP,
    LOG_STD_MAX,
    LOG_STD_MIN,
    action_affine,
    bounds_affine,
    feature_specs,
)
from user_sys.weights.gpu.device import DeviceCopy, HostCopies, as_array
from user_sys.weights.snapshot import PolicySnapshot

LAST_LAYER_GAIN = 0.01
GENERATOR = "generator"
Parameters = dict[str, Tensor]


class Rlpd(Algorithm):
    """See the file's head. Float32 on one device; draws from its own generators only."""

    def __init__(
        self,
        config: RlpdConfig,
        spec: RobotSpec,
        *,
        features: Sequence[str] = (),
        seed: int,
        device: str = "cpu",
        copies: HostCopies | None = None,
    ) -> None:
        """Fresh networks that read `features` of `spec` (default: all vectors), initialised and drawing with `seed`.

        Args:
            copies: takes snapshots on `device`, to be fetched later; None where it is the host's memory.
        """
        self._config, self._device = config, torch.device(device)
        self._host = copies
        self._generator = torch.Generator(self._device).manual_seed(seed)
        specs = feature_specs(spec, features)
        self._features = tuple(s.name for s in specs)
        self._affine = self._fixed_affine(specs, spec.action)
        inputs, actions = self._affine["input.offset"].numel(), self._affine["action.centre"].numel()
        self._actor = actor_parameters(inputs, actions, config.actor_hidden, self._generator)
        self._critics = critic_parameters(inputs + actions, config.critic_hidden, config.critics, self._generator)
        self._targets = {name: p.detach().clone() for name, p in self._critics.items()}
        self._acting = {name: p.detach().clone() for name, p in self._actor.items()}
        self._log_alpha = torch.tensor(math.log(config.initial_temperature), device=self._device, requires_grad=True)
        self._target_entropy = config.entropy_per_action * actions
        self._optimizers = {
            "actor": self._adam(self._actor.values()),
            "critics": self._adam(self._critics.values()),
            "temperature": self._adam([self._log_alpha]),
        }
        self._updates = 0
        self._newest: dict[str, Tensor] = {}

    def update(self, batch: Transitions) -> None:
        """See `Algorithm.update`."""
        observation, next_observation = self._inputs(batch.observation), self._inputs(batch.next_observation)
        action = self._scaled_action(batch.action)
        reward = torch.as_tensor(batch.reward, dtype=torch.float32, device=self._device)
        alive = 1.0 - torch.as_tensor(batch.terminated, device=self._device).float()
        discount = torch.as_tensor(batch.discount, dtype=torch.float32, device=self._device)
        weight = torch.as_tensor(batch.weight, dtype=torch.float32, device=self._device)
        target = self._target(next_observation, reward, discount * alive)
        self._update_critics(observation, action, target, weight)
        if self._updates % self._config.actor_period == 0:
            log_prob = self._update_actor(observation)
            self._update_temperature(log_prob)
        self._updates += 1

    def _target(self, next_observation: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """y, shape (n,); `discount` is 0 where nothing is bootstrapped."""
        with torch.no_grad():
            next_action, log_prob = self._draw(self._actor, next_observation)
            shuffled = torch.randperm(self._config.critics, generator=self._generator, device=self._device)
            subset = {name: p[shuffled[: self._config.target_critics]] for name, p in self._targets.items()}
            q = critics_forward(subset, torch.cat([next_observation, next_action], -1)).amin(0)
            if self._config.backup_entropy:
                q = q - self._log_alpha.exp() * log_prob
            return reward + discount * q

    def _update_critics(self, observation: Tensor, action: Tensor, target: Tensor, weight: Tensor) -> None:
        q = critics_forward(self._critics, torch.cat([observation, action], -1))
        loss = ((q - target).square() * weight).mean(-1)
        self._step("critics", loss.sum(), self._critics)  # the critics share nothing: a sum trains each as if alone
        online = [p.detach() for p in self._critics.values()]
        torch._foreach_lerp_(list(self._targets.values()), online, self._config.target_rate)
        self._newest |= {"critic_loss": loss.detach(), "q": q.detach(), "target": target}

    def _update_actor(self, observation: Tensor) -> Tensor:
        """Returns log pi of the drawn actions, shape (n,), without gradient."""
        action, log_prob = self._draw(self._actor, observation)
        frozen = {name: p.detach() for name, p in self._critics.items()}
        q = critics_forward(frozen, torch.cat([observation, action], -1)).mean(0)
        loss = (self._log_alpha.detach().exp() * log_prob - q).mean()
        self._step("actor", loss, self._actor)
        newest = [p.detach() for p in self._actor.values()]
        torch._foreach_lerp_(list(self._acting.values()), newest, self._config.acting_rate)
        self._newest |= {"actor_loss": loss.detach(), "log_prob": log_prob.detach()}
        return log_prob.detach()

    def _update_temperature(self, log_prob: Tensor) -> None:
        loss = -self._log_alpha.exp() * (log_prob.mean() + self._target_entropy)
        self._step("temperature", loss, {"log_alpha": self._log_alpha})

    def _step(self, network: str, loss: Tensor, parameters: Parameters) -> None:
        optimizer = self._optimizers[network]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), self._config.gradient_norm_max)
        optimizer.step()

    def _draw(self, actor: Parameters, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor_forward(actor, observation)
        noise = torch.empty_like(mean).normal_(generator=self._generator)
        return squash(mean, log_std, noise)

    def _inputs(self, arrays: Mapping[str, Array]) -> Tensor:
        parts = [torch.as_tensor(arrays[name], dtype=torch.float32, device=self._device) for name in self._features]
        x = torch.cat(parts, -1).sub_(self._affine["input.offset"]).mul_(self._affine["input.scale"])
        return x.clamp_(-INPUT_CLIP, INPUT_CLIP)

    def _scaled_action(self, action: Array) -> Tensor:
        a = torch.as_tensor(action, dtype=torch.float32, device=self._device) - self._affine["action.centre"]
        return a.div_(self._affine["action.scale"]).clamp_(-1.0, 1.0)

    def _fixed_affine(self, specs: Sequence[ArraySpec], action: ArraySpec) -> Parameters:
        offset, scale = bounds_affine(specs)
        centre, half = action_affine(action)
        arrays = {"input.offset": offset, "input.scale": scale, "action.centre": centre, "action.scale": half}
        return {name: torch.from_numpy(value).to(self._device) for name, value in arrays.items()}

    def _adam(self, parameters: Iterable[Tensor]) -> torch.optim.Adam:
        """Adam whose moments exist before the first step, made as torch would, so that every state holds them."""
        optimizer = torch.optim.Adam(parameters, lr=self._config.learning_rate, fused=True)
        for p in optimizer.param_groups[0]["params"]:
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = {"step": torch.zeros((), device=self._device), **moments}
        return optimizer

    def _tensors(self) -> Parameters:
        """Every tensor that updates change, by name."""
        networks = {"actor": self._actor, "critics": self._critics, "temperature": {"log_alpha": self._log_alpha}}
        named = {f"targets.{name}": p for name, p in self._targets.items()}
        named |= {f"acting.{name}": p for name, p in self._acting.items()}
        for network, parameters in networks.items():
            for name, p in parameters.items():
                named[f"{network}.{name}"] = p
                for moment, value in self._optimizers[network].state[p].items():
                    named[f"{network}.{name}.{moment}"] = value
        return named

    def scalars(self) -> dict[str, float]:
        """See `Algorithm.scalars`."""
        means = {name: float(value.mean()) for name, value in self._newest.items()}
        if "log_prob" in means:
            means["entropy"] = -means.pop("log_prob")
        return means | {"temperature": float(self._log_alpha.detach().exp())} if means else {}

    def policy_weights(self) -> dict[str, Array]:
        """See `Algorithm.policy_weights`; names and layout as `user_sys.policies.mlp` documents."""
        return _copies({**self._acting, **self._affine})

    def policy_snapshot(self) -> PolicySnapshot:
        """See `Algorithm.policy_snapshot`."""
        weights = {**self._acting, **self._affine}
        if self._host is not None:
            return self._host.snapshot(weights)
        return {name: as_array(tensor) for name, tensor in weights.items()}

    def td_errors(self) -> Array:
        """|y - Q_i(s, a)| of each sample of the newest update, before it, the mean over i: float32 (n,), a copy.

        Worked out when asked for. Raises KeyError before the first update.
        """
        errors: Array = (self._newest["q"] - self._newest["target"]).abs().mean(0).cpu().numpy()
        return errors

    @torch.no_grad()
    def policy_kl(self, former: PolicySnapshot, batch: Transitions) -> float:
        """Mean KL(acting policy || the one of the snapshot `former`) over the batch's observations, in nats.

        Of the Gaussians before squashing, which both undergo alike.
        """
        x = self._inputs(batch.observation)
        mean, log_std = actor_forward(self._acting, x)
        mean0, log_std0 = actor_forward(self._earlier(former), x)
        ratio = (2 * (log_std - log_std0)).exp()
        distance = ((mean - mean0) / log_std0.exp()).square()
        return float((0.5 * (ratio + distance - 1.0) - (log_std - log_std0)).sum(-1).mean())

    def _earlier(self, former: PolicySnapshot) -> Parameters:
        if isinstance(former, DeviceCopy):
            return {name: former.tensors[name] for name in self._acting}
        assert isinstance(former, Mapping)  # these are the two that `policy_snapshot` gives
        return {name: torch.from_numpy(former[name]).to(self._device) for name in self._acting}

    def state_dict(self) -> dict[str, Array]:
        """See `Algorithm.state_dict`."""
        state = _copies(self._tensors())
        state[GENERATOR] = self._generator.get_state().numpy().copy()
        state["updates"] = np.array([self._updates], np.int64)
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """See `Algorithm.load_state_dict`. A state from another sort of device gives all but its generator."""
        expected = {name: value.shape for name, value in self.state_dict().items()}
        found = {name: np.shape(value) for name, value in state.items()}
        same_device = found.get(GENERATOR) == expected[GENERATOR]
        if found | {GENERATOR: ()} != expected | {GENERATOR: ()} or GENERATOR not in found:
            wrong = sorted({k for k, _ in set(found.items()) ^ set(expected.items())})
            raise WireError(f"the state is of another RLPD (other settings or another robot): {wrong[:6]} differ")
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(torch.from_numpy(np.array(state[name])))
        if same_device:
            self._generator.set_state(torch.from_numpy(np.array(state[GENERATOR])))
        self._updates = int(state["updates"][0])


def actor_parameters(inputs: int, actions: int, hidden: tuple[int, ...], generator: torch.Generator) -> Parameters:
    """Named as `user_sys.policies.mlp` documents; weights have shape (in, out)."""
    parameters, width = {}, inputs
    for i, out in enumerate(hidden):
        parameters[f"hidden.{i}.weight"] = _xavier((width, out), generator)
        parameters[f"hidden.{i}.bias"] = _zeros((out,), generator)
        width = out
    for head in ("mean", "log_std"):
        parameters[f"{head}.weight"] = _xavier((width, actions), generator)
        parameters[f"{head}.bias"] = _zeros((actions,), generator)
    return parameters


def actor_forward(actor: Parameters, x: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, log_std) of the Gaussian before squashing, each (n, a), for scaled inputs `x` (n, inputs)."""
    for i in range(len(actor) // 2 - 2):
        x = F.relu(torch.addmm(actor[f"hidden.{i}.bias"], x, actor[f"hidden.{i}.weight"]))
    mean = torch.addmm(actor["mean.bias"], x, actor["mean.weight"])
    log_std = torch.addmm(actor["log_std.bias"], x, actor["log_std.weight"])
    return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)


def squash(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The action tanh(mean + std noise) in [-1, 1], (n, a), and its log density, (n,) (Haarnoja et al., appendix C)."""
    u = mean + log_std.exp() * noise
    gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    # log(1 - tanh(u)^2), in the form that stays finite for large |u|.
    log_slope = 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
    return torch.tanh(u), (gaussian - log_slope).sum(-1)


def critic_parameters(inputs: int, hidden: tuple[int, ...], critics: int, generator: torch.Generator) -> Parameters:
    """E critics in one set of tensors, the ensemble first: weights (E, in, out), biases (E, 1, out)."""
    parameters, width = {}, inputs
    for i, out in enumerate((*hidden, 1)):
        parameters[f"{i}.weight"] = _xavier((critics, width, out), generator)
        parameters[f"{i}.bias"] = _zeros((critics, 1, out), generator)
        width = out
    # Values start near 0: a sparse reward would take thousands of updates to lift a random pessimistic minimum.
    parameters[f"{len(hidden)}.weight"].data.mul_(LAST_LAYER_GAIN)
    return parameters


def critics_forward(critics: Parameters, x: Tensor) -> Tensor:
    """Q of every critic, (E, n), for `x` (n, in): linear, layer norm, relu; the last layer linear alone.

    The layer norm has no gain and bias of its own: the next linear layer has them.
    """
    depth, h = len(critics) // 2, x.expand(critics["0.weight"].shape[0], -1, -1)
    for i in range(depth - 1):
        h = torch.baddbmm(critics[f"{i}.bias"], h, critics[f"{i}.weight"])
        h = F.relu(F.layer_norm(h, h.shape[-1:]))
    return torch.baddbmm(critics[f"{depth - 1}.bias"], h, critics[f"{depth - 1}.weight"]).squeeze(-1)


def _xavier(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    bound = math.sqrt(6.0 / (shape[-2] + shape[-1]))
    weight = torch.empty(shape, device=generator.device).uniform_(-bound, bound, generator=generator)
    return weight.requires_grad_()


def _zeros(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.zeros(shape, device=generator.device).requires_grad_()


def _copies(tensors: Parameters) -> dict[str, Array]:
    return {name: np.array(t.detach().cpu().numpy()) for name, t in tensors.items()}
