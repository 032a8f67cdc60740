"""Backups of a store in a folder or bucket: incremental, verified by digest, also while a gateway writes the store.

A backup folder has ``objects/``, parts of files named by their SHA-256, and ``snapshots/``, one JSON file for each
backup that lists the parts of each file. A snapshot is written last, so an interrupted backup leaves the earlier ones
whole, and the next backup uses the parts that have arrived. `fsspec` reaches the folder: a path, ``s3://bucket/prefix``,
or any other URL for which its package is installed. Credentials come from that package's own settings.

A snapshot holds all records that were acknowledged before `back_up` began.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem

from hal.decode_errors import DECODE_ERRORS
from hal.durable import make_folder_durably, open_or_create, replace_durably, sync_folder
from hal.errors import install_hint
from user_sys.errors import StoreCorrupt, StoreError, StoreFull, StoreVersionMismatch
from user_sys.robot_records import ROBOTS_FOLDER, copy_robot_records, robot_records_of_store
from user_sys.store.files import NO_SPACE_ERRNOS, OS_FILES, pread_readable
from user_sys.store.labels import queued_files
from user_sys.store.maintenance import require_store
from user_sys.store.manifest import MANIFEST
from user_sys.store.record_format import (
    SegmentName,
    SegmentScan,
    list_segments,
    read_segment_header,
    read_sound_footer,
    resolve_generations,
)
from user_sys.store.verify import QUARANTINE

BACKUP_FORMAT = 1
PART_BYTES = 8 << 20
MAX_ATTEMPTS = 20  # compaction may replace segments, and a gateway store queued labels, while they are read
BUCKET_SCHEMES = ("s3", "s3a", "gs", "gcs", "abfs", "az")
OBJECTS, SNAPSHOTS = "objects", "snapshots"
_SNAPSHOT = re.compile(r"(\d{20})-([0-9a-f]{16})\.json")
_FILE_NAME = re.compile(r"([a-z]+/)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CREDENTIAL_ERRORS = ("NoCredentialsError", "PartialCredentialsError", "PermissionError", "ProfileNotFound")
Advance = Callable[[int], object]
_logger = logging.getLogger(__name__)


class BackupFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a snapshot.

    Attributes:
        name: its path in the store's folder.
        parts: SHA-256 digests in hex; each part but the last has `PART_BYTES`.
        is_final: it never changes again, so that the next backup need not read it.
    """

    name: str
    size_bytes: int
    parts: tuple[str, ...]
    is_final: bool = False


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The store at one moment. All backups of one store have its `log_id`; `program` is the version that wrote it."""

    format: int
    program: str
    log_id: str
    created_unix_ns: int
    files: tuple[BackupFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class BackupReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `back_up` or `restore`; `copied_bytes` were not at the target before.

    Attributes:
        unreadable_parts: of segments; the backup has zeros for what the disk could not read. The next one tries again.
    """

    snapshot: str
    files: int
    size_bytes: int
    copied_bytes: int
    seconds: float
    unreadable_parts: int = 0


class BackupFolder:
    """The folder or bucket of a URL. Errors of any file system become a StoreError of one line."""

    def __init__(self, url: str) -> None:
        """Raises StoreError: the URL's scheme is unknown, or its package is missing."""
        self.name = url.partition("://")[0]  # until the URL is read, because it may contain a password
        with self._translated("open"):
            self._files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
            self.name = str(self._files.unstrip_protocol(self._root))
            self._is_local = isinstance(self._files, LocalFileSystem)
            self._is_bucket = self.name.partition("://")[0] in BUCKET_SCHEMES

    def read(self, name: str) -> bytes:
        """Raises StoreError: it is missing, or cannot be read."""
        with self._translated("read", name):
            content: bytes = self._files.cat_file(f"{self._root}/{name}")
            return content

    def write(self, name: str, content: bytes) -> None:
        """Writes a file as a whole: an interruption leaves none of that name, or a shorter one."""
        path = f"{self._root}/{name}"
        with self._translated("write", name):
            if self._is_local:
                replace_durably(Path(path), content)
            else:
                if not self._is_bucket:  # a bucket has no folders, and a missing bucket is an error
                    self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._files.pipe_file(path, content)

    def sync(self, folder: str) -> None:
        """Makes the names of all files in `folder` and below durable, also those that a killed process left unsynced.

        Only needed for a local folder; a bucket's files are durable once written.
        """
        root = Path(self._root, folder)
        if self._is_local:
            with self._translated("sync", folder):
                make_folder_durably(root.parent)
                for each in (root.parent, root, *(path for path in root.iterdir() if path.is_dir())):
                    sync_folder(each)

    def delete(self, names: list[str]) -> None:
        """Deletes files; a missing one is no error."""
        with self._translated("delete from", names[0] if names else ""), contextlib.suppress(FileNotFoundError):
            if names:
                self._files.rm([f"{self._root}/{name}" for name in names])

    def sizes(self, folder: str) -> dict[str, int]:
        """The size in bytes of each file in `folder` and below, by its last name; empty if there is none."""
        with self._translated("list", folder), contextlib.suppress(FileNotFoundError):
            found = self._files.find(f"{self._root}/{folder}", detail=True)
            return {path.rpartition("/")[2]: int(entry["size"] or 0) for path, entry in found.items()}
        return {}

    @contextlib.contextmanager
    def _translated(self, verb: str, name: str = "") -> Iterator[None]:
        place = f"{self.name}/{name}" if name else self.name
        try:
            yield
        except FileNotFoundError as error:
            missing = f"{place} is missing" if name else f"{self.name} does not exist"
            raise StoreError(f"{missing} ({_one_line(error)}); it was deleted, or the URL is wrong") from error
        except ImportError as error:
            raise StoreError(f"cannot {verb} {place}: {_one_line(error)}: {install_hint('backup')}") from error
        except Exception as error:  # each file system has its own kinds
            if isinstance(error, OSError) and error.errno in NO_SPACE_ERRNOS:
                raise StoreFull(f"cannot {verb} {place}: the disk is full; free some space and repeat") from error
            is_refused = any(kind.__name__ in _CREDENTIAL_ERRORS for kind in type(error).__mro__)
            advice = "; check the credentials and the rights of their owner" if is_refused else ""
            raise StoreError(f"cannot {verb} {place}: {_one_line(error)}{advice}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Backing up -----------------------------------------------------------------------------------------------------------


def back_up(store: Path, url: str, *, keep: int = 0, advance: Advance | None = None) -> BackupReport:
    """Copies what `url` lacks of the store, and adds a snapshot. Blocks. Another process may write the store.

    Args:
        keep: number of newest snapshots that stay; older ones are then deleted with the parts that only they have. 0
            deletes nothing. An interruption leaves parts without a snapshot, which the next call deletes.
        advance: called with the size of each part, in bytes.

    Raises:
        StoreError: there is no store, another backup of it runs on this computer, `url` holds backups of another store,
            or a file cannot be read or written.
        StoreFull: the disk of `url` is full; the next backup continues.
        StoreVersionMismatch: a newer program wrote the backups at `url`, or the store.
    """
    started_ns, started_s = time.time_ns(), time.monotonic()
    require_store(store)
    # Another backup's new parts would be deleted as those of no snapshot.
    with _locked(store, f"backup of {store}"):
        return _back_up(store, BackupFolder(url), keep, advance, started_ns, started_s)


@contextlib.contextmanager
def _locked(folder: Path, what: str) -> Iterator[None]:
    """Holds the lock of `folder`. Raises StoreError if another process holds it; `what` is running then."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StoreError(f"another {what} is running; wait for its end") from None
    try:
        yield
    finally:
        os.close(fd)


def _back_up(
    store: Path, folder: BackupFolder, keep: int, advance: Advance | None, started_ns: int, started_s: float
) -> BackupReport:
    upload = _Upload(folder, advance)
    for _ in range(MAX_ATTEMPTS):
        queued = queued_files(store)
        try:
            found = [*upload.changing_files(store, queued), *upload.log_files(store)]
        except FileNotFoundError:
            continue  # compaction has replaced a segment
        if all(file.exists() for file in queued):
            break  # otherwise a restored store could apply these labels after newer ones that are in its log
    else:
        raise StoreError(f"{store} changes faster than it can be read; try again")
    snapshot = Snapshot(
        format=BACKUP_FORMAT,
        program=version("user-sys"),
        log_id=upload.log_id,
        created_unix_ns=started_ns,
        files=tuple(found),
    )
    raw = msgspec.json.encode(snapshot)
    name = f"{max(started_ns, upload.last_ns + 1):020d}-{hashlib.sha256(raw).hexdigest()[:16]}.json"
    folder.sync(OBJECTS)
    folder.write(f"{SNAPSHOTS}/{name}", raw)
    if keep:
        _delete_old(folder, keep)
    return BackupReport(
        snapshot=name,
        files=len(found),
        size_bytes=snapshot.size_bytes,
        copied_bytes=upload.copied_bytes,
        seconds=time.monotonic() - started_s,
        unreadable_parts=upload.unreadable_parts,
    )


def _delete_old(folder: BackupFolder, keep: int) -> None:
    """Keeps the last snapshots that are whole."""
    names, kept = list_snapshots(folder), list[tuple[str, Snapshot]]()
    for name in reversed(names):
        if len(kept) < keep and (snapshot := _whole_snapshot(folder, name)) is not None:
            kept.append((name, snapshot))
    used = {part for _, snapshot in kept for file in snapshot.files for part in file.parts}
    folder.delete([f"{SNAPSHOTS}/{name}" for name in names if name not in dict(kept)])
    folder.delete(
        [_object(digest) for digest in folder.sizes(OBJECTS) if _DIGEST.fullmatch(digest) and digest not in used]
    )


def _whole_snapshot(folder: BackupFolder, name: str) -> Snapshot | None:
    """None for a damaged snapshot, as an interrupted write leaves in some file systems."""
    try:
        return read_snapshot(folder, name)
    except StoreCorrupt as error:
        _logger.warning("store.snapshot_damaged %s", error)
        return None


class _Upload:
    """Copies parts that the backup folder lacks.

    Attributes:
        log_id: of the store, in hex; known after `log_files`.
        unreadable_parts: of segments, in this call of `log_files`.
        last_ns: time in the name of the last snapshot; 0 without one. The next name is above it, also if the clock was
            set back.
    """

    def __init__(self, folder: BackupFolder, advance: Advance | None) -> None:
        self.copied_bytes, self.unreadable_parts, self.log_id = 0, 0, ""
        self._folder, self._advance = folder, advance
        names = list_snapshots(folder)
        self.last_ns = int(names[-1].partition("-")[0]) if names else 0
        whole = (_whole_snapshot(folder, name) for name in reversed(names))
        self._last = next((snapshot for snapshot in whole if snapshot is not None), None)
        self._sizes = folder.sizes(OBJECTS)
        self._final = {file.name: file for file in self._last.files if file.is_final} if self._last else {}

    def changing_files(self, store: Path, queued: Sequence[Path]) -> list[BackupFile]:
        """Queued labels and robots' specs. Queued labels come before the log, into which a gateway moves them."""
        found = []
        for file in queued:
            with contextlib.suppress(FileNotFoundError):
                found.append(self._whole(file, str(file.relative_to(store))))
        with TemporaryDirectory() as scratch:
            specs = Path(scratch) / "store"
            copy_robot_records(robot_records_of_store(store), specs)
            found += [self._whole(file, f"{ROBOTS_FOLDER}/{file.name}") for file in sorted(specs.glob("*/*.json"))]
        found += [self._whole(file, f"{QUARANTINE}/{file.name}") for file in sorted((store / QUARANTINE).glob("*"))]
        return found

    def log_files(self, store: Path) -> list[BackupFile]:
        """The manifest, and the segments of the same moment.

        Raises:
            FileNotFoundError: compaction has replaced a segment; call it again.
            StoreError: the folder has backups of another store.
        """
        self.unreadable_parts = 0
        while True:
            raw, names = _manifest_bytes(store), resolve_generations(list_segments(store))[0]
            if raw == _manifest_bytes(store) and names == resolve_generations(list_segments(store))[0]:
                break
        found = [self._copy(MANIFEST, [raw])] if raw else []
        return found + [self._segment(store, name) for name in names]

    def _segment(self, store: Path, name: SegmentName) -> BackupFile:
        with OS_FILES.opened(store / str(name)) as fd:
            if not self.log_id:
                self._check_log(fd)
            known = self._final.get(str(name))
            if known is not None and self._is_same(fd, known) and self._has(known):
                if self._advance is not None:
                    self._advance(known.size_bytes)
                return known
            is_sealed = read_sound_footer(OS_FILES, fd, name) is not None
            end = OS_FILES.size(fd) if is_sealed else _end_of_records(fd, name)
            sizes = range(0, end, PART_BYTES)
            parts = (self._read_part(fd, name, min(PART_BYTES, end - offset), offset) for offset in sizes)
            unreadable = self.unreadable_parts
            file = self._copy(str(name), parts)
            if is_sealed and self.unreadable_parts == unreadable:  # otherwise the next backup tries to read it
                file = self._final[file.name] = msgspec.structs.replace(file, is_final=True)
            return file

    def _check_log(self, fd: int) -> None:
        header = read_segment_header(OS_FILES, fd)
        self.log_id = header.log_id.hex() if header is not None else ""
        if self._last is not None and self.log_id and self._last.log_id not in ("", self.log_id):
            raise StoreError(f"{self._folder.name} holds backups of another store; give each store a URL of its own")

    @staticmethod
    def _is_same(fd: int, known: BackupFile) -> bool:
        """Whether the segment is the known one, and not one of another history after a restore of an older snapshot.

        Compares size, first part (with the time of creation) and last part (with the index of all records).
        """
        return known.size_bytes == OS_FILES.size(fd) and all(
            hashlib.sha256(pread_readable(OS_FILES, fd, PART_BYTES, PART_BYTES * at)).hexdigest() == known.parts[at]
            for at in {0, len(known.parts) - 1}
        )

    def _has(self, file: BackupFile) -> bool:
        *full, last = [PART_BYTES] * (len(file.parts) - 1) + [file.size_bytes - PART_BYTES * (len(file.parts) - 1)]
        expected = zip(file.parts, (*full, last), strict=True)
        return all(self._sizes.get(digest) == size for digest, size in expected)

    def _whole(self, path: Path, name: str) -> BackupFile:
        return self._copy(name, [path.read_bytes()])

    def _read_part(self, fd: int, name: SegmentName, count: int, offset: int) -> bytes:
        try:
            return OS_FILES.pread(fd, count, offset)
        except OSError as error:
            _logger.error(
                "store.backup_unreadable segment=%s offset=%d bytes=%d: %s; the backup has zeros for what cannot be "
                "read: run `user-sys store verify`",
                name,
                offset,
                count,
                error.strerror,
            )
            self.unreadable_parts += 1
            return pread_readable(OS_FILES, fd, count, offset)

    def _copy(self, name: str, parts: Iterator[bytes] | list[bytes]) -> BackupFile:
        digests, size = [], 0
        for part in parts:
            digest = hashlib.sha256(part).hexdigest()
            if self._sizes.get(digest) != len(part):
                self._folder.write(_object(digest), part)
                self._sizes[digest] = len(part)
                self.copied_bytes += len(part)
            digests.append(digest)
            size += len(part)
            if self._advance is not None:
                self._advance(len(part))
        return BackupFile(name=name, size_bytes=size, parts=tuple(digests))


def _object(digest: str) -> str:
    return f"{OBJECTS}/{digest[:2]}/{digest}"


def _manifest_bytes(store: Path) -> bytes:
    try:
        return (store / MANIFEST).read_bytes()
    except FileNotFoundError:
        return b""


def _end_of_records(fd: int, name: SegmentName) -> int:
    """The end of the last whole record of an unsealed segment; what follows was never acknowledged."""
    scan = SegmentScan(OS_FILES, fd, name.number, name.generation)
    deque(scan, maxlen=0)
    return min(scan.end, OS_FILES.size(fd))


# Restoring ------------------------------------------------------------------------------------------------------------


def list_snapshots(folder: BackupFolder) -> list[str]:
    """Names of the snapshots, oldest first."""
    return sorted(name for name in folder.sizes(SNAPSHOTS) if _SNAPSHOT.fullmatch(name))


def read_snapshot(folder: BackupFolder, name: str) -> Snapshot:
    """Raises StoreError: it is missing; StoreCorrupt: it is damaged; StoreVersionMismatch: a newer program wrote it."""
    raw, found = folder.read(f"{SNAPSHOTS}/{name}"), _SNAPSHOT.fullmatch(name)
    if found is None or not hashlib.sha256(raw).hexdigest().startswith(found[2]):
        raise StoreCorrupt(f"the snapshot {name} in {folder.name} is damaged; restore another one (--snapshot)")
    try:
        tag = msgspec.json.decode(raw, type=_FormatTag)
        if tag.format > BACKUP_FORMAT:
            raise StoreVersionMismatch(
                f"the snapshot {name} has backup format {tag.format}, written by user-sys {tag.program}; this is "
                f"user-sys {version('user-sys')}, which reads format {BACKUP_FORMAT}: install the newer program"
            )
        snapshot = msgspec.json.decode(raw, type=Snapshot)
    except DECODE_ERRORS as error:
        raise StoreCorrupt(f"the snapshot {name} in {folder.name} does not decode: {error}") from None
    for file in snapshot.files:
        if not _FILE_NAME.fullmatch(file.name):
            raise StoreCorrupt(f"the snapshot {name} in {folder.name} names a file {file.name!r} outside a store")
    return snapshot


class _FormatTag(msgspec.Struct, frozen=True):
    format: int
    program: str = "of an unknown version"


def restore(url: str, store: Path, name: str = "", *, advance: Advance | None = None) -> BackupReport:
    """Writes the store of a snapshot (default: the newest) to the folder `store`, which must not exist or be empty.

    Blocks until all of it is durable. Each part's digest is verified. The folder appears only when it is whole.

    Raises:
        StoreError: there is no such snapshot, an object is missing, `store` exists, or another restore to it runs.
        StoreCorrupt: a snapshot or object is damaged; the message has its name.
        StoreFull: the disk of `store` is full.
        StoreVersionMismatch: a newer program wrote the snapshot.
    """
    started_s = time.monotonic()
    folder = BackupFolder(url)
    names = list_snapshots(folder)
    if not names:
        raise StoreError(f"{folder.name} has no backup: it has no file in {SNAPSHOTS}/")
    if name and name not in names:
        raise StoreError(f"{folder.name} has no snapshot {name!r}; `user-sys store restore {url} --list` shows all")
    _require_new(store)
    name = name or names[-1]
    snapshot = read_snapshot(folder, name)
    partial = store.with_name(f"{store.name}.restoring")
    try:
        make_folder_durably(partial)
        with _locked(partial, f"restore to {store}"):
            _require_new(store)  # another restore may have renamed the locked folder
            try:
                _restore_files(folder, snapshot, partial, advance)
                partial.replace(store)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        sync_folder(store.parent)
    except OSError as error:
        if error.errno not in NO_SPACE_ERRNOS:
            raise
        needed = f"{snapshot.size_bytes / 1e6:.3g} MB"
        raise StoreFull(f"cannot restore to {store}: the disk is full; the backup needs {needed}") from None
    return BackupReport(
        snapshot=name,
        files=len(snapshot.files),
        size_bytes=snapshot.size_bytes,
        copied_bytes=snapshot.size_bytes,
        seconds=time.monotonic() - started_s,
    )


def _require_new(store: Path) -> None:
    if store.exists() and (not store.is_dir() or any(store.iterdir())):
        raise StoreError(f"{store} exists; restore into a new folder")


def _restore_files(folder: BackupFolder, snapshot: Snapshot, partial: Path, advance: Advance | None) -> None:
    """Fills the locked folder `partial`, which a killed restore may have left with some files."""
    for left in list(partial.iterdir()):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    for file in snapshot.files:
        _restore_file(folder, file, partial / file.name, advance)
    sync_folder(partial)


def _restore_file(folder: BackupFolder, file: BackupFile, path: Path, advance: Advance | None) -> None:
    make_folder_durably(path.parent)
    with open(open_or_create(path, os.O_WRONLY | os.O_TRUNC), "wb") as target:
        for digest in file.parts:
            content = folder.read(_object(digest))
            if hashlib.sha256(content).hexdigest() != digest:
                raise StoreCorrupt(
                    f"{folder.name}/{_object(digest)}, a part of {file.name}, is damaged; delete it and back the store "
                    "up again, or restore another snapshot (--snapshot)"
                )
            target.write(content)
            if advance is not None:
                advance(len(content))
        target.flush()
        os.fsync(target.fileno())
    sync_folder(path.parent)
