"""LeRobot datasets as other programs read them, and interrupted exports."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from interchange_kit import (
    assert_same,
    bring_in,
    episode_chunks,
    export,
    make_store,
    pictures,
    plan,
    read_store,
    usual_store,
)
from msgspec.structs import replace

from hal.spec import ArraySpec, CameraSpec, RobotSpec
from robots.fake import FakeRobot
from user_sys.commands.main import main
from user_sys.episode import EpisodeSource, Phase
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import EpisodeFilter, EpisodeReader
from user_sys.interchange.lerobot_export import export_lerobot
from user_sys.robot_records import embodiment_names, read_robot_records, save_robot_record
from user_sys.store.labels import DeleteLabel, PhaseLabel, RewardLabel, SuccessLabel, TrimLabel
from user_sys.store.store import StoreReader, StoreWriter


def files(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_export_writes_the_files_of_the_format(tmp_path: Path) -> None:
    export(usual_store(tmp_path / "store"), tmp_path / "set", video=True)
    assert set(files(tmp_path / "set")) == {
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
        "videos/observation.images.wrist/chunk-000/file-000.mp4",
        "videos/observation.images.front/chunk-000/file-000.mp4",
    }
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0" and info["fps"] == 10 and info["splits"] == {"train": "0:3"}
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 22, 2)
    wrist = info["features"]["observation.images.wrist"]
    assert wrist["dtype"] == "video" and wrist["shape"] == [32, 48, 3]
    assert wrist["info"]["video.codec"] == "h264"
    assert info["features"]["phase"] == {"dtype": "uint8", "shape": [1], "names": None}
    assert info["features"]["t_capture_ns.wrist"] == {"dtype": "int64", "shape": [1], "names": None}


def test_export_numbers_steps_and_episodes(tmp_path: Path) -> None:
    export(usual_store(tmp_path / "store"), tmp_path / "set", file_mb=0.001)
    rows = [
        row for n in range(3) for row in pq.read_table(tmp_path / f"set/data/chunk-000/file-00{n}.parquet").to_pylist()
    ]
    assert [row["index"] for row in rows] == list(range(22))
    assert [row["episode_index"] for row in rows] == [0] * 10 + [1] * 7 + [2] * 5
    assert [row["frame_index"] for row in rows[10:17]] == list(range(7))
    assert rows[12]["timestamp"] == pytest.approx(0.2) and rows[12]["task_index"] == 1
    assert [row["next.success"] for row in rows].count(True) == 1 and rows[9]["next.success"]
    assert [number for number, row in enumerate(rows) if row["next.done"]] == [9, 16, 21]
    assert {row["source"] for row in rows[10:17]} == {"demo"}
    episode = pq.read_table(tmp_path / "set/meta/episodes/chunk-000/file-002.parquet").to_pylist()[0]
    assert (episode["dataset_from_index"], episode["dataset_to_index"], episode["data/file_index"]) == (17, 22, 2)
    assert episode["tasks"] == ["lift the cube"] and episode["user/success"] is None


def test_export_statistics_cover_all_steps(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    export(store, tmp_path / "set")
    statistics = json.loads((tmp_path / "set/meta/stats.json").read_text())
    state = np.concatenate([each.columns["observation.state"] for each in read_store(store).values()]).astype(float)
    found = statistics["observation.state"]
    np.testing.assert_allclose(found["mean"], state.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found["std"], state.std(0), rtol=1e-12)
    np.testing.assert_array_equal(found["min"], state.min(0))
    assert found["count"] == [22] and found["q01"][0] < found["q50"][0] < found["q99"][0]
    assert np.shape(statistics["observation.images.wrist"]["mean"]) == (3, 1, 1)
    assert 0 < statistics["observation.images.wrist"]["mean"][0][0][0] < 1
    assert "log_prob" not in statistics  # not finite everywhere; JSON has no NaN


def test_robot_spec_gives_element_names_and_rate(tmp_path: Path) -> None:
    def vector(name: str, *labels: str) -> ArraySpec:
        low, high = (-1.0,) * len(labels), (1.0,) * len(labels)
        return ArraySpec(name=name, labels=labels, units=("rad",) * len(labels), low=low, high=high)

    state, action = vector("observation.state", "shoulder", "elbow", "grip"), vector("action", "x", "y")
    camera = CameraSpec(name="wrist", height=32, width=48, rate_hz=30.0)
    spec = RobotSpec(model="two-joint", rate_hz=25.0, observation=(state,), action=action, cameras=(camera,))
    save_robot_record(tmp_path / "robots", "panda-0", spec)
    make_store(tmp_path / "store", episode_chunks("a", embodiment=spec.embodiment))
    export(tmp_path / "store", tmp_path / "set")
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    assert info["robot_type"] == "two-joint" and info["fps"] == 25
    assert info["features"]["observation.state"]["names"] == ["shoulder", "elbow", "grip"]
    assert info["features"]["applied_action"]["names"] == ["x", "y"]


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (EpisodeFilter(sources=(EpisodeSource.DEMO,)), ["b"]),
        (EpisodeFilter(tasks=("lift",)), ["a", "c"]),
        (EpisodeFilter(success=True), ["a"]),
        (EpisodeFilter(success=False), ["b"]),
        (EpisodeFilter(episodes=("c", "a")), ["a", "c"]),
    ],
)
def test_export_filters(tmp_path: Path, selection: EpisodeFilter, names: list[str]) -> None:
    store = make_store(tmp_path / "store", episode_chunks("open", ends=False))
    usual_store(store)
    (planned,) = plan(store, selection)
    assert [name for file in planned.files for name in file] == names


def test_export_applies_labels_and_skips_deleted_episodes(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    common = {"labeller": "ada", "at_unix_ns": 1}
    with StoreWriter.open(store) as writer:
        writer.append_label(SuccessLabel(episode="b", success=True, **common))
        writer.append_label(RewardLabel(episode="b", first_step=3, rewards=(0.5, 0.25), **common))
        writer.append_label(PhaseLabel(episode="b", first_step=0, steps=7, phase=Phase.TELEOP, **common))
        writer.append_label(DeleteLabel(episode="a", **common))
        writer.sync()
    export(store, tmp_path / "set")
    rows = pq.read_table(tmp_path / "set/data/chunk-000/file-000.parquet").to_pylist()
    assert len(rows) == 7 + 5 and rows[6]["next.success"]
    assert [row["next.reward"] for row in rows[3:5]] == [0.5, 0.25]
    assert {row["phase"] for row in rows[:7]} == {Phase.TELEOP}
    bring_in(tmp_path / "set", tmp_path / "again")
    end = read_store(tmp_path / "again")["b"].header.end
    assert end is not None and end.success and end.reward_source == "person"


def test_export_has_only_the_steps_that_a_trim_keeps(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    with StoreWriter.open(store) as writer:
        writer.append_label(TrimLabel(episode="a", first_step=2, steps=5, labeller="ada", at_unix_ns=1))
        writer.append_label(TrimLabel(episode="b", first_step=9, steps=1, labeller="ada", at_unix_ns=1))
        writer.sync()
    argv = ["store", "export", str(store), "--format", "lerobot", "--output", str(tmp_path / "set")]
    assert main(argv) == 0
    bring_in(tmp_path / "set", tmp_path / "again")
    whole, again = read_store(store)["a"], read_store(tmp_path / "again")
    assert set(again) == {"a-2-7", "c"}  # the trim of b is beyond its steps
    part = again["a-2-7"]
    assert (part.steps, part.chunk_steps) == (5, (2, 3)) and part.columns["terminated"].tolist() == [False] * 4 + [True]
    for name, column in part.columns.items():
        if name not in ("truncated", "terminated"):
            np.testing.assert_array_equal(column, whole.columns[name][2:7], err_msg=name)
    np.testing.assert_array_equal(part.final["observation.state"], whole.columns["observation.state"][7])
    for camera in ("wrist", "front"):  # step 2 repeats the picture of step 1, which is not in the export
        for mine, theirs in zip(pictures(part, camera), pictures(whole, camera)[2:7], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    end = part.header.end
    assert end is not None and end.steps == 5 and end.success


def test_imported_part_stays_apart_from_its_merged_episode(tmp_path: Path) -> None:
    store, again = make_store(tmp_path / "store", episode_chunks("a", 12)), tmp_path / "again"
    with StoreWriter.open(store) as writer:
        writer.append_label(TrimLabel(episode="a", first_step=2, steps=5, labeller="ada", at_unix_ns=1))
        writer.sync()
    whole = read_store(store)["a"]
    assert main(["store", "export", str(store), "--format", "lerobot", "--output", str(tmp_path / "set")]) == 0
    bring_in(tmp_path / "set", again)
    assert main(["store", "merge", str(store), "--into", str(again)]) == 0
    after = read_store(again)
    assert_same(after["a"], whole)
    np.testing.assert_array_equal(after["a-2-7"].columns["t_capture_ns"], whole.columns["t_capture_ns"][2:7])


def test_episode_with_a_gap_is_exported_up_to_it(tmp_path: Path) -> None:
    chunks = episode_chunks("holed", 15)
    store = make_store(tmp_path / "store", [chunks[0], chunks[1], chunks[3]])
    with pytest.raises(DataSetError, match="none of the store's 1 episodes"):
        plan(store)
    assert export(store, tmp_path / "set", EpisodeFilter(incomplete=True))[0].steps == 8
    bring_in(tmp_path / "set", tmp_path / "again")
    assert read_store(tmp_path / "again")["holed"].header.end is None


def test_empty_selection_and_unknown_episode_are_errors(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    with pytest.raises(DataSetError, match="none of the store's 3 episodes matches; change the filters"):
        plan(store, EpisodeFilter(tasks=("weld",)))
    with pytest.raises(DataSetError, match="no episode 'zz'.*inspect"):
        plan(store, EpisodeFilter(episodes=("zz",)))


def test_nonempty_output_is_refused(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    export(store, tmp_path / "set")
    with pytest.raises(DataSetError, match="set is not empty; remove it"):
        export(store, tmp_path / "set")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("")
    with pytest.raises(DataSetError, match="full is not empty"):
        export(store, tmp_path / "full")


def test_broken_export_is_no_dataset(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    with StoreReader.open(store) as opened, pytest.raises(KeyboardInterrupt):
        export_lerobot(EpisodeReader(opened), plan(store), tmp_path / "set", lambda steps: _break_off())
    with pytest.raises(DataSetError, match="or an unfinished one"):
        bring_in(tmp_path / "set", tmp_path / "again")


def _break_off() -> None:
    raise KeyboardInterrupt


def test_export_and_import_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, output, again = (str(tmp_path / name) for name in ("store", "set", "again"))
    make_store(Path(store), episode_chunks("a"), episode_chunks("u", embodiment="e2", size=6))
    assert main(["store", "export", store, "--format", "lerobot", "--output", output]) == 0
    text = capsys.readouterr().err
    assert "1 episodes, 10 steps at 10 Hz" in text and "each embodiment has a LeRobot dataset" in text
    assert main(["store", "import", output, "--output", again]) == 2
    assert "it holds the datasets e1, e2: import each" in capsys.readouterr().err
    assert main(["store", "import", f"{output}/e1", "--output", again]) == 0
    assert "1 episodes added, 10 steps" in capsys.readouterr().err
    assert list(read_store(Path(again))) == ["a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "mcap", "--cameras", "video"), "require --format lerobot"),
        (("--format", "mcap", "--fps", "10"), "require --format lerobot"),
        (("--format", "mcap", "--use-degrees"), "require --format lerobot"),
    ],
)
def test_options_without_effect_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    store = usual_store(tmp_path / "store")
    assert main(["store", "export", str(store), "--output", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_export_copies_robot_specs(tmp_path: Path) -> None:
    action = ArraySpec(name="action", labels=("x", "y"), units=("m", "m"), low=(-1.0, -1.0), high=(1.0, 1.0))
    spec = RobotSpec(model="two", rate_hz=25.0, observation=(), action=action, cameras=())
    store, sets, again = tmp_path / "store", tmp_path / "set", tmp_path / "again"
    save_robot_record(store / "robots", "panda-0", spec)
    make_store(store, episode_chunks("a", embodiment=spec.embodiment))
    assert main(["store", "export", str(store), "--format", "lerobot", "--output", str(sets)]) == 0
    card = (sets / "meta/robots/panda-0.json").read_text()
    (sets / "meta/robots/other.json").write_text(card.replace("panda-0", "../../outside"))
    assert main(["store", "import", str(sets), "--output", str(again)]) == 0
    assert [(each.robot, each.spec) for each in read_robot_records(again / "robots")] == [("panda-0", spec)]
    assert not (tmp_path / "outside.json").exists()


def test_export_keeps_the_name_by_which_an_earlier_version_recorded_a_robot_since_changed(tmp_path: Path) -> None:
    first = FakeRobot().spec
    slower = replace(first, limits=replace(first.limits, reduced_speed=0.1))
    store, sets, again = tmp_path / "store", tmp_path / "set", tmp_path / "again"
    save_robot_record(store / "robots", "panda-0", first)
    save_robot_record(store / "robots", "panda-0", slower)
    make_store(store, episode_chunks("a", embodiment=first.fingerprint))
    assert first.fingerprint in embodiment_names(store, slower)
    assert main(["store", "export", str(store), "--format", "lerobot", "--output", str(sets)]) == 0
    assert main(["store", "import", str(sets), "--output", str(again)]) == 0
    assert embodiment_names(again, slower) == embodiment_names(store, slower)
    assert read_robot_records(again / "robots") == read_robot_records(store / "robots")


def test_export_reports_skipped_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(tmp_path / "store", episode_chunks("a"), episode_chunks("b", ends=False))
    argv = ["store", "export", str(tmp_path / "store"), "--format", "mcap", "--output", str(tmp_path / "out")]
    assert main(argv) == 0
    assert "1 episodes that never ended were skipped" in capsys.readouterr().err
    assert main([*argv, "--incomplete"]) == 0
    assert "never ended" not in capsys.readouterr().err


def test_import_into_its_own_dataset_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(usual_store(tmp_path / "store"), tmp_path / "set")
    before = files(tmp_path / "set")
    assert main(["store", "import", str(tmp_path / "set"), "--output", str(tmp_path / "set")]) == 2
    assert "choose another folder for the store" in capsys.readouterr().err and files(tmp_path / "set") == before
