"""A signal that ends a process finds it wherever it is."""

from __future__ import annotations

import subprocess
import sys

HANDLED_WITH_THE_LOCK_IN_HAND = """
import signal, threading
from hal.signals import stop_on_signals
stop = threading.Event()
stop_on_signals(stop)
with stop._cond:  # as inside of a wait for it
    signal.raise_signal(signal.SIGTERM)
raise SystemExit(0 if stop.wait(60) else 1)
"""


def test_a_signal_ends_a_process_that_is_about_to_wait_for_it() -> None:
    assert subprocess.run([sys.executable, "-c", HANDLED_WITH_THE_LOCK_IN_HAND], timeout=120).returncode == 0
