"""Pins a version of a run's weights: all robots of a learner act with it. The learner's key signs the pin.

A person sets a pin (`user-sys weights rollback`), and with ``learner.publish.on_success_drop: best`` so does the run:

1. Robots act with the newest version. The version that acted when the success over `SUCCESS_WINDOWS`' larger window was
   at its best is kept on the gateway's disk, if the gateway still has it. Otherwise the newest stored one before it is.
2. The success falls by `SUCCESS_DROP` from its best: the kept version is pinned. Training goes on. The pin stays if the
   run is resumed now. At any other time, a resumed run measures its best anew.
3. After a window of episodes with the best version, robots try the newest for up to `TRIAL_EPISODES` episodes.
4. If the newest succeeds nearly as often (`AS_GOOD`), go to 1. Otherwise go to 2; each further trial comes after twice
   as many episodes.

The success of a version is that of the newest autonomous training episodes. A person's pin has precedence.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Literal

from hal.registry import MAX_TEXT_CHARS
from hal.state_database import audit_operator_action
from user_sys.console.progress import BEST_VERSION_SCALAR, SUCCESS_DROP, SUCCESS_WINDOWS
from user_sys.episode import EpisodeSource
from user_sys.errors import RunError, WireError
from user_sys.messages import NO_VERSION, EpisodeReport, PinnedVersion, decode_record
from user_sys.robot_records import LEARNER, learner_folder
from user_sys.weights.signing import SECRET_SUFFIX, SIGNING_KEY_NAME, load_signer
from user_sys.weights.version_store import VersionStore

log = logging.getLogger(__name__)
WINDOW = SUCCESS_WINDOWS[1]
TRIAL_EPISODES = 20
AS_GOOD = 0.1  # the newest version may succeed less often by this share
NEAR = 0.5  # an older version stands for the best one if its number is at least this share of the best one's
PROTECTED = 0.5  # a lower best success is not protected: at the start of training, success rises and falls
MAX_EPISODES_BETWEEN_TRIALS = 16 * WINDOW
AUTOMATIC = "learner.publish.on_success_drop"  # who pins


def published_learners(run: Path) -> list[str]:
    """The names of the run's learners that have published weights, and of its first."""
    return [LEARNER, *sorted(folder.name for folder in (run / "weights").glob(f"{LEARNER}-*/"))]


def current_pin(store: VersionStore) -> PinnedVersion | None:
    """The newest pin; None if there was none, or if the last one was released. Raises OSError, WireError."""
    signed = store.read_pin()
    pin = None if signed is None else decode_record(signed.body, PinnedVersion)
    return None if pin is None or pin.version == NO_VERSION else pin


def set_pin(run: Path, learner: str, version: int, by: str, reason: str) -> None:
    """Pins `version` for the robots of `learner`, or releases the pin (`NO_VERSION`).

    The gateway looks every second, and at its start. The serial number is greater than those of earlier runs, which
    robots may have accepted.

    Raises:
        RunError: the run's folder has no signing key.
        OSError: the pin cannot be stored.
    """
    key = run / "keys" / f"{SIGNING_KEY_NAME}{SECRET_SUFFIX}"
    if not key.exists():
        raise RunError(f"{run} has no {key.name}: run this command in the run's folder on the gateway's machine")
    store = VersionStore(learner_folder(run / "weights", learner))
    signed, newest = store.read_pin(), max(store.manifests(), key=lambda m: (m.epoch, m.version), default=None)
    serial = 0 if signed is None else decode_record(signed.body, PinnedVersion).serial + 1
    pin = PinnedVersion(
        serial=max(int(time.time()), serial),
        version=version,
        by=shorten(by, MAX_TEXT_CHARS),
        reason=shorten(reason, MAX_TEXT_CHARS),
        given_unix_ns=time.time_ns(),
        run=b"" if newest is None else newest.run,
    )
    store.set_pin(load_signer(key).sign(pin))
    target = "the newest version" if version == NO_VERSION else f"version {version}"
    audit_operator_action(pin.by, f"weights of {learner}: use {target}", run=run, reason=pin.reason)


def release_automatic_pins(run: Path) -> Iterator[str]:
    """Releases the pins of an earlier launch's guards. Yields what to tell a person. Raises as `set_pin`."""
    for learner in published_learners(run):
        try:
            pin = current_pin(VersionStore(learner_folder(run / "weights", learner)))
        except (OSError, WireError) as error:
            log.error("weights.pin_unreadable %s", error)
            continue
        if pin is not None and pin.by == AUTOMATIC:
            set_pin(run, learner, NO_VERSION, AUTOMATIC, "on_success_drop is not best any more")
            yield f"{learner}: robots act with the newest version again, no longer with version {pin.version}"


_Acting = Literal["newest", "best", "trial"]


class SuccessGuard:
    """Guards the success of one learner's robots. One thread calls it."""

    def __init__(self, run: Path, learner: str = LEARNER) -> None:
        """`run`: its folder, which may have the pin of an earlier launch's guard."""
        self._run, self._learner = run, learner
        self._store = VersionStore(learner_folder(run / "weights", learner))
        self._outcomes = deque[bool](maxlen=WINDOW)  # of the versions that act
        self._version, self._episodes = NO_VERSION, 0  # of the newest episode; since the versions were exchanged
        self._acting: _Acting = "newest"
        self._best_version, self._best = NO_VERSION, 0.0  # and its success
        self._trial_after = WINDOW
        try:
            pin = current_pin(self._store)
        except (OSError, WireError) as error:
            log.error("weights.pin_unreadable %s", error)
            pin = None
        if pin is not None and pin.by == AUTOMATIC:
            self._acting, self._best_version = "best", pin.version

    @property
    def pinned(self) -> int:
        """The version that the guard has pinned; `NO_VERSION` without one."""
        return self._best_version if self._acting == "best" else NO_VERSION

    def add(self, episode: EpisodeReport) -> None:
        """Counts an autonomous training episode, unless it was cut off without a label."""
        if episode.success is None:
            return
        is_best = episode.policy_version == self._best_version
        if (self._acting == "best" and not is_best) or (self._acting == "trial" and is_best):
            return  # it began before the versions were exchanged
        self._outcomes.append(episode.success)
        self._version = episode.policy_version
        self._episodes += 1

    def apply(self) -> str:
        """Keeps and pins versions as the episodes ask for. Returns what to tell a person; empty if nothing changed."""
        try:
            pin = current_pin(self._store)
            if (self._acting == "best") if pin is None else (pin.by != AUTOMATIC):  # a person has released or pinned
                self._begin("newest")
                return ""
            return {"newest": self._guard, "best": self._try, "trial": self._judge}[self._acting]()
        except (OSError, WireError) as error:
            log.error("weights.best_version_failed %s", error)
            return ""

    @property
    def _share(self) -> float:
        return sum(self._outcomes) / len(self._outcomes)

    def _begin(self, acting: _Acting) -> None:
        self._acting, self._episodes = acting, 0
        self._outcomes.clear()

    def _guard(self) -> str:
        if len(self._outcomes) < WINDOW:
            return ""
        if self._share >= self._best:
            self._best_version, self._best = self._version, self._share
        if self._best < PROTECTED:
            return ""
        self._keep()
        if self._share > self._best - SUCCESS_DROP:
            return ""
        return self._pin(f"success fell from {self._best:.0%} to {self._share:.0%}")

    def _keep(self) -> None:
        """Has the gateway keep the best version, and until it is stored, the one that stands for it."""
        versions = {self._best_version, self._stored_best()} - {NO_VERSION}
        if versions != self._store.kept():
            self._store.keep(versions)

    def _stored_best(self) -> int:
        """The best version, or the nearest one before it that is stored; `NO_VERSION` if there is none."""
        stored = (manifest.version for manifest in self._store.manifests())
        near = [each for each in stored if NEAR * self._best_version <= each <= self._best_version]
        return max(near, default=NO_VERSION)

    def _try(self) -> str:
        if self._episodes < self._trial_after:
            return ""
        self._best = self._share
        set_pin(self._run, self._learner, NO_VERSION, AUTOMATIC, "trial of the newest version")
        self._begin("trial")
        return f"{self._learner}: robots try the newest version again"

    def _judge(self) -> str:
        judged = max(TRIAL_EPISODES, len(self._outcomes))  # fast simulated robots finish more at once
        missing = judged - len(self._outcomes)
        if sum(self._outcomes) + missing < (self._best - AS_GOOD) * judged:
            self._trial_after = min(2 * self._trial_after, MAX_EPISODES_BETWEEN_TRIALS)
            return self._pin(f"the newest version succeeded in {sum(self._outcomes)} of {len(self._outcomes)} episodes")
        if missing > 0:
            return ""
        self._acting, self._trial_after = "newest", WINDOW
        return f"{self._learner}: robots act with the newest version: it is as good as the best again"

    def _pin(self, why: str) -> str:
        self._best_version = self._stored_best()
        if self._best_version == NO_VERSION:
            self._best = 0.0
            self._begin("newest")
            return f"{self._learner}: {why}, and the best version so far is not stored; robots act with the newest"
        set_pin(self._run, self._learner, self._best_version, AUTOMATIC, why)
        self._begin("best")
        return f"{self._learner}: {why}; robots act with version {self._best_version}, the best so far that is stored"


class SuccessGuards:
    """The guards of a run, one for each learner. One thread calls it."""

    def __init__(self, run: Path) -> None:
        """`run`: as for `SuccessGuard`."""
        self._run = run
        self._guards = {learner: SuccessGuard(run, learner) for learner in published_learners(run)}
        self._learner_from_robot: Mapping[str, str] = {}

    def set_learners(self, learner_from_robot: Mapping[str, str]) -> None:
        """Sets each robot's learner. A robot that is not named here has the run's first learner."""
        self._learner_from_robot = learner_from_robot

    def add(self, episode: EpisodeReport) -> None:
        """Counts an episode, if it is of training and no person has helped."""
        if episode.source != EpisodeSource.ONLINE or episode.intervention_steps:
            return
        learner = self._learner_from_robot.get(episode.robot, LEARNER)
        if learner not in self._guards:
            self._guards[learner] = SuccessGuard(self._run, learner)
        self._guards[learner].add(episode)

    def apply(self) -> list[str]:
        """See `SuccessGuard.apply`."""
        return [line for guard in self._guards.values() if (line := guard.apply())]

    def scalars(self, robots: Collection[str]) -> dict[str, float]:
        """The version that robots act with instead of the newest, by learner; -1 without one.

        Also -1 for learners that none of `robots`, those that have reported, has; without any, all learners count.
        """
        learners = {self._learner_from_robot.get(robot, LEARNER) for robot in robots} or self._guards.keys()
        pinned = {name: each.pinned if name in learners else NO_VERSION for name, each in self._guards.items()}
        return {f"{BEST_VERSION_SCALAR}/{name}": float(version) for name, version in pinned.items()}
