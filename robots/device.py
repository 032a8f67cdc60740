"""Access to a physical device: a lock, a thread for calls that may hang, and capture times from a device's clock."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import ipaddress
import os
import queue
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from importlib import import_module
from typing import Any, TypeVar

from hal.errors import HalError, HardwareLost, LeaseHeld, SpecError, StaleObservation, install_hint
from hal.lease import MachineLock
from hal.machine_folder import TEST_FOLDER_VARIABLE, shared_file, tests_folder
from hal.robot import no_op

STOP_CHECK_INTERVAL_S = 0.1
EXIT_TIMEOUT_S = 2.0  # for a call that hangs at exit; libfranka gives up after 1 s
OFFSET_WINDOW_NS = 10_000_000_000  # clocks that differ by 1e-4 drift by 1 ms in this time
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9.-]+")
_MAX_KEY_CHARS = 100
_LOCAL_PREFIXES = ("gamepad-", "ros2-")

T = TypeVar("T")


class DeviceThread:
    """Runs the calls of a device one at a time, each with a timeout.

    After a call that timed out or was abandoned, the device is lost and every later call is refused.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._abandoned_operation = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(
        self, operation: str, function: Callable[[], T], timeout_s: float, check_stop: Callable[[], None] = no_op
    ) -> T:
        """Call `function` on the thread and return its result.

        Args:
            check_stop: called periodically while waiting; an exception from it ends the wait.

        Raises:
            HardwareLost: `function` raised any exception, or timed out; the message says which.
        """
        if self._abandoned_operation:
            raise HardwareLost(f"{self._name} has hung since {self._abandoned_operation}")
        future: Future[T] = Future()
        self._calls.put((future, function))
        until_s = time.monotonic() + timeout_s
        try:
            while not wait([future], min(STOP_CHECK_INTERVAL_S, max(0.0, until_s - time.monotonic()))).done:
                check_stop()
                if time.monotonic() >= until_s:
                    raise HardwareLost(f"{self._name}: {operation} took longer than {timeout_s:g} s")
        except BaseException:
            self._abandoned_operation = operation
            # a thread that returns from C++ during Python's shutdown would abort the process
            atexit.register(self._thread.join, EXIT_TIMEOUT_S)
            raise
        try:
            return future.result()
        except Exception as error:  # of the device's library
            raise HardwareLost(f"{self._name}: {operation} failed: {type(error).__name__}: {error}") from error

    def close(self, *last: Callable[[], object]) -> None:
        """End the thread after its current call and the calls `last`, which also run after an abandoned call returns.
        Their errors are ignored."""
        for function in last:
            self._calls.put((Future(), function))
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # `call` raises it
                future.set_exception(error)


def run_all(steps: Sequence[Callable[[], object]]) -> None:
    """Run every step, and then raise the first HardwareLost of them."""
    errors: list[HardwareLost] = []
    for step in steps:
        try:
            step()
        except HardwareLost as error:
            errors.append(error)
    if errors:
        raise errors[0]


class DeviceClock:
    """Maps a device's stamps to ``time.monotonic_ns``. The least recent delay counts as 0. One thread calls it.

    Attributes:
        newest_ns: the capture time of the newest reading; None before the first.
    """

    def __init__(self) -> None:
        self.newest_ns: int | None = None
        self._stamp_ns = 0
        self._offsets_ns: list[int] = []  # the least of the previous window, then of this one
        self._since_ns = 0

    def captured_ns(self, stamp_ns: int, arrival_ns: int) -> int:
        """The capture time of a reading that arrives now: it never decreases, and is never after its arrival."""
        if self.newest_ns is not None and stamp_ns == self._stamp_ns:
            return self.newest_ns
        offset_ns = arrival_ns - stamp_ns
        if not self._offsets_ns or arrival_ns - self._since_ns > OFFSET_WINDOW_NS:  # clocks drift apart
            self._since_ns, self._offsets_ns = arrival_ns, [*self._offsets_ns[-1:], offset_ns]
        self._offsets_ns[-1] = min(self._offsets_ns[-1], offset_ns)
        self._stamp_ns, self.newest_ns = stamp_ns, max(self.newest_ns or 0, stamp_ns + min(self._offsets_ns))
        return self.newest_ns


def import_library(library: str, extra: str, error: type[HalError] = SpecError) -> Any:
    """Import a device's library. Raises `error`, with the command that installs it."""
    try:
        return import_module(library)
    except ImportError as cause:
        raise error(f"{library} cannot be imported: {cause}; install it with: {install_hint(extra)}") from cause


def age_s(captured_ns: int) -> float:
    """The age of a reading by its time of ``time.monotonic_ns``."""
    return (time.monotonic_ns() - captured_ns) / 1e9


def require_fresh(device: str, captured_ns: int, stale_after_s: float) -> None:
    """Raises StaleObservation if the newest reading of `device` is older than `stale_after_s`."""
    if (old_s := age_s(captured_ns)) > stale_after_s:
        raise StaleObservation(
            f"{device}: the newest reading is {old_s:.3f} s old; at most {stale_after_s:g} s are allowed"
        )


class DeviceLock:
    """An exclusive lock on some devices, from `acquire` to `release` or the end of this process. All are locked, or
    none.

    `hal.lease.robot_lock` locks a robot's name; two names may share an arm or a camera.

    Of a device node, the node itself is locked, and its device number in the machine folder: a container that mounts
    the folder has another node. Of an address, the machine folder has the lock.
    """

    def __init__(self, *places: str) -> None:
        """`places`: device paths, whose links are followed, or addresses. Empty strings are ignored."""
        found = {os.path.realpath(place) if place.startswith("/") else place: place for place in places if place}
        self._places = found
        self._locks: list[MachineLock] = []
        self._nodes: list[int] = []

    def acquire(self) -> None:
        """Lock all devices. Does nothing if this object holds them.

        Raises:
            HardwareLost: another process or another object holds one of them, or a process of tests would open a real
                device. None stays locked.
        """
        if self._locks:
            return
        try:
            for key, place in self._places.items():
                self._lock_place(key, place)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release all devices. Does nothing if none is locked."""
        for handle in self._nodes:
            os.close(handle)
        for lock in self._locks:
            lock.release()
        self._nodes.clear()
        self._locks.clear()

    def _lock_place(self, key: str, place: str) -> None:
        lock = MachineLock(shared_file(f"device.{_lock_name(key)}.lock"), "", place)
        try:
            lock.acquire()
            self._locks.append(lock)
            if key.startswith("/"):
                self._lock_node(key)
        except (LeaseHeld, BlockingIOError) as error:
            by = lock.owner() if isinstance(error, LeaseHeld) else "a process that locked the device"
            raise HardwareLost(
                f"{place} is already in use by {by or 'another process'} on this machine; stop that process first"
            ) from None

    def _lock_node(self, path: str) -> None:
        """Lock the node; a node that cannot be opened is skipped, because its driver reports the reason. Raises
        BlockingIOError."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return
        self._nodes.append(handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_name(key: str) -> str:
    """The file name of the lock: from the device number, or the resolved address. Raises HardwareLost."""
    if key.startswith("/"):
        with contextlib.suppress(OSError):
            found = os.stat(key)
            if stat.S_ISCHR(found.st_mode):
                return f"char-{os.major(found.st_rdev)}-{os.minor(found.st_rdev)}"
    elif not key.startswith(_LOCAL_PREFIXES):
        key = _resolve_address(key)
    return _UNSAFE_CHARACTERS.sub("_", key)[-_MAX_KEY_CHARS:]


def _resolve_address(host: str) -> str:
    """Resolve a host name to its IP address, if it has one. Raises HardwareLost in a process of tests for an address
    that is not loopback."""
    with contextlib.suppress(OSError):
        host = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    simulated = False
    with contextlib.suppress(ValueError):
        simulated = ipaddress.ip_address(host).is_loopback
    if tests_folder() is not None and not simulated:
        raise HardwareLost(
            f"{host} is not a loopback address, and {TEST_FOLDER_VARIABLE} is set for simulated devices; "
            "unset it to use real ones"
        )
    return host
