"""``python tests/fuzz/fuzz_one.py TARGET [libFuzzer's options]``: fuzzes one parser until a finding or time is up.

TARGET ``all`` is all of them in turn.

A finding is an exception that the parser may not raise, a crash, a hang of `HANG_S`, or `MEMORY_MB` of memory. How many
of the inputs the parser took is printed at each power of two of them.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

INSTRUMENTED = [
    *("user_sys.codec", "user_sys.episode", "user_sys.messages", "user_sys.config", "user_sys.tunnel.keys"),
    *("user_sys.tunnel.protocol", "user_sys.store", "user_sys.messages", "user_sys.codec", "hal.spec"),
    *("user_sys.weights.patches", "user_sys.console.protocol", "user_sys.replay.reader"),
    *("user_sys.interchange.frames", "user_sys.interchange.lerobot_format", "user_sys.interchange.lerobot_import"),
]

with atheris.instrument_imports(include=INSTRUMENTED):
    from targets import TARGETS, Target

HANG_S = 60  # on a busy machine
MEMORY_MB = 1024
MAX_BYTES = 8192
ANEW = 0.3  # share of inputs derived from an example instead of the previous input
BLINDLY = 0.3  # share of changes by libFuzzer if a target has its own mutations


class Fuzzed:
    """Some targets; with several, the first byte of an input selects one."""

    def __init__(self, targets: list[Target]) -> None:
        self._targets = targets
        self._seen = self._taken = 0

    def _split(self, raw: bytes) -> tuple[Target, bytes, bytes]:
        if len(self._targets) == 1:
            return self._targets[0], b"", raw
        return self._targets[raw[0] % len(self._targets) if raw else 0], raw[:1], raw[1:]

    def once(self, raw: bytes) -> None:
        target, _, content = self._split(raw)
        self._seen += 1
        try:
            target.parse(content)
            self._taken += 1
        except target.allowed:
            pass
        if self._seen & (self._seen - 1) == 0:
            print(f"#taken {100 * self._taken / self._seen:.0f} % of {self._seen}", file=sys.stderr)

    def mutate(self, raw: bytes, max_bytes: int, seed: int) -> bytes:
        """The next input, made of `raw` or of an example."""
        rng = random.Random(seed)
        target, chosen, content = self._split(raw)
        if target.examples and rng.random() < ANEW:
            content = rng.choice(target.examples)
        for _ in range(rng.choice((1, 1, 2, 3))):
            content = self._changed(target, content, max_bytes, rng)
        return (chosen + content)[:max_bytes]

    def _changed(self, target: Target, content: bytes, max_bytes: int, rng: random.Random) -> bytes:
        if target.mutate is not None and rng.random() > BLINDLY:
            try:
                return target.mutate(content, rng)
            except Exception:  # no longer of that form
                pass
        return bytes(atheris.Mutate(content[: max_bytes - 1], max_bytes - 1))


def main() -> None:
    name, *options = sys.argv[1:]
    targets = list(TARGETS.values()) if name == "all" else [TARGETS[name]]
    for target in targets:
        for example in target.examples:
            target.parse(example)  # lazy imports happen before the clock runs
    corpus = Path(tempfile.mkdtemp(prefix=f"corpus-{name}-"))
    for which, target in enumerate(targets):
        for number, example in enumerate(target.examples):
            (corpus / f"{which}-{number}").write_bytes(bytes([which] if len(targets) > 1 else []) + example)
    limits = (f"-timeout={HANG_S}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={MAX_BYTES}")
    fuzzed = Fuzzed(targets)
    atheris.Setup([sys.argv[0], *limits, *options, str(corpus)], fuzzed.once, custom_mutator=fuzzed.mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
