"""The check whether another computer sees a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from user_sys.run.cluster_allocation import FOLDER_CHECK_TIMEOUT_S, RemoteRead, SharedFolderCheck


class Elsewhere:
    """Another computer whose answer the test sets; without an answer, a read advances the clock by its wait."""

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


def test_check_without_wait_does_not_block(tmp_path: Path, elsewhere: Elsewhere) -> None:
    look = SharedFolderCheck(tmp_path, elsewhere.ask, clock=elsewhere.clock)
    assert look.is_visible(0.0) is None and elsewhere.now_s == 0.0
    assert elsewhere.asked is not None
    elsewhere.answer = elsewhere.asked.read_text()
    assert look.is_visible(0.0) is True
    look.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", ["", "what another computer has there"])
def test_another_text_means_not_visible(answer: str, tmp_path: Path, elsewhere: Elsewhere) -> None:
    look = SharedFolderCheck(tmp_path / "not" / "made", elsewhere.ask, clock=elsewhere.clock)
    assert elsewhere.asked is not None and elsewhere.asked.parent == tmp_path
    elsewhere.answer = answer
    assert look.is_visible(60.0) is False


def test_no_answer_before_the_timeout_means_not_visible(tmp_path: Path, elsewhere: Elsewhere) -> None:
    look = SharedFolderCheck(tmp_path, elsewhere.ask, clock=elsewhere.clock)
    assert look.is_visible(FOLDER_CHECK_TIMEOUT_S / 2) is None
    assert look.is_visible(FOLDER_CHECK_TIMEOUT_S) is False and elsewhere.now_s == FOLDER_CHECK_TIMEOUT_S


def test_failed_check_leaves_no_file(tmp_path: Path) -> None:
    def refuse(path: Path) -> RemoteRead:
        raise RuntimeError("the cluster has gone")

    with pytest.raises(RuntimeError):
        SharedFolderCheck(tmp_path, refuse)
    assert not list(tmp_path.iterdir())
