"""A scripted operator at the console's protocol corrects a policy until it succeeds alone (HG-DAgger, and RaC).

    python -m benchmarks.interventions                     # one seed, about 8 minutes
    python -m benchmarks.interventions --seeds 0,1,2 --runs DIR
    python -m benchmarks.interventions --quick             # short runs, only to see whether they work

`lift` starts from a policy that imitates a few demonstrations. Two runs go on from it, each with the same operator for
the same minutes of driving: HG-DAgger, and RaC (Hu et al. 2025, arXiv 2509.07953), in which the operator first rewinds
the arm, and the learner imitates the recovery too. The arm works in real time.

The operator is a program in place of a page: it takes over by the WebSocket of the run's console when an episode is
late, drives by the page's messages, and hands back. A person sees the cube in the pictures; the operator gets the
action of the task's expert for each observation from a task of this module, `WatchedLift`, as a datagram.

``docs/images/interventions.png`` shows success and the share of episodes with help against the operator's time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect

from benchmarks.harness import OUT, ROOT, Row, report, user_sys
from hal.robot import Observation, Robot
from hal.task import ExpertPolicy, Task, TaskOutcome
from sim.tasks import LiftTask
from user_sys.run.config import RunFolder
from user_sys.run.report import EpisodePoint, new_figure, save_figure, training_history

GOAL = 12
START, WANTED = 0.60, 0.95
ROBOT, TASK = "corrected-0", "watched_lift"  # a name that no other run on this computer has
WATCH_PORT = "USER_SYS_WATCH_PORT"
LATE_STEPS = 30  # the expert needs 12
GAIN = 0.5  # of the expert's step: an input takes effect a control period late, and the full step would overshoot
INPUT_PERIOD_S = 0.04  # as the page sends
REWIND_S = 1.0
WINDOW, LEAST = 20, 5  # episodes in a share
MINUTES = 1.0  # of driving, in a run
RUN_MAX_S = 240.0  # of a run
START_S = 60.0
WAIT_S = 120.0
LEAVE_S = 60.0
EVALUATION_S = 600.0
EXPERT_FORMAT = "<3f1f"  # shares of the tool's step along x, y, z; the gripper's opening as a share in [-1, 1]
ENTRY_POINT = f"[user_sys.tasks]\n{TASK} = benchmarks.interventions:WatchedLift\n"
PLOT = ROOT / "docs" / "images" / "interventions.png"
ALWAYS = (
    "--console.port=0",
    "--logging.wandb.mode=disabled",
    "--evaluation.video_episodes=0",
    "--evaluation.video_failures=0",
    "--target.success=0",
    f"--robots.0.name={ROBOT}",
    f"--robots.0.task={TASK}",
    "--learner.batch_size=256",
)
BC = ("--learner.algorithm=bc", "--demonstrations.episodes=2", f"--learner.max_training_s={START_S:g}",
      "--learner.max_updates=600", "--evaluation.episodes=100", "--robots.0.explore=off")  # fmt: skip
ONLINE = ("--learner.algorithm=hg_dagger", "--robots.0.real_time=true", "--demonstrations.episodes=2",
          "--learner.max_training_s=3600", "--learner.warmup_updates=1", "--evaluation.episodes=0")  # fmt: skip
METHODS = {
    "HG-DAgger": "{steps: [demonstrations, successes], phases: [correction]}",
    "RaC": "{steps: [demonstrations, successes], phases: [correction, recovery]}",
}


class WatchedLift(Task):
    """`lift`, whose expert's action for each observation goes to the port of this computer in `WATCH_PORT`."""

    has_expert = True

    def __init__(self, lift: LiftTask, robot: Robot) -> None:
        self._lift, self._robot = lift, robot
        self.name, self.instruction, self.max_steps = TASK, lift.instruction, lift.max_steps
        self._expert = lift.make_expert(robot, 0, 0.0)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._port = int(os.environ.get(WATCH_PORT, "0"))

    @classmethod
    def for_robot(cls, robot: Robot, settings: Any) -> Self:
        return cls(LiftTask.for_robot(robot, settings), robot)

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        self._lift.reset(robot, rng)

    def evaluate(self, observation: Observation) -> TaskOutcome:
        if self._port:
            spec = self._robot.spec.action
            low, high = np.array(spec.low), np.array(spec.high)
            action = 2 * (self._expert(observation.arrays) - low) / (high - low) - 1
            self._socket.sendto(struct.pack(EXPERT_FORMAT, *action), ("127.0.0.1", self._port))
        return self._lift.evaluate(observation)

    def make_expert(self, robot: Robot, seed: int, noise: float) -> ExpertPolicy:
        return self._lift.make_expert(robot, seed, noise)


class Operator:
    """See the module. Drives until it has driven for `minutes`; a context manager.

    Attributes:
        driven_s: for how long it has driven.
    """

    def __init__(self, url: str, eyes: socket.socket, *, rewinds: bool) -> None:
        parts = urlsplit(url)
        self._address, self._eyes, self._rewinds = f"ws://{parts.netloc}/ws?{parts.query}", eyes, rewinds
        self.driven_s = 0.0
        self._status: dict[str, Any] = {}
        self._action = (0.0, 0.0, 0.0, 0.0)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._socket = self._stack.enter_context(connect(self._address, proxy=None))
        self._send(type="hello", operator="scripted")
        self._send(type="look", on=True, large=[])  # the program needs no pictures
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        self._stack.callback(reader.join)
        self._stack.callback(self._socket.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def drive(self, seconds: float, deadline_s: float) -> None:
        """Watches and corrects until it has driven for so long, or until `deadline_s`, by the monotonic clock."""
        while self.driven_s < seconds and time.monotonic() < deadline_s:
            if self._status.get("authority") == "policy" and self._status["step"] >= LATE_STEPS:
                self._correct(self._status["episode"])
            self._send(type="ping", sent_ms=1e3 * time.monotonic())  # a silent page is closed
            time.sleep(INPUT_PERIOD_S)

    def _correct(self, episode: str) -> None:
        """Takes over until the episode ends."""
        began_s = time.monotonic()
        self._order("take-over")
        while (status := self._status)["episode"] == episode:
            now_s = time.monotonic()
            if status["authority"] == "hold":
                self._order("take-over")
            rewinds = self._rewinds and now_s - began_s < REWIND_S
            *move, gripper = self._expert()
            self._send(type="drive", robot=ROBOT, move=move, gripper=gripper, rewind=rewinds)
            time.sleep(INPUT_PERIOD_S)
        self._order("hand-back")
        self.driven_s += time.monotonic() - began_s
        while self._status["authority"] != "policy":
            time.sleep(INPUT_PERIOD_S)

    def _expert(self) -> tuple[float, ...]:
        """The newest action, in the shares of the page's messages."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._action = struct.unpack(EXPERT_FORMAT, self._eyes.recv(64))
        *move, gripper = (min(1.0, max(-1.0, share)) for share in self._action)
        return *(GAIN * share for share in move), gripper

    def _order(self, order: str) -> None:
        self._send(type="order", robot=ROBOT, order=order)

    def _send(self, **message: Any) -> None:
        self._socket.send(json.dumps(message))

    def _read(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            for frame in self._socket:
                message = json.loads(frame)
                if message["type"] == "state" and message["view"]["robots"]:
                    self._status = message["view"]["robots"][0]["status"] or self._status


@dataclass(frozen=True)
class Corrected:
    """A run with an operator: its episodes, each with the operator's minutes before it; and its success alone."""

    minutes: list[float]
    episodes: list[EpisodePoint]
    driven_min: float
    success: float

    def helped(self, half: int) -> float:
        """The share of episodes with help in the first or second half of the episodes."""
        middle = len(self.episodes) // 2
        found = self.episodes[middle:] if half else self.episodes[:middle]
        return sum(each.assisted for each in found) / max(1, len(found))

    def moving(self, assisted: bool) -> tuple[list[float], list[float]]:
        """Seconds of driving; the share of episodes with help, or else of successes alone, of the newest `WINDOW`."""
        flags = [e.assisted if assisted else bool(e.success) and not e.assisted for e in self.episodes]
        shares = [float(np.mean(flags[max(0, n - WINDOW + 1) : n + 1])) for n in range(len(flags))]
        return [60 * at for at in self.minutes[LEAST - 1 :]], shares[LEAST - 1 :]


@dataclass(frozen=True)
class Bench:
    """`minutes`: of driving in each run."""

    runs: Path
    minutes: float
    episodes: int

    def train(self, name: str, *overrides: str, port: int = 0) -> subprocess.Popen[bytes]:
        command = user_sys("train", ROOT / "configs" / "demo.yaml", "--any-result", f"--name={name}")
        command += [f"--runs={self.runs}", *ALWAYS, *overrides]
        print("==", " ".join(command[2:]), flush=True)
        return subprocess.Popen(command, env=self._environment(port))

    def _environment(self, port: int = 0) -> dict[str, str]:
        paths = os.pathsep.join(map(str, (ROOT, self.runs / "plugin")))
        return {**os.environ, "PYTHONPATH": paths, WATCH_PORT: str(port)}

    def start(self, seed: int) -> tuple[Path, float]:
        """The policy that both runs start from, and its success."""
        folder = self.runs / f"start-seed{seed}"
        if not (folder / "summary.json").exists():
            evaluation = f"--evaluation.episodes={self.episodes}"
            self.train(folder.name, f"--seed={seed}", *BC, evaluation).wait(START_S + EVALUATION_S)
        return folder, float(json.loads((folder / "summary.json").read_text())["success"])

    def correct(self, method: str, start: Path, seed: int, minutes: float) -> Corrected:
        """A run of `method` until the operator has driven for `minutes`, or `RUN_MAX_S`; then its policy alone."""
        folder, eyes = RunFolder(self.runs / f"{method}-seed{seed}"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        eyes.bind(("127.0.0.1", 0))
        eyes.setblocking(False)
        options = f"--learner.options={METHODS[method]}"
        run = self.train(
            folder.path.name, f"--seed={seed + 100}", *ONLINE, options, f"--learner.initial_policy={start}",
            port=eyes.getsockname()[1],
        )  # fmt: skip
        try:
            deadline_s = time.monotonic() + WAIT_S
            while not folder.console_address.exists() and time.monotonic() < deadline_s:
                time.sleep(0.2)
            with eyes, Operator(folder.console_address.read_text(), eyes, rewinds=method == "RaC") as operator:
                operator.drive(60 * minutes, time.monotonic() + RUN_MAX_S)
                driven_min = operator.driven_s / 60
        except (OSError, WebSocketException) as error:
            print(f"{method}: the operator ended: {error}", flush=True)
            raise
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(LEAVE_S)
        episodes = training_history(folder)
        total = sum(each.assisted for each in episodes)
        helped = np.cumsum([0, *(each.assisted for each in episodes)])[:-1]
        minutes = [driven_min * float(count) / max(1, total) for count in helped]
        return Corrected(minutes, episodes, driven_min, self.success_alone(folder.path))

    def success_alone(self, run: Path) -> float:
        command = user_sys("evaluate", run, "--json", f"--episodes={self.episodes}")
        done = subprocess.check_output(command, env=self._environment(), timeout=EVALUATION_S)
        return float(json.loads(done)["success"])

    def install_task(self) -> None:
        """Makes `WatchedLift` known as a task to programs whose path has the folder ``plugin``."""
        info = self.runs / "plugin" / "watched_lift-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: watched-lift\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINT)


def rows_of(bench: Bench, seeds: Sequence[int]) -> Iterator[Row]:
    """See the module."""
    bench.install_task()
    starts = [bench.start(seed) for seed in seeds]
    least = max(success for _, success in starts)
    yield Row(
        GOAL, "start: success alone, best seed", "share", least, START, START / max(least, 1e-9), 1.0, least < START
    )
    found: dict[str, list[Corrected]] = {name: [] for name in METHODS}
    for seed, (start, _) in zip(seeds, starts, strict=True):
        minutes = bench.minutes
        for method in METHODS:
            found[method].append(bench.correct(method, start, seed, minutes))
            minutes = found[method][-1].driven_min  # the same for all
    for method, runs in found.items():
        worst, first = min(run.success for run in runs), method == "HG-DAgger"
        met = worst > WANTED if first else None
        yield Row(
            GOAL, f"{method}: success alone, worst seed", "share", worst, 1.0, worst, WANTED if first else None, met
        )
        halves = [float(np.mean([run.helped(half) for run in runs])) for half in (0, 1)]
        falls = halves[1] < halves[0] if first else None
        yield Row(GOAL, f"{method}: episodes with help, second half; bound: first half", "share", halves[1], halves[0],
                  halves[0] / max(halves[1], 1e-9), 1.0 if first else None, falls)  # fmt: skip
        driven, count = (
            float(np.mean(each)) for each in ([r.driven_min for r in runs], [len(r.episodes) for r in runs])
        )
        yield Row(GOAL, f"{method}: the operator drove", "min", driven, note=f"{count:.0f} episodes")
    draw(found, least, OUT / "interventions.png" if bench.minutes < MINUTES else PLOT)


def draw(found: dict[str, list[Corrected]], start: float, path: Path) -> None:
    """The first seed of each method, and what its policy reaches alone in the end."""
    figure = new_figure()
    axes = figure.subplots()
    for (method, runs), colour in zip(found.items(), ("#1f5fa8", "#d9662b"), strict=True):
        run = runs[0]
        for assisted, style, label in ((False, "-", "success without help"), (True, ":", "episodes with help")):
            seconds, shares = run.moving(assisted)
            axes.plot(seconds, [100 * share for share in shares], style, color=colour, label=f"{method}: {label}")
        axes.plot([60 * run.driven_min], [100 * run.success], "o", color=colour, clip_on=False)
    axes.plot([0], [100 * start], "o", color="#6b7280", label="evaluation of the policy alone", clip_on=False)
    axes.set(xlabel="seconds that the operator drove", ylabel=f"% of the last {WINDOW} episodes", ylim=(-2, 104))
    axes.set_title("lift: corrections at the console", loc="left", fontsize=11, fontweight="bold")
    axes.grid(axis="y", color="#e5e7eb", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    path.parent.mkdir(exist_ok=True)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0", help="such as 0,1,2")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of driving, in each run")
    parser.add_argument("--quick", action="store_true", help="short runs, only to see whether they work")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="user-sys-interventions-") as temporary:
        bench = Bench(
            (options.runs or Path(temporary)).resolve(),
            0.2 if options.quick else options.minutes,
            5 if options.quick else 100,
        )
        reduced = (
            "short runs" if options.quick else "" if options.minutes >= MINUTES else f"{options.minutes:g} minutes"
        )
        report("interventions", list(rows_of(bench, [int(seed) for seed in options.seeds.split(",")])), reduced=reduced)


if __name__ == "__main__":
    main()
