"""Weight pushes: their time, their size, and their cost to the learner's step (goals 9, 10, 11).

``python -m benchmarks.weights`` prints a table and writes ``benchmarks/out/weights.json`` and the governor's plot
next to it; ``--small`` leaves out the policy of 450 million parameters (it needs 8 GB of memory and minutes).
Everything runs over loopback, gateway and robot in a process each. The bound of a push is the same bytes over bare
libzmq with CURVE.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from benchmarks.harness import Row, at_most, compare, report
from benchmarks.weights_ends import Holder, MakePair, pushing, sizes_of
from benchmarks.weights_links import far_rows, fleet_row
from benchmarks.weights_models import (
    LORA_RANK,
    Weights,
    adapted,
    bfloats,
    cnn_shapes,
    floats,
    mlp_shapes,
    moved,
    stepped,
    transformer_shapes,
    unrelated,
    unrelated_bfloats,
)
from benchmarks.weights_peers import BareCurve, GrpcPeer, RayPeer
from benchmarks.weights_steps import step_rows
from user_sys.weights.receiver import DoubleBufferedPolicy

SWAPS_S = 10.0
ROBOT = "panda-0"
STAGES = ("fetch", "decode", "load")


def push_rows(name: str, make: MakePair, weights: Weights, with_ray: bool) -> list[Row]:
    """A full push against its bytes over bare CURVE, the peers' method, and the time of each stage."""
    with ExitStack() as stack:
        peers: dict[str, Callable[[], float]] = {}
        if with_ray:
            ray = RayPeer()
            stack.callback(ray.close)
            peers["Ray object store"] = lambda: 1e3 * ray.push(weights)
        pushes = stack.enter_context(pushing(make))
        robot = stack.enter_context(pushes.robot(ROBOT))
        bare, grpc = BareCurve(), GrpcPeer(weights)
        stack.callback(bare.close)
        stack.callback(grpc.close)
        peers["torch.save + gRPC"] = lambda: 1e3 * grpc.push()
        payload = bytes(pushes.sizes.full_bytes)
        stages: list[Mapping[str, float]] = []

        def pushed_ms() -> float:
            seconds = pushes.seconds([ROBOT], [robot])
            stages.append({**robot.stages, "all": seconds})
            return 1e3 * seconds

        title = f"{name} ({pushes.sizes.full_bytes / 1e6:,.1f} MB)"
        row = compare(
            f"full push, wire to applied, {title}; bound: bytes over CURVE",
            pushed_ms,
            lambda: 1e3 * bare.seconds(payload),
            goal=9,
            unit="ms",
            target=1 / 1.5,
            more_is_better=False,
            peers=peers,
        )
    return [row, *_stage_rows(title, stages[1:])]


def _stage_rows(title: str, pushes: Sequence[Mapping[str, float]]) -> list[Row]:
    """Medians of the stages; the rest is the way of the offer, and the wait for the loop's next check."""
    rest = [times["all"] - sum(times[stage] for stage in STAGES) for times in pushes]
    found = {stage: [times[stage] for times in pushes] for stage in STAGES} | {"offer and swap": rest}
    return [
        Row(9, f"of it: {stage}, {title}", "ms", 1e3 * statistics.median(seconds)) for stage, seconds in found.items()
    ]


def change_rows(name: str, make: MakePair, target: float | None = None) -> list[Row]:
    """A push of what changed: its size against all weights, and its time; two versions in turn."""
    with pushing(make) as pushes, pushes.robot(ROBOT) as robot:
        pushes.seconds([ROBOT], [robot])
        times = [1e3 * pushes.seconds([ROBOT], [robot]) for _ in range(8)]
        sizes = pushes.sizes
    smaller = sizes.full_bytes / sizes.sent_bytes
    met = None if target is None else smaller >= target
    return [
        Row(10, f"{name}: all weights / payload, {sizes.codecs}", "times", smaller, target,
            None if target is None else smaller / target, target=None if target is None else 1.0, met=met),
        Row(9, f"{name}: push, wire to applied", "ms", statistics.median(times)),
        Row(10, f"{name}: encoding, once for all robots", "ms", 1e3 * sizes.encode_s),
    ]  # fmt: skip


def large_rows() -> list[Row]:
    shapes = transformer_shapes()
    title = f"transformer of {sum(map(math.prod, shapes.values())) / 1e6:.0f}M, bf16"
    rows = change_rows(f"{title}, 1% of values changed", partial(moved, shapes, 0.01), 40.0)
    return rows + change_rows(f"{title}, LoRA of rank {LORA_RANK}", partial(adapted, shapes), 40.0)


def smallest_rows() -> list[Row]:
    """Above 50% changed values a difference may still be smaller; it is chosen only then."""
    shapes = cnn_shapes()
    rows = []
    for what, pair in (("all replaced", unrelated(shapes)), ("55% of bf16 moved", moved(shapes, 0.55))):
        sizes = sizes_of(*pair)
        smaller = sizes.full_bytes / sizes.sent_bytes
        rows.append(Row(10, f"CNN, {what}: all weights / payload, {sizes.codecs}", "times", smaller, 1.0, smaller,
                        target=1.0, met=smaller >= 1.0))  # fmt: skip
    return rows


def swap_row() -> Row:
    """p99.9 of a swap while another thread loads versions of 1 MB one after the other."""
    weights, swapper, stop = floats(mlp_shapes(), 0), DoubleBufferedPolicy(Holder), threading.Event()

    def load() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            swapper.load(version, weights)
            time.sleep(1e-3)

    loader = threading.Thread(target=load)
    loader.start()
    times: list[int] = []
    until_s = time.monotonic() + SWAPS_S
    while time.monotonic() < until_s:
        started = time.perf_counter_ns()
        swapped = swapper.swap_if_ready()
        taken = time.perf_counter_ns() - started
        if swapped is not None:
            times.append(taken)
        time.sleep(1e-5)
    stop.set()
    loader.join()
    worst = float(np.quantile(times, 0.999)) / 1e3
    return at_most(9, "swap pause, p99.9 next to a busy loader", "µs", worst, 100.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="without the policy of 450 million parameters")
    parser.add_argument("--no-ray", action="store_true", help="without the peer that takes seconds to start")
    options = parser.parse_args()
    ray = not options.no_ray
    rows = [swap_row()]
    for name, shapes in (("MLP", mlp_shapes()), ("CNN", cnn_shapes())):
        rows += push_rows(name, partial(unrelated, shapes), floats(shapes, 0), ray)
        rows += change_rows(f"{name}, a step of all values", partial(stepped, shapes))
    rows += [*smallest_rows(), fleet_row(), *far_rows(), *step_rows()]
    if not options.small:
        shapes = transformer_shapes()
        rows += push_rows("transformer, bf16", partial(unrelated_bfloats, shapes), bfloats(shapes, 0), ray)
        rows += large_rows()
    left_out = options.small * ["the policy of 450M parameters"] + options.no_ray * ["Ray"]
    report("weights", rows, reduced=f"without {' and '.join(left_out)}" if left_out else "")


if __name__ == "__main__":
    main()
