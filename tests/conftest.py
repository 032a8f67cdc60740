"""Settings of every test."""

from __future__ import annotations

import os
import signal
import socket
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# Properties are tried with the same examples in every run and take what time they need: hypothesis by itself fails an
# example that takes over 200 ms, which tells how busy the machine is. `--hypothesis-profile=explore` draws others.
_UNHURRIED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, database=None, print_blob=True, max_examples=50, **_UNHURRIED)
settings.register_profile("explore", print_blob=True, max_examples=200, **_UNHURRIED)
settings.load_profile("repeatable")

# Tests run beside each other and compute little: one thread each is faster. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whoever starts the tests in the background of a shell has SIGINT ignored, in them and in all that they start; here
# Ctrl-C is meant to work.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Folders of this process, which is one of several under `pytest -n`, and of the processes that its tests start:
# locks, sockets and e-stops (a socket's path has at most 107 bytes), and audit logs that belong to no run.
_FOLDERS = {
    name: tempfile.TemporaryDirectory(prefix="us-", dir="/tmp", ignore_cleanup_errors=True)
    for name in ("USER_SYS_TEST_FOLDER", "XDG_STATE_HOME")
}
os.environ.update({name: folder.name for name, folder in _FOLDERS.items()})


def pytest_unconfigure() -> None:
    for folder in _FOLDERS.values():
        folder.cleanup()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which the environments of single drivers do not have
def pytest_xdist_auto_num_workers() -> int:
    """Workers of `pytest -n auto`. The tests wait for other processes half of their time; a worker takes up to 1 GB."""
    return min(16, 2 * (os.cpu_count() or 1) + 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under `make test` the longest tests start first, so that no worker runs one when the others are done."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("long")), default=0))


@pytest.fixture
def ipv6() -> None:
    """Skips the test on a machine without IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
