"""How ``user-sys node`` starts Ray again."""

from __future__ import annotations

import pytest

from user_sys.commands import node


@pytest.mark.parametrize(("endless", "starts"), [(True, 3), (False, 1)])
def test_join_starts_ray_again_until_a_signal(endless: bool, starts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [(1, False), (-9, False), (0, True)]
    monkeypatch.setattr(node, "_run", lambda argv, environment: ends.pop(0))
    monkeypatch.setattr(node, "JOIN_PAUSE_S", 0.0)
    node._run_until_end([], {}, (), endless=endless)
    assert len(ends) == 3 - starts
