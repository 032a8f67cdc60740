"""A signal that ends a process finds it wherever it is."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

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


OUTLIVES_ITS_TERMINAL = """
import os, signal, sys, threading
from hal.signals import stop_on_signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs this test may be under nohup
os.open(os.ttyname(0), os.O_RDWR)  # the first process of a session that opens a terminal has it for its own
stop = threading.Event()
stop_on_signals(stop)
print("ready", flush=True)
ended = stop.wait(60)
print("a line for nobody", flush=True)
open(sys.argv[1], "w").write("ended" if ended else "goes on")
"""


def test_the_end_of_its_terminal_ends_a_process_in_good_order(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    argv = [sys.executable, "-c", OUTLIVES_ITS_TERMINAL, str(tmp_path / "result")]
    with subprocess.Popen(argv, stdin=its, stdout=its, stderr=its, start_new_session=True) as process:
        os.close(its)
        assert b"ready" in os.read(ours, 100)
        os.close(ours)
        assert process.wait(120) == 0
    assert (tmp_path / "result").read_text() == "ended"


IN_A_LIBRARY_THAT_IS_DEAF = """
import ctypes, os, signal, threading
from hal.signals import ends_in_time
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
library.pthread_mutex_lock(mutex)
told, rescue = [], threading.Timer(60, os._exit, [1])
rescue.start()
def tell():
    told.append("to stop")
    library.pthread_mutex_unlock(mutex)
with ends_in_time(60, lambda: os._exit(3)) as end:
    end.defer(tell)
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
    library.pthread_mutex_lock(mutex)  # no signal ends this, and no handler runs meanwhile
rescue.cancel()
raise SystemExit(0 if end.asked.is_set() and told == ["to stop"] else 2)
"""


def test_a_signal_is_told_of_while_the_main_thread_cannot_hear_it() -> None:
    assert subprocess.run([sys.executable, "-c", IN_A_LIBRARY_THAT_IS_DEAF], timeout=120).returncode == 0


RAISES = """
import signal
from hal.signals import ends_in_time
before = signal.getsignal(signal.SIGTERM)
try:
    with ends_in_time(60, lambda: None) as end:
        signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    raise SystemExit(0 if end.asked.is_set() and signal.getsignal(signal.SIGTERM) is before else 1)
"""


def test_a_signal_interrupts_unless_that_is_deferred() -> None:
    assert subprocess.run([sys.executable, "-c", RAISES], timeout=120).returncode == 0


DEAF_TO_SIGNALS = """
import ctypes, os, signal, sys, threading
from hal.signals import SECOND_AFTER_S, ends_in_time
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
library.pthread_mutex_lock(mutex)
with ends_in_time(float(sys.argv[1]), lambda: os._exit(7)) as end:
    end.defer(lambda: None)
    for at_s in map(float, sys.argv[2:]):
        threading.Timer(at_s, os.kill, [os.getpid(), signal.SIGINT]).start()
    library.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("argv", [("0.5", "0.2"), ("600", "0.2", "1.6")])
def test_a_process_that_does_not_end_is_abandoned(argv: tuple[str, ...]) -> None:
    """After its time, or at a second signal."""
    assert subprocess.run([sys.executable, "-c", DEAF_TO_SIGNALS, *argv], timeout=120).returncode == 7


def test_a_signal_that_a_wrapper_passes_on_is_no_second_one() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF_TO_SIGNALS, "600", "0.2", "0.4"]) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.5)
        process.kill()
