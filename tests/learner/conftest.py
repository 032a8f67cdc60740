from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def floats_as_they_were() -> Iterator[None]:
    """A learner has its process flush tiny floats to zero; the tests that follow need them."""
    yield
    torch.set_flush_denormal(False)
