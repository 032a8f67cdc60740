"""``python tests/fuzz/fuzz_all.py SECONDS [TARGET ...]``: fuzzes one parser after another; fails on a finding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from targets import TARGETS

START_S = 600.0  # importing under instrumentation, on a busy machine


def fuzz(name: str, folder: Path, *options: str, seconds: float = 0) -> subprocess.CompletedProcess[str]:
    """Runs libFuzzer with `options`, which take about `seconds`. Inputs that found something are written to `folder`,
    where its report says."""
    command = [sys.executable, str(Path(__file__).parent / "fuzz_one.py"), name, *options]
    prefix = f"-artifact_prefix={folder}/{name}-"
    return subprocess.run([*command, prefix], capture_output=True, text=True, timeout=seconds + START_S)


def main() -> int:
    seconds, *names = sys.argv[1:]
    failed = []
    for name in names or TARGETS:
        done = fuzz(name, Path.cwd(), f"-max_total_time={seconds}", seconds=float(seconds))
        lines = done.stderr.splitlines()
        taken = [line for line in lines if line.startswith("#taken")][-1:]
        last = [line for line in lines if line.startswith("#") and line not in taken][-1:]
        print(f"{name}: {'ok' if done.returncode == 0 else 'FOUND'} {' '.join(taken + last)[:140]}", flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stderr[-3000:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
