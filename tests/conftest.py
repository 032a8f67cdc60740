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
settings.register_profile("repeatable", derandomize=True, database=None, print_blob=True, **_UNHURRIED)
settings.register_profile("explore", print_blob=True, **_UNHURRIED)
settings.load_profile("repeatable")

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="user-sys-tests-")  # of audit logs that belong to no run

# Whoever starts the tests in the background of a shell has SIGINT ignored, in them and in all that they start; here
# Ctrl-C is meant to work.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Locks, sockets and e-stops of the tests lie in a folder of their own, also those of the processes that they start.
_FOLDER = tempfile.TemporaryDirectory(prefix="us-", dir="/tmp")  # a socket's path has at most 107 bytes
os.environ["USER_SYS_TEST_FOLDER"] = _FOLDER.name


@pytest.fixture
def ipv6() -> None:
    """Skips the test on a machine without IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
