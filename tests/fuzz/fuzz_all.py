"""``python tests/fuzz/fuzz_all.py SECONDS [TARGET ...]``: fuzzes parsers, one on each processor; fails on a finding."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from targets import TARGETS

START_S = 600.0  # importing under instrumentation, on a busy machine


def fuzz(name: str, folder: Path, *options: str, seconds: float = 0) -> str:
    """Runs libFuzzer with `options`, which take about `seconds`. Returns its finding, or an empty string.

    A run that takes much longer is a finding too. Inputs that cause a finding are written to `folder`.
    """
    command = [sys.executable, str(Path(__file__).parent / "fuzz_one.py"), name, *options]
    prefix, within_s = f"-artifact_prefix={folder}/{name}-", seconds + START_S
    try:
        done = subprocess.run([*command, prefix], capture_output=True, text=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        return f"{name} did not end within {within_s:g} s"
    return done.stderr[-3000:] if done.returncode else ""


def main() -> int:
    seconds, *names = sys.argv[1:]
    names = names or list(TARGETS)
    has_findings = False
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {
            name: pool.submit(fuzz, name, Path.cwd(), f"-max_total_time={seconds}", seconds=float(seconds))
            for name in names
        }
        for name, run in runs.items():
            finding = run.result()
            has_findings |= bool(finding)
            print(f"{name}: {finding or 'ok'}", flush=True)
    return int(has_findings)


if __name__ == "__main__":
    sys.exit(main())
