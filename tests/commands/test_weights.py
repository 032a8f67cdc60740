"""The commands of ``user-sys weights``: list, rollback and release."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from user_sys.commands.main import main
from user_sys.messages import WeightsManifest
from user_sys.run.config import RunConfig, RunFolder, create_run_folder
from user_sys.run.pins import current_pin, set_pin
from user_sys.store.store import StoreWriter
from user_sys.weights.catalog import BlobCache, VersionCatalog
from user_sys.weights.signing import ensure_signer
from user_sys.weights.state import build_tensor_set
from user_sys.weights.version_store import VersionStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return create_run_folder(RunConfig(runs=tmp_path), "demo", "tcp://127.0.0.1:5999")[0].path


def store_version(run: Path, version: int, learner: str = ".") -> VersionStore:
    """The run's learner has published one version."""
    signer = ensure_signer(run / "keys", "learner")
    state = build_tensor_set({"w": np.zeros(3, np.float32)})
    manifest = WeightsManifest(
        version=version,
        updates=version,
        precision="exact",
        digest=state.digest,
        table_bytes=len(state.table),
        size_bytes=state.size_bytes,
        published_unix_ns=0,
    )
    catalog = VersionCatalog(BlobCache())
    store = VersionStore(run / "weights" / learner)
    stored = catalog.add_tensors(manifest, signer.sign(manifest), state)
    store.save([stored], catalog.cache, signer.public_key)
    return store


def output(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["weights", *map(str, argv)]) == 0
    return " ".join(capsys.readouterr().out.split())


def error_output(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["weights", *map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1
    return captured.err


def test_rollback_pins_one_learner_of_several(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = store_version(run, 3), store_version(run, 3, "learner-so-101")
    message = output(capsys, "rollback", 3, run, "--learner", "learner-so-101")
    assert "every robot of learner-so-101 will use version 3" in message
    assert first.read_pin() is None and second.read_pin() is not None
    assert output(capsys, "list", run).endswith("these are of learner; --learner NAME shows those of learner-so-101")


def test_rollback_without_a_gateway_says_when_it_takes_effect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_version(run, 3)
    assert "it applies this at its start" in output(capsys, "rollback", 3, run)
    with StoreWriter.open(RunFolder(run).store):
        assert output(capsys, "release", run) == "every robot will use the newest version"


@pytest.mark.parametrize("pinned", [None, 1])
def test_rollback_to_a_version_that_the_gateway_removes_meanwhile_leaves_the_former_pin(
    pinned: int | None, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_version(run, 1)
    if pinned is not None:
        output(capsys, "rollback", pinned, run)
    store_version(run, 3)
    monkeypatch.setattr("user_sys.commands.weights.set_pin", lambda *pin: (set_pin(*pin), store_version(run, 4)))
    assert "version 3 is not stored" in error_output(capsys, "rollback", 3, run)
    found = current_pin(store)
    assert (None if found is None else found.version) == pinned


def test_release_without_a_pin_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_version(run, 3)
    assert "no version is pinned" in error_output(capsys, "release", run)
    output(capsys, "rollback", 3, run)
    output(capsys, "release", run)
    assert "its robots use the newest version already" in error_output(capsys, "release", run)


@pytest.mark.parametrize("order", [["list"], ["list", "--json"], ["rollback", "1"], ["release"]])
def test_run_without_weights_is_refused_with_the_reason(
    order: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{run} has no weights yet: its learner has published no version" in error_output(capsys, *order, run)
    assert f"{tmp_path} is not a run folder" in error_output(capsys, *order, tmp_path)


def test_learner_without_versions_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_version(run, 3, "learner-so-101")
    assert f"learner of {run} has no weights yet" in error_output(capsys, "list", run)
    assert "version 3 is not stored in learner of" in error_output(capsys, "rollback", 3, run)
    output(capsys, "list", run, "--learner", "learner-so-101", "--json")


def test_rollback_without_the_learners_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A relay stores weights in its folder too."""
    store_version(tmp_path, 3)
    (tmp_path / "keys" / "learner.sign").unlink()
    assert "3" in output(capsys, "list", tmp_path)
    message = error_output(capsys, "rollback", 3, tmp_path)
    assert f"{tmp_path} has no learner.sign: run this command in the run's folder" in message


def test_reason_is_shown_verbatim_on_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_version(run, 3)
    output(capsys, "rollback", 3, run, "--by", "ada", "--reason", f"it [left] shakes [/b]\nbadly {'x' * 600}")
    assert output(capsys, "list", run).endswith("version 3 is pinned by ada: it [left] shakes [/b] badly [...]")
