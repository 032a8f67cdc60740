"""A power cut at any moment loses nothing acknowledged; without any one sync it would."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator

import pytest
from crash_scenarios import durable, packet
from crash_states import Result, Verdict, examine, judge
from disk_model import ROOT, Disk, ModelFiles
from store_kit import stored

from user_sys.errors import StoreError
from user_sys.store.store import StoreReader, StoreWriter


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def kept(result: Result) -> bool:
    assert not result.violations, result.first
    return result.states > 10


def caught(verdict: Verdict) -> bool:
    assert [site for site, how in verdict.caught.items() if not how] == []
    return all(map(kept, verdict.scenarios.values()))


@pytest.mark.parametrize(("scenario", "check_every"), [("appending", 6), ("compacting", 12)])
def test_power_cut_in_sampled_states_loses_nothing(scenario: str, check_every: int) -> None:
    result = examine(scenario, kill_every=0, chances=0, check_every=check_every)
    assert kept(result) and result.states > 75


class LosingFiles(ModelFiles):
    """As Linux after a failed sync: the bytes stay readable, are not on the disk, and no later sync writes them."""

    def fdatasync(self, fd: int) -> None:
        disk, file = self.disk, self._open[fd]
        if not disk.fail_with:
            return super().fdatasync(fd)
        last = max(at for at, event in enumerate(disk.trace) if event.kind == "sync" and event.file == file)
        for at in range(last, len(disk.trace)):
            if disk.trace[at].kind == "write" and disk.trace[at].file == file:
                disk.trace[at] = disk.trace[at]._replace(kind="note")
        disk.fail_with = 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_power_cut_after_a_failed_sync_and_a_new_writer_loses_nothing() -> None:
    disk = Disk()
    writer = StoreWriter.open(ROOT, files=LosingFiles(disk))
    writer.append(packet("ep", 0))
    writer.sync()
    writer.append(packet("ep", 1))
    disk.fail_with = errno.EIO
    with pytest.raises(StoreError, match="sync failed"):
        writer.sync()
    disk.kill()
    with StoreWriter.open(ROOT, files=disk.files()) as again:
        again.append(packet("ep", 1))
        again.sync()
    with StoreReader.open(ROOT, files=Disk(durable(disk)).files()) as reader:
        reader.refresh()
        assert stored(reader) == [("ep", 0), ("ep", 1)] and not reader.damaged


def test_every_sync_of_a_repair_is_needed() -> None:
    verdict = judge(0, 0, ["repairing"])
    assert caught(verdict) and len(verdict.caught) > 4


@pytest.mark.slow
def test_power_cut_loses_nothing_and_every_sync_is_needed() -> None:
    verdict = judge(0, 0, ["appending", "repairing"])
    assert caught(verdict) and verdict.states > 500 and len(verdict.caught) > 14


@pytest.mark.slow
def test_power_cut_during_compaction_loses_nothing() -> None:
    assert kept(examine("compacting", kill_every=0, chances=0))


@pytest.mark.slow
def test_power_cut_in_ten_thousand_states() -> None:
    verdict = judge(2, 2)
    assert caught(verdict) and verdict.states >= 10_000
