"""``python tests/fuzz/fuzz_all.py SECONDS [TARGET ...]``: fuzzes parsers, one on each processor; fails on a finding."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from targets import TARGETS

START_S = 600.0  # importing under instrumentation, on a busy machine
LATE = 124  # exit status after a timeout, as of `timeout`


def fuzz(name: str, folder: Path, *options: str, seconds: float = 0) -> subprocess.CompletedProcess[str]:
    """Runs libFuzzer with `options`, which take about `seconds`; a run that takes much longer has failed. Findings
    are written to `folder`."""
    command = [sys.executable, str(Path(__file__).parent / "fuzz_one.py"), name, *options]
    prefix, within_s = f"-artifact_prefix={folder}/{name}-", seconds + START_S
    try:
        return subprocess.run([*command, prefix], capture_output=True, text=True, timeout=within_s)
    except subprocess.TimeoutExpired as late:
        report = (late.stderr or b"").decode(errors="replace") + f"\n{name} did not end within {within_s:g} s"
        return subprocess.CompletedProcess(late.cmd, LATE, "", report)


def verdict(name: str, done: subprocess.CompletedProcess[str]) -> str:
    """One line: how many inputs there were, and how many of them the parser took."""
    lines = done.stderr.splitlines()
    taken = [line for line in lines if line.startswith("#taken")]
    inputs = [line for line in lines if line[:1] == "#" and line[1:2].isdigit()]
    return " ".join([f"{name}:", "FOUND" if done.returncode else "ok", *taken[-1:], *inputs[-1:]])[:160]


def main() -> int:
    seconds, *names = sys.argv[1:]
    failed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {
            pool.submit(fuzz, name, Path.cwd(), f"-max_total_time={seconds}", seconds=float(seconds)): name
            for name in names or TARGETS
        }
        for future in as_completed(running):
            name, done = running[future], future.result()
            print(verdict(name, done), flush=True)
            if done.returncode:
                failed.append(name)
                print(done.stderr[-3000:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
