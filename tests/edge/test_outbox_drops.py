"""A full outbox drops whole autonomous episodes, oldest first, and no other chunk, also when it is killed."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episode_kit import chunk_header

from user_sys.edge.outbox import BLOCK_BYTES, Outbox, OutboxFull
from user_sys.episode import Chunk, EpisodeEnd, EpisodeSource, Phase, decode_chunk
from user_sys.store.files import Buffer, Files

MAX_BYTES = 256 << 10
CHUNKS = 3
Key = tuple[str, int]


def chunk(
    name: str, index: int, *, last: bool, source: EpisodeSource = EpisodeSource.ONLINE, phase: Phase = Phase.POLICY
) -> bytes:
    header = chunk_header(
        name,
        2,
        index=index,
        first_step=2 * index,
        robot="r",
        embodiment="fake",
        task="t",
        sentence="",
        source=source,
        started_unix_ns=0,
        end=EpisodeEnd(steps=2 * index + 2, success=None) if last else None,
    )
    phases = np.array([Phase.POLICY, phase], np.uint8)
    return Chunk(header, {"observation.state": np.zeros((2, 300), np.float32), "phase": phases}, {}).encode()


def episode(name: str, chunks: int = CHUNKS, **said: Any) -> list[bytes]:
    return [chunk(name, index, last=index == chunks - 1, **said) for index in range(chunks)]


def opened(path: Path, **said: Any) -> Outbox:
    return Outbox.open(path, max_bytes=MAX_BYTES, when_full="drop_oldest_autonomous", **said)


def waiting(outbox: Outbox) -> list[Key]:
    """The pending chunks. A call counts as sending them, so call it at the end."""
    headers = [decode_chunk(each.packet).header for each in outbox.pending()]
    return [(header.episode, header.index) for header in headers]


def record(outbox: Outbox, name: str, **said: Any) -> list[Key]:
    for packet in episode(name, **said):
        outbox.append(packet)
    return [(name, index) for index in range(CHUNKS)]


def test_oldest_autonomous_episodes_are_dropped_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as outbox:
        recorded = [key for number in range(100) for key in record(outbox, f"e-{number}")]
        dropped, used = outbox.dropped, outbox.used_bytes
        kept = waiting(outbox)
    assert dropped.episodes > 50 and dropped.chunks == CHUNKS * dropped.episodes
    assert kept == recorded[dropped.chunks :], "the oldest went, whole, and the rest is in order"
    assert used <= MAX_BYTES
    assert outbox.scalars()["outbox_dropped_episodes"] == dropped.episodes
    assert "outbox.dropped episodes=" in caplog.text
    with opened(tmp_path) as outbox:
        assert (waiting(outbox), outbox.dropped.episodes) == (kept, dropped.episodes)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.chunk")) <= MAX_BYTES


def test_episodes_of_people_are_never_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        kept = record(outbox, "demo", source=EpisodeSource.DEMO, phase=Phase.TELEOP)
        kept += record(outbox, "evaluated", source=EpisodeSource.EVALUATION)
        for phase in (Phase.TELEOP, Phase.CORRECTION, Phase.RECOVERY):
            for number in range(4):
                record(outbox, f"alone-{phase}-{number}")
            kept += record(outbox, f"with-{phase}", phase=phase)
        for number in range(100):
            record(outbox, f"later-{number}")
        assert outbox.dropped.episodes > 12
        left = waiting(outbox)
    assert left[: len(kept)] == kept
    assert all(name.startswith("later") for name, _ in left[len(kept) :])


def test_outbox_full_of_peoples_episodes_pauses(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        recorded: list[Key] = []
        with pytest.raises(OutboxFull, match="recording pauses"):
            for number in itertools.count():
                recorded += record(outbox, f"demo-{number}", source=EpisodeSource.DEMO)
        assert outbox.dropped.episodes == 0
        assert set(recorded) <= set(waiting(outbox))


def test_open_episode_is_not_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        record(outbox, "before")
        with pytest.raises(OutboxFull):
            for index in itertools.count():
                outbox.append(chunk("endless", index, last=False))
        assert outbox.dropped.episodes == 1
        assert waiting(outbox) == [("endless", each) for each in range(index)]


def test_partly_sent_episode_is_not_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        first = record(outbox, "acknowledged-in-part")
        outbox.acknowledge(0)
        second = record(outbox, "sent-in-part")
        sent = list(itertools.islice(outbox.pending(), CHUNKS))
        assert decode_chunk(sent[-1].packet).header.episode == "sent-in-part"
        for number in range(100):
            record(outbox, f"e-{number}")
        assert outbox.dropped.episodes > 0
        assert waiting(outbox)[: 2 * CHUNKS - 1] == [*first[1:], *second]


def test_unfinished_episode_of_a_killed_session_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        outbox.append(chunk("cut-off", 0, last=False))
    with opened(tmp_path) as outbox:
        for number in range(60):
            record(outbox, f"e-{number}")
        assert "cut-off" not in dict(waiting(outbox))


def test_damaged_drop_record_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as outbox:
        for number in range(40):
            record(outbox, f"e-{number}")
        assert outbox.dropped.episodes
    note = tmp_path / "dropped"
    note.write_bytes(note.read_bytes()[:-1])
    with opened(tmp_path) as outbox:
        assert "outbox.drop_record_damaged" in caplog.text and not outbox.dropped.episodes
        assert ("e-39", CHUNKS - 1) in waiting(outbox)


class SmallDisk(Files):
    """A disk of `MAX_BYTES`. What is on it, in blocks, is that of the files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        blocks = sum(-(-file.stat().st_size // BLOCK_BYTES) for file in self._folder.iterdir())
        if blocks * BLOCK_BYTES + sum(map(len, buffers)) > MAX_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self.pwritev(fd, [bytes(16 * BLOCK_BYTES)], offset)


def test_full_disk_drops_as_a_full_outbox_does(tmp_path: Path) -> None:
    with Outbox.open(tmp_path, when_full="drop_oldest_autonomous", files=SmallDisk(tmp_path)) as outbox:
        outbox.allocate_reserve()
        kept = record(outbox, "demo", source=EpisodeSource.DEMO, phase=Phase.TELEOP)
        recorded = [key for number in range(100) for key in record(outbox, f"e-{number}")]
        dropped = outbox.dropped
        assert dropped.episodes > 50 and dropped.chunks == CHUNKS * dropped.episodes
        assert (tmp_path / "reserve").exists()
        with pytest.raises(OutboxFull, match="waiting for disk space"):
            for number in itertools.count():
                record(outbox, f"demo-{number}", source=EpisodeSource.DEMO)
        left = waiting(outbox)
    assert left[: len(kept)] == kept and not set(left) & set(recorded), "people's episodes only"


class FewInodes(Files):
    """A disk with plenty of bytes, and room for `limit` files in a folder."""

    limit = 1000

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT and not path.exists() and len(os.listdir(path.parent)) >= self.limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, flags)


def test_reserve_leaves_the_few_inodes_of_a_disk_to_the_chunks(tmp_path: Path) -> None:
    files = FewInodes()
    with opened(tmp_path, files=files) as outbox:
        files.limit = len(os.listdir(tmp_path)) + 4 * CHUNKS + 2  # the reserve, and the record of what is dropped
        outbox.allocate_reserve()
        recorded = [key for number in range(5) for key in record(outbox, f"e-{number}")]
        assert outbox.dropped.episodes == 1
        with pytest.raises(OutboxFull, match=r"MB free, but it has no free files \(inodes\), or a quota"):
            for number in itertools.count():
                record(outbox, f"demo-{number}", source=EpisodeSource.DEMO)
        assert not set(waiting(outbox)) & set(recorded)


class Killed(BaseException):
    """The process is killed."""


class Mortal(Files):
    """Files of a process that is killed at operation `at`, after half a write. Syncs do nothing."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.count = at, -1
        for name in ("open", "pwritev", "ftruncate", "rename", "unlink", "fsync", "fdatasync", "sync_folder"):
            setattr(self, name, functools.partial(self._counted, name, getattr(super(), name)))

    def _counted(self, name: str, operation: Callable[..., Any], *args: Any) -> Any:
        self.count += 1
        if self.at >= 0 and self.count >= self.at:
            if self.count == self.at and name == "pwritev":
                fd, buffers, offset = args
                super().pwritev(fd, [b"".join(buffers)[: sum(map(len, buffers)) // 2]], offset)
            raise Killed
        return None if "sync" in name else operation(*args)


def story() -> Iterator[tuple[str, list[bytes]]]:
    yield "demo", episode("demo", source=EpisodeSource.DEMO)
    for number in range(40):
        yield f"e-{number}", episode(f"e-{number}", phase=Phase.CORRECTION if number % 9 == 4 else Phase.POLICY)


def live(path: Path, files: Files, durable: list[Key]) -> None:
    with opened(path, files=files) as outbox:
        for name, packets in story():
            for index, packet in enumerate(packets):
                outbox.append(packet)
                durable.append((name, index))


def require_whole(left: list[Key], durable: list[Key]) -> None:
    """No chunk twice; all chunks of an episode or none; and all episodes of a person."""
    assert max(Counter(left).values()) == 1
    recorded, found = Counter(name for name, _ in durable), Counter(name for name, _ in left)
    for name, count in recorded.items():
        kept = name == "demo" or int(name.removeprefix("e-")) % 9 == 4
        assert found[name] >= count if kept or count < CHUNKS else found[name] in (0, CHUNKS), name


def killed_at(at: int) -> int:
    """Kills a session at one file operation; returns its number of operations."""
    with tempfile.TemporaryDirectory() as folder:
        durable: list[Key] = []
        files = Mortal(at)
        try:
            live(Path(folder), files, durable)
        except Killed:
            pass
        with opened(Path(folder), files=Mortal()) as outbox:
            for packet in episode("after"):
                outbox.append(packet)
            require_whole(waiting(outbox), durable)
        return files.count


def test_kill_at_some_file_operations_loses_no_chunk() -> None:
    total = killed_at(-1)
    for at in range(total // 2, total, 41):
        killed_at(at)


@pytest.mark.slow
def test_kill_at_each_file_operation_loses_no_chunk() -> None:
    for at in range(1, killed_at(-1)):
        killed_at(at)
