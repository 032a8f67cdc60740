"""The audit file: what it says, and that nobody can fill the disk or push others out of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from user_sys.tunnel.audit import FILES_KEPT, REFUSALS_AT_ONCE, AuditLog
from user_sys.tunnel.keys import fingerprint, new_keypair


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_from_where_with_which_key_and_when(tmp_path: Path) -> None:
    log, key = AuditLog(tmp_path / "audit.jsonl"), new_keypair().public
    log.write("opened", public=key, peer="panda-0", role="robot", address="10.0.0.7")
    log.close()
    again = AuditLog(tmp_path / "audit.jsonl")
    again.write("closed", public=key, peer="panda-0", role="robot", address="10.0.0.7", reason="silent for 5 s")
    again.close()
    opened, closed = lines(tmp_path / "audit.jsonl")
    when = time.mktime(time.strptime(str(opened.pop("time"))[:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone
    assert abs(when - time.time()) < 60
    who = {"peer": "panda-0", "role": "robot", "address": "10.0.0.7", "key": fingerprint(key)}
    assert opened == {"event": "opened", **who} and closed["reason"] == "silent for 5 s"
    assert key not in (tmp_path / "audit.jsonl").read_text()


def test_a_flood_of_strangers_is_counted_and_does_not_push_others_out(tmp_path: Path) -> None:
    clock = Clock()
    log = AuditLog(tmp_path / "audit.jsonl", clock=clock)
    log.write("opened", peer="panda-0", role="robot")
    for _ in range(10_000):
        log.write("refused", public="x", reason="this key is not allowed")
    log.write("closed", peer="panda-0", role="robot")
    clock.now_s += 60
    log.write("refused", reason="once more")
    log.close()
    written = lines(tmp_path / "audit.jsonl")
    assert len(written) == 3 + REFUSALS_AT_ONCE
    assert [line["event"] for line in written if line["event"] != "refused"] == ["opened", "closed"]
    assert written[-1]["held_back"] == 10_000 - REFUSALS_AT_ONCE


def test_the_files_are_bounded(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", max_bytes=2_000)
    for number in range(1_000):
        log.write("closed", peer=f"panda-{number}", reason="x" * 1_000)
    log.close()
    files = list(tmp_path.iterdir())
    assert len(files) == 1 + FILES_KEPT and sum(file.stat().st_size for file in files) < 2_000 * (1 + FILES_KEPT)
    assert "panda-999" in (tmp_path / "audit.jsonl").read_text()


def test_a_file_that_cannot_be_written_is_reported_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    log = AuditLog(Path("/dev/full"))
    log.write("opened", peer="panda-0")
    log.close()
    assert "audit.not_written" in caplog.text
