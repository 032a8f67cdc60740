"""The cost of pushes to the learner's step (goal 11), with the governor.

The learner (RLPD's update on random batches, one thread) and its publisher are real; the gateway and a robot are
processes of their own, as in a run.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import OUT, Row, reached
from benchmarks.tunnel import gateway_process
from benchmarks.tunnel_ends import hello
from user_sys.algorithms.conformance import example_batch
from user_sys.algorithms.rlpd import Rlpd, RlpdSettings
from user_sys.gateway.gateway import GatewayAddress
from user_sys.learner.publisher_client import PublisherClient
from user_sys.learner.publisher_protocol import PublisherSettings
from user_sys.messages import PROTOCOL_VERSION, Hello
from user_sys.policies.conformance import example_spec
from user_sys.policies.mlp import MlpPolicy
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import Keyring, load_keypair, new_keypair, save_keypair
from user_sys.weights.governor import Governor, GovernorConfig
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.receiver import DoubleBufferedPolicy, ReceiverConfig, WeightsReceiver

PAIRS = 15
MANY_PAIRS = 45  # for the goal of 1%: the medians of fifteen differ by more from one sitting to the next
SETTLING_PAIRS = 12  # the governor needs about so many, from a share of 1 to a steady share
STEPS = 60  # in each half of a pair: short, so that what else runs on the machine disturbs both halves alike
BEFORE_S = 0.85  # of each half, not counted: gateway and robot work on a push for almost as long
BATCH = 256
GOVERNED_S = 30.0
PERIOD = RlpdSettings().actor_period
PLOT = OUT / "weights-governor.png"


def step_rows() -> list[Row]:
    """Median step while pushing after every step, and once a second, against the step without pushes.

    The goal of 3% is for a push after every step. With the governor on, as it ships, steps pass without one: the row
    has the share of those with one. Without the governor there is no goal, since it does not ship so.
    """
    torch.set_num_threads(1)
    rows = []
    with Fleet() as fleet:
        for title, config, every_s, pairs, target in (
            ("after every step", GovernorConfig(), 0.0, PAIRS, 1 / 1.03),
            ("after every step, governor off", GovernorConfig(enabled=False), 0.0, PAIRS, None),
            ("once a second", GovernorConfig(), 1.0, MANY_PAIRS, 1 / 1.01),
        ):
            with fleet.publisher(config) as publisher:
                rows += _row(fleet, publisher, title, every_s, pairs, target)
        with fleet.publisher(GovernorConfig()) as publisher:
            plot(fleet, publisher)
    return rows


class Fleet:
    """A gateway and a robot in processes of their own, and a learner's algorithm here."""

    def __enter__(self) -> Fleet:
        self._stack = ExitStack()
        self.run = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.version = self.steps = 0
        spec, rng = example_spec(), np.random.default_rng(0)
        self.algorithm = Rlpd(RlpdSettings(), MlpPolicy.make_module(spec), spec)
        self.batch = example_batch(rng, BATCH)
        learner = new_keypair()
        save_keypair(learner, self.run / "keys", "learner")
        Keyring(self.run / "keys").allow(learner.public, "learner", "learner")
        self.address, _ = self._stack.enter_context(gateway_process(self.run))
        robot = multiprocessing.get_context("spawn").Process(target=act, args=(self.run, self.address), daemon=True)
        robot.start()
        self._stack.callback(robot.terminate)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def publisher(self, config: GovernorConfig) -> PublisherClient:
        keys, hello = self.run / "keys", Hello(protocol=PROTOCOL_VERSION, role="learner", name="learner")
        setup = PublisherSettings(
            endpoint=self.address.endpoint,
            tunnel_key=str(keys / "learner.key"),
            gateway_key=self.address.public_key,
            hello=hello,
            signing_folder=str(keys),
            publish=PublishConfig(governor=config),
        )
        return PublisherClient(setup, print)

    def step(self, publisher: PublisherClient, push: bool) -> float:
        """Seconds of one update as the learner makes it, including its publishing."""
        self.steps += 1
        started = time.perf_counter()
        self.algorithm.update(self.batch, self.steps)
        if push and not publisher.is_busy:
            self.version += 1
            weights = {name: tensor.numpy() for name, tensor in self.algorithm.policy.state_dict().items()}
            publisher.publish(weights, self.version, self.version)
        taken_s = time.perf_counter() - started
        publisher.observe(taken_s)
        return taken_s


def act(run: Path, address: GatewayAddress) -> None:
    """A robot that does nothing but take each version, at 100 Hz. Its process is terminated."""
    spec = example_spec()
    swapper, config = DoubleBufferedPolicy(lambda: MlpPolicy(spec)), ReceiverConfig()
    keys = load_keypair(run / "keys" / "panda-0.key")
    with TunnelClient(address.endpoint, keys, address.public_key, hello()) as client:
        client.wait_open(30)
        with WeightsReceiver(
            client, swapper, config, run / "keys", run / "edge", Governor(config.governor)
        ) as receiver:
            while True:
                if swapper.swap_if_ready() is not None:
                    client.send(receiver.applied_report("panda-0"))
                time.sleep(0.01)


def _row(
    fleet: Fleet, publisher: PublisherClient, title: str, every_s: float, pairs: int, target: float | None
) -> list[Row]:
    next_s = 0.0

    def due() -> bool:
        nonlocal next_s
        if time.monotonic() < next_s:
            return False
        next_s = time.monotonic() + every_s
        return True

    for _ in range(SETTLING_PAIRS):
        half(fleet, publisher, lambda: False)
        half(fleet, publisher, due)
    idle, pushing = list[Half](), list[Half]()
    published, steps = publisher.published, fleet.steps
    for pair in range(pairs):
        for push in (pair % 2 == 0, pair % 2 == 1):
            (pushing if push else idle).append(half(fleet, publisher, due if push else lambda: False))
    name = f"a push {title}; bound: without pushes"
    pushed = 2 * (publisher.published - published) / (fleet.steps - steps)
    share = None if every_s else pushed
    return [
        Row(11, f"share of steps with a push, a push {title}", "", pushed),
        _half_row(
            f"learner's median step, {name}", [h.step_ms for h in pushing], [h.step_ms for h in idle], target, share
        ),
        _half_row(
            f"of it: its thread's own processor time, {name}", [h.own_ms for h in pushing], [h.own_ms for h in idle]
        ),
        _half_row(
            f"processor time of the learner's process, per step, {name}",
            [h.process_ms for h in pushing],
            [h.process_ms for h in idle],
        ),
    ]


def _half_row(
    name: str, ours: list[float], bound: list[float], target: float | None = None, share: float | None = None
) -> Row:
    ratios = [b / o for o, b in zip(ours, bound, strict=True)]
    ratio, spread = statistics.median(ratios), (min(ratios), max(ratios))
    figures = statistics.median(ours), statistics.median(bound), ratio, target, reached(ratio, target, share)
    return Row(11, name, "ms", *figures, spread=spread, share=share)


@dataclass(frozen=True)
class Half:
    """Milliseconds: the median step, the processor time of the median step's thread, and that of the process a step.

    A step is the mean of as many as there are to each update of the actor: those take twice as long as the others.
    On a machine that others use, a step waits for the processor; its processor time does not include that.
    """

    step_ms: float
    own_ms: float
    process_ms: float


def half(fleet: Fleet, publisher: PublisherClient, due: Callable[[], bool]) -> Half:
    """`STEPS` steps, after the push in progress has arrived and `BEFORE_S` of the same have passed."""
    publisher.wait_until_stored(10)
    before_s = time.monotonic() + BEFORE_S
    while time.monotonic() < before_s or fleet.steps % PERIOD:
        fleet.step(publisher, due())
    process_s, wall, own = time.process_time(), list[float](), list[float]()
    for _ in range(STEPS // PERIOD):
        own_s, wall_s = time.thread_time(), sum(fleet.step(publisher, due()) for _ in range(PERIOD))
        wall.append(wall_s / PERIOD)
        own.append((time.thread_time() - own_s) / PERIOD)
    process_ms = 1e3 * (time.process_time() - process_s) / STEPS
    return Half(1e3 * statistics.median(wall), 1e3 * statistics.median(own), process_ms)


def plot(fleet: Fleet, publisher: PublisherClient) -> None:
    """The governor's decisions over half a minute: a learner that pushes for ten seconds of every fifteen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    started, times, shares_left = time.monotonic(), [], []
    while (now := time.monotonic() - started) < GOVERNED_S:
        times.append((now, 1e3 * fleet.step(publisher, push=now % 15 >= 5)))
        shares_left.append(publisher.scalars().get("governor/share", 1.0))
    figure, (steps, shares) = plt.subplots(2, 1, sharex=True, figsize=(9, 5), layout="constrained")
    steps.plot(*zip(*times, strict=True), ".", markersize=2, color="0.5")
    steps.set_ylabel("learner's step, ms")
    steps.set_ylim(0, 2.5 * float(np.median([t for _, t in times])))
    shares.step([at for at, _ in times], shares_left, where="post")
    shares.set_ylabel("share left to pushes")
    shares.set_xlabel("seconds; pushes after every step from 5 to 15 and from 20 to 30")
    shares.set_ylim(0, 1.05)
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)
