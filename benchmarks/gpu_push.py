"""The cost of a weight push for a GPU's inference and training: by thread blocks, and with the governor (goal 11).

``python -m benchmarks.gpu_push`` needs a GPU and takes some minutes; without one it runs a small policy on the CPU
through the same code, which measures nothing. It prints a table and writes ``benchmarks/out/gpu_push.json``, again
after each way to push, so that an interrupted run leaves the figures measured so far.

A thread pushes without pause, as a learner does that publishes nothing but bfloat16: it copies the learner's float32
weights, rounds them to bfloat16 by a kernel of so many thread blocks, and copies them to host memory, on a stream of
the lowest priority. Meanwhile this thread measures inference and training steps of the same
policy, in rounds with and without pushes in turn. Both threads need Python's lock, as in a learner's process; what a
policy process infers has a lock of its own.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from torch import nn

from benchmarks.harness import Row, report
from user_sys.codec import Array
from user_sys.learner.config import training_stream
from user_sys.weights.governor import PUSH_AFTERMATH_S, GovernedBudget, Governor, GovernorConfig
from user_sys.weights.gpu_copy import DeviceSnapshot, HostCopier, on_stream

CTAS = (1, 2, 4, 8, 16, 32)
GOVERNED = GovernorConfig(budget=0.05, quantile=0.99, max_ctas=CTAS[-1])
STOP_S = 60.0
LONGEST_PUSH_S = 30.0
SETTLING = 4  # rounds that do not count, in which the governor finds its share


@dataclass(frozen=True)
class Scale:
    """How large the policy is, and how often each thing is measured; `rounds` are pairs of idle and pushing."""

    width: int
    layers: int
    tokens: int
    rounds: int
    inferences: int
    steps: int

    @property
    def title(self) -> str:
        return f"{12 * self.width**2 * self.layers / 1e6:.3g}M"


FULL = Scale(width=1280, layers=23, tokens=256, rounds=7, inferences=200, steps=20)
SMOKE = Scale(width=64, layers=2, tokens=8, rounds=2, inferences=20, steps=3)


class Gpu:
    """A policy that infers and trains on a device, and the learner's float32 weights of it.

    Attributes:
        pushing: the stream of the thread that pushes; one for all, since torch keeps the memory that each has had.
    """

    def __init__(self, scale: Scale, device: torch.device) -> None:
        self.scale, self.device = scale, device
        self.pushing = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        layers = [
            nn.TransformerEncoderLayer(
                scale.width, max(1, scale.width // 64), 4 * scale.width, 0.0, batch_first=True, norm_first=True
            )
            for _ in range(scale.layers)
        ]
        self.policy = nn.Sequential(*layers).to(device, torch.bfloat16)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=1e-6)
        self.masters = {name: p.detach().float() for name, p in self.policy.named_parameters()}
        self._one = torch.randn(1, scale.tokens, scale.width, device=device, dtype=torch.bfloat16)
        self._batch = self._one.expand(8, -1, -1).contiguous()
        self.infer()
        self.train()

    def infer(self) -> float:
        """Seconds."""
        started = time.perf_counter()
        with torch.inference_mode():
            self.policy(self._one)
        self.wait()
        return time.perf_counter() - started

    def train(self) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        self.policy(self._batch).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Until the stream of this thread is empty; the pushes have another."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


@dataclass(frozen=True)
class Mode:
    """A row of the table: the share that a push may take, or `governor`."""

    title: str
    ctas: int = CTAS[-1]
    governor: Governor | None = None

    def push(self, weights: DeviceSnapshot, into: Mapping[str, Array], stop: threading.Event) -> None:
        """Copies the weights to the host and reports to the governor, as the learner's publisher does.

        After `stop` the rest of them is copied without a limit: a push within the budget may take a minute.
        """
        weights.wait()
        if (governor := self.governor) is None:
            weights.fetch(into, GovernedBudget(GovernorConfig(enabled=False, max_ctas=self.ctas), lambda: 1.0))
            return
        governor.begin_push()
        allowance = GovernedBudget(GOVERNED, lambda: 1.0 if stop.is_set() else governor.share)
        weights.fetch(into, allowance)
        governor.end_push(allowance.worked_s)


def modes() -> Iterator[Mode]:
    """First the one that has a goal."""
    yield Mode("governor on", governor=Governor(GOVERNED))
    for ctas in CTAS:
        yield Mode(f"{ctas} thread blocks, governor off", ctas)


@contextmanager
def pushing(gpu: Gpu, mode: Mode, copies: HostCopier, into: Mapping[str, Array]) -> Iterator[list[float]]:
    """Pushes without pause until the block ends; yields the seconds of each whole push as they come."""
    times: list[float] = []
    stop, failures = threading.Event(), list[BaseException]()

    def push() -> None:
        try:
            with on_stream(gpu.pushing):
                while not stop.is_set():
                    started = time.perf_counter()
                    mode.push(copies.snapshot(gpu.masters), into, stop)
                    if not stop.is_set():
                        times.append(time.perf_counter() - started)
        except Exception as error:  # of any kind: the measurement is to fail, and not to go on without pushes
            failures.append(error)

    thread = threading.Thread(target=push, name="push")
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join(STOP_S)
    if failures or thread.is_alive():
        raise RuntimeError(f"pushing with {mode.title} failed or did not end") from next(iter(failures), None)


@dataclass(frozen=True)
class Measured:
    """Milliseconds: inference, 50th and 99th percentile, and the median training step."""

    p50: float
    p99: float
    step: float


def measure(gpu: Gpu, observe: Callable[[float], None]) -> Measured:
    inference = []
    for _ in range(gpu.scale.inferences):
        inference.append(gpu.infer())
        observe(inference[-1])
    steps = [gpu.train() for _ in range(gpu.scale.steps)]
    return Measured(*(1e3 * float(np.quantile(t, q)) for t, q in ((inference, 0.5), (inference, 0.99), (steps, 0.5))))


def rows(gpu: Gpu, mode: Mode) -> list[Row]:
    """Idle and pushing in turn; the governor learns from all of it."""
    observe = mode.governor.observe if mode.governor else lambda seconds: None
    copies = HostCopier(gpu.device, "bf16")
    into = {name: np.empty(shape, dtype) for name, (dtype, shape) in copies.layout(gpu.masters).items()}
    pairs, pushes = [], list[float]()
    for number in range(-(SETTLING if mode.governor else 1), gpu.scale.rounds):
        if mode.governor:
            time.sleep(PUSH_AFTERMATH_S)  # until then it attributes each slow step to a push
        idle = measure(gpu, observe)
        with pushing(gpu, mode, copies, into) as times:
            busy = measure(gpu, observe)
        if number >= 0:
            pairs.append((idle, busy))
            pushes += times
    if not pushes:  # each is longer than a round
        with pushing(gpu, mode, copies, into) as pushes:
            end_s = time.perf_counter() + LONGEST_PUSH_S
            while not pushes and time.perf_counter() < end_s:
                observe(gpu.infer())
    found = [_row(gpu, mode, figure, pairs) for figure in ("p50", "p99", "step")]
    size = sum(tensor.numel() * 2 for tensor in gpu.masters.values())
    name = f"{gpu.scale.title}, {mode.title}: a push of {size / 1e6:,.3g} MB"
    longer = "" if pushes else f"longer than {LONGEST_PUSH_S:g} s"
    found.append(Row(11, name, "ms", 1e3 * float(np.median(pushes)) if pushes else None, note=longer))
    if mode.governor:
        found.append(
            Row(11, f"{gpu.scale.title}, {mode.title}: share of its thread's time", "%", 100 * mode.governor.share)
        )
    return found


def _row(gpu: Gpu, mode: Mode, figure: str, pairs: list[tuple[Measured, Measured]]) -> Row:
    idle, busy = (np.array([getattr(half, figure) for half in halves]) for halves in zip(*pairs, strict=True))
    ratio = float(np.median(idle / busy))
    target = {"p99": 1 / 1.05}.get(figure) if mode.governor else None
    what = "training step" if figure == "step" else f"inference {figure}"
    met = None if target is None or gpu.device.type != "cuda" else ratio >= target
    name = f"{gpu.scale.title}, {mode.title}: {what} during pushes; bound: idle"
    return Row(11, name, "ms", float(np.median(busy)), float(np.median(idle)), ratio, target, met)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small policy and few rounds, also on a GPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reduced = "no GPU" if device.type == "cpu" else "a small policy" if options.smoke else ""
    with training_stream(device.type):
        gpu = Gpu(SMOKE if options.smoke or device.type == "cpu" else FULL, device)
        found: list[Row] = []
        for mode in modes():
            found += rows(gpu, mode)
            report("gpu_push", found, reduced=reduced)
    if device.type == "cpu":
        Console().print(
            "There is no GPU: these are figures of a small policy on the CPU, and say nothing about pushes."
        )


if __name__ == "__main__":
    main()
