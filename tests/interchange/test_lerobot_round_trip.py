"""Export to LeRobot and import restore every step."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import interchange_kit
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interchange_kit import assert_same, bring_in, episode_chunks, export, make_store, read_store, usual_store

from hal.spec import ArraySpec, RobotSpec
from user_sys.commands.main import main
from user_sys.episode import Chunk, EpisodeSource, decode_chunk
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import EpisodeFilter
from user_sys.interchange.lerobot_import import ImportOptions, LerobotDataset
from user_sys.robot_records import save_robot_record
from user_sys.store.labels import DeleteLabel, column_labels
from user_sys.store.maintenance import Retention, add_labels, compact_store

IMPORT = """
import sys
from pathlib import Path
from user_sys.interchange.lerobot_import import ImportOptions, import_lerobot
from user_sys.interchange.lerobot_import import LerobotDataset
root, store = Path(sys.argv[1]), Path(sys.argv[2])
import_lerobot(LerobotDataset.open(root), store, ImportOptions(), lambda steps: print(steps, flush=True))
"""


def test_images_round_trip_exactly(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    export(store, tmp_path / "set")
    done = bring_in(tmp_path / "set", tmp_path / "again")
    assert (done.episodes, done.steps, done.skipped_features) == (3, 22, ())
    before, after = read_store(store), read_store(tmp_path / "again")
    assert list(before) == list(after) == ["a", "b", "c"]
    for name, episode in before.items():
        assert_same(episode, after[name])


def test_raw_frames_round_trip_exactly(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", episode_chunks("a", raw=True))
    export(store, tmp_path / "set")
    bring_in(tmp_path / "set", tmp_path / "again")
    again = read_store(tmp_path / "again")["a"]
    assert_same(read_store(store)["a"], again)
    assert isinstance(again.frames["observation.images.wrist"][0], np.ndarray)


def test_video_round_trips_within_codec_loss(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    export(store, tmp_path / "set", video=True)
    bring_in(tmp_path / "set", tmp_path / "again")
    after = read_store(tmp_path / "again")
    for name, episode in read_store(store).items():
        assert_same(episode, after[name], frames_within=6.0)


def test_video_of_odd_size_round_trips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(interchange_kit.CAMERAS, "front", (75, 93))
    store = make_store(tmp_path / "store", episode_chunks("a", cameras=("front",)))
    export(store, tmp_path / "set", video=True)
    bring_in(tmp_path / "set", tmp_path / "again")
    assert_same(read_store(store)["a"], read_store(tmp_path / "again")["a"], frames_within=6.0)


def test_labelled_columns_are_exported_in_place_of_recorded_ones(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    recorded = read_store(store)["a"].columns["log_prob"]
    values = {"log_prob": [-1.0, -2.0], "advantage": [0.5, 0.5]}
    add_labels(store, column_labels("a", values, "recap", first_step=3))
    export(store, tmp_path / "set")
    bring_in(tmp_path / "set", tmp_path / "again")
    found = read_store(tmp_path / "again")["a"].columns
    np.testing.assert_array_equal(found["log_prob"], [*recorded[:3], -1.0, -2.0, *recorded[5:]])
    assert found["log_prob"].dtype == np.float32 and "advantage" not in found


def store_with_arm(store: Path) -> str:
    """Records an arm with angles in rad in the store; returns its embodiment."""
    state = ArraySpec.from_rows("observation.state", [(f"{n}", "rad" if n else "%", -5.0, 5.0) for n in range(3)])
    action = ArraySpec.from_rows("action", [("m", "rad/s", -5.0, 5.0), ("gripper", "%", -5.0, 5.0)])
    spec = RobotSpec(model="arm", rate_hz=10.0, observation=(state,), action=action)
    save_robot_record(store / "robots", "arm-0", spec)
    return spec.embodiment


def test_degrees_round_trip(tmp_path: Path) -> None:
    store = tmp_path / "store"
    make_store(store, episode_chunks("a", embodiment=store_with_arm(store)))
    command = ["store", "export", str(store), "--format", "lerobot", "--output", str(tmp_path / "set")]
    assert main([*command, "--use-degrees"]) == 0
    before = read_store(store)["a"]
    (exported,) = LerobotDataset.open(tmp_path / "set").episodes()
    for name, ours, degrees in (
        ("observation.state", "observation.state", (1, 180 / np.pi, 180 / np.pi)),
        ("action", "action", (180 / np.pi, 1)),
        ("applied_action", "action.applied", (180 / np.pi, 1)),
    ):
        np.testing.assert_allclose(exported.columns[name], before.columns[ours] * degrees, rtol=1e-6)
    assert main(["store", "import", str(tmp_path / "set"), "--output", str(tmp_path / "again")]) == 0
    after = read_store(tmp_path / "again")["a"]  # the dataset says that it is in degrees
    for found, wanted in ((after.columns, before.columns), (after.final, before.final)):
        for name, column in wanted.items():
            np.testing.assert_allclose(found[name], column, rtol=1e-6, err_msg=name)


def test_degrees_without_a_spec_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataSetError, match="--use-degrees needs the spec of embodiment e1, which the store lacks"):
        export(usual_store(tmp_path / "store"), tmp_path / "set", use_degrees=True)


def test_import_in_degrees_of_an_export_in_rad_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    make_store(store, episode_chunks("a", embodiment=store_with_arm(store)))
    export(store, tmp_path / "set")
    with pytest.raises(DataSetError, match="user/use_degrees is false .* leave out --use-degrees"):
        bring_in(tmp_path / "set", tmp_path / "again", ImportOptions(use_degrees=True))


def test_export_without_a_spec_can_be_imported_in_degrees(tmp_path: Path) -> None:
    again = tmp_path / "again"
    store = make_store(tmp_path / "store", episode_chunks("a", embodiment=store_with_arm(again)))
    export(store, tmp_path / "set")
    assert bring_in(tmp_path / "set", again, ImportOptions(use_degrees=True)).episodes == 1
    before, after = (read_store(each)["a"].columns["observation.state"] for each in (store, again))
    np.testing.assert_allclose(after, before * (1, np.pi / 180, np.pi / 180), rtol=1e-6)


def test_repeated_import_adds_only_missing_episodes(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    export(store, tmp_path / "set")
    half_done = make_store(tmp_path / "again", episode_chunks("a", 10)[:2])
    assert bring_in(tmp_path / "set", half_done).episodes == 3
    done = bring_in(tmp_path / "set", half_done)
    assert (done.episodes, done.already_stored) == (0, 3)
    after = read_store(half_done)
    for name, episode in read_store(store).items():
        assert_same(episode, after[name])


def test_import_with_another_source_replaces_deleted_episodes(tmp_path: Path) -> None:
    store, demo = usual_store(tmp_path / "store"), ImportOptions(source=EpisodeSource.DEMO)
    export(store, tmp_path / "set")
    done = bring_in(tmp_path / "set", store, demo)
    assert (done.episodes, done.already_stored) == (0, 3), "they are not there twice"
    add_labels(store, [DeleteLabel(episode=each, labeller="ada", at_unix_ns=1) for each in "abc"])
    for added, known in ((2, 0), (0, 2)):
        done = bring_in(tmp_path / "set", store, demo)
        assert (done.episodes, done.already_stored, done.deleted) == (added, known, 1), "b was recorded as demo"
    assert {name: each.header.source for name, each in read_store(store).items()} == {
        "a-as-demo": EpisodeSource.DEMO,
        "c-as-demo": EpisodeSource.DEMO,
    }
    done = bring_in(tmp_path / "set", store)
    assert (done.episodes, done.already_stored, done.deleted) == (0, 0, 3)


def test_import_of_an_episode_that_was_deleted_and_compacted_is_not_counted(tmp_path: Path) -> None:
    export(usual_store(tmp_path / "store"), tmp_path / "set")
    again = tmp_path / "again"
    bring_in(tmp_path / "set", again)
    add_labels(again, [DeleteLabel(episode="b", labeller="ada", at_unix_ns=1)])
    compact_store(again, Retention())
    done = bring_in(tmp_path / "set", again)
    assert (done.episodes, done.steps, done.already_stored, done.deleted) == (0, 0, 2, 1)


def test_repeated_import_of_an_unfinished_episode_adds_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", episode_chunks("cut", ends=False))
    export(store, tmp_path / "set", EpisodeFilter(incomplete=True))
    bring_in(tmp_path / "set", tmp_path / "again")
    done = bring_in(tmp_path / "set", tmp_path / "again")
    assert (done.episodes, done.steps, done.already_stored) == (0, 0, 1)


@pytest.mark.parametrize("video", [False, True])
def test_steps_before_the_first_picture_stay_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, video: bool
) -> None:
    usual_frame, usual_times = interchange_kit.frame, interchange_kit.capture_ns
    monkeypatch.setattr(interchange_kit, "frame", lambda c, n, raw: None if n < 6 else usual_frame(c, n, raw))
    monkeypatch.setattr(interchange_kit, "capture_ns", lambda c, n: usual_times(c, n) * (np.arange(n) >= 6))
    store = make_store(tmp_path / "store", episode_chunks("a"))
    export(store, tmp_path / "set", video=video)
    bring_in(tmp_path / "set", tmp_path / "again")
    before, after = read_store(store)["a"], read_store(tmp_path / "again")["a"]
    for name, frames in before.frames.items():
        shown = [None if frame is None else type(frame) for frame in after.frames[name]]
        assert shown[:7] == [None] * 6 + [bytes]
        np.testing.assert_array_equal(after.captured_ns[name], before.captured_ns[name])
        if not video:
            assert after.frames[name][:8] == frames[:8]


def test_picture_captured_at_time_0_returns(tmp_path: Path) -> None:
    chunk = decode_chunk(episode_chunks("a", 4)[0])
    columns = dict(chunk.columns)
    for name in columns:
        if name.endswith("t_capture_ns"):
            columns[name] = columns[name] * 0 + np.arange(4) * 100_000_000
    store = make_store(tmp_path / "store", [Chunk(chunk.header, columns, chunk.final).encode()])
    export(store, tmp_path / "set")
    bring_in(tmp_path / "set", tmp_path / "again")
    assert_same(read_store(store)["a"], read_store(tmp_path / "again")["a"])


def test_killed_import_resumes(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", *(episode_chunks(f"e{n}", 9) for n in range(12)))
    export(store, tmp_path / "set")
    command = [sys.executable, "-c", IMPORT, str(tmp_path / "set"), str(tmp_path / "again")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "9\n"
        process.send_signal(signal.SIGKILL)
    done = bring_in(tmp_path / "set", tmp_path / "again")
    assert done.already_stored >= 1 and done.already_stored + done.episodes == 12
    after = read_store(tmp_path / "again")
    for name, episode in read_store(store).items():
        assert_same(episode, after[name])


def test_incomplete_episode_round_trips(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", episode_chunks("a"), episode_chunks("cut", ends=False))
    export(store, tmp_path / "set", EpisodeFilter(incomplete=True))
    bring_in(tmp_path / "set", tmp_path / "again")
    assert_same(read_store(store)["cut"], read_store(tmp_path / "again")["cut"])


def test_each_embodiment_becomes_a_dataset(tmp_path: Path) -> None:
    store = make_store(
        tmp_path / "store",
        episode_chunks("a", cameras=("wrist",)),
        episode_chunks("u", robot="ur-0", embodiment="e2", size=6, cameras=()),
        episode_chunks("b", cameras=("wrist",)),
        episode_chunks("blind", cameras=()),
    )
    plans = export(store, tmp_path / "sets")
    assert [(each.folder, each.episodes) for each in plans] == [("e1", 2), ("e2", 1), ("e1-2", 1)]
    for each in plans:
        bring_in(tmp_path / "sets" / each.folder, tmp_path / "again")
    after = read_store(tmp_path / "again")
    for name, episode in read_store(store).items():
        assert_same(episode, after[name])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    file_mb=st.sampled_from([0.001, 0.004, 1.0]),
    video=st.booleans(),
)
def test_round_trip_with_any_file_size(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], file_mb: float, video: bool
) -> None:
    folder = tmp_path_factory.mktemp("division")
    chunks = [episode_chunks(f"e{n}", steps, cameras=("front",)) for n, steps in enumerate(lengths)]
    store = make_store(folder / "store", *chunks)
    export(store, folder / "set", file_mb=file_mb, video=video)
    bring_in(folder / "set", folder / "again")
    after = read_store(folder / "again")
    for name, episode in read_store(store).items():
        assert_same(episode, after[name], frames_within=6.0 if video else 0.0)
