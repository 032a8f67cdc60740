"""``user-sys weights`` as a person reads it who looks after a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from user_sys.commands.main import main
from user_sys.run.config import RunConfig, RunFolder, create_run_folder
from user_sys.store.store import StoreWriter
from user_sys.weights.patches import VersionIndex, full_patch
from user_sys.weights.signing import ensure_signer
from user_sys.weights.state import build_manifest, build_tensor_set
from user_sys.weights.version_store import VersionStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return create_run_folder(RunConfig(runs=tmp_path), "demo", "tcp://127.0.0.1:5999")[0].path


def keep(run: Path, version: int, learner: str = ".") -> VersionStore:
    """The run's learner has published one version."""
    signer = ensure_signer(run / "keys", "learner")
    state = build_tensor_set({"w": np.zeros(3, np.float32)})
    manifest = build_manifest(state, version, version, 0, (0.0, 0.0))
    parcel = full_patch(state, version)
    kept = VersionIndex({("exact", version): (manifest, signer.sign(manifest))}, {parcel.info.id: parcel})
    shelf = VersionStore(run / "weights" / learner)
    shelf.save(kept, signer.public_key)
    return shelf


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["weights", *map(str, argv)]) == 0
    return " ".join(capsys.readouterr().out.split())


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["weights", *map(str, argv)]) == 2
    told = capsys.readouterr()
    assert not told.out and told.err.count("\n") == 1
    return told.err


def test_a_person_gives_orders_to_the_robots_of_one_learner_of_several(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = keep(run, 3), keep(run, 3, "learner-so-101")
    told = said(capsys, "rollback", 3, run, "--learner", "learner-so-101")
    assert "every robot of learner-so-101 is to act with version 3" in told
    assert first.read_pin() is None and second.read_pin() is not None
    assert said(capsys, "list", run).endswith("these are of learner; --learner NAME shows those of learner-so-101")


def test_an_order_says_whether_a_gateway_is_there_to_obey_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(run, 3)
    assert "the next one obeys" in said(capsys, "rollback", 3, run)
    with StoreWriter.open(RunFolder(run).store):
        assert said(capsys, "release", run) == "every robot is to act with the newest version"


def test_there_is_nothing_to_release_where_no_order_stands(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(run, 3)
    assert "no version is ordered" in refused(capsys, "release", run)
    said(capsys, "rollback", 3, run)
    said(capsys, "release", run)
    assert "its robots act with the newest already" in refused(capsys, "release", run)


@pytest.mark.parametrize("order", [["list"], ["list", "--json"], ["rollback", "1"], ["release"]])
def test_where_there_are_no_weights_it_is_said_why(
    order: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{run} has no weights yet: its learner has published no version" in refused(capsys, *order, run)
    assert f"{tmp_path} is not a run folder" in refused(capsys, *order, tmp_path)


def test_a_learner_that_has_published_nothing_is_told_of(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(run, 3, "learner-so-101")
    assert f"learner of {run} has no weights yet" in refused(capsys, "list", run)
    assert "version 3 is not kept in learner of" in refused(capsys, "rollback", 3, run)
    said(capsys, "list", run, "--learner", "learner-so-101", "--json")


def test_an_order_is_given_where_the_learners_key_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A relay keeps weights in its folder too."""
    keep(tmp_path, 3)
    (tmp_path / "keys" / "learner.sign").unlink()
    assert "3" in said(capsys, "list", tmp_path)
    told = refused(capsys, "rollback", 3, tmp_path)
    assert f"{tmp_path} has no learner.sign: give the order in the run's folder on the gateway's machine" in told


def test_what_a_person_says_is_told_as_it_was_said_in_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(run, 3)
    said(capsys, "rollback", 3, run, "--by", "ada", "--reason", f"it [left] shakes [/b]\nbadly {'x' * 600}")
    assert said(capsys, "list", run).endswith("version 3 is ordered by ada: it [left] shakes [/b] badly [...]")
