"""A simulated run for the console's tests: a real hub and a real control authority, in a thread."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import simplejpeg
from episode_kit import chunk_header

from hal.spec import ArraySpec, RobotSpec
from user_sys.console.config import ConsoleConfig
from user_sys.console.hub import ConsoleHub
from user_sys.console.server import ConsoleServer
from user_sys.edge.control_authority import ControlAuthority
from user_sys.episode import Chunk, EpisodeEnd, Phase, frame_columns
from user_sys.messages import (
    ControlPeriod,
    EpisodeReport,
    MetricsReport,
    OperatorCommand,
    Preview,
    PreviewRequest,
    RobotStatus,
)
from user_sys.store.store import StoreWriter

PERIOD_S = 0.05
SPEC = RobotSpec(
    model="simulated-arm",
    rate_hz=10.0,
    observation=(),
    action=ArraySpec(
        name="action",
        labels=("dx", "dy", "dz", "gripper"),
        units=("m",) * 4,
        low=(-0.02,) * 3 + (0.0,),
        high=(0.02,) * 3 + (0.08,),
    ),
    neutral=(0.0,) * 4,
    tool_delta=(0, 1, 2),
    gripper=3,
)


class Clock:
    """A clock that a test can stop, so that a busy machine causes no input timeout."""

    def __init__(self) -> None:
        self._now_s = self._since_s = 0.0
        self._runs = False

    def __call__(self) -> float:
        return self._now_s + (time.monotonic() - self._since_s if self._runs else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._since_s, self._runs = time.monotonic(), True
        try:
            yield
        finally:
            self._now_s, self._runs = self(), False


class SimulatedRun:
    """One robot with two cameras, in a thread until `close`. `sent` holds the console's messages.

    Others may be added to its hub (`add`).
    """

    def __init__(self, robot: str = "panda-0", hub: ConsoleHub | None = None, folder: Path = Path()) -> None:
        self.robot = robot
        self.hub = hub or ConsoleHub("demo", self.send, {robot: SPEC}, budget_s=300.0, folder=folder)
        self._others: dict[str, SimulatedRun] = {}
        self.clock = Clock()  # for the input timeout
        self.authority = ControlAuthority(robot, SPEC, self.clock)
        self.sent: list[OperatorCommand | PreviewRequest] = []
        self.away = False  # without a gateway nothing can be sent
        self.limits: tuple[str, ...] = ()  # at which the robot is
        self.state: tuple[float, ...] = ()  # in each status, with the `promised` actions
        self.promised: tuple[tuple[float, ...], ...] = ()
        self._tool = np.array([0.0, 0.0, 0.5, 1.0])
        self._step = 0
        self._watched_until_s = 0.0
        self._watched: tuple[str, ...] = ()  # cameras; empty for all
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._live, name="simulated")

    def start(self) -> SimulatedRun:
        self._thread.start()
        return self

    def add(self, robot: str) -> SimulatedRun:
        """Starts another robot of this run; `close` ends it too."""
        self._others[robot] = SimulatedRun(robot, self.hub).start()
        return self._others[robot]

    def close(self) -> None:
        for other in self._others.values():
            other.close()
        self._ending.set()
        self._thread.join(timeout=60)

    def orders(self, kind: str) -> list[OperatorCommand]:
        return [m for m in list(self.sent) if isinstance(m, OperatorCommand) and m.order == kind]

    def learn(self, episodes: int) -> None:
        """Updates the curves of a successful run."""
        for n in range(episodes):
            share = n / episodes
            self.hub.update(
                EpisodeReport(
                    robot=self.robot,
                    episode=f"e-{n}",
                    source="online",
                    steps=40,
                    success=(n * 7919) % 100 < share * 110,
                    intervention_steps=0,
                    episode_return=share,
                    policy_version=n,
                )  # fmt: skip
            )
            scalars = {"critic_loss": 2.0 * math.exp(-4 * share) + 0.02 * math.sin(n), "actor_loss": 1.2 - share}
            self.hub.update(MetricsReport(node="learner", count=n * 50, scalars=scalars))

    def send(self, message: OperatorCommand | PreviewRequest) -> bool:
        if self.away:
            return False
        if message.robot in self._others:
            return self._others[message.robot].send(message)
        self.sent.append(message)
        if isinstance(message, PreviewRequest):
            if message.pose:
                return True
            self._watched_until_s, self._watched = time.monotonic() + message.ttl_s, message.cameras
            return True
        with self._lock:
            reply = self.authority.apply(message)
        self.hub.update(reply)
        return True

    def _live(self) -> None:
        while not self._ending.wait(PERIOD_S):
            with self._lock:
                state = self.authority.update()
                self._tool[:3] = np.clip(self._tool[:3] + 0.04 * self.authority.twist()[:3], -1, 1)
                phase, operator = self.authority.phase.name.lower(), self.authority.operator
            self._step += 1
            self.hub.update(
                RobotStatus(
                    robot=self.robot,
                    authority=state.value,
                    operator=operator,
                    phase=phase,
                    episode="panda-0-1763695921123-9f2c1a",
                    step=self._step % 100,
                    policy_version=212,
                    real_time=operator != "",
                    outbox_chunks=2,
                    control_hz=10.0 if operator else 84.0,
                    safety_interventions=3,
                    limits=self.limits,
                    requested_by=self.authority.requested_by,
                    help=self.authority.help_reason,
                    awaits_reset=self.authority.awaits_reset,
                    tool_speed=self.authority.tool_drive.speed,
                    task="lift",
                    tool_refusal=self.authority.tool_drive.refusal,
                    periods=(self._period(),),
                    state=self.state,
                    promised=self.promised,
                )  # fmt: skip
            )
            if time.monotonic() < self._watched_until_s:
                self._film()

    def _period(self) -> ControlPeriod:
        requested = (*(0.02 * self.authority.twist()[:3]).tolist(), 0.04)
        limited = 32 * bool(self.limits)
        return ControlPeriod(time.monotonic(), requested, (0.01, *requested[1:]), limited, 4.0, 1.0)

    def _film(self) -> None:
        for camera in self._watched or ("front", "wrist"):
            size = (120, 160) if camera == "front" else (120, 120)  # small: every test draws
            jpeg = simplejpeg.encode_jpeg(self._draw(size, camera), quality=85)
            self.hub.update_preview(Preview(robot=self.robot, camera=camera, step=self._step), jpeg)

    def _draw(self, size: tuple[int, int], camera: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        rows, columns = np.mgrid[0 : size[0], 0 : size[1]] / size[0]
        picture = np.stack([70 + 60 * rows, 78 + 50 * rows, 92 + 40 * rows], -1)
        x, y, z = self._tool[:3] if camera == "front" else self._tool[:3] * 1.5
        cube = (abs(columns - 0.66) < 0.07) & (abs(rows - 0.7) < 0.07)
        tool = (columns - 0.66 + 0.4 * y) ** 2 + (rows - 0.75 + 0.3 * x + 0.4 * z) ** 2 < 0.004
        picture[cube], picture[tool] = (214, 96, 77), (240, 244, 248)
        return np.ascontiguousarray(picture.astype(np.uint8))


STEPS = 12  # of an episode of `write_episode`


def write_episode(
    path: Path, episode: str, *, success: bool = True, task: str = "lift", robot: str = "panda-0"
) -> None:
    """Stores the episode of `episode_chunk`."""
    with StoreWriter.open(path) as writer:
        writer.append(episode_chunk(episode, success=success, task=task, robot=robot).encode())


def episode_chunk(episode: str, *, success: bool = True, task: str = "lift", robot: str = "panda-0") -> Chunk:
    """A whole episode: a JPEG camera that misses every other picture, a raw one, and a correction at the end."""
    wide = [np.full((48, 64, 3), 20 * n, np.uint8) for n in range(STEPS)]
    jpeg = [simplejpeg.encode_jpeg(picture) if n % 2 == 0 else None for n, picture in enumerate(wide)]
    raw = [np.full((24, 24, 3), 250 - 20 * n, np.uint8) for n in range(STEPS)]
    columns = {
        "action": np.linspace([0, 1, 2], [1, 0, 2], STEPS, dtype=np.float32),
        "reward": np.eye(STEPS, dtype=np.float32)[-1] * success,
        "phase": np.array([Phase.POLICY] * 6 + [Phase.CORRECTION] * 6, np.uint8),
        "policy_version": np.full(STEPS, 7, np.int64),
        "t_capture_ns": np.arange(STEPS, dtype=np.int64) * 50_000_000,
    }
    columns |= frame_columns("observation.images.front", jpeg, columns["t_capture_ns"])
    columns |= frame_columns("observation.images.wrist", raw, columns["t_capture_ns"])
    end = EpisodeEnd(steps=STEPS, success=success)
    header = chunk_header(episode, STEPS, robot=robot, task=task, started_unix_ns=time.time_ns(), end=end)
    return Chunk(header, columns, {})


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits until `true()`; fails after `seconds`."""
    deadline_s = time.monotonic() + seconds
    pause = threading.Event()
    while not true():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        pause.wait(0.01)


def main() -> None:
    """``python console_kit.py PORT``: serves a simulated run until SIGTERM, for tests that kill it."""
    simulated = SimulatedRun().start()
    server = ConsoleServer(simulated.hub, ConsoleConfig(port=int(sys.argv[1])), token="simulated")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    sys.stdout.write(f"{server.start()}\n")
    sys.stdout.flush()
    ended.wait()
    server.stop()
    simulated.close()


if __name__ == "__main__":
    main()
