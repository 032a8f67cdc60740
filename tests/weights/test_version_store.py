"""The version store after kills, damage and a full disk."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from weights_kit import full_version, learner_key, random_weights

from user_sys.messages import SignedRecord, WeightsManifest, decode_record
from user_sys.weights.patches import VersionIndex
from user_sys.weights.version_store import VersionStore, newest_version

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from weights_kit import full_version, learner_key, random_weights
from user_sys.weights.patches import VersionIndex
from user_sys.weights.version_store import VersionStore
folder, first = Path(sys.argv[1]), int(sys.argv[3])
signer, _ = learner_key(folder)
for version in range(first, first + 10_000):
    manifest, signed, patch = full_version(random_weights(version, rows=256), version, signer)
    VersionStore(folder / "kept").save(VersionIndex({("exact", version): (manifest, signed)}, {patch.info.id: patch}))
    print(version, flush=True)
"""


def kill_while_saving(folder: Path, first: int, rng: random.Random) -> int:
    """Saves versions until it is killed. Returns the last version that it reported as saved."""
    argv = [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent), str(first)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = int(process.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        return max([last, *map(int, process.stdout.read().split()[:-1] or [last])])


def kills(folder: Path, count: int) -> None:
    _, trust = learner_key(folder)
    rng, version = random.Random(0), 1
    for _ in range(count):
        version = kill_while_saving(folder, version + 1, rng)
        found = newest_version(VersionStore(folder / "kept").load())
        assert found is not None and found[0].version >= version
        manifest, state = found
        trust.verify(VersionStore(folder / "kept").load().manifests["exact", manifest.version][1], WeightsManifest)
        expected = random_weights(manifest.version, rows=256)
        assert all((state.tensors[name].tobytes() == array.tobytes()) for name, array in expected.items())
        version = manifest.version


def test_kill_while_saving_leaves_a_complete_version(tmp_path: Path) -> None:
    kills(tmp_path, 5)


@pytest.mark.slow
def test_two_hundred_kills_while_saving_leave_complete_versions(tmp_path: Path) -> None:
    kills(tmp_path, 200)


def test_other_files_in_the_folder_are_ignored(tmp_path: Path) -> None:
    signer, _ = learner_key(tmp_path)
    store = VersionStore(tmp_path / "kept")
    assert newest_version(store.load()) is None
    manifest, signed, patch = full_version(random_weights(1), 1, signer)
    store.save(VersionIndex({("exact", 1): (manifest, signed)}, {patch.info.id: patch}))
    (tmp_path / "kept" / "0000000009-exact-ff.parcel").write_bytes(b"half")
    found = newest_version(store.load())
    assert found is not None and found[0].version == 1
    store.save(store.load())
    assert len(list((tmp_path / "kept").glob("*.parcel"))) == 1, "unlisted files are removed"
    (tmp_path / "kept" / "index").write_bytes(b"\xff\xff")
    assert newest_version(store.load()) is None


def test_save_replaces_damaged_files_and_removes_partial_ones(tmp_path: Path) -> None:
    signer, _ = learner_key(tmp_path)
    manifest, signed, patch = full_version(random_weights(1), 1, signer)
    whole = VersionIndex({("exact", 1): (manifest, signed)}, {patch.info.id: patch})
    VersionStore(tmp_path / "kept").save(whole)
    (path,) = (tmp_path / "kept").glob("*.parcel")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    half = path.with_name(f".{path.name}.00ff00ff")
    half.write_bytes(b"half")
    store = VersionStore(tmp_path / "kept")
    assert newest_version(store.load()) is None
    store.save(whole)
    assert newest_version(VersionStore(tmp_path / "kept").load()) is not None and not half.exists()


def test_undecodable_manifest_is_skipped(tmp_path: Path) -> None:
    signer, _ = learner_key(tmp_path)
    manifest, _, patch = full_version(random_weights(1), 1, signer)
    store = VersionStore(tmp_path / "kept")
    store.save(VersionIndex({("exact", 1): (manifest, SignedRecord(b"\xff", b""))}, {patch.info.id: patch}))
    assert newest_version(store.load()) is None


def test_load_while_the_writer_replaces_files_reports_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    signer, _ = learner_key(tmp_path)
    writer, indexes = VersionStore(tmp_path / "kept"), []
    for version in (1, 2):
        manifest, signed, patch = full_version(random_weights(version), version, signer)
        writer.save(VersionIndex({("exact", version): (manifest, signed)}, {patch.info.id: patch}))
        indexes.append((tmp_path / "kept" / "index").read_bytes())

    def decode_older(raw: bytes, kind: type[Any]) -> Any:
        """Decodes the index as it was before the writer replaced it, the first time."""
        return decode_record(indexes.pop(0) if raw == indexes[-1] and len(indexes) > 1 else raw, kind)

    monkeypatch.setattr("user_sys.weights.version_store.decode_record", decode_older)
    assert VersionStore(tmp_path / "kept").load().complete_versions() == [2]
    assert caplog.messages == []


def test_save_on_a_full_disk_leaves_no_partial_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signer, _ = learner_key(tmp_path)
    folder, versions = tmp_path / "kept", [full_version(random_weights(n), n, signer) for n in range(1, 5)]
    size = len(versions[0][2].payload)

    def write(path: Path, content: bytes) -> None:
        if sum(file.stat().st_size for file in folder.iterdir() if file != path) + len(content) > 3 * size:
            raise OSError(errno.ENOSPC, "no space left on device")
        path.write_bytes(content)

    monkeypatch.setattr("user_sys.weights.version_store.replace_durably", write)

    def of(*chosen: int) -> VersionIndex:
        found = [versions[number - 1] for number in chosen]
        manifests = {("exact", manifest.version): (manifest, signed) for manifest, signed, _ in found}
        return VersionIndex(manifests, {patch.info.id: patch for *_, patch in found})  # type: ignore[arg-type]

    store = VersionStore(folder)
    store.save(of(1))
    with pytest.raises(OSError, match="no space"):
        store.save(of(2, 3))
    kept = newest_version(VersionStore(folder).load())
    assert kept is not None and kept[0].version == 1
    store.save(of(4))
    kept = newest_version(VersionStore(folder).load())
    assert kept is not None and kept[0].version == 4
