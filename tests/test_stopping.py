"""Ctrl-C, a killed launcher and a hung part of the run: robots hold soon, and the program ends soon.

The bounds are those of a user's expectation with slack for a busy machine.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from run_kit import Launch, until, user_sys

from hal.lease import MachineLock

HOLD_S, END_S = 2.0, 10.0
SLACK_S = 5.0  # for a busy machine

DRIVER = '''
"""A robot that writes down when it was last moved. A reset takes a while, in small moves."""
import time
from dataclasses import dataclass, replace
from pathlib import Path
from hal.driver import RobotSetup, read_options
from robots import fake

@dataclass(frozen=True)
class Options:
    moved: str = ""
    reset_s: float = 0.0

class Arm(fake.FakeRobot):
    def moves(self):
        with open(self.options.moved, "w") as file:
            file.write(str(time.monotonic()))
    def command(self, action):
        self.moves()
        return super().command(action)

class Reach(fake.FakeTask):
    def reset(self, robot, rng):
        end = time.monotonic() + robot.options.reset_s
        while time.monotonic() < end:
            robot.check_stop()
            robot.moves()
            time.sleep(0.02)
        super().reset(robot, rng)

def make_robot_setup(request):
    options = read_options(Options, request)
    robot = Arm(fake.FakeRobotConfig(rate_hz=50))
    robot.options = options
    return RobotSetup(request.name, robot, Reach())
'''

RUN = """
robots:
  - {name: arm, driver: stamping, task: reach, real_time: true, explore: "on", options: {moved: MOVED, reset_s: RESET}}
demonstrations: {episodes: EPISODES}
learner: {max_training_s: 600, batch_size: 64, checkpoint_interval_s: 2, warmup_updates: 50}
console: {port: 0}
logging: {wandb: {mode: disabled}}
"""


class Bench:
    """A folder with a configuration, and the driver that it names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.moved = folder, folder / "moved"
        site = folder / "site"
        (site / "stamping-0.dist-info").mkdir(parents=True)
        (site / "stamping.py").write_text(DRIVER)
        (site / "stamping-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stamping\nVersion: 0\n")
        (site / "stamping-0.dist-info" / "entry_points.txt").write_text(
            "[user_sys.drivers]\nstamping = stamping:make_robot_setup\n"
        )
        self.env = {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])}

    def write(self, reset_s: float = 0.0, episodes: int = 0) -> Path:
        settings = {"MOVED": str(self.moved), "RESET": str(reset_s), "EPISODES": str(episodes)}
        path = self.folder / "run.yaml"
        path.write_text(re.sub("|".join(settings), lambda found: settings[found[0]], RUN))
        return path

    @contextmanager
    def train(self, name: str = "run", reset_s: float = 0.0, runtime: Path | None = None) -> Iterator[Launch]:
        config = self.write(reset_s)
        with user_sys(self.folder, "train", config, "--name", name, env=self.env, runtime=runtime) as launch:
            yield launch

    def moved_s(self) -> float:
        """When the robot last moved, on the clock of `time.monotonic`; 0 before."""
        try:
            return float(self.moved.read_text() or "0")
        except FileNotFoundError:
            return 0.0

    def await_motion(self, launch: Launch) -> None:
        until(lambda: launch.process.poll() is not None or time.monotonic() - self.moved_s() < 0.5, "the robot moves")
        assert launch.process.poll() is None, launch.err

    def await_training(self, launch: Launch) -> None:
        metrics = self.folder / "runs" / "run" / "metrics" / "learner.jsonl"
        until(lambda: launch.process.poll() is not None or metrics.exists(), "it trains")

    def require_held(self, since_s: float, within_s: float = HOLD_S) -> None:
        """The robot last moved at most so long after `since_s`, and does not move any more."""
        until(lambda: time.monotonic() - self.moved_s() > 1.0 and time.monotonic() - since_s > within_s, "a hold", 60)
        held_s = max(0.0, self.moved_s() - since_s)
        print(f"held {held_s:.2f} s after")
        assert held_s < within_s + SLACK_S


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def require_ends(launch: Launch, since_s: float, status: int = 130) -> None:
    assert launch.wait(120) == status, launch.err
    took_s = time.monotonic() - since_s
    print(f"ended {took_s:.2f} s after")
    assert took_s < END_S + SLACK_S
    launch.require_nothing_left()


def pids_of(launch: Launch, *words: str) -> list[int]:
    return [pid for pid, line in launch.processes().items() if any(word in line for word in words)]


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    with ExitStack() as stack:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            stack.callback(_go_on, pid)
        yield


def _go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


@pytest.mark.slow
def test_interrupt_of_a_frozen_launcher(bench: Bench) -> None:
    with bench.train() as launch:
        bench.await_training(launch)
        bench.await_motion(launch)
        with frozen(launch.process.pid):
            time.sleep(11)  # the gateway takes its session for dead
        began_s = time.monotonic()
        launch.process.send_signal(signal.SIGINT)
        bench.require_held(began_s)
        require_ends(launch, began_s)
    saved = bench.folder / "runs" / "run" / "checkpoints"
    assert [path for path in saved.iterdir() if path.name != "lock"]


@pytest.mark.slow
@pytest.mark.parametrize("hung", ["gateway", "ray", "learner"])
def test_interrupt_while_a_process_hangs(hung: str, bench: Bench) -> None:
    words = {
        "gateway": ["user_sys.gateway"],
        "ray": ["gcs_server --", "/raylet --"],
        "learner": ["user_sys.run.learner_process "],
    }
    with bench.train() as launch:
        bench.await_motion(launch)
        with frozen(*pids_of(launch, *words[hung])):
            began_s = time.monotonic()
            launch.interrupt()
            bench.require_held(began_s)
            assert launch.wait(120) == 130, launch.err
            took_s = time.monotonic() - began_s
            print(f"ended {took_s:.2f} s after")
            assert took_s < END_S + SLACK_S


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_robot_on_its_way_to_a_start_holds(number: signal.Signals, bench: Bench) -> None:
    with bench.train(reset_s=120.0) as launch:
        bench.await_motion(launch)
        began_s = time.monotonic()
        os.killpg(launch.process.pid, number)
        bench.require_held(began_s)
        require_ends(launch, began_s)


@pytest.mark.slow
def test_interrupt_while_another_program_drives_the_robot(bench: Bench) -> None:
    runtime = bench.folder / "locks"
    runtime.mkdir(mode=0o700)
    with MachineLock(runtime / "arm.lock", "for another run"), bench.train(runtime=runtime) as launch:
        until(lambda: "arm waits: " in launch.out or launch.process.poll() is not None, "it says whom it waits for")
        began_s = time.monotonic()
        launch.interrupt()
        require_ends(launch, began_s)
        assert not bench.moved_s()


@pytest.mark.slow
def test_killed_launcher_leaves_no_robot_driven(bench: Bench) -> None:
    with bench.train() as launch:
        bench.await_motion(launch)
        began_s = time.monotonic()
        launch.process.kill()
        bench.require_held(began_s)
        launch.require_nothing_left()
    words = (bench.folder / "runs" / "run" / "logs" / "arm-driver.log").read_text()
    assert "safety.counts" in words, "it was ended in good order"


@pytest.mark.slow
def test_second_interrupt_exits_immediately(bench: Bench) -> None:
    with bench.train() as launch:
        bench.await_motion(launch)
        with frozen(*pids_of(launch, "user_sys.run.learner_process ")):  # it would be waited for
            began_s = time.monotonic()
            launch.interrupt()
            time.sleep(1.5)  # sooner it is the same one
            launch.interrupt()
            assert launch.wait(10) == 130
            assert time.monotonic() - began_s < 4.0 + SLACK_S
            assert "ended at once" in launch.err
            bench.require_held(began_s)


@pytest.mark.long(10)
def test_interrupt_stops_recording(bench: Bench) -> None:
    config = bench.write(reset_s=60.0)
    with user_sys(bench.folder, "record", config, "--output", "demos", env=bench.env) as launch:
        bench.await_motion(launch)
        began_s = time.monotonic()
        launch.process.send_signal(signal.SIGTERM)
        bench.require_held(began_s)
        require_ends(launch, began_s)
