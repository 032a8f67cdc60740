"""Settings of every test."""

from __future__ import annotations

import gc
import os
import signal
import socket
import tempfile
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Properties are tried with the same examples in every run and take what time they need: hypothesis by itself fails an
# example that takes over 200 ms, which tells how busy the machine is. `--hypothesis-profile=explore` draws others.
_UNHURRIED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, database=None, print_blob=True, max_examples=50, **_UNHURRIED)
settings.register_profile("explore", print_blob=True, max_examples=200, **_UNHURRIED)
settings.load_profile("repeatable")

# Tests run next to each other and compute little: one thread each is faster. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background has SIGINT ignored, in them and in all that they start; here
# Ctrl-C is meant to work.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The tests of a group share an expensive fixture.
GROUPS = {
    "hal/test_ray_cluster.py": "Ray",  # on a busy machine its processes exceed the 15 s that a node gives them
    "test_end_to_end.py": "Ray",
    "console/test_console_browser.py": "a browser",
    "robots/test_ur.py": "a simulated controller",
    "rewards/test_rewards.py": "a trained classifier",
    "policies/test_trainable.py": "peft",
    "learner/test_learner_with_adapters.py": "peft",
    "algorithms/test_dsrl.py": "peft",
    "test_architecture.py": "the parsed modules",
    "test_bring_your_robot.py": "an environment with the template",
}
# Tests by name, of any module, that train in the two processes of `user_sys.algorithms.conformance`.
TWO_PROCESSES = (
    "test_processes_that_train_together_keep_the_same_weights",
    "test_two_processes_have_the_gradient_of_one",
    "test_two_processes_with_half_the_batch_each_learn_what_one_does",
    "test_processes_with_unequal_shares_of_people_clone_as_one",
    "test_processes_with_unequal_shares_of_usable_steps_train_as_one",
)

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
    """Workers of `pytest -n auto`. The tests wait for other processes most of their time; a worker takes up to 1 GB."""
    return min(16, 5 * (os.cpu_count() or 1) // 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `make test` a worker gets one test after the other, but all tests of a group.

    The mark xdist_group does not work with pytest 9.2 and pytest-xdist 3.8.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.rpartition("::")[2].partition("[")[0] in TWO_PROCESSES:
                return "two training processes"
            return GROUPS.get(nodeid.partition("::")[0].removeprefix("tests/"), nodeid)

    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
    return GroupScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector never scans what the tests import, such as torch: that takes a tenth of their time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


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
