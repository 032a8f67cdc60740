"""What is told of an address where no Ray cluster answers, in less time than Ray itself takes."""

from __future__ import annotations

import socket
import threading

import pytest

from hal import ray_address
from hal.errors import HalError
from hal.ray_address import require_cluster, require_token

SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def ask(says: bytes | None, host: str = "127.0.0.1") -> None:
    """Asks a server that says this to whoever comes, and then ends; None: that is silent until it was asked."""
    asked = threading.Event()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:

        def serve() -> None:
            link, _ = server.accept()
            with link:
                if says is None:
                    asked.wait(60.0)
                    return
                link.recv(1024)
                link.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            require_cluster(f"{f'[{host}]' if ':' in host else host}:{server.getsockname()[1]}")
        finally:
            asked.set()
            thread.join(60.0)


def test_what_speaks_as_ray_does_is_let_be() -> None:
    ask(SETTINGS)
    require_cluster("auto")


@pytest.mark.usefixtures("ipv6")
def test_an_ipv6_address_stands_in_brackets() -> None:
    ask(SETTINGS, "::1")


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_something_else_that_listens_is_told_to_be_none(says: bytes) -> None:
    with pytest.raises(HalError, match=r"what listens at 127\.0\.0\.1:\d+ is no Ray cluster"):
        ask(says)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere"}, "wants a token, and there is none in /nowhere"),
        ({"HOME": "/nowhere"}, "wants a token, and none is given"),
    ],
)
def test_a_token_that_is_not_there_is_told_in_one_line(token: dict[str, str], why: str) -> None:
    with pytest.raises(HalError, match=f"^the Ray cluster at 127.0.0.1:1 {why}: copy the .*PATH$"):
        require_token("127.0.0.1:1", {"RAY_AUTH_MODE": "token", **token})


def test_what_is_silent_or_not_there_is_told_within_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_address, "ANSWER_WITHIN_S", 0.05)
    with pytest.raises(HalError, match=r"no Ray cluster answers at 127\.0\.0\.1:\d+: timed out"):
        ask(None)
    for address in ("127.0.0.1:1", "127.0.0.1:99999", f"{'a' * 70}.example:1", "a\0b:1"):
        with pytest.raises(HalError, match="no Ray cluster answers at "):
            require_cluster(address)
