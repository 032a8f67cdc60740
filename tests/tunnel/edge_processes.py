"""``python edge_processes.py RUN ENDPOINT PUBLIC_KEY``: runs one edge after another, each in a forked process.

For each line on standard input it forks a process that records as fast as it can, and prints its process id and then
each durable sequence number. After a kill it prints "dead". Forking avoids the start of an interpreter.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tunnel_kit import QUICK, chunk, hello

from user_sys.edge.outbox import Outbox, OutboxFull
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import load_keypair

OUTBOX_BYTES = 1 << 20
FULL_RETRY_S = 0.01


def say(word: object) -> None:
    """Writes a line in one system call, so that a kill does not cut it."""
    os.write(sys.stdout.fileno(), f"{word}\n".encode())


def live(run: Path, endpoint: str, public_key: str) -> None:
    """Never returns."""
    say(os.getpid())
    outbox = Outbox.open(run / "outbox", max_bytes=OUTBOX_BYTES)
    keys = load_keypair(run / "keys" / "panda-0.key")
    TunnelClient(endpoint, keys, public_key, hello("panda-0"), outbox=outbox, limits=QUICK).start()
    while True:
        number = outbox.next_sequence
        try:
            outbox.append(chunk(number))
        except OutboxFull:  # the gateway is slower: recording pauses, as in a session
            time.sleep(FULL_RETRY_S)
            continue
        say(number)


def main() -> None:
    run, endpoint, public_key = Path(sys.argv[1]), *sys.argv[2:]
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            live(run, endpoint, public_key)
        os.waitpid(child, 0)
        say("dead")


if __name__ == "__main__":
    main()
