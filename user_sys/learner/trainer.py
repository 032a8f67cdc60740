"""The trainer of one process: it updates the algorithm with its part of each batch."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hal.errors import SpecError
from hal.resource import local_node
from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import (
    GENERATOR,
    NETWORK,
    POLICY,
    Algorithm,
    TdErrors,
    TrainingData,
    fits_policy,
    load_generators,
    load_policy_state,
    load_state,
    save_state,
)
from user_sys.algorithms.distributed import TrainingGroup, divide, is_divided, mark_divided, own_part, whole
from user_sys.codec import Array
from user_sys.compose import PolicyConfig
from user_sys.errors import ConfigError, RunError, WireError
from user_sys.learner.batch_source import BatchSource, require_suitable
from user_sys.learner.checkpoint import Checkpoint, read_checkpoint
from user_sys.learner.config import CPU, ComputeConfig, LearnerConfig
from user_sys.plugins import load_algorithm, load_policy
from user_sys.policies.trainable import apply_train_settings, frozen_parameters
from user_sys.store.store import StoreReader
from user_sys.trace import span
from user_sys.weights.gpu_copy import HostCopier, PolicySnapshot, as_array, make_host_copier
from user_sys.weights.state import NotFinite

log = logging.getLogger(__name__)

SAMPLER_PREFIX = "sampler."  # prefix of the sampler's arrays in a checkpoint
OWN_PREFIXES = (GENERATOR, SAMPLER_PREFIX)  # of arrays that differ from process to process
RANK_PREFIX = "rank."  # prefix of other ranks' arrays, before their number
ALGORITHM_KEY, POLICY_KEY, PROCESS_COUNT_KEY = "algorithm", "policy", "processes"  # scalars of a checkpoint
LOG_ID_KEY, RECORD_KEY = "log_id", "record"  # other ones: of the store, and of the newest record that was read
TRAINED_COPIES = 5  # of what trains: parameters, gradients, two moments of Adam, and a slow copy or a snapshot
HOST_COPIES = 1  # of all parameters on the CPU: the memory that the publisher process shares


class Trainer:
    """Trains in one process. One thread constructs it and calls it.

    Attributes:
        algorithm: the algorithm with its networks.
        batches: the steps in the store, and the batches of them.
        group: the processes that train together.
        policy_kind: kind of the policy.
        is_pretrained: the initial weights are of another run or a checkpoint, so that robots may act with them.
        can_sample: every process has steps to draw, as of the last `refresh` or `update`.
        skipped: consecutive batches without a step to clone, in updates that clone the steps of people.
    """

    def __init__(
        self,
        config: LearnerConfig,
        spec: RobotSpec,
        reader: StoreReader,
        *,
        policy: PolicyConfig | None = None,
        seed: int = 0,
        device: str = CPU,
        group: TrainingGroup | None = None,
        initial_state: Mapping[str, Array | Tensor] | None = None,
    ) -> None:
        """Builds the algorithm, the replay buffer and the sampler. It seeds torch's generators.

        Args:
            reader: the store, used from this thread only.
            policy: the policy to train; None for the default.
            device: a torch device; for a GPU, batches lie in page-locked memory.
            group: the processes that train together; None for a single process.
            initial_state: of an algorithm with the same policy, with or without adapters, whose weights training starts
                from.

        Raises:
            ConfigError: the settings do not fit the robot, the algorithm or the device.
            RunError: there is too little memory.
            WireError: `initial_state` is of another policy.
        """
        self.group = group = TrainingGroup() if group is None else group
        self._config, self._seed = config, seed
        self.can_sample, self._updates, self.skipped = False, 0, 0
        on = self._on = torch.device(device)
        torch.manual_seed(seed)  # the same networks in all processes
        policy = policy or PolicyConfig()
        self.policy_kind = policy.kind
        kind, settings = load_policy(policy.kind, policy.options)
        if config.compute.recompute:
            kind.check_recompute(settings)
        make_module = partial(kind.make_module, spec, settings=settings, features=policy.features)
        planned = None if kind.reads_files(settings) else planned_module(make_module, settings)
        processes, copies = group.world if config.compute.divide else 1, _copies(config, on)
        if planned is not None:
            require_memory(planned, on, processes, copies)
        module = make_module()
        starts_from_another = initial_state is not None or bool(config.initial_policy)  # also when it resumes
        self.is_pretrained = starts_from_another or bool(getattr(module, "is_pretrained", False))
        _prepare_policy(module, settings, initial_state)
        if planned is None:
            require_memory(module, on, processes, copies)
        self._snapshots = PolicySnapshots(frozen_parameters(module), make_host_copier(device, config.publish))
        if config.compute.divide:
            divide(module.to(on), device)
        algorithm, settings = load_algorithm(config.algorithm, config.options)
        _require_td_errors(config, algorithm)
        self.algorithm = algorithm(settings, module, spec).to(on)
        self._step = TrainingStep(self.algorithm, config.compute, on, self.frozen.values())
        group.average_gradients(self.algorithm)
        self._seed_draws(0)
        self.batches = BatchSource(config, spec, reader, self.algorithm, seed=seed, device=on, group=group)

    def _seed_draws(self, updates: int) -> None:
        """Seeds torch's generators; each process draws differently."""
        sequence = np.random.SeedSequence((self._seed, self.group.rank, updates))
        torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def close(self) -> None:
        """Ends the threads. A second call has no effect."""
        self.batches.close()

    def refresh(self) -> None:
        """Reads new steps from the store. All processes call it together."""
        with span("refresh"):
            self.batches.replay.refresh()
        self.can_sample = self.group.all_true(self.batches.is_ready)

    def update(self, number: int) -> bool:
        """Makes update `number` of all processes together; each draws its part of the batch.

        Returns False, without an update, if a process has drawn only windows that cannot be read, or if the update
        clones the steps of people and no process has drawn any; of a batch in parts, the first part counts.
        """
        for part in range(self._config.compute.parts):
            with span("sample"):
                batch = self.batches.next(number)
            if self.batches.once is not None:
                self.can_sample = self.group.all_true(batch is not None)
            if batch is None or not self.can_sample:
                return False
            if part == 0 and self._clones_nothing(number):
                return False
            with span("update"):
                self._step.update(batch, number, part)
            self.batches.note_update()
        self._updates = number + 1
        return True

    def _clones_nothing(self, number: int) -> bool:
        is_empty = number < self.batches.cloned_updates and self.group.all_true(not self.batches.has_example)
        self.skipped = self.skipped + 1 if is_empty else 0
        return is_empty

    @property
    def policy(self) -> nn.Module:
        """The module that acts."""
        return self.algorithm.policy

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        """The policy's parameters that never change, by their names in its `state_dict`."""
        return self._snapshots.frozen

    def require_finite(self) -> dict[str, float]:
        """Returns the scalars of the newest update.

        Raises:
            NotFinite: a loss, a gradient or a weight is NaN or infinite; the message names the first of them, and what
                is not finite in the batch.
        """
        scalars = self.algorithm.scalars()
        found = [f"{name} is {value}" for name, value in scalars.items() if not math.isfinite(value)]
        if not found:
            found = self._step.not_finite()
        if found:
            inputs = self.batches.not_finite_inputs() if self._updates else ()
            raise NotFinite(f"training diverged by update {self._updates}: {', '.join([*found[:3], *inputs])}")
        return scalars

    def gather(self, wanted: bool) -> None:
        """Gathers a divided policy for the next `policy_snapshot`, if rank 0 wants it; no effect on another policy.

        All processes call it together.
        """
        if self._config.compute.divide and self.group.broadcast(int(wanted)):
            self._snapshots.gather(self.algorithm.policy, keep=self.group.rank == 0)

    def policy_snapshot(self) -> PolicySnapshot:
        """Returns the current weights for publishing, without blocking; of a divided policy those of `gather`.

        In host memory these are the arrays themselves, valid until the next update. On a device they are a copy that
        another thread fetches later, with the values of this moment.

        Raises:
            NotFinite: as `require_finite`.
        """
        self.require_finite()
        return self._snapshots.take(self.algorithm.policy)

    def state_dict(self) -> dict[str, Array]:
        """Returns copies of the state that determines later updates and is not in the store. All processes call it.

        That of rank 0 holds the networks and optimizers, without `frozen`. Each holds the generators and the sampler of
        all processes.
        """
        state = save_state(self.algorithm, self.frozen, generators_only=self.group.rank != 0)
        state |= {SAMPLER_PREFIX + name: value for name, value in self.batches.state_dict().items()}
        own = {name: value for name, value in state.items() if name.startswith(OWN_PREFIXES)}
        for rank, arrays in enumerate(self.group.gather(own)):
            state |= {_rank_prefix(rank) + name: value for name, value in arrays.items()}
        return state

    def lacks_records(self, checkpoint: Checkpoint) -> bool:
        """Whether `checkpoint` has read records that the store lacks, after a `refresh`.

        The store is then another one, or a backup from before, whose later records have their sequence numbers. A
        record of an episode that was deleted may be missing: compaction has removed it.
        """
        position = int(checkpoint.scalars["position"])
        if not (saved := str(checkpoint.scalars.get(RECORD_KEY, ""))):  # of an older release, or of an empty store
            return position > self.batches.position()
        return self.batches.record_at(position) != saved and not self.batches.was_deleted(saved)

    def load_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Continues from `checkpoint`, after a `refresh`. All processes call it.

        Returns False if another number of processes or another sampler wrote it, or if it has read records
        that the store lacks: networks and optimizers are loaded, and sampler and generators start from their seeds.

        Raises:
            WireError: the checkpoint is of other settings or another robot.
        """
        load_state(self.algorithm, checkpoint.arrays, self.frozen)
        lacks_records, once = self.lacks_records(checkpoint), self.batches.once
        has_as_many = checkpoint.scalars.get(PROCESS_COUNT_KEY, 1) == self.group.world
        if has_as_many and not lacks_records and self._load_draws(checkpoint):
            return True
        self._seed_draws(checkpoint.updates)
        if once is not None and lacks_records:  # records up to its position may be new
            once.skip_versions(int(checkpoint.scalars["version"]), self.batches.replay.index)
        elif once is not None:
            once.skip(int(checkpoint.scalars["position"]), self.batches.replay.index)
        return False

    def _load_draws(self, checkpoint: Checkpoint) -> bool:
        """Restores sampler and generators of this process. Returns False if the state is of another sampler."""
        prefix = _rank_prefix(self.group.rank)
        own = {name.removeprefix(prefix): value for name, value in checkpoint.arrays.items() if name.startswith(prefix)}
        sampler = {k.removeprefix(SAMPLER_PREFIX): v for k, v in own.items() if k.startswith(SAMPLER_PREFIX)}
        try:
            self.batches.load_state_dict(sampler)
        except WireError as error:
            kind = self._config.sampler.kind
            log.warning("learner.sampler_changed kind=%s: the sampler starts from its seed (%s)", kind, error)
            return False
        load_generators(own)
        return True


class PolicySnapshots:
    """Takes snapshots of a policy for publishing.

    Attributes:
        frozen: its parameters that never change, by their names in its `state_dict`.
    """

    def __init__(self, frozen: Mapping[str, Tensor], copier: HostCopier | None) -> None:
        """`copier`: None for a policy in host memory."""
        self.frozen, self._copier = frozen, copier
        self._arrays: dict[str, Array] | None = None  # of `frozen` in host memory, read-only; of none on a device
        self._trained: list[tuple[str, Tensor]] = []  # the other parameters
        self._buffers: list[tuple[str, nn.Module, str]] = []  # name, and the module that has it as what
        self._gathered: dict[str, Tensor] = {}  # of a divided policy, for the next `take`

    def take(self, policy: nn.Module) -> PolicySnapshot:
        """See `Trainer.policy_snapshot`. Frozen parameters are the same read-only arrays each time."""
        if self._arrays is None:
            self._arrays = self._frozen_arrays(policy)
        gathered, self._gathered = self._gathered, {}
        tensors = {name: gathered.get(name, each).detach() for name, each in self._trained}
        tensors |= {name: getattr(owner, leaf).detach() for name, owner, leaf in self._buffers}
        if self._copier is not None:
            return self._copier.snapshot({**self.frozen, **tensors}, self.frozen.keys(), gathered.keys())
        return {**self._arrays, **{name: as_array(tensor) for name, tensor in tensors.items()}}

    def gather(self, policy: nn.Module, *, keep: bool) -> None:
        """Gathers the divided parameters, and keeps them until `take` in the process that wants them. All call it."""
        self._gathered = {}
        for name, each in policy.named_parameters(remove_duplicate=False):
            if is_divided(each):
                gathered = whole(each.detach())
                if keep:
                    self._gathered[name] = gathered

    def _frozen_arrays(self, policy: nn.Module) -> dict[str, Array]:
        """Finds the tensors once: to list those of a large policy takes longer than to copy what trains."""
        named = policy.state_dict()
        parameters = dict(policy.named_parameters(remove_duplicate=False))
        self._trained = [(name, parameters[name]) for name in named if name in parameters and name not in self.frozen]
        parts = [(name, *name.rpartition(".")[::2]) for name in named if name not in parameters]
        self._buffers = [(name, policy.get_submodule(owner), leaf) for name, owner, leaf in parts]
        if self._copier is not None:
            return {}
        arrays = {name: as_array(self.frozen[name].detach()) for name in named if name in self.frozen}
        for array in arrays.values():
            array.flags.writeable = False
        return arrays


def _prepare_policy(module: nn.Module, settings: Any, initial_state: Mapping[str, Array | Tensor] | None) -> None:
    """Loads the initial weights, with or without adapters, and applies the settings of what trains.

    A policy that steers a frozen one, its attribute ``base``, takes them for that, unless they are of such a policy.
    """
    base = getattr(module, "base", None)
    of_base = NETWORK + POLICY + "base."
    if initial_state is not None and base is not None and not any(name.startswith(of_base) for name in initial_state):
        load_policy_state(base, initial_state)
        return
    is_plain = initial_state is not None and fits_policy(module, initial_state)
    if initial_state is not None and is_plain:
        load_policy_state(module, initial_state)
    apply_train_settings(module, settings)
    if initial_state is not None and not is_plain:
        load_policy_state(module, initial_state)


def _rank_prefix(rank: int) -> str:
    return f"{RANK_PREFIX}{rank}." if rank else ""


class TrainingStep:
    """Runs the updates of an algorithm as `ComputeConfig` says, of which it knows nothing. One thread calls it.

    An update runs under autocast. Hooks sum the gradients over the parts of a batch, and leave none before the last
    part, so that the algorithm's optimizers make no step.
    """

    def __init__(
        self, algorithm: Algorithm, config: ComputeConfig, device: torch.device, frozen: Iterable[Tensor] = ()
    ) -> None:
        """`frozen`: parameters of the policy that never change."""
        self._algorithm, self._config, self._device = algorithm, config, device
        kept = {id(each) for each in frozen}
        named = ((name, each) for name, each in algorithm.named_parameters() if id(each) not in kept)
        self._changing = [(name, each) for name, each in named if each.numel()]
        stepped = {id(each) for used in algorithm.optimizers.values() for each in _parameters_of(used)}
        self._unstepped = [each for _, each in self._changing if id(each) not in stepped]
        self._part = 0
        self._sums: dict[Tensor, Tensor] = {}
        if config.parts > 1:
            for parameter in algorithm.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._add_gradient)  # type: ignore[no-untyped-call]
        if config.recompute:
            for block in blocks_of(algorithm):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def update(self, batch: Any, number: int, part: int) -> None:
        """Makes update `number` with a part of its batch; the optimizers step with the last part."""
        self._part = part
        with self._autocast():
            self._algorithm.update(batch, number)

    def not_finite(self) -> list[str]:
        """Returns what is NaN or infinite after an update: gradients and parameters, as parts of a message."""
        # An optimizer carries its gradients into its parameters; to read these alone holds up a push half as long.
        gradients = [each.grad for each in self._unstepped if each.grad is not None]
        tensors = [own_part(each) for each in (*gradients, *(each.detach() for _, each in self._changing))]
        if not tensors or torch.stack(torch._foreach_norm(tensors)).isfinite().all():  # a tenth of the time of max
            return []
        named = {f"the gradient of {name}": each.grad for name, each in self._changing if each.grad is not None}
        named |= {name: each.detach() for name, each in self._changing}
        return [f"{name} is not finite" for name, each in named.items() if not own_part(each).isfinite().all()]

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._config.precision == "float32":
            return nullcontext()
        # Without a cache: an algorithm may step an optimizer and go on with the same network.
        return torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False)

    def _add_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None  # torch has just accumulated it
        total = self._sums.pop(parameter, None)
        total = gradient if total is None else total.add_(gradient)
        if self._part == self._config.parts - 1:
            parameter.grad = total.div_(self._config.parts)
        else:
            self._sums[parameter], parameter.grad = total, None


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the blocks of transformers and the like: elements of an `nn.ModuleList` that have modules of their own."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and any(True for each in child for _ in each.children()):
            yield from (each for each in child if any(True for _ in each.children()))
        else:
            yield from blocks_of(child)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Translates the lack of memory of a GPU, in all that a learner does there. Raises RunError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise RunError(
            f"the GPU of {local_node()} has too little memory for training: {free / 1e9:.1f} of {total / 1e9:.1f} GB "
            "are free; raise learner.compute.parts, set learner.compute.recompute (or, for LeRobot's diffusion, "
            "pi0 and pi05, policy.options.config.gradient_checkpointing), or train less (policy.options.train)"
        ) from error


def planned_module(make_module: Callable[[], nn.Module], settings: Any) -> nn.Module | None:
    """Returns a policy's module with `settings` on torch's meta device, which takes no memory; None if it cannot."""
    try:
        with torch.device("meta"), torch.random.fork_rng([]):
            return apply_train_settings(make_module(), settings)
    except Exception:  # of any type: the policy may be of a package, and is built again
        return None


def _require_td_errors(config: LearnerConfig, algorithm: type[Algorithm]) -> None:
    """Raises ConfigError: the sampler needs TD errors, and the algorithm has none."""
    if config.sampler.uses_feedback and not issubclass(algorithm, TdErrors):
        raise ConfigError(
            f"learner.sampler.kind is {config.sampler.kind}, which needs TD errors; {config.algorithm} has none: "
            "remove it"
        )


def require_trainable(
    config: LearnerConfig, policy: PolicyConfig, spec: RobotSpec, saved: Path | None = None
) -> TrainingData | None:
    """Checks that the algorithm can train the policy, from the checkpoint `saved` if given, and suits the settings.

    It builds both, unless the policy reads files; without `saved` on torch's meta device, which takes no memory.

    Returns what the algorithm trains on; None if only the learner can build it.

    Raises:
        ConfigError, SpecError: as the constructors do, and `Trainer`.
        WireError: as `Trainer.load_checkpoint` and `read_checkpoint`.
    """
    kind, settings = load_policy(policy.kind, policy.options)
    algorithm, options = load_algorithm(config.algorithm, config.options)
    _require_td_errors(config, algorithm)
    if config.compute.recompute:
        kind.check_recompute(settings)
    try:
        if kind.reads_files(settings):
            return None
        with torch.device("meta" if saved is None else CPU), torch.random.fork_rng([]):
            module = apply_train_settings(kind.make_module(spec, settings=settings, features=policy.features), settings)
            if config.compute.divide:
                mark_divided(module)
            frozen = frozen_parameters(module)
            built = algorithm(options, module, spec)
            require_suitable(config, built.data)
            if saved is not None:
                load_state(built, read_checkpoint(saved).arrays, frozen)
            return built.data
    except (ConfigError, SpecError, WireError):
        raise
    except Exception:  # of any type: those of a package may need numbers, and the learner builds them again
        return None


def _copies(config: LearnerConfig, device: torch.device) -> int:
    """Returns how many copies of what trains the device holds; an algorithm with an acting rate may keep a slow one."""
    _, settings = load_algorithm(config.algorithm, config.options)
    has_both = device.type != CPU and getattr(settings, "acting_rate", 1.0) != 1.0  # a slow copy, and a snapshot
    return TRAINED_COPIES + has_both


def require_memory(module: nn.Module, device: torch.device, processes: int = 1, copies: int = TRAINED_COPIES) -> None:
    """Checks that a policy and what trains it have room; activations are not part of the estimate.

    Args:
        module: on the meta device, or in host memory.
        device: on which it will train.
        processes: that divide what trains; each begins with the whole policy.
        copies: of what trains.

    Raises:
        RunError: there is too little memory.
    """
    frozen = sum(each.nbytes for each in frozen_parameters(module).values())
    held = sum(each.nbytes for each in module.parameters() if each.device.type == device.type)
    trained = sum(each.nbytes for each in module.parameters()) - frozen
    shared = HOST_COPIES * (frozen + trained) if device.type == CPU else 0
    needed = frozen + trained + (copies - 1) * trained // processes + shared
    available = held + (free_memory_bytes() if device.type == CPU else torch.cuda.mem_get_info(device)[0])
    if needed > available:
        raise RunError(
            f"training needs about {needed / 1e9:.1f} GB for {trained / 1e9:.2f} GB of weights that train and "
            f"{frozen / 1e9:.2f} GB that are frozen, and {local_node()} has {available / 1e9:.1f} GB free ({device}): "
            "train less (policy.options.train), or use a computer with more memory"
        )


def free_memory_bytes() -> int:
    """Returns the memory that processes of this computer can still take."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return found.get("MemAvailable", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
