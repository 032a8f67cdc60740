"""A device library that hangs is detected and does not block the caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hal.errors import HalError, HardwareLost
from robots.device_thread import DeviceThread

DEADLINE_S = 60.0


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_check_stop_abandons_the_device(let_go: threading.Event) -> None:
    thread, asked = DeviceThread("arm"), [0]

    def check_stop() -> None:
        asked[0] += 1
        if asked[0] == 3:
            raise HalError("the driver is to end")

    with pytest.raises(HalError, match="the driver is to end"):
        thread.call("connecting", lambda: let_go.wait(DEADLINE_S), DEADLINE_S, check_stop)
    with pytest.raises(HardwareLost, match="arm has hung since connecting"):
        thread.call("disconnecting", lambda: None, DEADLINE_S)
    thread.close()


def test_call_with_check_stop_returns_or_raises(let_go: threading.Event) -> None:
    thread = DeviceThread("arm")
    assert thread.call("connecting", lambda: let_go.wait(0.2), DEADLINE_S, lambda: None) is False
    with pytest.raises(HardwareLost, match="connecting failed: ZeroDivisionError"):
        thread.call("connecting", lambda: 1 // 0, DEADLINE_S, lambda: None)
    with pytest.raises(HardwareLost, match="connecting took longer than 0.1 s"):
        thread.call("connecting", lambda: let_go.wait(DEADLINE_S), 0.1, lambda: None)
    thread.close()
