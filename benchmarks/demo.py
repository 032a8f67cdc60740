"""Goal 12: `make demo` for several seeds, each through the whole system in processes of its own, as a person runs it.

    python -m benchmarks.demo --seeds 0 1 2

The bound of the time is the five minutes that the goal allows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, report

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
GOAL, ALLOWED_S, WANTED = 12, 300.0, 0.95
RUN_DEADLINE_S = 900.0


def run_demo(seed: int, runs: Path) -> dict[str, Any]:
    """One demo; its ``summary.json`` and how long the command took (``wall_s``)."""
    command = [sys.executable, "-m", "user_sys.cli", "train", str(CONFIG), "--name", f"seed{seed}", "--runs", str(runs)]
    began = time.monotonic()
    subprocess.run([*command, "--seed", str(seed), "--console.port", "0"], check=True, timeout=RUN_DEADLINE_S)
    summary: dict[str, Any] = json.loads((runs / f"seed{seed}" / "summary.json").read_text())
    return {**summary, "wall_s": time.monotonic() - began}


def rows(summaries: list[dict[str, Any]]) -> list[Row]:
    success = min(summary["success"] for summary in summaries)
    training = max(summary["training_s"] for summary in summaries)
    name = f"of {len(summaries)} seeds"
    return [
        Row(
            GOAL, f"success over 100 episodes, worst {name}", "share", success, 1.0, success, WANTED, success >= WANTED
        ),
        Row(
            GOAL,
            f"training time, longest {name}",
            "s",
            training,
            ALLOWED_S,
            ALLOWED_S / training,
            1.0,
            training <= ALLOWED_S,
        ),
        *(Row(GOAL, f"seed {s['seed']}: command", "s", s["wall_s"], 0.0, 0.0, None, None) for s in summaries),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="user-sys-demo-") as runs:
        summaries = [run_demo(seed, Path(runs)) for seed in args.seeds]
    for summary in summaries:
        print(json.dumps(summary))
    report("demo", rows(summaries))


if __name__ == "__main__":
    main()
