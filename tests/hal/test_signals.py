"""Signals end a process in any state, within its deadline."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

SIGNAL_WITH_LOCK_HELD = """
import signal, threading
from hal.signals import stop_on_signals
stop = threading.Event()
stop_on_signals(stop)
wait = threading.Condition.wait
def interrupted_wait(condition, timeout=None):
    threading.Condition.wait = wait
    signal.raise_signal(signal.SIGTERM)  # `stop.wait` holds the event's lock here
    return wait(condition, timeout)
threading.Condition.wait = interrupted_wait
raise SystemExit(0 if stop.wait(60) else 1)
"""


def test_signal_before_wait_sets_event() -> None:
    assert subprocess.run([sys.executable, "-c", SIGNAL_WITH_LOCK_HELD], timeout=120).returncode == 0


TERMINAL_CLOSES = """
import os, signal, sys, threading
from hal.signals import stop_on_signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
os.open(os.ttyname(0), os.O_RDWR)  # opening a terminal makes it the controlling one of a new session
stop = threading.Event()
stop_on_signals(stop)
print("ready", flush=True)
ended = stop.wait(60)
print("a line after the end", flush=True)
open(sys.argv[1], "w").write("ended" if ended else "goes on")
"""


def test_closed_terminal_ends_process_cleanly(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    argv = [sys.executable, "-c", TERMINAL_CLOSES, str(tmp_path / "result")]
    with subprocess.Popen(argv, stdin=its, stdout=its, stderr=its, start_new_session=True) as process:
        os.close(its)
        assert b"ready" in os.read(ours, 100)
        os.close(ours)
        assert process.wait(120) == 0
    assert (tmp_path / "result").read_text() == "ended"


BLOCKED_IN_LIBRARY = """
import ctypes, os, signal, threading
from hal.signals import bounded_shutdown
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
library.pthread_mutex_lock(mutex)
calls, rescue = [], threading.Timer(60, os._exit, [1])
rescue.start()
def on_stop():
    calls.append("stop")
    library.pthread_mutex_unlock(mutex)
with bounded_shutdown(60, lambda: os._exit(3)) as end:
    end.defer(on_stop)
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
    library.pthread_mutex_lock(mutex)  # no signal interrupts this, and no handler runs
rescue.cancel()
raise SystemExit(0 if end.requested.is_set() and calls == ["stop"] else 2)
"""


def test_deferred_signal_calls_back_while_main_thread_is_blocked() -> None:
    assert subprocess.run([sys.executable, "-c", BLOCKED_IN_LIBRARY], timeout=120).returncode == 0


RAISES = """
import signal
from hal.signals import bounded_shutdown
before = signal.getsignal(signal.SIGTERM)
try:
    with bounded_shutdown(60, lambda: None) as end:
        signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    raise SystemExit(0 if end.requested.is_set() and signal.getsignal(signal.SIGTERM) is before else 1)
"""


def test_signal_raises_unless_deferred() -> None:
    assert subprocess.run([sys.executable, "-c", RAISES], timeout=120).returncode == 0


NEVER_ENDS = """
import ctypes, os, signal, sys, threading
from hal.signals import bounded_shutdown
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
library.pthread_mutex_lock(mutex)
with bounded_shutdown(float(sys.argv[1]), lambda: os._exit(7)) as end:
    end.defer(lambda: None)
    for at_s in map(float, sys.argv[2:]):
        threading.Timer(at_s, os.kill, [os.getpid(), signal.SIGINT]).start()
    library.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("argv", [("0.5", "0.2"), ("600", "0.2", "1.6")])
def test_process_that_does_not_end_is_aborted(argv: tuple[str, ...]) -> None:
    """At its deadline, or at a second signal."""
    assert subprocess.run([sys.executable, "-c", NEVER_ENDS, *argv], timeout=120).returncode == 7


def test_repeated_signal_within_a_second_counts_once() -> None:
    with subprocess.Popen([sys.executable, "-c", NEVER_ENDS, "600", "0.2", "0.4"]) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.5)
        process.kill()
