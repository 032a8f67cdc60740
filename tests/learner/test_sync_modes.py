"""Each setting of when to publish, and of who waits, does what it says: from a run's YAML to the signed versions."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from user_sys.codec import Array
from user_sys.config import load
from user_sys.learner.learner import VersionPublisher
from user_sys.messages import (
    FOREIGN_RUN,
    PublisherEpoch,
    WeightsManifest,
    WeightsMessage,
    WeightsOffer,
    WeightsProgress,
    WeightsReceived,
    decode_record,
)
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.run.config import RunConfig
from user_sys.tunnel.protocol import Envelope, Payload
from user_sys.weights.double_buffer import DoubleBufferedPolicy
from user_sys.weights.governor import MAX_PAUSE_S, Governor
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.receiver import ReceiverConfig, WeightsReceiver
from user_sys.weights.signing import Signer, ensure_signer, new_signer

DEADLINE_S = 120.0
STEP = 0.02  # by which the only weight moves with each update


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.001)


@dataclass
class InMemoryChannel:
    """One end of a link within the process; it remembers what was offered. Without another end it is a gateway that
    has all of it at once."""

    inbox: queue.Queue[Envelope] = field(default_factory=queue.Queue)
    other: InMemoryChannel | None = None
    offers: list[WeightsOffer] = field(default_factory=list)

    def send_weights(self, message: WeightsMessage, payload: Payload | None = None) -> bool:
        if isinstance(message, WeightsOffer):
            self.offers.append(message)
            if self.other is None:
                version = decode_record(message.manifests[0].body, WeightsManifest).version
                self.inbox.put(Envelope(WeightsReceived(version=version)))
        if self.other is not None:
            self.other.inbox.put(Envelope(message, payload))
        return True

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        try:
            return self.inbox.get(timeout=timeout_s) if timeout_s > 0 else self.inbox.get_nowait()
        except queue.Empty:
            return None


class ConstantPolicy(Policy):
    """Its only weight says of which update it is."""

    size = 0.0

    def act(self, observation: object, sentence: str, *, deterministic: bool) -> ActionChunk:
        return ActionChunk(np.zeros((1, 1), np.float32), np.zeros(1, np.float32))

    def load(self, weights: Mapping[str, Array]) -> None:
        self.size = float(weights["w"][0])


class TrainingLoop:
    """A learner's loop with its real publisher: one update a second of a clock of its own."""

    def __init__(self, config: RunConfig, publisher: Publisher, end: InMemoryChannel, signer: Signer) -> None:
        self.publisher, self._end, self._signer = publisher, end, signer
        self.updates, self.episodes, self.weight = 0, 0, 0.0
        self.publishing = VersionPublisher(config.learner.publish, publisher, lambda: float(self.updates))
        self.publishing.version_limit = 1000

    def train(self, updates: int) -> list[int]:
        """Returns after how many updates versions were published so far, as the learner has signed it."""
        for _ in range(updates):
            if not self.publishing.is_too_far_ahead:
                self._update()
        opened = [self._signer.verifier.verify(offer.manifests[0], WeightsManifest) for offer in self._end.offers]
        assert [manifest.version for manifest in opened] == list(range(1, len(opened) + 1))
        return [manifest.updates for manifest in opened]

    def _update(self) -> None:
        self.updates += 1
        self.weight += STEP
        self.publishing.update_episode_count(lambda: self.episodes)
        self.publishing.publish_if_due(self.updates, self._weights, self._moved)
        until(lambda: not self.publisher.is_busy, "the version is ready before the next update")
        if self._end.other is None:
            until(
                lambda: self.publisher.progress.stored_version == self.publisher.progress.ready_version,
                "the gateway has it",
            )

    def _weights(self) -> dict[str, Array]:
        return {"w": np.array([self.weight])}

    def _moved(self, former: Mapping[str, Array]) -> float:
        return float((self.weight - former["w"][0]) ** 2)


@contextmanager
def learner(
    tmp_path: Path, text: str, robot: InMemoryChannel | None = None
) -> Iterator[tuple[RunConfig, TrainingLoop]]:
    """A learner with the settings of a YAML file."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    config, end, signer = load(RunConfig, path), InMemoryChannel(other=robot), new_signer()
    if robot is not None:
        robot.other = end
    with Publisher(end, signer, config.learner.publish) as publisher:
        yield config, TrainingLoop(config, publisher, end, signer)


@pytest.mark.parametrize(
    ("settings", "published_after"),
    [
        ("{every_s: 0, every_updates: 7}", [7, 14, 21, 28]),
        ("{every_s: 10}", [1, 11, 21]),
        ("{every_s: 10, every_updates: 4}", [1, 5, 9, 13, 17, 21, 25, 29]),
        ("{every_s: 0, kl: 0.25}", [10, 40, 70]),
        ("{every_s: 0, kl: 0.25, every_updates: 25}", [10, 35, 60, 85]),
    ],
)
def test_it_publishes_when_the_settings_say_so(tmp_path: Path, settings: str, published_after: list[int]) -> None:
    """KL: 0.25 is when the weight has moved by 0.5, so after 25 updates, which shows at the next tenth one."""
    updates = 90 if "kl" in settings else 30
    with learner(tmp_path, f"learner: {{publish: {settings}}}") as (_, trained):
        assert trained.train(updates) == published_after


def test_it_publishes_at_the_ends_of_episodes(tmp_path: Path) -> None:
    with learner(tmp_path, "learner: {publish: {every_s: 0, at_episode_ends: true}}") as (_, trained):
        assert trained.train(5) == []
        trained.episodes = 2
        assert trained.train(5) == [6]
        trained.episodes = 3
        assert trained.train(5) == [6, 11]


def test_what_is_due_waits_while_the_governor_has_pushes_pause(tmp_path: Path) -> None:
    with learner(tmp_path, "learner: {publish: {every_s: 0, every_updates: 1}}") as (_, trained):
        publisher = trained.publisher
        publisher.governor.share = 0.05
        publisher.governor.observe(1000.0)  # a step of so many seconds: pauses of the longest
        trained.publishing.publish(1, trained._weights)
        until(lambda: publisher.progress.ready_version == 1, "the first is ready")
        assert publisher.is_busy and publisher.progress.next_allowed_s > time.monotonic() + MAX_PAUSE_S / 2
        trained.publishing.publish_if_due(2, trained._weights, trained._moved)
        assert publisher.progress.submitted_version == 1
        trained.publishing.publish(3, trained._weights)
        until(
            lambda: publisher.progress.ready_version == 2, "the last one, at the end of training, is published at once"
        )


def test_a_bound_on_staleness_holds_the_learner_back(tmp_path: Path) -> None:
    with learner(tmp_path, "learner: {publish: {every_s: 0, every_updates: 1, max_versions_ahead: 2}}") as (_, trained):
        assert trained.train(5) == [1, 2, 3, 4, 5], "no robot acts with any yet"

        def oldest(version: int) -> None:
            trained._end.inbox.put(Envelope(WeightsProgress(oldest=version)))
            until(lambda: trained.publisher.progress.oldest_in_use == version, "the learner hears of it")

        oldest(4)
        assert trained.train(5)[5:] == [6, 7], "then a robot is more than two behind"
        oldest(5)
        assert trained.train(5)[7:] == [8]
        oldest(-1)
        assert trained.train(2)[8:] == [9, 10], "the robot has left"


def test_a_bound_on_staleness_holds_the_robot_back(tmp_path: Path) -> None:
    text = "{weights: {max_staleness_versions: 1}, learner: {publish: {every_s: 0, every_updates: 1}}}"
    robot, swapper = InMemoryChannel(), DoubleBufferedPolicy(ConstantPolicy)
    with learner(tmp_path, text, robot) as (config, trained):
        with WeightsReceiver(
            robot, swapper, config.weights, tmp_path / "keys", None, Governor(config.weights.governor)
        ) as inlet:
            trained.train(1)
            until(lambda: swapper.swap_if_ready() == 1, "it acts with the first")
            trained.train(1)
            until(lambda: inlet.planner.newest_version == 2, "it has heard of the second")
            assert not inlet.is_too_stale(), "one behind is allowed"
            trained.train(1)
            until(lambda: inlet.planner.newest_version == 3, "it has heard of the third")
            assert inlet.is_too_stale() and swapper.version == 1
            until(lambda: swapper.swap_if_ready() == 3, "it has the third")
            assert not inlet.is_too_stale()
            assert isinstance(swapper.policy, ConstantPolicy) and swapper.policy.size == pytest.approx(3 * STEP)
        inlet.raise_failure()


def test_weights_of_another_run_are_too_old_as_soon_as_this_one_has_any(tmp_path: Path) -> None:
    """Whatever their number is: those of this run begin at one."""
    config, robot, swapper = (
        ReceiverConfig(max_staleness_versions=3),
        InMemoryChannel(),
        DoubleBufferedPolicy(ConstantPolicy),
    )
    keys = tmp_path / "keys"
    signer = ensure_signer(keys, "learner")

    def inlet() -> WeightsReceiver:
        return WeightsReceiver(robot, swapper, config, keys, tmp_path / "kept", Governor(config.governor))

    def serve(life: PublisherEpoch, version: int) -> Publisher:
        end = InMemoryChannel(other=robot)
        robot.other = end
        publisher = Publisher(end, signer, PublishConfig(), epoch=life)
        publisher.publish({"w": np.array([float(version)])}, version, updates=version)
        return publisher

    with inlet() as receiving, serve(PublisherEpoch(b"first", 1), 300):
        until(lambda: swapper.swap_if_ready() == 300, "it acts with the first run's")
        assert swapper.version == 300 and not receiving.is_too_stale()
    robot, swapper = InMemoryChannel(), DoubleBufferedPolicy(ConstantPolicy)
    with inlet() as receiving:
        assert swapper.swap_if_ready() == 300 and swapper.version == FOREIGN_RUN
        assert not receiving.is_too_stale(), "nothing is known of this run"
        with serve(PublisherEpoch(b"second", 2), 1):
            until(
                lambda: receiving.planner.loaded_version == 1,
                "the second run's has come, and the robot does not swap yet",
            )
            assert receiving.is_too_stale() and swapper.version == FOREIGN_RUN
            assert swapper.swap_if_ready() == 1 and swapper.version == 1 and not receiving.is_too_stale()
