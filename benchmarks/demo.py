"""The demo on each simulated arm and for several seeds, each through the whole system, as a person runs it (goal 12).

    python -m benchmarks.demo --arms panda so101 ur5e --seeds 0 1 2

Success is of 100 evaluation episodes after training, without exploration and from starts not trained on. Training time
is the learner's. The bound of both is the goal's: 95% within 60 s. In the same sitting and by the same rule train, on
one arm with one seed: a plain single-process loop (`benchmarks.learning`), with as many steps for each update as the
demo had there, and Stable-Baselines3's SAC with the demonstrations in its buffer (`benchmarks.peers.sb3_sac`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import learning, peers
from benchmarks.harness import Row, report
from benchmarks.learning import CONFIGS

GOAL, ALLOWED_S, WANTED = 12, 60.0, 0.95
SEEDS = (0, 1, 2)
PEERS_ARM, PEERS_SEED, PEERS_LIMIT_S = "panda", 0, 300.0
RUN_DEADLINE_S = 900.0
ENDED = (0, 1)  # exit statuses of a run that came to its end: its target was reached, or was not


@dataclass(frozen=True)
class Demo:
    """One demo: its ``summary.json``, and seconds of the whole command."""

    arm: str
    seed: int
    summary: dict[str, Any]
    command_s: float


def run_demo(arm: str, seed: int, runs: Path) -> Demo:
    """Raises CalledProcessError when the run fails, and TimeoutExpired after `RUN_DEADLINE_S`."""
    name = f"{arm}-{seed}"
    command = [
        sys.executable,
        "-m",
        "user_sys.commands.main",
        "train",
        str(CONFIGS[arm]),
        "--name",
        name,
        "--runs",
        str(runs),
    ]
    began = time.monotonic()
    done = subprocess.run([*command, "--seed", str(seed), "--console.port", "0"], timeout=RUN_DEADLINE_S)
    command_s = time.monotonic() - began
    summary = runs / name / "summary.json"
    if done.returncode not in ENDED or not summary.exists():
        raise subprocess.CalledProcessError(done.returncode, command)
    return Demo(arm, seed, json.loads(summary.read_text()), command_s)


def peer_figures(demos: list[Demo], limit_s: float) -> dict[str, float | str]:
    """Seconds until each peer was done by the demo's rule; how far it came, in words, if it was not."""
    beside = next((demo for demo in demos if (demo.arm, demo.seed) == (PEERS_ARM, PEERS_SEED)), demos[0])
    ratio = beside.summary["env_steps"] / max(1, beside.summary["updates"])
    plain = learning.train(beside.arm, beside.seed, ratio, limit_s)
    where = f"{beside.arm}, seed {beside.seed}"
    enough = plain.done and plain.successes >= WANTED * plain.episodes
    return {
        f"plain loop, {where}": plain.seconds if enough else plain.words,
        f"Stable-Baselines3's SAC, {where}": sac(beside, limit_s),
    }


def sac(beside: Demo, limit_s: float) -> float | str:
    peer = peers.start("sb3_sac", CONFIGS[beside.arm], beside.seed, limit_s)
    if isinstance(peer, str):
        return peer
    with peer:
        seconds = peer.round(limit_s + RUN_DEADLINE_S)
        return seconds if seconds > 0 else f"at the limit, {peer.last_line}"


def rows(demos: list[Demo], found: dict[str, float | str]) -> list[Row]:
    """The worst of each arm's seeds against the goal, then what each took."""
    rows: list[Row] = []
    for arm in dict.fromkeys(demo.arm for demo in demos):
        mine = [demo for demo in demos if demo.arm == arm]
        success = min(demo.summary["success"] for demo in mine)
        longest = max(demo.summary["training_s"] for demo in mine)
        worst = f"worst of {len(mine)} seeds"
        rows += [
            Row(GOAL, f"{arm}: success over 100 episodes, {worst}", "share", success, 1.0, success, WANTED,
                success >= WANTED),
            Row(GOAL, f"{arm}: training time, {worst}; bound: the goal's", "s", longest, ALLOWED_S, ALLOWED_S / longest,
                1.0, longest <= ALLOWED_S, found if arm == PEERS_ARM else {}),
        ]  # fmt: skip
    for demo in demos:
        name = f"{demo.arm}, seed {demo.seed}"
        rows += [
            Row(GOAL, f"{name}: {what}", unit, float(figure), None, None)
            for what, unit, figure in (
                ("success over 100 episodes", "share", demo.summary["success"]),
                ("training time", "s", demo.summary["training_s"]),
                ("environment steps", "steps", demo.summary["env_steps"]),
                ("updates", "updates", demo.summary["updates"]),
                ("whole command", "s", demo.command_s),
            )
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--peer-limit-s", type=float, default=PEERS_LIMIT_S, help="of training of each peer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="user-sys-demo-") as runs:
        demos = [run_demo(arm, seed, Path(runs)) for arm in args.arms for seed in args.seeds]
    whole = set(args.arms) == set(CONFIGS) and set(args.seeds) >= set(SEEDS) and args.peer_limit_s >= PEERS_LIMIT_S
    reduced = "" if whole else f"{', '.join(args.arms)}; seeds {args.seeds}; peers at most {args.peer_limit_s:g} s"
    report("demo", rows(demos, peer_figures(demos, args.peer_limit_s)), reduced=reduced)


if __name__ == "__main__":
    main()
