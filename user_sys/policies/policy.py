"""The interface of a policy: observations and an instruction in, a chunk of actions out."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

from msgspec import Meta

from hal.errors import SpecError
from hal.settings import Limit, suggest
from hal.spec import Array, RobotSpec
from user_sys.errors import ConfigError
from user_sys.messages import Precision
from user_sys.policies.correction import ChunkCorrection

if TYPE_CHECKING:
    from torch import nn

AGE_SUFFIX = ".age"
"""Suffix of a camera's feature: the age of its frame."""

SENTENCE = "observation.sentence"
"""Feature of a batch: what the policy's module reads of the task's sentence (`SentenceReader`)."""

ExecutionMethod = Literal["switch", "ensemble", "rtc", "training_rtc", "vlash", "a2c2"]


@dataclass(frozen=True)
class ActionChunk:
    """The actions of the next H control periods; H is 1 for policies that act on each observation.

    Attributes:
        actions: float32 (H, a), in the action spec's units and within its bounds.
        log_prob: float32 (H,), natural log of the density from which each action was drawn, over actions scaled to
            [-1, 1]; NaN if the action is deterministic or the policy has no density.
        execute: how many actions the robot executes before it uses the next chunk; 0 for all. The others are promised:
            the robot executes them while the next chunk is late, if it need not wait (`ExecutionConfig.mode`).
        correction: for the method ``a2c2``.
        bridged: promised actions (`ChunkContext`) that the policy takes as executed, at most as many as it was trained
            for. With ``vlash`` the chunk begins after them, with ``training_rtc`` it begins with them.
    """

    actions: Array
    log_prob: Array
    execute: int = 0
    correction: ChunkCorrection | None = None
    bridged: int = 0


@dataclass(frozen=True)
class ChunkContext:
    """What a robot with asynchronous execution does while its next chunk is computed.

    Attributes:
        prefix: float32 (k, a), promised actions in the action spec's units: the robot executes them from the control
            period of the observation on, while it has no newer chunk. It may be empty.
        delay: predicted count of control periods from the observation to the first use of the chunk: the first `delay`
            actions of `prefix` will be executed whatever the policy answers.
        method: how the robot passes to the next chunk, see `ExecutionConfig`.
    """

    prefix: Array
    delay: int
    method: ExecutionMethod = "switch"

    @property
    def assured(self) -> int:
        """How many promised actions will be executed whatever the policy answers."""
        return min(self.delay, len(self.prefix))


class PolicyQuery(NamedTuple):
    """What an agent asks a policy for; see `Policy.act`."""

    observation: Mapping[str, Array]
    sentence: str
    deterministic: bool
    context: ChunkContext | None = None


@dataclass(frozen=True)
class ExecutionConfig:
    """How a robot executes the chunks of a policy.

    Attributes:
        mode: wait: the control loop waits for each chunk. async: the next chunk is computed while the last one runs,
            and the loop never waits.
        method: how the robot passes from one chunk to the next. switch: a new chunk replaces the old one. ensemble: the
            mean of all chunks of a period. rtc: guidance makes a chunk continue the promised actions. training_rtc: so
            does the training. vlash: a chunk begins in the state where the promised actions end. a2c2: a small network
            corrects each action by the newest observation.
        ensemble_decay: of the weights of newer chunks, exp(-decay * i) for the i-th oldest; 0 for equal weights.
        delay_periods: a simulated robot that does not follow the clock uses a chunk so many control periods after its
            observation; 0 is at once. measured: as many as the policy took, by the clock. A robot that follows the
            clock uses a chunk as soon as it is there, but a simulated one is evaluated as the others.
    """

    mode: Literal["wait", "async"] = "wait"
    method: ExecutionMethod = "switch"
    ensemble_decay: Annotated[float, Meta(ge=0)] = 0.01
    delay_periods: Limit | Literal["measured"] = 0

    def __post_init__(self) -> None:
        if self.mode == "wait" and (self.method != "switch" or self.delay_periods):
            given = f"method {self.method} and delay_periods {self.delay_periods}"
            raise ConfigError(f"policy.execution: {given} are for mode async; set it")


class Policy(ABC):
    """A policy: numpy in, numpy out. One thread calls a policy object. `act` blocks only for its own computation, which
    may run in another process.

    Attributes:
        precisions: accepted precisions of weights, the most exact first; `load` gets rounded weights as float32.
        cameras: the cameras whose newest frames `act` reads; constant.
    """

    precisions: tuple[Precision, ...] = ("exact",)
    cameras: tuple[str, ...] = ()

    @abstractmethod
    def act(
        self,
        observation: Mapping[str, Array],
        sentence: str,
        *,
        deterministic: bool,
        context: ChunkContext | None = None,
    ) -> ActionChunk:
        """Selects the next actions.

        Args:
            observation: feature name to array, one unbatched observation by the robot's spec; may hold further
                features. Of each of `cameras` it holds the newest frame, uint8 (h, w, 3), as
                ``observation.images.<camera>``, and the time from its capture to that of the observation, float32 (1,),
                s, as ``observation.images.<camera>.age``. The arrays are read-only.
            sentence: the task's instruction; a policy of one task ignores it.
            deterministic: return the most likely action instead of a draw, for example in evaluation.
            context: of a robot that executes chunks asynchronously. A policy that does not use it ignores it.

        Raises:
            SpecError: a feature that the policy reads is missing or has another shape.
            PolicyUnavailable: the policy runs in another process and gives no action now.
        """

    def act_batch(
        self,
        observations: Sequence[Mapping[str, Array]],
        sentences: Sequence[str],
        *,
        deterministic: bool,
        contexts: Sequence[ChunkContext | None] = (),
    ) -> list[ActionChunk]:
        """Selects the next actions of several robots; see `act`. `contexts`: one for each robot, or empty for none."""
        return [
            self.act(observation, sentence, deterministic=deterministic, context=context)
            for observation, sentence, context in zip(
                observations, sentences, contexts or [None] * len(observations), strict=True
            )
        ]

    @abstractmethod
    def load(self, weights: Mapping[str, Array]) -> None:
        """Loads all of `weights` or none; later calls of `act` use them.

        A read-only array never changes. So the policy may use its memory, and a copy of the policy that loads the same
        array shares it. Other arrays are copied.

        Raises:
            WireError: names or shapes do not fit this policy; the previous weights stay.
        """

    def copy(self) -> Self:
        """Returns a policy that acts and loads weights on its own, such as the second copy of a double buffer.

        It explores with random numbers of its own.
        """
        return copy.deepcopy(self)


class TrainablePolicy(Policy):
    """A kind of policy that a config selects (`user_sys.plugins`): how it acts, and the module that trains it.

    Attributes:
        settings: the dataclass of its settings, `policy.options`; all fields have defaults.
        acts_without_torch: on ``cpu`` it acts without importing torch, so that a robot's session can run it. Any other
            policy acts in a policy server.
    """

    settings: ClassVar[type[Any]]
    acts_without_torch: ClassVar[bool] = False

    @abstractmethod
    def __init__(
        self,
        spec: RobotSpec,
        *,
        settings: Any = None,
        features: Sequence[str] = (),
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """Builds a policy for `spec` that reads `features` (default: all vectors) and draws with `seed`.

        Args:
            settings: of the class `settings`; None for the defaults.
            device: torch device; see `acts_without_torch`.

        Raises:
            SpecError: the policy cannot read the features or give the actions of `spec`.
        """

    @classmethod
    @abstractmethod
    def make_module(cls, spec: RobotSpec, *, settings: Any = None, features: Sequence[str] = ()) -> nn.Module:
        """Builds the module that trains. `load` takes the arrays of its `state_dict`, float32 or `codec.BF16`.

        torch's default generator initialises it. A setting ``train``, of the class `trainable.TrainSettings`, is
        applied afterwards; parameters that require no gradient are frozen.
        """

    @classmethod
    def reads_files(cls, settings: Any) -> bool:
        """Returns whether `make_module` reads files, such as pretrained weights.

        If it does not, the learner calls it on torch's meta device too, to see whether there is enough memory.
        """
        return False

    @classmethod
    def check_recompute(cls, settings: Any) -> None:
        """Raises ConfigError: `learner.compute.recompute` has no effect on this policy, because no block is called."""

    @classmethod
    def execution_delays(cls, settings: Any) -> dict[ExecutionMethod, int]:
        """Returns the methods of asynchronous execution that a policy with `settings` can do.

        The value is the longest delay in control periods that does not stop the robot: half a chunk, as the next chunk
        is requested when this one is first used. By default these are the methods that need nothing of the policy.
        """
        half = getattr(settings, "chunk_length", 1) // 2
        return {"switch": half, "ensemble": half}

    @classmethod
    def check_robot(cls, spec: RobotSpec, settings: Any, features: Sequence[str] = ()) -> None:
        """Checks a robot before a run starts, besides its cameras. Raises SpecError: the policy cannot act for it."""

    @classmethod
    def select_cameras(cls, spec: RobotSpec, settings: Any) -> tuple[str, ...]:
        """Returns the cameras that a policy with `settings` reads on a robot: `Policy.cameras`, without building it.

        By default these are the setting ``cameras``, or all cameras of the robot if that is empty; no camera for
        settings without it. They are in the robot's order.

        Raises:
            SpecError: the robot lacks such a camera, or has none, or the setting has another order.
        """
        if not hasattr(settings, "cameras"):
            return ()
        known = [camera.name for camera in spec.cameras]
        if not known:
            raise SpecError(
                f"the policy reads pictures, and {spec.model} has no camera; add one in the robot's options"
            )
        if unknown := [name for name in settings.cameras if name not in known]:
            raise SpecError(
                f"policy.options.cameras: {spec.model} has no camera {unknown[0]!r}; {suggest(unknown[0], known)}"
            )
        require_order("policy.options.cameras", settings.cameras, known)
        return tuple(settings.cameras) or tuple(known)


def require_order(setting: str, listed: Sequence[str], known: Sequence[str]) -> None:
    """Checks names of vectors or cameras: weights have columns for each, and no names of them.

    Raises SpecError: `listed`, of `setting`, is not in the order of `known`, which the robot has, or names one twice.
    """
    ordered = [name for name in known if name in listed]
    if [*listed] != ordered:
        raise SpecError(
            f"{setting} is [{', '.join(listed)}]: give the robot's order, [{', '.join(ordered)}], and train anew; "
            "weights that were trained with another order cannot be used"
        )


@runtime_checkable
class ExportablePolicy(Protocol):
    """A policy that another library can load; `user-sys policy export` writes it."""

    def export(self, folder: Path) -> None:
        """Writes the policy with its present weights into the new folder `folder`."""
