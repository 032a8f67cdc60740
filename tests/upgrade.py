"""Robots run an earlier wheel while their cloud is replaced by this checkout: ``make test-upgrade``; two minutes.

The earlier wheel is of `earlier_commit` (`--wheel-of COMMIT` names another). Its `user-sys edge` drives two robots. Its
cloud, in the environment that it sets up itself, trains with them until it is killed. The robots lose their leases and
hold. This checkout resumes the run; the robots connect to it, and continue. At the end the store has each step once.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from run_kit import Launch, user_sys
from site_kit import headers, require_delivered, waiting
from wait_kit import until

from user_sys.messages import PREVIOUS_PROTOCOL_VERSION, PROTOCOL_VERSION
from user_sys.run.metrics import read_metrics
from user_sys.run.prepare import free_port

ROOT = Path(__file__).resolve().parents[1]
ROBOTS = ("left", "right")
LEASE_S, START_S = 3.0, 240.0
HELD = "its lease has expired, and the robot is held"
CLOUD = """
gateway: {{endpoint: 'tcp://127.0.0.1:{port}', lease_ttl_s: {lease}}}
learner: {{max_training_s: 100000, batch_size: 32, warmup_updates: 20, checkpoint_interval_s: 5}}
logging: {{wandb: {{mode: disabled}}}}
console: {{port: 0}}
"""
ROBOT = "  - {{name: {name}, driver: fake, task: reach, real_time: true, options: {{rate_hz: 20}}}}\n"


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def earlier_commit() -> str:
    """The last commit of the previous protocol; if the history has none, the first of this one."""
    line, before = (f"PROTOCOL_VERSION = {version}\n" for version in (PROTOCOL_VERSION, PREVIOUS_PROTOCOL_VERSION))
    first = git("log", "--format=%h", f"-S{line}", "--", "user_sys/messages.py").split()[-1]
    is_previous = before in git("show", f"{first}^:user_sys/messages.py")
    return git("rev-parse", "--short", f"{first}^").strip() if is_previous else first


def install(commit: str, folder: Path) -> tuple[Path, Path]:
    """The Pythons of the commit's own environment, and of one with its wheel and what a robot's computer needs."""
    tree, environment = folder / "tree", folder / "environment"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, tree)
    uv = Path(sys.executable).with_name("uv")
    run(uv, "venv", "--python", sys.executable, environment)
    (wheel,) = folder.glob("*.whl")
    python = environment / "bin" / "python"
    run(uv, "pip", "install", "--python", python, "-c", ROOT / "constraints.txt", f"{wheel}[edge]")
    run(tree / ".ci" / "set-up", "edge,sim,learner")
    return tree / ".venv" / "bin" / "python", python


def protocol_of(python: Path, folder: Path) -> str:
    asked = "import user_sys.messages as m; print(m.PROTOCOL_VERSION)"
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.check_output([python, "-c", asked], cwd=folder, env=environment, text=True).strip()


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def user_sys_now(folder: Path, *words: str) -> None:
    run(sys.executable, "-m", "user_sys.commands.main", *words, f"--folder={folder / 'keys'}")


def upgrade(commit: str, folder: Path) -> None:
    before, python = install(commit, folder)
    print(f"upgrade: the robots run the wheel of {commit}, protocol {protocol_of(python, folder)}", flush=True)
    port = free_port("127.0.0.1")
    for name in ("gateway", *ROBOTS):
        user_sys_now(folder, "keys", "new", name)
    for name in ROBOTS:
        user_sys_now(folder, "keys", "allow", name, "--role", "robot")
    (folder / "cloud.yaml").write_text(CLOUD.format(port=port, lease=LEASE_S))
    (folder / "robots.yaml").write_text("robots:\n" + "".join(ROBOT.format(name=name) for name in ROBOTS))
    home = folder / "runs" / "kept"
    outboxes = [folder / "edge" / name / "outbox" for name in ROBOTS]

    def updates() -> int:
        reports = [line for line in read_metrics(home / "metrics" / "learner.jsonl") if line.get("count")]
        return int(reports[-1]["count"] or 0) if reports else 0

    now, alone = {"PYTHONPATH": str(ROOT)}, {"PYTHONPATH": ""}
    robots = ("edge", "robots.yaml", "--connect", f"tcp://127.0.0.1:{port}")
    with user_sys(folder, *robots, python=python, env=alone) as edge:
        with user_sys(folder, "cloud", "cloud.yaml", "--name", "kept", python=before, env=alone) as old:
            until(lambda: updates() > 50 or ended(old), "the earlier cloud trains", START_S)
            printed = len(edge.out)
            os.kill(old.process.pid, signal.SIGKILL)
            old.wait()
        learned, steps = updates(), stored_steps(home)
        print(f"upgrade: the earlier cloud was killed after {learned} updates and {steps} steps", flush=True)
        until(lambda: edge.out[printed:].count(HELD) >= len(ROBOTS), "the robots hold", START_S)
        print("upgrade: both robots hold", flush=True)
        kept = {(each.episode, each.index) for outbox in outboxes for each in waiting(outbox)}
        with user_sys(folder, "cloud", "--resume", str(home), env=now) as new:

            def continues() -> bool:
                return updates() > learned + 50 and stored_steps(home) > steps + 100

            until(lambda: continues() or ended(new), "the new cloud trains with them", START_S)
            until(lambda: edge.out.count("reachable again") >= len(ROBOTS), "the robots are reachable", START_S)
            print(f"upgrade: the robots drive again; {updates()} updates, {stored_steps(home)} steps", flush=True)
            new.interrupt()
            assert new.wait() == 130, new.err
            assert edge.wait() == 0, edge.err
    stored = {(each.episode, each.index) for each in headers(home / "store")}
    assert kept <= stored, f"lost: {sorted(kept - stored)}"
    assert kept, "no step was recorded while the cloud was away"
    for outbox in outboxes:
        require_delivered(home, outbox)
    assert not any(waiting(outbox) for outbox in outboxes), "chunks are left in an outbox"
    print(f"upgrade: passed; {stored_steps(home)} steps, none lost or repeated; {len(kept)} chunks waited", flush=True)


def ended(launch: Launch) -> bool:
    assert launch.process.poll() is None, f"{launch.out[-2000:]}{launch.err[-2000:]}"
    return False


def stored_steps(home: Path) -> int:
    return sum(each.steps for each in headers(home / "store"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--wheel-of", metavar="COMMIT", help="default: the last of the previous protocol, or the first of this"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="us-upgrade-") as folder:
        upgrade(given.wheel_of or earlier_commit(), Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
