"""Own files with invalid UTF-8: each reader reports them as damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hal.errors import HalError
from hal.registry import OperatorOverrides, read_registry
from user_sys.errors import UserSysError
from user_sys.gateway.gateway import read_gateway_address
from user_sys.run.config import open_run_folder

NO_TEXT = b'{"format": "\xff\xfe", "endpoint": "\xff", "orders": {"\xff": {}}}'


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("run.json", open_run_folder),
        ("gateway.json", read_gateway_address),
        ("registry.json", read_registry),
        ("orders.json", lambda folder: OperatorOverrides(folder / "orders.json").read()),
    ],
)
def test_invalid_utf8_is_reported_as_damage(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    (tmp_path / name).write_bytes(NO_TEXT)
    with pytest.raises((UserSysError, HalError), match=name):
        read(tmp_path)
