"""Threads, clock and waits of a simulation: one real thread, one seeded order of events, time that jumps from one to
the next.

Code under simulation keeps its threads and its blocking waits; `Runtime.patched` gives its modules this file's Thread,
Event, Condition and clock. A thread is then a greenlet that runs until it waits.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from unittest import mock

from greenlet import GreenletExit, getcurrent, greenlet

JITTER_S = 0.001


class SimTask:
    """A repeated step: `step` runs it and returns the seconds until it is due again."""

    def __init__(self, process: SimProcess, name: str, step: Callable[[], float]) -> None:
        self.process, self.name, self.step = process, name, step
        self.due_s = math.inf

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"


class SimProcess:
    """Tasks that end together."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime, self.name = runtime, name
        self.tasks: list[SimTask] = []
        self.fibers: list[greenlet] = []
        self.frozen_until_s = 0.0
        self.alive = True

    def every(self, name: str, step: Callable[[], float], woken: bool = True) -> SimTask:
        """Repeats `step`. If `woken`, a poke of the process runs it at once."""
        task = SimTask(self, name, step)
        if woken:
            self.tasks.append(task)
        self.runtime.poke(task)
        return task

    def thread(self, name: str, run: Callable[[], None]) -> SimTask:
        """A greenlet that runs `run`, which waits by `Runtime.pause`."""
        fiber = greenlet(run, parent=self.runtime.hub)
        self.fibers.append(fiber)
        return self.every(name, lambda: math.inf if fiber.dead else _pause_of(fiber.switch()))

    def poke(self) -> None:
        for task in self.tasks:
            self.runtime.poke(task)

    def kill(self) -> None:
        self.alive = False
        for fiber in self.fibers:
            if not fiber.dead:
                fiber.throw(GreenletExit)


def _pause_of(switched: object) -> float:
    return switched if isinstance(switched, float) else math.inf


class Runtime:
    """The order of events. Events that are due at about the same time run in an order drawn from `rng`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.hub = getcurrent()
        self.now_s, self.wall_s = 1000.0, 1.7e9
        self.events = 0
        self.current: SimProcess | None = None
        self.running: SimTask | None = None
        self._queue: list[tuple[float, int, SimTask]] = []
        self._serial = 0

    # The clock

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)

    def time_ns(self) -> int:
        return int((self.now_s + self.wall_s) * 1e9)

    # Order

    def poke(self, task: SimTask, delay_s: float = 0.0) -> None:
        """Runs `task` after at most about `delay_s`."""
        at = self.now_s + delay_s + self.rng.random() * JITTER_S
        if at < task.due_s:
            self._schedule(task, at)

    def _schedule(self, task: SimTask, at: float) -> None:
        task.due_s = at
        if at < math.inf:
            self._serial += 1
            heapq.heappush(self._queue, (at, self._serial, task))

    def pause(self, timeout_s: float) -> None:
        """From a thread: waits until poked, or for `timeout_s`."""
        self.hub.switch(float(timeout_s))

    def run_until(self, end_s: float) -> None:
        while self._queue and self._queue[0][0] <= end_s:
            at, _, task = heapq.heappop(self._queue)
            if at != task.due_s or not task.process.alive:
                continue
            self.now_s = max(self.now_s, at)
            if task.process.frozen_until_s > self.now_s:
                self._schedule(task, task.process.frozen_until_s + self.rng.random() * JITTER_S)
                continue
            self._happen(task)
        self.now_s = max(self.now_s, end_s)

    def _happen(self, task: SimTask) -> None:
        self.events += 1
        task.due_s = math.inf
        self.current, self.running = task.process, task
        delay_s = task.step()
        self.current = self.running = None
        if task.process.alive:
            self._schedule(task, min(task.due_s, self.now_s + delay_s + self.rng.random() * JITTER_S))

    @contextmanager
    def within(self, process: SimProcess) -> Iterator[None]:
        """Threads that start in the block belong to `process`."""
        before, self.current = self.current, process
        try:
            yield
        finally:
            self.current = before

    # Replacements for the code under simulation

    @contextmanager
    def patched(self, modules: dict[ModuleType, dict[str, object]]) -> Iterator[None]:
        """Gives `modules` this runtime's clock and threads, and their other replacements."""
        clock = SimpleNamespace(monotonic=self.monotonic, monotonic_ns=self.monotonic_ns, time_ns=self.time_ns)
        with ExitStack() as stack:
            for module, names in modules.items():
                for name, value in {"time": clock, "threading": self.threading()}.items():
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, value))
                for name, value in names.items():
                    stack.enter_context(mock.patch.object(module, name, value))
            yield

    def threading(self) -> SimpleNamespace:
        return SimpleNamespace(
            Thread=lambda target, name, daemon, args=(): _Thread(self, name, functools.partial(target, *args)),
            Event=lambda: _Event(self),
            Condition=lambda lock=None: _Condition(self),
            Lock=nullcontext,  # a thread is interrupted only when it waits
            get_ident=lambda: -1,
        )


class _Thread:
    ident: int | None = None

    def __init__(self, runtime: Runtime, name: str, target: Callable[[], None]) -> None:
        self._runtime, self._name, self._target = runtime, name, target

    def start(self) -> None:
        assert self._runtime.current is not None
        self.ident = 1
        self._runtime.current.thread(self._name, self._target)


class _Event:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._set = runtime, False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float) -> bool:
        if not self._set:
            self._runtime.pause(timeout_s)
        return self._set


class _Condition:
    """It needs no lock: a thread is interrupted only when it waits, which would release the lock."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waiting: list[SimTask] = []

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return

    def wait(self, timeout_s: float) -> None:
        assert self._runtime.running is not None
        self._waiting.append(self._runtime.running)
        self._runtime.pause(timeout_s)

    def notify(self) -> None:
        for task in self._waiting:
            self._runtime.poke(task)
        self._waiting.clear()

    notify_all = notify
