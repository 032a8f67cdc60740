"""The version store after kills, damage and a full disk; numbers of versions; offers that are sent again."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from weights_kit import add_version, assert_equal_weights, learner_key, random_weights

from user_sys.codec import Array
from user_sys.messages import WeightsManifest, WeightsOffer
from user_sys.store.files import Files
from user_sys.weights.catalog import BlobCache, VersionCatalog, WeightsServer, thin_versions
from user_sys.weights.signing import Signer, next_epoch, run_id_of
from user_sys.weights.version_store import INDEX_FILE, VersionStore, newest_version, read_tensors

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from weights_kit import learner_key, random_weights
from test_version_store import save
folder, first = Path(sys.argv[1]), int(sys.argv[3])
signer, _ = learner_key(folder)
for version in range(first, first + 10_000):
    save(folder, signer, {version: random_weights(version, rows=256)})
    print(version, flush=True)
"""


def save(folder: Path, signer: Signer, versions: dict[int, dict[str, Array]]) -> VersionStore:
    catalog, store = VersionCatalog(BlobCache()), VersionStore(folder / "kept")
    for number, weights in versions.items():
        add_version(catalog, weights, number, signer)
    store.save(catalog.versions.values(), catalog.cache, signer.public_key)
    return store


def stored(folder: Path) -> dict[int, dict[str, Array]]:
    catalog = VersionStore(folder / "kept").load()
    return {
        version.manifest.version: {e.name: a for e, a in read_tensors(version, catalog.cache).items()}
        for version in catalog.versions.values()
    }


def files(folder: Path) -> list[Path]:
    return sorted((folder / "kept").glob("*.blobs"))


def kills(folder: Path, count: int) -> None:
    """Kills a process that saves one version after the other; each time a complete version is left."""
    _, trust = learner_key(folder)
    rng, last = random.Random(0), 0
    for _ in range(count):
        argv = [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent), str(last + 1)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            reported = int(process.stdout.readline())
            time.sleep(rng.uniform(0.0, 0.05))
            process.send_signal(signal.SIGKILL)
            reported = max([reported, *map(int, process.stdout.read().split()[:-1] or [reported])])
        found = newest_version(VersionStore(folder / "kept").load())
        assert found is not None and found.manifest.version >= reported
        trust.verify(found.signed, WeightsManifest)
        last = found.manifest.version
        assert_equal_weights(stored(folder)[last], random_weights(last, rows=256))


def test_kill_while_saving_leaves_a_complete_version(tmp_path: Path) -> None:
    kills(tmp_path, 3)


@pytest.mark.slow
def test_two_hundred_kills_while_saving_leave_complete_versions(tmp_path: Path) -> None:
    kills(tmp_path, 200)


def test_equal_tensors_are_written_once_and_old_files_are_removed(tmp_path: Path) -> None:
    signer, _ = learner_key(tmp_path)
    frozen = np.random.default_rng(0).normal(size=10_000)
    catalog, store = VersionCatalog(BlobCache()), VersionStore(tmp_path / "kept")
    for version in range(1, 30):
        added = add_version(catalog, {"frozen": frozen, "w": np.full(500, version)}, version, signer)
        store.save([added], catalog.cache)
        assert sum(path.stat().st_size for path in files(tmp_path)) < 1.5 * frozen.nbytes
    assert list(stored(tmp_path)) == [29]
    (tmp_path / "kept" / "00009999.blobs").write_bytes(b"half")
    (tmp_path / "kept" / ".00009998.blobs.00ff").write_bytes(b"half")
    assert list(stored(tmp_path)) == [29], "other files are ignored"
    store.save([added], catalog.cache)
    assert len(files(tmp_path)) <= 3, "and removed"


def test_damaged_version_is_skipped_and_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    signer, _ = learner_key(tmp_path)
    versions = {n: random_weights(n) for n in (1, 2)}
    save(tmp_path, signer, {1: versions[1]})
    store, catalog = VersionStore(tmp_path / "kept"), VersionStore(tmp_path / "kept").load()
    add_version(catalog, versions[2], 2, signer)
    store.load()
    store.save(catalog.versions.values(), catalog.cache)
    newest = files(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"!")
    assert list(stored(tmp_path)) == [1] and "another digest" in caplog.text
    again = VersionStore(tmp_path / "kept")
    again.load()
    again.save(catalog.versions.values(), catalog.cache)
    assert sorted(stored(tmp_path)) == [1, 2]
    (tmp_path / "kept" / "index").write_bytes(b"\xff\xff")
    assert stored(tmp_path) == {}


def test_version_with_a_bad_sector_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    signer, _ = learner_key(tmp_path)
    weights = {"a": np.zeros(50_000), "b": np.ones(50_000)}
    save(tmp_path, signer, {1: weights, 2: {**weights, "b": np.full(50_000, 2.0)}})
    (file,) = files(tmp_path)
    bad, plain = file.stat().st_size - 5000, Files.pread

    def pread(self: Files, fd: int, count: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == file.stat().st_ino and offset <= bad < offset + count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(self, fd, count, offset)

    monkeypatch.setattr(Files, "pread", pread)
    assert len(stored(tmp_path)) == 1, "the other version has no part there"
    assert file.name in caplog.text


def test_save_on_a_full_disk_keeps_the_previous_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signer, _ = learner_key(tmp_path)
    save(tmp_path, signer, {1: random_weights(1)})
    before = files(tmp_path)

    def fail(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("user_sys.weights.version_store.replace_durably", fail)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path, signer, {2: random_weights(2)})
    assert list(stored(tmp_path)) == [1] and files(tmp_path) == before, "partial files are removed"


def test_load_while_the_writer_replaces_files_reports_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    signer, _ = learner_key(tmp_path)
    save(tmp_path, signer, {1: random_weights(1)})
    reader = VersionStore(tmp_path / "kept")
    stale = [(reader.folder / INDEX_FILE).read_bytes()]
    catalog = reader.load()
    add_version(catalog, random_weights(2), 2, signer)
    reader.save(list(catalog.versions.values())[1:], catalog.cache)
    read_bytes = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: stale.pop() if path.name == INDEX_FILE and stale else read_bytes(path)
    )
    assert list(stored(tmp_path)) == [2] and caplog.messages == []


@pytest.mark.parametrize(("count", "most"), [(0, 3), (1, 1), (5, 1), (100, 8), (7, 8), (3, 2)])
def test_old_versions_are_further_apart(count: int, most: int) -> None:
    kept = thin_versions(list(range(1, count + 1)), most)
    assert len(kept) == min(count, most) and kept == sorted(kept) and (not kept or kept[-1] == count)
    if count == 100:
        assert np.all(np.diff(np.diff(kept)) <= 0), "the newest lie closest"


def test_learner_with_a_checkpoint_keeps_its_run(tmp_path: Path) -> None:
    first = run_id_of(tmp_path)
    (tmp_path / "000000000001.checkpoint").touch()
    assert run_id_of(tmp_path) == first
    (tmp_path / "000000000001.checkpoint").unlink()
    assert run_id_of(tmp_path) != first, "its numbers begin again"


def test_epochs_grow_under_any_clock_and_follow_it_for_a_copied_key(tmp_path: Path) -> None:
    lives = [next_epoch(tmp_path, lambda at=at: at) for at in (1000.0, 1000.0, 10.0, 2000.0)]  # type: ignore[misc]
    assert lives == [1000, 1001, 1002, 2000]
    assert next_epoch(tmp_path / "copied", lambda: 3000.0) == 3000


def test_epoch_that_cannot_be_saved_is_the_time_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "keys").touch()
    assert next_epoch(tmp_path / "keys", lambda: 50.0) == 50
    assert "weights.epoch_not_stored" in caplog.text
    (tmp_path / "learner.lives").write_text("what?")
    assert next_epoch(tmp_path, lambda: 60.0) == 60
    assert "weights.epoch_unreadable" in caplog.text


def test_offer_that_is_not_sent_is_sent_again() -> None:
    outcomes, sent = iter([False, True]), list[bool]()

    def send(name: str, message: object, payload: object) -> bool:
        sent.append(next(outcomes))
        return sent[-1]

    server = WeightsServer(BlobCache(1 << 20), send, lambda: WeightsOffer(manifests=(), signer=b""), clock=lambda: 0.0)
    server.add_peer("gateway")
    for _ in range(3):
        server.step()
    assert sent == [False, True], "the first while the tunnel was not open"
