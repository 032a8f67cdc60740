"""Policies of SmolVLA's and pi0's size on a GPU: training, inference, and both during pushes (goal 23).

``python -m benchmarks.gpu_vla`` needs a GPU and takes about four minutes. Without one it runs a tiny policy on the CPU
through the same code, which measures nothing. The policies are `vla` with random weights and as many parameters as
SmolVLA (450 million) and pi0 (3.3 billion), on two cameras of 224x224.

Training is behaviour cloning of adapters, of the action expert, or of everything, in bfloat16 by autocast. Inference
draws chunks for one robot and for eight robots at once, as a policy server does, pictures in host memory included. In
the end one thread trains and pushes adapters without pause, within the governor's budget, while another infers; it is
compared with the same thread alone.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.gpu_learning import robot
from benchmarks.harness import Row, report
from hal.spec import STATE
from user_sys.algorithms.algorithm import TensorBatch, policy_arrays
from user_sys.algorithms.bc import Bc, BcSettings
from user_sys.algorithms.conformance import EXAMPLE_SENTENCES
from user_sys.codec import Array
from user_sys.learner.config import ComputeConfig, training_stream
from user_sys.learner.trainer import TrainingStep
from user_sys.policies.policy import SENTENCE
from user_sys.policies.trainable import TrainSettings, apply_train_settings, frozen_parameters
from user_sys.policies.vla import VlaNetwork, VlaPolicy, VlaSettings
from user_sys.weights.governor import GovernedBudget, Governor, GovernorConfig
from user_sys.weights.gpu_copy import HostCopier

TRAINS = {
    "LoRA of rank 16": TrainSettings(mode="lora", targets=("prefix.blocks", "expert.blocks")),
    "expert": TrainSettings(mode="modules", modules=("expert",)),
    "full": TrainSettings(),
}
ROBOTS = 8
STATE_SIZE, ACTION_SIZE = 14, 7
HOST = torch.device("cpu")
STOP_S = 60.0
BUDGET = GovernorConfig(budget=0.05, quantile=0.99)


@dataclass(frozen=True)
class Size:
    """A policy, the batch that trains it, and for how long each figure is measured."""

    name: str
    settings: VlaSettings
    batch: int
    seconds: float = 8.0
    picture: int = 224


SIZES = (
    Size("SmolVLA's 450M", VlaSettings(width=960, heads=15, prefix_layers=32, expert_layers=19, chunk_length=50), 32),
    Size("pi0's 3.3B", VlaSettings(width=2048, heads=16, prefix_layers=72, expert_layers=18, chunk_length=50), 16),
)
SMOKE = (Size("tiny", VlaSettings(width=32, heads=2, prefix_layers=2, expert_layers=2), 4, 0.2, 32),)


class Bench:
    """A policy that trains and acts on a device."""

    def __init__(self, size: Size, train: TrainSettings, device: torch.device) -> None:
        self.size, self.device = size, device
        spec, settings = robot(size.picture, STATE_SIZE, ACTION_SIZE), replace(size.settings, train=train)
        torch.manual_seed(0)
        with device:
            module = apply_train_settings(VlaPolicy.make_module(spec, settings=settings), settings)
        assert isinstance(module, VlaNetwork)
        self.module, self.frozen = module, frozen_parameters(module).keys()
        self.algorithm = Bc(BcSettings(acting_rate=1.0), module, spec).to(device)
        self.step = TrainingStep(self.algorithm, ComputeConfig(precision="bf16", recompute=True), device)
        self.updates = 0
        self._spec, self._settings = spec, settings
        self._batch = self._draw(size.batch)

    def _draw(self, n: int) -> TensorBatch:
        spec, device = self._spec, self.device
        words = self.module.encode_sentences(EXAMPLE_SENTENCES[:1] * n).to(device)
        observation = {STATE: torch.rand(n, STATE_SIZE, device=device), SENTENCE: words}
        for camera in spec.cameras:
            observation[camera.feature] = torch.randint(0, 256, (n, *camera.shape), device=device, dtype=torch.uint8)
        action = torch.rand(n, self.module.chunk_length, ACTION_SIZE, device=device)
        none, ones = torch.zeros(n, device=device), torch.ones(n, device=device)
        mask = torch.ones(n, self.module.chunk_length, dtype=torch.bool, device=device)
        return TensorBatch(observation, {}, action, none, ones, none.bool(), ones, mask)

    def train(self) -> None:
        self.step.update(self._batch, self.updates, 0)
        self.updates += 1
        self.wait()

    def server(self) -> Callable[[int], object]:
        """Returns what draws a chunk for each of so many robots, as a policy server does."""
        policy = VlaPolicy(self._spec, settings=self._settings, device=self.device.type)
        policy.load(policy_arrays(self.module))
        rng = np.random.default_rng(0)
        view: dict[str, Array] = {STATE: rng.uniform(-1, 1, STATE_SIZE).astype(np.float32)}
        view |= {each.feature: rng.integers(0, 256, each.shape, np.uint8) for each in self._spec.cameras}
        return lambda n: policy.act_batch([view] * n, EXAMPLE_SENTENCES[:1] * n, deterministic=False)

    def wait(self) -> None:
        """Until the stream of this thread is empty."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def times_s(call: Callable[[], object], seconds: float) -> list[float]:
    """The seconds of each call, after two that do not count."""
    found = list[float]()
    for _ in range(2):
        call()
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(found) < 3:
        started_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - started_s)
    return found


def pushes(bench: Bench, governor: Governor, stop: threading.Event) -> Iterator[int]:
    """Copies what trains to host memory, as a learner's publisher does; yields the bytes of each push."""
    copier = HostCopier(bench.device)
    weights = copier.snapshot(bench.module.state_dict(), bench.frozen)
    into = {name: np.empty(shape, kind) for name, (kind, shape) in weights.layout.items() if name not in bench.frozen}
    while not stop.is_set():
        weights = copier.snapshot(bench.module.state_dict(), bench.frozen)
        governor.begin_push()
        budget = GovernedBudget(BUDGET, lambda: governor.share)
        weights.wait()
        weights.fetch(into, budget)
        governor.end_push(budget.worked_s)
        yield sum(array.nbytes for array in into.values())


def while_training_and_pushing(bench: Bench, infer_once: Callable[[], object]) -> tuple[list[float], int, int]:
    """Seconds of each inference of this thread, and the updates and pushes of another one meanwhile."""
    governor, stop = Governor(BUDGET), threading.Event()
    failures, made = list[BaseException](), [0, 0]

    def train() -> None:
        try:
            with training_stream(bench.device.type):
                for made[1], _ in enumerate(pushes(bench, governor, stop), 1):
                    bench.train()
                    made[0] += 1
        except Exception as error:  # of any kind: the measurement is to fail
            failures.append(error)

    thread = threading.Thread(target=train, name="train")
    thread.start()

    def infer() -> None:
        started_s = time.perf_counter()
        infer_once()
        governor.observe(time.perf_counter() - started_s)

    try:
        found = times_s(infer, bench.size.seconds)
    finally:
        stop.set()
        thread.join(STOP_S)
    if failures or thread.is_alive():
        raise RuntimeError("training beside inference failed or did not end") from next(iter(failures), None)
    return found, made[0], made[1]


def rows(size: Size, device: torch.device, trains: Mapping[str, TrainSettings] = TRAINS) -> Iterator[Row]:
    def row(what: str, unit: str, figure: float, bound: float | None = None) -> Row:
        return Row(23, f"{size.name}, {what}", unit, figure, bound, None if bound is None else bound / figure)

    for title, train in trains.items():
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            bench = Bench(size, train, device)
            seconds = float(np.median(times_s(bench.train, size.seconds)))
        except torch.cuda.OutOfMemoryError:
            yield Row(23, f"{size.name}, {title}: samples trained", "1/s", None, note="too little memory")
            continue
        yield row(f"{title}: samples trained", "1/s", size.batch / seconds)
        if device.type == "cuda":
            yield row(f"{title}: memory of training", "GB", torch.cuda.max_memory_allocated() / 1e9)
        state = bench.module.state_dict()
        moved: Mapping[str, torch.Tensor] = {name: each for name, each in state.items() if name not in bench.frozen}
        size_bytes = sum(each.nbytes for each in moved.values())
        yield row(f"{title}: a push", "MB", size_bytes / 1e6)
        if title == next(iter(trains)):
            yield from _inference(bench, row)
        del bench


def _inference(bench: Bench, row: Callable[..., Row]) -> Iterator[Row]:
    infer = bench.server()
    alone = times_s(lambda: infer(1), bench.size.seconds)
    together = times_s(lambda: infer(ROBOTS), bench.size.seconds)
    busy, updates, made = while_training_and_pushing(bench, lambda: infer(1))
    yield row("inference of one robot", "chunks/s", 1 / float(np.median(alone)))
    yield row(f"inference of {ROBOTS} robots at once", "chunks/s", ROBOTS / float(np.median(together)))
    p99 = [1e3 * float(np.quantile(each, 0.99)) for each in (busy, alone)]
    yield row(f"inference p99 while it trains ({updates} updates) and pushes ({made}); bound: idle", "ms", *p99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny policy, also on a GPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_small = options.smoke or device.type == "cpu"
    reduced = "no GPU" if device.type == "cpu" else "a tiny policy" if options.smoke else ""
    found: list[Row] = []
    for size in SMOKE if is_small else SIZES:
        for each in rows(size, device):
            found.append(each)
            report("gpu_vla", found, reduced=reduced)


if __name__ == "__main__":
    main()
