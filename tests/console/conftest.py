"""Fixtures of the console's tests."""

from __future__ import annotations

from collections.abc import Iterator

import argon2
import pytest


class QuickPasswordHasher(argon2.PasswordHasher):
    """Hashes a password in a millisecond; the product's takes a tenth of a second."""

    def __init__(self) -> None:
        super().__init__(time_cost=1, memory_cost=8, parallelism=1)


@pytest.fixture(scope="session", autouse=True)
def password_hasher() -> Iterator[type[argon2.PasswordHasher]]:
    """Replaces argon2's hasher by a quick one, and returns the original."""
    hasher = argon2.PasswordHasher
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("argon2.PasswordHasher", QuickPasswordHasher)
        yield hasher
