"""RLPD: online reinforcement learning with prior data, after Ball, Smith, Kostrikov and Levine, "Efficient Online
Reinforcement Learning with Offline Data", ICML 2023 (arXiv 2302.02948), algorithm 1.

It is soft actor-critic (Haarnoja et al. 2018, learned temperature) with three changes. Batches are half demonstrations
and half online experience (the replay package does this). Critics have layer norm. There are E critics, and a random
subset of Z makes the target:

    y        = r + gamma (1 - terminated) min_{i in Z} Q_theta'_i(s', a'),   a' ~ pi_phi(.|s')
    L(theta) = sum_i w (y - Q_theta_i(s, a))^2
    L(phi)   = alpha log pi_phi(a|s) - mean_i Q_theta_i(s, a),               a ~ pi_phi(.|s)
    L(alpha) = -alpha (log pi_phi(a|s) + target entropy)
    theta'  <- theta' + rho (theta - theta')

Over n steps r is the discounted sum of rewards, and gamma^n replaces gamma. The batch holds both, and the weights w,
which are 1 unless the sampler corrects for its priorities. By default y has no entropy term, as the paper advises for
sparse rewards. G, the number of critic updates per actor update, is `actor_period`. Actions are scaled to [-1, 1] and
observations to the bounds of their spec.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hal.spec import Array, ArraySpec, RobotSpec
from user_sys.algorithms.algorithm import Algorithm, TransitionArrays
from user_sys.algorithms.distributed import FunctionalModule, Parameters, ShardedWeights, TrainingGroup
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
from user_sys.weights.gpu_copy import DeviceSnapshot, HostCopier, as_array
from user_sys.weights.snapshot import PolicySnapshot

LAST_LAYER_GAIN = 0.01
GENERATOR, NOISE = "generator", "noise"
NETWORKS = ("targets", "acting", "actor", "critics")
TEMPERATURE = "temperature"


class Rlpd(Algorithm):
    """See the module. Float32 on one device, with random generators of its own.

    In a `group`, each rank updates with its own batch and holds its rows of every network, gradient and moment (FSDP2).
    Gradients are averaged, so that the batches count as one. All ranks call the same methods in the same order. Weights
    and
    state are complete at rank 0, and empty elsewhere.
    """

    def __init__(
        self,
        config: RlpdConfig,
        spec: RobotSpec,
        *,
        features: Sequence[str] = (),
        seed: int,
        device: str = "cpu",
        copier: HostCopier | None = None,
        group: TrainingGroup | None = None,
    ) -> None:
        """Builds networks that read `features` of `spec` (default: all vectors); `seed` initialises them and all draws.

        Args:
            copier: takes snapshots on `device` for a later fetch; None for host memory.
            group: the ranks that train together; None for a single process.
        """
        self._config, self._device, self._seed, self._group = config, torch.device(device), seed, group
        self._copier = copier
        self._generator = torch.Generator(self._device).manual_seed(seed)  # its draws are equal on all ranks
        specs = feature_specs(spec, features)
        self._features = tuple(s.name for s in specs)
        self._affine = self._fixed_affine(specs, spec.action)
        inputs, actions = self._affine["input.offset"].numel(), self._affine["action.centre"].numel()
        actor = FunctionalModule(
            actor_parameters(inputs, actions, config.actor_hidden, self._generator), compute=actor_forward
        )
        critics = FunctionalModule(
            critic_parameters(inputs + actions, config.critic_hidden, config.critics, self._generator),
            compute=critic_values,
        )
        networks = (critics.frozen_copy(), actor.frozen_copy(), actor, critics)
        self._networks = dict(zip(NETWORKS, networks, strict=True))
        self._noise = self._generator
        if group is not None:
            for network in self._networks.values():
                group.shard(network)
            self._noise = torch.Generator(self._device).manual_seed(_rank_seed(seed, group.rank, 0))
        self._parameters = {name: network.local_parameters() for name, network in self._networks.items()}
        self._log_alpha = torch.tensor(math.log(config.initial_temperature), device=self._device, requires_grad=True)
        self._target_entropy = config.entropy_per_action * actions
        self._optimizers = {
            "actor": self._adam(self._parameters["actor"].values()),
            "critics": self._adam(self._parameters["critics"].values()),
            TEMPERATURE: self._adam([self._log_alpha]),
        }
        self._updates = 0
        self._newest: dict[str, Tensor] = {}

    def update(self, batch: TransitionArrays) -> None:
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
        """Returns y, shape (n,); `discount` is 0 if nothing is bootstrapped."""
        with torch.no_grad():
            next_action, log_prob = self._draw(next_observation)
            shuffled = torch.randperm(self._config.critics, generator=self._generator, device=self._device)
            subset = shuffled[: self._config.target_critics]
            q: Tensor = (
                self._networks["targets"](torch.cat([next_observation, next_action], -1), subset=subset)
                .squeeze(-1)
                .amin(0)
            )
            if self._config.backup_entropy:
                q = q - self._log_alpha.exp() * log_prob
            return reward + discount * q

    def _update_critics(self, observation: Tensor, action: Tensor, target: Tensor, weight: Tensor) -> None:
        q = self._networks["critics"](torch.cat([observation, action], -1)).squeeze(-1)
        loss = ((q - target).square() * weight).mean(-1)
        self._step("critics", loss.sum())  # the critics share no parameters, so a sum trains each on its own
        self._follow("targets", "critics", self._config.target_rate)
        self._newest |= {"critic_loss": loss.detach(), "q": q.detach(), "target": target}

    def _update_actor(self, observation: Tensor) -> Tensor:
        """Returns log pi of the drawn actions, shape (n,), without gradient."""
        action, log_prob = self._draw(observation)
        q = self._networks["critics"](torch.cat([observation, action], -1), frozen=True).squeeze(-1).mean(0)
        loss = (self._log_alpha.detach().exp() * log_prob - q).mean()
        self._step("actor", loss)
        self._follow("acting", "actor", self._config.acting_rate)
        self._newest |= {"actor_loss": loss.detach(), "log_prob": log_prob.detach()}
        return log_prob.detach()

    def _update_temperature(self, log_prob: Tensor) -> None:
        self._step(TEMPERATURE, -self._log_alpha.exp() * (log_prob.mean() + self._target_entropy))

    def _step(self, name: str, loss: Tensor) -> None:
        optimizer = self._optimizers[name]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._clip(name, optimizer.param_groups[0]["params"])
        optimizer.step()

    def _clip(self, name: str, parameters: list[Tensor]) -> None:
        """Scales a gradient down to its maximum norm, which covers all shards."""
        most = self._config.gradient_norm_max
        if self._group is None:
            torch.nn.utils.clip_grad_norm_(parameters, most)
        elif name == TEMPERATURE:  # a scalar, equal on all ranks
            self._group.all_reduce_mean(require_gradient(self._log_alpha))
            torch.nn.utils.clip_grad_norm_(parameters, most)
        else:
            self._networks[name].move_gradients_to(self._parameters[name])
            total = self._group.global_norm([require_gradient(p) for p in parameters])
            torch.nn.utils.clip_grads_with_norm_(parameters, most, total)

    def _follow(self, slow: str, fast: str, rate: float) -> None:
        newest = [p.detach() for p in self._parameters[fast].values()]
        torch._foreach_lerp_(list(self._parameters[slow].values()), newest, rate)

    def _draw(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self._networks["actor"](observation)
        return squash(mean, log_std, self._draw_noise(mean))

    def _draw_noise(self, mean: Tensor) -> Tensor:
        return torch.empty_like(mean).normal_(generator=self._noise)

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
        """Creates Adam with its moments before the first step, so that every state holds them."""
        optimizer = torch.optim.Adam(parameters, lr=self._config.learning_rate, fused=True)
        for p in optimizer.param_groups[0]["params"]:
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = {"step": torch.zeros((), device=self._device), **moments}
        return optimizer

    def _tensors(self) -> Parameters:
        """Returns every tensor that updates change, or this rank's shard of it, by name."""
        named = {f"{slow}.{name}": p for slow in ("targets", "acting") for name, p in self._parameters[slow].items()}
        trained = {name: self._parameters[name] for name in ("actor", "critics")}
        for network, parameters in (trained | {TEMPERATURE: {"log_alpha": self._log_alpha}}).items():
            for name, p in parameters.items():
                named[f"{network}.{name}"] = p
                for moment, value in self._optimizers[network].state[p].items():
                    named[f"{network}.{name}.{moment}"] = value
        return named

    def _shapes(self, tensors: Parameters) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the whole tensors; a moment has the shape of its parameter."""
        whole = {
            f"{network}.{name}": shape
            for network, parts in self._networks.items()
            for name, shape in parts.shapes.items()
        }
        return {
            name: (whole[name] if name in whole else whole[name.rpartition(".")[0]]) if tensor.ndim else ()
            for name, tensor in tensors.items()
        }

    def scalars(self) -> dict[str, float]:
        """See `Algorithm.scalars`; for this rank's batch."""
        means = {name: float(value.mean()) for name, value in self._newest.items()}
        if "log_prob" in means:
            means["entropy"] = -means.pop("log_prob")
        return means | {"temperature": float(self._log_alpha.detach().exp())} if means else {}

    def policy_weights(self) -> dict[str, Array]:
        """See `Algorithm.policy_weights`; names and layout as `user_sys.policies.mlp` documents."""
        acting = self._parameters["acting"]
        if self._group is None:
            return _to_arrays({**acting, **self._affine})
        whole = self._group.gather_tensors(acting, self._networks["acting"].shapes)
        return {**whole, **_to_arrays(self._affine)} if self._group.rank == 0 else {}

    def policy_snapshot(self) -> PolicySnapshot:
        """See `Algorithm.policy_snapshot`. In a group each rank fetches its shard."""
        acting = self._parameters["acting"]
        if self._group is not None:
            if self._copier is None:
                return self.policy_weights()
            rest = _to_arrays(self._affine)
            return ShardedWeights(
                self._copier.snapshot(acting), self._networks["acting"].shapes, rest, self._group.weights_gather
            )
        weights = {**acting, **self._affine}
        if self._copier is not None:
            return self._copier.snapshot(weights)
        return {name: as_array(tensor) for name, tensor in weights.items()}

    def td_errors(self) -> Array:
        """Computes |y - Q_i(s, a)| of each sample before the newest update, averaged over i: float32 (n,), a copy.

        Raises KeyError before the first update.
        """
        errors: Array = (self._newest["q"] - self._newest["target"]).abs().mean(0).cpu().numpy()
        return errors

    @torch.no_grad()
    def policy_kl(
        self, former: PolicySnapshot, batch: TransitionArrays, newest: Mapping[str, Array] | None = None
    ) -> float:
        """Returns the mean KL(acting policy || policy `former`) over the batch's observations, in nats.

        It compares the Gaussians before squashing, which is the same for both.

        Args:
            newest: the acting policy's weights from `policy_weights`, if ranks hold shards of it.
        """
        x = self._inputs(batch.observation)
        mean, log_std = actor_forward(self._parameters["acting"] if newest is None else self._on_device(newest), x)
        mean0, log_std0 = actor_forward(self._on_device(former), x)
        ratio = (2 * (log_std - log_std0)).exp()
        distance = ((mean - mean0) / log_std0.exp()).square()
        return float((0.5 * (ratio + distance - 1.0) - (log_std - log_std0)).sum(-1).mean())

    def _on_device(self, weights: PolicySnapshot) -> Parameters:
        """Returns the actor's parameters among a policy's weights."""
        if isinstance(weights, DeviceSnapshot):
            return {name: weights.tensors[name] for name in self._networks["acting"].shapes}
        assert isinstance(weights, Mapping)  # the two forms that hold whole tensors
        return {name: torch.from_numpy(weights[name]).to(self._device) for name in self._networks["acting"].shapes}

    def state_dict(self) -> dict[str, Array]:
        """See `Algorithm.state_dict`."""
        tensors = self._tensors()
        if self._group is None:
            state = _to_arrays(tensors)
        else:
            state = self._group.gather_tensors(tensors, self._shapes(tensors))
            noise = self._group.gather_bytes(self._noise.get_state().numpy().tobytes())
            if self._group.rank:
                return {}
            state[NOISE] = np.stack([np.frombuffer(each, np.uint8) for each in noise])
        state[GENERATOR] = self._generator.get_state().numpy().copy()
        state["updates"] = np.array([self._updates], np.int64)
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """See `Algorithm.load_state_dict`. Each rank gets the whole state and takes its shards.

        A state from another kind of device restores all but the generators. One from another number of ranks restores
        all but
        the generators of noise. These restart from their seeds.
        """
        tensors = self._tensors()
        expected = {**self._shapes(tensors), GENERATOR: (), "updates": (1,)}
        found = {name: np.shape(value) for name, value in state.items() if name != NOISE}
        if {**found, GENERATOR: ()} != expected or GENERATOR not in found:
            wrong = sorted({k for k, _ in set(found.items()) ^ set(expected.items())} - {GENERATOR})
            raise WireError(
                f"the state does not fit this RLPD, for example of other settings or another robot: {wrong[:6]} differ"
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                whole = torch.from_numpy(np.array(state[name]))
                tensor.copy_(whole if self._group is None else self._group.local_shard(whole))
        self._updates = int(state["updates"][0])
        _restore_generator(self._generator, state[GENERATOR])
        if self._group is not None:
            self._restore_noise(state.get(NOISE, np.empty(0, np.uint8)), self._group)

    def _restore_noise(self, saved: Array, group: TrainingGroup) -> None:
        if len(saved) != group.world or not _restore_generator(self._noise, saved[group.rank]):
            self._noise.manual_seed(_rank_seed(self._seed, group.rank, self._updates))


def actor_parameters(inputs: int, actions: int, hidden: tuple[int, ...], generator: torch.Generator) -> Parameters:
    """Creates the actor's parameters, named as in `user_sys.policies.mlp`; weights have shape (in, out)."""
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
    """Returns (mean, log_std) of the Gaussian before squashing, each (n, a), for scaled inputs `x` (n, inputs)."""
    for i in range(len(actor) // 2 - 2):
        x = F.relu(torch.addmm(actor[f"hidden.{i}.bias"], x, actor[f"hidden.{i}.weight"]))
    mean = torch.addmm(actor["mean.bias"], x, actor["mean.weight"])
    log_std = torch.addmm(actor["log_std.bias"], x, actor["log_std.weight"])
    return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)


def squash(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the action tanh(mean + std noise), (n, a), and its log density, (n,) (Haarnoja et al., appendix C)."""
    u = mean + log_std.exp() * noise
    gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    # log(1 - tanh(u)^2), in the form that stays finite for large |u|.
    log_slope = 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
    return torch.tanh(u), (gaussian - log_slope).sum(-1)


def critic_parameters(inputs: int, hidden: tuple[int, ...], critics: int, generator: torch.Generator) -> Parameters:
    """Creates E critics in one set of tensors, the ensemble first: weights (E, in, out), biases (E, 1, out)."""
    parameters, width = {}, inputs
    for i, out in enumerate((*hidden, 1)):
        parameters[f"{i}.weight"] = _xavier((critics, width, out), generator)
        parameters[f"{i}.bias"] = _zeros((critics, 1, out), generator)
        width = out
    # Values start near 0. It would take thousands of updates to raise a random pessimistic minimum by sparse rewards.
    parameters[f"{len(hidden)}.weight"].data.mul_(LAST_LAYER_GAIN)
    return parameters


def critics_forward(critics: Parameters, x: Tensor) -> Tensor:
    """Returns Q of every critic, (E, n), for `x` (n, in): linear, layer norm, relu; the last layer is linear.

    The layer norm has no gain and bias: the next linear layer has them.
    """
    return critic_values(critics, x).squeeze(-1)


def critic_values(critics: Parameters, x: Tensor, *, subset: Tensor | None = None, frozen: bool = False) -> Tensor:
    """As `critics_forward`, but of shape (E, n, 1), because FSDP2 does not allow views.

    Args:
        subset: indices of the critics to evaluate.
        frozen: the critics get no gradient.
    """
    if frozen:
        critics = {name: p.detach() for name, p in critics.items()}
    if subset is not None:
        critics = {name: p[subset] for name, p in critics.items()}
    depth, h = len(critics) // 2, x.expand(critics["0.weight"].shape[0], -1, -1)
    for i in range(depth - 1):
        h = torch.baddbmm(critics[f"{i}.bias"], h, critics[f"{i}.weight"])
        h = F.relu(F.layer_norm(h, h.shape[-1:]))
    return torch.baddbmm(critics[f"{depth - 1}.bias"], h, critics[f"{depth - 1}.weight"])


def require_gradient(parameter: Tensor) -> Tensor:
    """Returns the gradient. Raises RuntimeError if there is none."""
    if parameter.grad is None:
        raise RuntimeError("a parameter has no gradient: the loss does not depend on it; check the loss function")
    return parameter.grad


def _restore_generator(generator: torch.Generator, saved: Array) -> bool:
    """Restores a generator. Returns False, without effect, if `saved` is of another kind of device."""
    fits = np.shape(saved) == tuple(generator.get_state().shape)
    if fits:
        generator.set_state(torch.from_numpy(np.array(saved)))
    return fits


def _rank_seed(seed: int, rank: int, updates: int) -> int:
    """Returns the seed of a rank's own draws after so many updates."""
    return int(np.random.SeedSequence((seed, rank, updates)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _xavier(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    bound = math.sqrt(6.0 / (shape[-2] + shape[-1]))
    weight = torch.empty(shape, device=generator.device).uniform_(-bound, bound, generator=generator)
    return weight.requires_grad_()


def _zeros(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.zeros(shape, device=generator.device).requires_grad_()


def _to_arrays(tensors: Parameters) -> dict[str, Array]:
    return {name: np.array(t.detach().cpu().numpy()) for name, t in tensors.items()}
