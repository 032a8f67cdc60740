"""The guard of a run's success: which version it has kept, which it pins, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from user_sys.console.progress import BEST_VERSION_SCALAR
from user_sys.messages import EpisodeReport, WeightsManifest
from user_sys.run.pins import AUTOMATIC, SuccessGuards, current_pin, set_pin
from user_sys.weights.catalog import BlobCache, VersionCatalog
from user_sys.weights.signing import ensure_signer
from user_sys.weights.state import build_tensor_set
from user_sys.weights.version_store import VersionStore


def store_versions(run: Path, *versions: int) -> VersionStore:
    """The gateway has these versions of the run on disk, and no others."""
    signer, state = ensure_signer(run / "keys", "learner"), build_tensor_set({"w": np.zeros(3, np.float32)})
    catalog, store = VersionCatalog(BlobCache()), VersionStore(run / "weights")
    for version in versions:
        manifest = WeightsManifest(
            version=version, updates=version, precision="exact", digest=state.digest, table_bytes=len(state.table),
            size_bytes=state.size_bytes, published_unix_ns=0,
        )  # fmt: skip
        catalog.add_tensors(manifest, signer.sign(manifest), state)
    store.save(catalog.versions.values(), catalog.cache, signer.public_key)
    return store


def act(guards: SuccessGuards, version: int, successes: int, failures: int = 0) -> str:
    """Episodes that began with `version`. Returns what the guards say."""
    for success in [True] * successes + [False] * failures:
        guards.add(EpisodeReport(robot="one", episode="e", source="online", steps=9, success=success,
                                 intervention_steps=0, episode_return=0.0, policy_version=version))  # fmt: skip
    return " ".join(guards.apply())


def test_guard_keeps_the_stored_version_before_a_best_one_that_is_gone(tmp_path: Path) -> None:
    store, guards = store_versions(tmp_path, 1, 414, 448, 503, 524, 537, 545, 548, 550), SuccessGuards(tmp_path)
    assert act(guards, 500, successes=50) == "" and store.kept() == {448, 500}
    store_versions(tmp_path, 1, 448, 647, 880, 1000)
    assert "robots act with version 448, the best so far that is stored" in act(guards, 1000, 0, failures=10)
    pin = current_pin(store)
    assert pin is not None and pin.version == 448


def test_guard_keeps_a_best_version_that_is_not_yet_written(tmp_path: Path) -> None:
    store, guards = store_versions(tmp_path, 1, 448, 499), SuccessGuards(tmp_path)
    assert act(guards, 500, successes=50) == "" and store.kept() == {499, 500}
    store_versions(tmp_path, 1, 499, 500, 510)
    assert "robots act with version 500" in act(guards, 510, 0, failures=10) and store.kept() == {500}


def test_guard_keeps_a_best_version_that_the_gateway_has_in_memory(tmp_path: Path) -> None:
    store, guards = store_versions(tmp_path, 109, 110), SuccessGuards(tmp_path)
    assert act(guards, 106, successes=50) == "" and store.kept() == {106}
    store_versions(tmp_path, 106, 111, 112)
    assert "robots act with version 106" in act(guards, 112, 0, failures=10)


def test_guard_compares_the_newest_with_what_the_pinned_version_has_achieved(tmp_path: Path) -> None:
    _, guards = store_versions(tmp_path, 300, 400), SuccessGuards(tmp_path)
    act(guards, 310, successes=50)
    assert "robots act with version 300" in act(guards, 400, 0, failures=10)
    assert "try the newest" in act(guards, 300, successes=28, failures=22)
    assert "as good as the best again" in act(guards, 400, successes=12, failures=8)
    assert act(guards, 400, successes=18, failures=12) == "", "60% is more than 56%"


def test_guard_pins_no_version_in_place_of_a_best_one_that_is_gone(tmp_path: Path) -> None:
    store, guards = store_versions(tmp_path, 1, 998, 1000), SuccessGuards(tmp_path)
    assert act(guards, 950, successes=50) == ""
    gone = "the best version so far is not stored; robots act with the newest"
    assert gone in act(guards, 1000, 0, failures=10) and current_pin(store) is None
    assert act(guards, 1000, successes=30, failures=20) == "" and store.kept() == {1000}, "a new best counts"


def test_guards_name_the_pinned_version_after_a_resume_before_any_episode(tmp_path: Path) -> None:
    store, guards = store_versions(tmp_path, 300), SuccessGuards(tmp_path)
    act(guards, 300, successes=50)
    store_versions(tmp_path, 300, 400)
    act(guards, 400, 0, failures=10)
    resumed = SuccessGuards(tmp_path)
    assert resumed.apply() == [] and resumed.scalars([]) == {f"{BEST_VERSION_SCALAR}/learner": 300.0}
    pin = current_pin(store)
    assert pin is not None and pin.version == 300


def test_guards_name_no_pinned_version_of_a_learner_whose_robots_do_not_report(tmp_path: Path) -> None:
    store_versions(tmp_path, 300)
    (tmp_path / "weights" / "learner-ur5e-0a1b2c").mkdir()
    ensure_signer(tmp_path / "keys", "learner")
    set_pin(tmp_path, "learner-ur5e-0a1b2c", 300, AUTOMATIC, "success fell")
    guards = SuccessGuards(tmp_path)
    guards.set_learners({"one": "learner", "gone": "learner-ur5e-0a1b2c"})
    assert set(guards.scalars(["one"]).values()) == {-1.0} and 300.0 in guards.scalars(["one", "gone"]).values()
