"""What a computer is held to see of a folder, by when and what it answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from user_sys.run.cluster_allocation import FOLDER_CHECK_TIMEOUT_S, RemoteRead, SharedFolderCheck


class Elsewhere:
    """Another computer, which answers when told to; asking it takes the time that one waits for it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.answer: str | None = None
        self.asked: Path | None = None

    def clock(self) -> float:
        return self.now_s

    def ask(self, path: Path) -> RemoteRead:
        self.asked = path
        return self._told

    def _told(self, wait_s: float) -> str | None:
        if self.answer is None:
            self.now_s += wait_s
        return self.answer


@pytest.fixture
def elsewhere() -> Elsewhere:
    return Elsewhere()


def test_nobody_waits_for_an_answer_who_does_not_want_to(tmp_path: Path, elsewhere: Elsewhere) -> None:
    look = SharedFolderCheck(tmp_path, elsewhere.ask, clock=elsewhere.clock)
    assert look.is_visible(0.0) is None and elsewhere.now_s == 0.0
    assert elsewhere.asked is not None
    elsewhere.answer = elsewhere.asked.read_text()
    assert look.is_visible(0.0) is True
    look.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", ["", "what another computer has there"])
def test_who_has_another_folder_there_does_not_see_it(answer: str, tmp_path: Path, elsewhere: Elsewhere) -> None:
    look = SharedFolderCheck(tmp_path / "not" / "made", elsewhere.ask, clock=elsewhere.clock)
    assert elsewhere.asked is not None and elsewhere.asked.parent == tmp_path
    elsewhere.answer = answer
    assert look.is_visible(60.0) is False


def test_who_does_not_answer_in_time_does_not_see_it(tmp_path: Path, elsewhere: Elsewhere) -> None:
    look = SharedFolderCheck(tmp_path, elsewhere.ask, clock=elsewhere.clock)
    assert look.is_visible(FOLDER_CHECK_TIMEOUT_S / 2) is None
    assert look.is_visible(FOLDER_CHECK_TIMEOUT_S) is False and elsewhere.now_s == FOLDER_CHECK_TIMEOUT_S


def test_no_sign_is_left_where_it_cannot_be_asked(tmp_path: Path) -> None:
    def refuse(path: Path) -> RemoteRead:
        raise RuntimeError("the cluster has gone")

    with pytest.raises(RuntimeError):
        SharedFolderCheck(tmp_path, refuse)
    assert not list(tmp_path.iterdir())
