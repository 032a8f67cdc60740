"""A policy that acts with the module that trains: the base class of policies that act in torch, in a policy server."""

from __future__ import annotations

import copy
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hal.errors import SpecError
from hal.spec import Array, RobotSpec
from user_sys.codec import BF16
from user_sys.errors import RunError, WireError
from user_sys.policies.policy import (
    AGE_SUFFIX,
    SENTENCE,
    ActionChunk,
    ChunkContext,
    ExecutionMethod,
    TrainablePolicy,
)
from user_sys.policies.scaling import (
    ActionBounds,
    RandomExploration,
    camera_specs,
    feature_specs,
    require_features,
    require_pictures,
)
from user_sys.policies.trainable import apply_train_settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class PromisedActions:
    """The `ChunkContext` of n robots, as tensors on the policy's device.

    Attributes:
        actions: float32 (n, K, a), in the action spec's units; zero after a robot's last promised action.
        count: int64 (n,), how many of the K are promised.
        delay: int64 (n,), predicted control periods from the observation to the first use of the chunk.
        method: how the robots pass to the next chunk.
    """

    actions: Tensor
    count: Tensor
    delay: Tensor
    method: ExecutionMethod


class TorchPolicy(TrainablePolicy):
    """Acts with `make_module`'s module in evaluation mode. Until the first `load` it explores within the action bounds.

    A subclass defines `settings`, `make_module` and `draw`, and reads pictures of the cameras that `select_cameras`
    returns. With one seed it draws the same noise on every device. On ``cpu`` it limits torch's threads in this process
    to ``OMP_NUM_THREADS``, or to one: a network for one observation gains nothing from more, and a learner loses them.

    Attributes:
        options: its settings.
        cameras: names of the cameras that it reads.
        sentences: of the observations that `draw` draws for.
    """

    precisions = ("exact", "bf16")

    def __init__(
        self,
        spec: RobotSpec,
        *,
        settings: Any = None,
        features: Sequence[str] = (),
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """See `TrainablePolicy`."""
        import torch

        if device == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.options = self.settings() if settings is None else settings
        self._specs = feature_specs(spec, features)
        self.cameras, self.sentences = self.select_cameras(spec, self.options), tuple[str, ...]()
        self._pictures = camera_specs(spec, self.cameras)
        self._bounds, self._device = ActionBounds(spec.action), device
        self._seed(seed)
        with torch.random.fork_rng([]):  # the initial weights are not used
            module = self.make_module(spec, settings=self.options, features=features)
            apply_train_settings(module, self.options)
        for parameter in module.parameters():  # `load` gives them memory
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        self.module: Any = module.eval().requires_grad_(False).to(device)
        parts: Iterator[Any] = module.modules()  # of which one may be a frozen policy that another one steers
        for encode in {part.encode_sentences for part in parts if hasattr(part, "encode_sentences")}:
            encode([""])  # a pretrained encoder is read now, and not while robots wait
        self._shared: dict[str, tuple[Array, Tensor]] = {}  # the newest read-only arrays, and the tensors with them
        self._has_weights = False
        # Also without weights a chunk bridges each delay that `execution_delays` allows.
        self._random_actions = max(1, 2 * self.execution_delays(self.options).get("switch", 0))

    def _seed(self, seed: int) -> None:
        import torch

        self._exploration = RandomExploration(self._bounds, np.random.default_rng(seed))
        self._generator = torch.Generator().manual_seed(seed)

    @classmethod
    def reads_files(cls, settings: Any) -> bool:
        """See `TrainablePolicy.reads_files`; by default whether pictures are read by a pretrained model of timm."""
        return getattr(settings, "timm_file", None) is not None

    @abstractmethod
    def draw(
        self, observation: Mapping[str, Tensor], *, deterministic: bool, promised: PromisedActions | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draws chunks for n observations on the device, without gradients.

        `promised`: of the robots; None if none executes chunks asynchronously. A policy may ignore it.

        Returns actions in the spec's units, (n, H, a), and their log densities, (n, H); see `ActionChunk`.
        """

    def noise(self, shape: tuple[int, ...], *, deterministic: bool) -> Tensor:
        """Draws standard normal noise, or zeros, on the device."""
        import torch

        noise = torch.zeros(shape) if deterministic else torch.randn(shape, generator=self._generator)
        return noise.to(self._device)

    def act(
        self,
        observation: Mapping[str, Array],
        sentence: str,
        *,
        deterministic: bool,
        context: ChunkContext | None = None,
    ) -> ActionChunk:
        """See `Policy.act`."""
        return self.act_batch([observation], [sentence], deterministic=deterministic, contexts=[context])[0]

    def act_batch(
        self,
        observations: Sequence[Mapping[str, Array]],
        sentences: Sequence[str],
        *,
        deterministic: bool,
        contexts: Sequence[ChunkContext | None] = (),
    ) -> list[ActionChunk]:
        """See `Policy.act_batch`; the network computes all observations at once."""
        import torch

        for observation in observations:
            require_features(self._specs, observation)
            require_pictures(self._pictures, observation)
        for context in contexts:
            if context is not None and context.prefix.shape[1:] != self._bounds.centre.shape:
                raise SpecError(
                    f"promised actions have shape {context.prefix.shape}; an action has {self._bounds.centre.shape}"
                )
        if not self._has_weights:
            return [self._explore(each, deterministic) for each in contexts or [None] * len(observations)]
        vectors = {spec.name: [observation[spec.name] for observation in observations] for spec in self._specs}
        arrays = {name: np.stack(each, dtype=np.float32) for name, each in vectors.items()}  # as in training
        pictures = [camera.feature for camera in self._pictures]
        arrays |= {name: np.stack([observation[name] for observation in observations]) for name in pictures}
        ages = [name + AGE_SUFFIX for name in pictures]
        for name in ages if all(set(ages) <= set(each) for each in observations) else ():
            arrays[name] = np.stack([observation[name] for observation in observations])
        with self._acting(), torch.no_grad() if any(contexts) else torch.inference_mode():  # guidance needs gradients
            promised = self._promised(contexts)
            tensors = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
            if hasattr(self.module, "encode_sentences"):  # a `user_sys.algorithms.algorithm.SentenceReader`
                tensors[SENTENCE] = self.module.encode_sentences(sentences).to(self._device)
            self.sentences = tuple(sentences)
            drawn = self.draw(tensors, deterministic=deterministic, promised=promised)
            actions, log_prob = (each.cpu().numpy() for each in drawn)
        execute = getattr(self.options, "execute", 0)
        return [self._bounds.chunk(*pair, execute) for pair in zip(actions, log_prob, strict=True)]

    def _explore(self, context: ChunkContext | None, deterministic: bool) -> ActionChunk:
        """One random action; with a context a chunk that goes on with the promised ones."""
        if context is None:
            return self._exploration.act(deterministic)
        if len(context.prefix):
            self._exploration.resume(context.prefix[-1])
        begins_after = self.bridged(context) if context.method == "vlash" else 0
        promised = [*context.prefix[begins_after:]]
        return self._exploration.act(deterministic, self._random_actions, promised, getattr(self.options, "execute", 0))

    def bridged(self, context: ChunkContext | None) -> int:
        """See `ActionChunk.bridged`."""
        return 0

    def _acting(self) -> AbstractContextManager[object]:
        """On a GPU, work in this context does not wait for an upload of weights."""
        import torch

        return nullcontext() if self._device == "cpu" else torch.cuda.stream(acting_stream(self._device))

    def _promised(self, contexts: Sequence[ChunkContext | None]) -> PromisedActions | None:
        import torch

        if all(context is None for context in contexts):
            return None
        lengths = [0 if context is None else len(context.prefix) for context in contexts]
        actions = np.zeros((len(contexts), max(lengths), self._bounds.centre.size), np.float32)
        for row, context, length in zip(actions, contexts, lengths, strict=True):
            if context is not None and length:
                row[:length] = context.prefix
        delays = [0 if context is None else context.delay for context in contexts]
        arrays = (actions, np.array(lengths, np.int64), np.array(delays, np.int64))
        method = next(context.method for context in contexts if context is not None)
        promised, count, delay = (torch.from_numpy(array).to(self._device) for array in arrays)
        return PromisedActions(promised, count, delay, method)

    def load(self, weights: Mapping[str, Array]) -> None:
        """See `Policy.load`. After an error other than WireError, some tensors are new: load again before acting."""
        import torch

        own = self.module.state_dict(keep_vars=True)
        expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
        found = {name: value.shape for name, value in weights.items()}
        if found != expected:
            wrong = sorted(set(found.items()) ^ set(expected.items()))
            raise WireError(f"weights do not fit this {type(self).__name__}; they differ in {wrong[:6]}")
        for name, array in weights.items():  # one by one, so that a GPU needs no memory for both versions
            own[name].data = self._loaded(name, array, own[name].dtype)
        if self._device != "cpu":  # the stream that acts does not wait for this one
            torch.cuda.synchronize(self._device)
        self._has_weights = True

    def copy(self) -> Self:
        """See `Policy.copy`. Both share the memory of what they load as the same read-only arrays."""
        import torch

        memo: dict[int, Any] = {id(self._shared): self._shared}
        for parameter in self.module.parameters():  # as they are: `load` never writes into their memory
            memo[id(parameter)] = torch.nn.Parameter(parameter.data, requires_grad=False)
        copied = copy.deepcopy(self, memo)
        copied._seed(int(torch.randint(2**62, (), generator=self._generator)))
        return copied

    def _loaded(self, name: str, array: Array, dtype: torch.dtype) -> Tensor:
        """Returns the tensor of an array on the device; the same one for the same read-only array."""
        import torch

        known = self._shared.get(name)
        if known is not None and known[0] is array:
            return known[1]
        aligned = np.require(array, requirements=("C", "A"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of arrays that it could write to
            is_bf16 = array.dtype == BF16
            bits = torch.from_numpy(aligned.view(np.int16) if is_bf16 else aligned)
        tensor = (bits.view(torch.bfloat16) if is_bf16 else bits).to(self._device, dtype)
        if array.flags.writeable:
            return tensor.clone()
        self._shared[name] = array, tensor
        return tensor


def warm_up_gpu() -> bool:
    """Prepares matrix products for the calling thread, which will act. Returns False without a GPU.

    Raises:
        RunError: there is a GPU, and it cannot be used.
    """
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        with torch.cuda.stream(acting_stream("cuda")):
            some = torch.zeros(8, 8, device="cuda")
            torch.addmm(some[0], some, some).cpu()
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise RunError(f"the GPU cannot be used: {why}; end what uses it, or set policy.device to cpu") from error
    return True


@cache
def acting_stream(device: str) -> torch.cuda.Stream:
    """Returns the CUDA stream on which all policies of this process act, ahead of other work on the GPU.

    It is shared, because on each stream the matrix library starts slowly and keeps 8 to 32 MB.
    """
    import torch

    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
