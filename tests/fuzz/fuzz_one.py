"""``python tests/fuzz/fuzz_one.py TARGET [libFuzzer's options]``: fuzzes one parser until a finding or time is up.

TARGET ``all`` is all of them in turn.

A finding is an exception that the parser may not raise, a crash, a hang of `HANG_S`, or `MEMORY_MB` of memory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

INSTRUMENTED = [
    *("user_sys.codec", "user_sys.episode", "user_sys.messages", "user_sys.config", "user_sys.tunnel.keys"),
    *("user_sys.tunnel.wire", "user_sys.store", "user_sys.weights.records", "user_sys.jpeg"),
    *("user_sys.interchange.frames", "user_sys.interchange.lerobot_format", "user_sys.interchange.lerobot_read"),
]

with atheris.instrument_imports(include=INSTRUMENTED):
    from targets import TARGETS

HANG_S = 60  # of a machine that may do much else
MEMORY_MB = 1024
MAX_BYTES = 8192


def main() -> None:
    name, *options = sys.argv[1:]
    targets = list(TARGETS.values()) if name == "all" else [TARGETS[name]]

    def once(raw: bytes) -> None:
        which = raw[0] % len(targets) if len(targets) > 1 and raw else 0
        target = targets[which]
        try:
            target.parse(raw[1:] if len(targets) > 1 else raw)
        except target.allowed:
            return

    for target in targets:
        for example in target.examples:
            target.parse(example)  # what is imported lazily is imported before the clock runs
    corpus = Path(tempfile.mkdtemp(prefix=f"corpus-{name}-"))
    for which, target in enumerate(targets):
        for number, example in enumerate(target.examples):
            (corpus / f"{which}-{number}").write_bytes(bytes([which] if len(targets) > 1 else []) + example)
    limits = (f"-timeout={HANG_S}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={MAX_BYTES}")
    atheris.Setup([sys.argv[0], *limits, *options, str(corpus)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
