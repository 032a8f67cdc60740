"""How Ray is imported and started in this process, with its settings in place."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from hal.ray_nodes import NODE_SETTINGS

logger = logging.getLogger(__name__)

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    **NODE_SETTINGS,
}
_OF_THE_TERMINAL = (signal.SIGHUP, signal.SIGTSTP)
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Whatever its name says: the address of this machine's node is then 127.0.0.1, and every server of Ray binds to it."""


def init_ray(ray: Any, tries: int = 1, **settings: Any) -> None:
    """``ray.init``, anew where a busy machine did not let its node come up within the 30 s that Ray gives it.

    Raises:
        RuntimeError: it did not come up in so many `tries`; else as ``ray.init``.
    """
    for left in reversed(range(tries)):
        try:
            with _keeping_signals():
                ray.init(**settings)
            return
        except Exception as error:  # Ray raises a bare Exception for this
            if "timed out" not in str(error) or tries == 1:
                raise
            ray.shutdown()
            if not left:
                raise RuntimeError(f"{tries} times, {error}") from error
            logger.info("ray.slow_start: the machine is busy; trying again")


@contextlib.contextmanager
def _keeping_signals() -> Iterator[None]:
    """Keeps Ray's start from changing what SIGTERM does here, and the end of the terminal or Ctrl-Z from reaching Ray's
    processes, which are in this process's group: they are to outlive it by the time that stopping robots takes."""
    ours = threading.current_thread() is threading.main_thread()
    before, mask = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_TERMINAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if ours:
            signal.signal(signal.SIGTERM, before)


def import_ray(token: str | None) -> Any:
    """Ray reads its settings when it is imported, and its processes inherit them. `token`: for a cluster of ours."""
    for name, value in {**_QUIET, **(_LOOPBACK if token is not None else {})}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if token is not None and os.environ["RAY_AUTH_MODE"] == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", token)
    import ray

    return ray


def silence(ray: Any) -> None:
    """Keeps Ray's remarks (that a worker died, say) off the terminal; its logs have them, and `statuses` the outcome.

    There is no setting for these. This switch is the one that Ray's own debugger uses while it has the terminal.
    """
    ray._private.worker._worker_logs_enabled = False
