"""A robot's process that is killed while it takes weights in comes back with a policy that works."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from weights_kit import full_version, learner_key, random_weights

from user_sys.messages import SignedRecord, WeightsManifest
from user_sys.weights.patches import VersionIndex
from user_sys.weights.version_store import VersionStore, _StoreIndex, newest_version

KEEPER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from weights_kit import full_version, learner_key, random_weights
from user_sys.weights.patches import Catalogue
from user_sys.weights.version_store import Shelf
folder, first = Path(sys.argv[1]), int(sys.argv[3])
signer, _ = learner_key(folder)
for version in range(first, first + 10_000):
    manifest, signed, parcel = full_version(random_weights(version, rows=256), version, signer)
    Shelf(folder / "kept").keep(Catalogue({("exact", version): (manifest, signed)}, {parcel.info.id: parcel}))
    print(version, flush=True)
"""


def killed_while_keeping(folder: Path, first: int, rng: random.Random) -> int:
    """Keeps one version after another until it is killed; returns the last of which it had said that it is kept."""
    argv = [sys.executable, "-c", KEEPER, str(folder), str(Path(__file__).parent), str(first)]
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
        version = killed_while_keeping(folder, version + 1, rng)
        found = newest_version(VersionStore(folder / "kept").load())
        assert found is not None and found[0].version >= version
        manifest, state = found
        trust.verify(VersionStore(folder / "kept").load().manifests["exact", manifest.version][1], WeightsManifest)
        expected = random_weights(manifest.version, rows=256)
        assert all((state.tensors[name].tobytes() == array.tobytes()) for name, array in expected.items())
        version = manifest.version


def test_a_kill_while_a_version_is_kept_leaves_one_that_is_whole(tmp_path: Path) -> None:
    kills(tmp_path, 5)


@pytest.mark.slow
def test_two_hundred_kills_while_versions_are_kept(tmp_path: Path) -> None:
    kills(tmp_path, 200)


def test_what_lies_in_the_folder_besides_is_no_version(tmp_path: Path) -> None:
    signer, _ = learner_key(tmp_path)
    shelf = VersionStore(tmp_path / "kept")
    assert newest_version(shelf.load()) is None
    manifest, signed, parcel = full_version(random_weights(1), 1, signer)
    shelf.save(VersionIndex({("exact", 1): (manifest, signed)}, {parcel.info.id: parcel}))
    (tmp_path / "kept" / "0000000009-exact-ff.parcel").write_bytes(b"half")
    found = newest_version(shelf.load())
    assert found is not None and found[0].version == 1
    shelf.save(shelf.load())
    assert len(list((tmp_path / "kept").glob("*.parcel"))) == 1, "what nothing names is removed"
    (tmp_path / "kept" / "index").write_bytes(b"\xff\xff")
    assert newest_version(shelf.load()) is None


def test_a_damaged_file_is_written_anew_and_what_a_kill_left_half_written_goes(tmp_path: Path) -> None:
    signer, _ = learner_key(tmp_path)
    manifest, signed, parcel = full_version(random_weights(1), 1, signer)
    whole = VersionIndex({("exact", 1): (manifest, signed)}, {parcel.info.id: parcel})
    VersionStore(tmp_path / "kept").save(whole)
    (path,) = (tmp_path / "kept").glob("*.parcel")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    half = path.with_name(f".{path.name}.00ff00ff")
    half.write_bytes(b"half")
    shelf = VersionStore(tmp_path / "kept")
    assert newest_version(shelf.load()) is None
    shelf.save(whole)
    assert newest_version(VersionStore(tmp_path / "kept").load()) is not None and not half.exists()


def test_a_manifest_that_does_not_decode_is_passed_over(tmp_path: Path) -> None:
    signer, _ = learner_key(tmp_path)
    manifest, _, parcel = full_version(random_weights(1), 1, signer)
    shelf = VersionStore(tmp_path / "kept")
    shelf.save(VersionIndex({("exact", 1): (manifest, SignedRecord(b"\xff", b""))}, {parcel.info.id: parcel}))
    assert newest_version(shelf.load()) is None


def test_what_its_writer_gives_up_meanwhile_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    signer, _ = learner_key(tmp_path)
    writer, indexes = VersionStore(tmp_path / "kept"), []
    for version in (1, 2):
        manifest, signed, parcel = full_version(random_weights(version), version, signer)
        writer.save(VersionIndex({("exact", version): (manifest, signed)}, {parcel.info.id: parcel}))
        indexes.append(writer._index())

    class Late(VersionStore):
        """Reads the index before the writer has replaced it, and the files afterwards."""

        def _index(self) -> _StoreIndex:
            return indexes.pop(0) if len(indexes) > 1 else indexes[0]

    assert Late(tmp_path / "kept").load().complete_versions() == [2]
    assert caplog.messages == []


def test_what_a_full_disk_had_no_room_for_is_in_the_way_of_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        return VersionIndex(manifests, {parcel.info.id: parcel for *_, parcel in found})  # type: ignore[arg-type]

    shelf = VersionStore(folder)
    shelf.save(of(1))
    with pytest.raises(OSError, match="no space"):
        shelf.save(of(2, 3))
    kept = newest_version(VersionStore(folder).load())
    assert kept is not None and kept[0].version == 1
    shelf.save(of(4))
    kept = newest_version(VersionStore(folder).load())
    assert kept is not None and kept[0].version == 4
