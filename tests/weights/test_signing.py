"""Whose numbers versions have, and which run is the later one: clocks may jump."""

from __future__ import annotations

from pathlib import Path

import pytest

from user_sys.weights.signing import next_epoch, run_id_of


def test_a_learner_that_goes_on_from_a_checkpoint_goes_on_with_its_numbers(tmp_path: Path) -> None:
    first = run_id_of(tmp_path)
    (tmp_path / "000000000001.checkpoint").touch()
    assert run_id_of(tmp_path) == first
    (tmp_path / "000000000001.checkpoint").unlink()
    assert run_id_of(tmp_path) != first, "its numbers begin anew"


def test_lives_grow_whatever_the_clock_does_and_go_with_it_where_the_key_is_a_copy(tmp_path: Path) -> None:
    lives = [next_epoch(tmp_path, lambda at=at: at) for at in (1000.0, 1000.0, 10.0, 2000.0)]  # type: ignore[misc]
    assert lives == [1000, 1001, 1002, 2000]
    assert next_epoch(tmp_path / "copied", lambda: 3000.0) == 3000


def test_a_life_that_cannot_be_kept_goes_by_the_clock_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").touch()
    assert next_epoch(tmp_path / "keys", lambda: 50.0) == 50
    assert "weights.epoch_not_stored" in caplog.text
    (tmp_path / "learner.lives").write_text("what?")
    assert next_epoch(tmp_path, lambda: 60.0) == 60
    assert "weights.epoch_unreadable" in caplog.text
