"""``python tests/fuzz/fuzz_one.py TARGET [libFuzzer's options]``: fuzzes one parser until a finding or time is up.

TARGET ``all`` is all of them: the first byte of an input selects one. A finding is an exception that the parser may not
raise, a crash, a hang of `HANG_S`, or `MEMORY_MB` of memory.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
from pathlib import Path

import atheris

INSTRUMENTED = [
    *("user_sys.codec", "user_sys.episode", "user_sys.messages", "user_sys.config", "user_sys.tunnel.keys"),
    *("user_sys.tunnel.protocol", "user_sys.store", "hal.spec", "user_sys.weights.catalog"),
    *("user_sys.console.protocol", "user_sys.replay.buffer"),
    *("user_sys.interchange.frames", "user_sys.interchange.lerobot_format", "user_sys.interchange.lerobot_import"),
]

with atheris.instrument_imports(include=INSTRUMENTED):
    from targets import TARGETS, Target

HANG_S = 60  # on a busy machine
MEMORY_MB = 1024
MAX_BYTES = 8192
ANEW = 0.3  # share of inputs derived from an example instead of the previous input
BLINDLY = 0.3  # share of changes by libFuzzer if a target has its own mutations


class FuzzedTargets:
    """The first byte of an input selects a target."""

    def __init__(self, targets: list[Target]) -> None:
        self._targets = targets

    def _target(self, raw: bytes) -> Target:
        return self._targets[raw[0] % len(self._targets) if raw else 0]

    def parse(self, raw: bytes) -> None:
        target = self._target(raw)
        with contextlib.suppress(*target.allowed):
            target.parse(raw[1:])

    def mutate(self, raw: bytes, max_bytes: int, seed: int) -> bytes:
        """The next input, made of `raw` or of an example."""
        rng, target, content = random.Random(seed), self._target(raw), raw[1:]
        if target.examples and rng.random() < ANEW:
            content = rng.choice(target.examples)
        for _ in range(rng.choice((1, 1, 2, 3))):
            content = self._changed(target, content, max_bytes, rng)
        return ((raw[:1] or b"\0") + content)[:max_bytes]

    def _changed(self, target: Target, content: bytes, max_bytes: int, rng: random.Random) -> bytes:
        if target.mutate is not None and rng.random() > BLINDLY:
            with contextlib.suppress(Exception):  # no longer of that form
                return target.mutate(content, rng)
        return bytes(atheris.Mutate(content[: max_bytes - 1], max_bytes - 1))


def main() -> None:
    # libFuzzer's limit is on the peak of resident memory, which exec hands on from the process that starts this one.
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    name, *options = sys.argv[1:]
    targets = list(TARGETS.values()) if name == "all" else [TARGETS[name]]
    corpus = Path(tempfile.mkdtemp(prefix=f"corpus-{name}-"))
    for which, target in enumerate(targets):
        for number, example in enumerate(target.examples):
            target.parse(example)  # lazy imports happen before the clock runs
            (corpus / f"{which}-{number}").write_bytes(bytes([which]) + example)
    limits = (f"-timeout={HANG_S}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={MAX_BYTES}")
    fuzzed = FuzzedTargets(targets)
    atheris.Setup([sys.argv[0], *limits, *options, str(corpus)], fuzzed.parse, custom_mutator=fuzzed.mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
