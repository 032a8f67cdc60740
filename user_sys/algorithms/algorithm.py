"""The interface of a learning algorithm: ordinary torch code that trains a policy on the learner's batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from hal.spec import Array, RobotSpec
from user_sys.algorithms.distributed import divided_like, own_part, whole
from user_sys.errors import ConfigError, WireError
from user_sys.policies.flow import FlowNetwork
from user_sys.policies.networks import Affine
from user_sys.policies.policy import SENTENCE
from user_sys.policies.steered import SteeredNetwork
from user_sys.replay.batches import Batch, BatchSpec
from user_sys.replay.selectors import INTERVENTION_PHASES, MixturePart, PhaseName
from user_sys.weights.gpu_copy import as_array

NETWORK, OPTIMIZER, GENERATOR = "network.", "optimizer.", "generator."  # prefixes of the arrays of a state
POLICY = "policy."  # prefix of the policy's tensors among those of the networks
NOTHING_FROZEN: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class TensorBatch:
    """A batch of n samples on the training device: columns of a `user_sys.replay.batches.Batch`.

    Attributes:
        observation, next_observation: feature name to float32 (n, d); images uint8 (n, height, width, 3).
        action: float32 (n, a), the applied action in the action spec's units.
        reward: float32 (n,), summed over the steps of the transition, discounted to the first.
        discount: float32 (n,), factor of the next observation's value, without regard to `terminated`.
        terminated: bool (n,), true if the next observation's value is not bootstrapped.
        weight: float32 (n,), factor of the loss.
        mask, phase, failed_by_hand, policy_version, extras, steps: as in `Batch`.
        sentence: int64 (n,), place of each sample's instruction in `sentences`.
        sentences: the instructions of all stored episodes; the places in it never change.

    With action chunks, `action`, `phase`, `failed_by_hand`, `policy_version` and `extras` have a second axis of the
    chunk's length.
    """

    observation: dict[str, Tensor]
    next_observation: dict[str, Tensor]
    action: Tensor
    reward: Tensor
    discount: Tensor
    terminated: Tensor
    weight: Tensor
    mask: Tensor | None = None
    phase: Tensor | None = None
    failed_by_hand: Tensor | None = None
    policy_version: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    sentence: Tensor | None = None
    sentences: tuple[str, ...] = ()
    steps: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch, sentences: tuple[str, ...], device: torch.device) -> Self:
        """Moves the arrays of `batch` to `device`; in host memory the tensors share their memory."""
        columns = [each.name for each in fields(cls) if each.name != "sentences"]
        return cls(**{name: _to_tensors(getattr(batch, name), device) for name in columns}, sentences=sentences)

    def rows(self, rows: Tensor | slice) -> Self:
        """Returns the samples `rows`: indices, bool (n,), or a slice."""
        return type(self)(**{each.name: _select(getattr(self, each.name), rows) for each in fields(self)})

    def instructions(self) -> list[str]:
        """Returns the instruction of each sample; empty if the batch has none."""
        if self.sentence is None:
            return [""] * len(self.weight)
        return [self.sentences[place] for place in self.sentence.tolist()]

    def with_sentences(self, read: Tensor) -> Self:
        """Adds to each observation what the policy reads of its sentence.

        Args:
            read: `SentenceReader.encode_sentences` of all `sentences`, (len(sentences), ...).
        """
        assert self.sentence is not None  # as in batches of the learner
        of_samples = read[self.sentence]
        of_steps = of_samples
        if self.reward.ndim == 2:  # observations of each step
            of_steps = of_samples[:, None].expand(-1, self.reward.shape[1], *(-1 for _ in of_samples.shape[1:]))
        return replace(
            self,
            observation={**self.observation, SENTENCE: of_steps},
            next_observation={**self.next_observation, SENTENCE: of_samples},
        )


def _select(value: Any, rows: Tensor | slice) -> Any:
    if isinstance(value, dict):
        return {name: tensor[rows] for name, tensor in value.items()}
    return value[rows] if isinstance(value, Tensor) else value


def _to_tensors(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to_tensors(array, device) for name, array in value.items()}
    return torch.from_numpy(value).to(device)


@dataclass(frozen=True)
class TrainingData:
    """What an algorithm trains on; the learner provides it.

    Attributes:
        batches: makes the shape of its batches; the argument is the setting `learner.sampler.n_step`.
        features: observation vectors in its batches; empty for all of the robot.
        cameras: names of the cameras in its batches.
        extras: other numeric columns of a step in its batches, such as ``log_prob``, to their shapes.
        mixture: what the sampler `mixed` draws, in parts; empty for demonstrations and online steps, in shares by
            `learner.demo_fraction`.
        mixture_settings: names of the algorithm's settings that make `mixture`; refused if the sampler replaces it.
        interventions: phases of the role `interventions` in a `learner.sampler.mixture`.
        finished: steps only of episodes that have ended and are completely stored.
        phases: of its steps, unless `learner.sampler.only` names phases; empty for all.
        once: its batches hold each online step once, in order, as far as `learner.staleness` allows, and its weights
            are published after each update (`user_sys.replay.once`). A batch has `batch_size` windows of
            `BatchSpec.chunk_length` steps, or steps without chunks.
        cloned_updates: updates at the start that clone the steps of people. One whose batch has none is not made.
    """

    batches: Callable[[int], BatchSpec]
    features: tuple[str, ...] = ()
    cameras: tuple[str, ...] = ()
    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    mixture: tuple[MixturePart, ...] = ()
    mixture_settings: tuple[str, ...] = ()
    interventions: tuple[PhaseName, ...] = INTERVENTION_PHASES
    finished: bool = False
    phases: tuple[PhaseName, ...] = ()
    once: bool = False
    cloned_updates: int = 0


class Algorithm(nn.Module, ABC):
    """A learning algorithm with all that it trains: networks as submodules, and `optimizers`. One thread calls it.

    It draws with torch's default generators. The learner seeds them, moves the algorithm to its device, averages the
    gradients of all `parameters` over the processes that train together, and keeps checkpoints. Each backward pass
    accumulates into a parameter at most once, and each update passes the same parameters in all processes.

    Attributes:
        settings: the dataclass of its settings, `learner.options`; all fields have defaults.
        policy: the submodule that acts; its `state_dict` is published.
        optimizers: by name; their hyperparameters come from the settings also after a resumption.
    """

    settings: ClassVar[type[Any]]
    policy: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]

    def __init__(self, settings: Any, policy: nn.Module, spec: RobotSpec) -> None:
        """Builds an algorithm that trains `policy`, from `TrainablePolicy.make_module`; subclasses extend it.

        Raises:
            ConfigError: it cannot train this policy or robot.
        """
        super().__init__()
        self.policy, self.optimizers = policy, {}

    @property
    @abstractmethod
    def data(self) -> TrainingData:
        """What it trains on."""

    @abstractmethod
    def update(self, batch: TensorBatch, number: int) -> None:
        """Makes update `number`, counted from 0 over all resumptions. The batch's tensors are valid during the call."""

    @abstractmethod
    def scalars(self) -> dict[str, float]:
        """Computes losses and statistics of the newest update. Empty before the first."""


@runtime_checkable
class TdErrors(Protocol):
    """An algorithm whose TD errors guide the sampler; prioritized and task-balanced samplers need it."""

    def td_errors(self) -> Tensor:
        """Returns the absolute TD error of each sample before the newest update, float32 (n,); samplers ignore NaN."""


class ObservationEncoder(Protocol):
    """What the modules of policies share.

    Attributes:
        features, cameras: names of the vectors and of the cameras that `encode` reads.
        observation_size: how many of `encode`'s first columns critics and value networks read.
        action_size: elements of an action.
        encoder: what `encode` trains: the encoders of pictures, by camera.
        pretrain_updates: updates at the start that clone the demonstrations (`imitation_loss`).
        frozen_from: number of the update from which `encoder` never changes; -1: always trained. From it on, batches
            hold `user_sys.policies.scaling.encoded_feature` of each camera, (n, k), instead of its pictures.
    """

    features: tuple[str, ...]
    cameras: tuple[str, ...]
    observation_size: int
    action_size: int
    pretrain_updates: int
    frozen_from: int
    if TYPE_CHECKING:  # from Python 3.12 on, isinstance finds no submodule of a torch module
        encoder: nn.ModuleDict

    def encode(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Returns the encoded observation, float32 (n, observation_size or more), with gradients.

        In training mode pictures are shifted at random. Actor-critics train `encoder` by their critics' loss, and
        detach the result for the actor.
        """

    def encode_images(self, camera: str, images: Tensor) -> Tensor:
        """Returns the encoded pictures, float32 (n, k), of `images`, uint8 (n, h, w, 3); no gradient, no shift."""

    def scale_action(self, action: Tensor) -> Tensor:
        """Maps actions (..., a) from the spec's units to [-1, 1]."""


@runtime_checkable
class SentenceReader(Protocol):
    """A policy's module that reads the task's sentence: `encode` gets the feature `SENTENCE` with each observation."""

    def encode_sentences(self, sentences: Sequence[str]) -> Tensor:
        """Returns what `encode` reads of each sentence, (m, ...); the same for a sentence in all versions."""


@runtime_checkable
class GaussianPolicy(ObservationEncoder, Protocol):
    """A policy's module with a squashed Gaussian density over actions, for actor-critic algorithms."""

    def draw(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns scaled actions (n, a) at encoded observations `x`, and their log density, (n,).

        `noise`: standard normal, (n, a).
        """

    def log_prob(self, x: Tensor, action: Tensor) -> Tensor:
        """Returns the log density (n,) of scaled actions (n, a)."""

    def entropy(self, x: Tensor) -> Tensor:
        """Returns the entropy (n,) before squashing, in nats. Differentiable."""

    def imitation_loss(self, x: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the loss (n,) that clones scaled actions (n, a)."""


@runtime_checkable
class ChunkPolicy(ObservationEncoder, Protocol):
    """A policy's module that generates action chunks by flow matching, for algorithms on chunks.

    A chunk has shape (n, H, a) and is scaled to [-1, 1]. Time runs from noise at t = 0 to the chunk at t = 1.

    Attributes:
        chunk_length: H, actions of a chunk.
        flow_steps: steps of `sample` by default.
    """

    chunk_length: int
    flow_steps: int

    def velocity(self, x_t: Tensor, t: Tensor, context: Tensor, condition: Tensor | None = None) -> Tensor:
        """Returns dx/dt (n, H, a) at `x_t` and time `t` (n,), given `encode` of the observation."""

    def sample(
        self,
        context: Tensor,
        noise: Tensor,
        steps: int | None = None,
        condition: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """Returns chunks from `noise` (n, H, a). Differentiable."""

    def imitation_loss(
        self, context: Tensor, action: Tensor, mask: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        """Returns the flow-matching loss (n,) of chunks `action` over the steps in `mask` (n, H)."""


def refuse_delay_training(policy: nn.Module, algorithm: str) -> None:
    """Raises ConfigError: the policy needs training for asynchronous execution that `algorithm` does not do."""
    if isinstance(policy, FlowNetwork) and (policy.window_length > policy.chunk_length or policy.correction):
        raise ConfigError(
            f"policy.options: {algorithm} does not train offset_max and correction_hidden: leave them out, or use bc "
            "or hg_dagger"
        )


def refuse_cloning(policy: ObservationEncoder, algorithm: str) -> None:
    """Raises ConfigError: the policy needs updates at the start that clone, which `algorithm` does not do."""
    if policy.pretrain_updates:
        ignored = "pretrain_updates" if policy.frozen_from < 0 else "pretrain_updates and encoder: frozen"
        raise ConfigError(
            f"policy.options.pretrain_updates is {policy.pretrain_updates}, and {algorithm} clones no demonstrations: "
            f"leave out {ignored}, and start from a run of bc by learner.initial_policy"
        )


def refuse_steered(policy: nn.Module, algorithm: str) -> None:
    """Raises ConfigError: the policy's actions are noise of a frozen policy, and no recorded action is one."""
    if isinstance(policy, SteeredNetwork):
        raise ConfigError(
            f"policy.kind is steered, which {algorithm} cannot train: set learner.algorithm to dsrl, or policy.kind to "
            "the frozen policy's own"
        )


@runtime_checkable
class ImitationPolicy(Protocol):
    """A policy's module that trains by a loss of its own, such as a policy of another library.

    Attributes:
        features, cameras, frozen_from: as of an `ObservationEncoder`.
        chunk_length: actions of a training sample.
    """

    features: tuple[str, ...]
    cameras: tuple[str, ...]
    chunk_length: int
    frozen_from: int

    def batch_loss(
        self, observation: Mapping[str, Tensor], sentences: Sequence[str], action: Tensor, mask: Tensor
    ) -> Tensor:
        """Returns the loss (n,) that clones chunks `action` (n, H, a), in the spec's units, over the steps in `mask`.

        Args:
            observation: as in a `TensorBatch`.
            sentences: the instruction of each sample; empty if it has none.
            mask: bool (n, H), which steps of a chunk exist.
        """


def imitation_loss(policy: GaussianPolicy | ChunkPolicy, batch: TensorBatch) -> Tensor:
    """Returns the loss (n,) that clones the actions of `batch`; with chunks, over the steps that exist."""
    return policy.imitation_loss(policy.encode(batch.observation), policy.scale_action(batch.action), batch.mask)


# State ----------------------------------------------------------------------------------------------------------------


def policy_arrays(policy: nn.Module) -> dict[str, Array]:
    """Returns copies in host memory of what `Policy.load` takes; of a divided policy in all processes together."""
    return {name: np.array(as_array(whole(tensor.detach()).cpu())) for name, tensor in policy.state_dict().items()}


def save_state(
    algorithm: Algorithm, frozen: Mapping[str, Tensor] = NOTHING_FROZEN, *, generators_only: bool = False
) -> dict[str, Array]:
    """Returns copies of all state that determines later updates: networks, optimizers, and torch's generators.

    A tensor that has several names is saved under the first of them. bfloat16 becomes float32, without loss. Tensors of
    a divided policy are gathered, for which all processes call it.

    Args:
        frozen: parameters of the policy that are not saved, because they never change.
        generators_only: returns only the generators; networks and optimizers are gathered for other processes.
    """
    tensors = {NETWORK + name: tensor for name, tensor in _own_tensors(algorithm, frozen).items()}
    for name, optimizer in algorithm.optimizers.items():
        for index, values in optimizer.state_dict()["state"].items():
            tensors |= {f"{OPTIMIZER}{name}.{index}.{key}": torch.as_tensor(value) for key, value in values.items()}
    if generators_only:
        for tensor in tensors.values():
            whole(tensor.detach())
        tensors = {}
    tensors[GENERATOR + "cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors[GENERATOR + "cuda"] = torch.cuda.get_rng_state()
    return {name: _saved_array(tensor) for name, tensor in tensors.items()}


def _own_tensors(module: nn.Module, frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the networks, each once, without those that share the memory of `frozen`."""
    seen = {(tensor.data_ptr(), tensor.shape) for tensor in frozen.values()}
    own: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        key = own_part(tensor).data_ptr(), tensor.shape
        if key not in seen or not tensor.numel():
            own[name] = tensor
            seen.add(key)
    return own


def _saved_array(tensor: Tensor) -> Array:
    found = whole(tensor.detach())
    return np.array((found.float() if found.dtype == torch.bfloat16 else found).cpu().numpy())


def load_state(algorithm: Algorithm, state: Mapping[str, Array], frozen: Mapping[str, Tensor] = NOTHING_FROZEN) -> None:
    """Restores networks and optimizers from `save_state`.

    Raises:
        WireError: names or shapes differ from this algorithm's; nothing was changed.
    """
    saved = _part(state, NETWORK)
    if different := _differences(algorithm, saved, frozen):
        raise WireError(
            f"the state does not fit this {type(algorithm).__name__}, for example of other settings or another robot: "
            f"{sorted(different)[:6]} differ"
        )
    own = algorithm.state_dict()
    algorithm.load_state_dict({name: divided_like(each, own[name]) for name, each in saved.items()}, strict=False)
    for name, optimizer in algorithm.optimizers.items():
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        values: dict[int, dict[str, Tensor]] = {}
        for key, tensor in _part(state, f"{OPTIMIZER}{name}.").items():
            index, _, field = key.partition(".")
            values.setdefault(int(index), {})[field] = divided_like(tensor, parameters[int(index)])
        optimizer.load_state_dict({"state": values, "param_groups": optimizer.state_dict()["param_groups"]})


def _differences(
    module: nn.Module, saved: Mapping[str, Array | Tensor], frozen: Mapping[str, Tensor] = NOTHING_FROZEN
) -> set[str]:
    """Returns the names that `saved` lacks, those unknown to `module`, and those of another shape.

    A tensor that has several names is needed under the first of them.
    """
    known = {(name, tuple(tensor.shape)) for name, tensor in module.state_dict().items()}
    needed = {(name, tuple(tensor.shape)) for name, tensor in _own_tensors(module, frozen).items()}
    found = {(name, tuple(tensor.shape)) for name, tensor in saved.items()}
    return {name for name, _ in (needed - found) | (found - known)}


def fits_policy(module: nn.Module, state: Mapping[str, Array | Tensor]) -> bool:
    """Returns whether the policy in the state of an algorithm has the names, shapes and scaling of `module`."""
    return not _policy_differences(module, state)


def load_policy_state(module: nn.Module, state: Mapping[str, Array | Tensor]) -> None:
    """Loads the policy that acts, of the state of any algorithm, into a policy's module.

    Raises:
        WireError: names, shapes or what scales vectors and actions differ from this policy's; nothing was changed.
    """
    if different := _policy_differences(module, state):
        raise WireError(
            f"learner.initial_policy does not fit policy.kind and policy.options, or is of another robot: {different} "
            "differ"
        )
    module.load_state_dict(_part(state, NETWORK + POLICY), strict=False)  # tied weights have one of their names


def _policy_differences(module: nn.Module, state: Mapping[str, Array | Tensor]) -> list[str]:
    prefix = NETWORK + POLICY
    own = module.state_dict()
    different = _differences(module, {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    parts = [path for path, part in module.named_modules() if isinstance(part, Affine)]
    constants = {name for name in own if name.rpartition(".")[0] in parts} - different
    different |= {name for name in constants if not np.allclose(own[name].cpu(), state[prefix + name])}
    return sorted(different)[:6]


def load_generators(state: Mapping[str, Array]) -> None:
    """Restores torch's generators from `save_state`: after `load_state`, later updates are bit-identical.

    A generator of a GPU is restored only if there is one.
    """
    generators = _part(state, GENERATOR)
    torch.set_rng_state(generators["cpu"])
    if "cuda" in generators and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])


def _part(state: Mapping[str, Array | Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns copies of the arrays with this prefix, without it; tensors as they are."""
    return {
        name.removeprefix(prefix): value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        for name, value in state.items()
        if name.startswith(prefix)
    }
