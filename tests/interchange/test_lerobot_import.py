"""Foreign and broken datasets."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from interchange_kit import bring_in, episode_chunks, export, make_store, picture, read_store, usual_store
from msgspec.structs import replace

from hal.settings import NAME_PATTERN
from hal.spec import ArraySpec, RobotSpec
from user_sys.episode import EpisodeSource, Phase
from user_sys.errors import DataSetError
from user_sys.interchange.frames import encode_png
from user_sys.interchange.lerobot_import import ImportOptions, LerobotDataset, valid_name
from user_sys.robot_records import save_robot_record
from user_sys.store.labels import DeleteLabel
from user_sys.store.maintenance import add_labels, compact_store, merge_stores


def foreign(root: Path) -> Path:
    """A minimal dataset of another program: two episodes of 40 and 3 steps."""
    lengths = (40, 3)
    steps = sum(lengths)
    frame_index = np.concatenate([np.arange(n) for n in lengths])
    state = np.arange(steps * 2, dtype=np.float32).reshape(steps, 2)
    image = {"bytes": encode_png(picture("front", 0)), "path": "x.png"}
    table = pa.table(
        {
            "observation.state": pa.FixedSizeListArray.from_arrays(pa.array(state.reshape(-1)), 2),
            "observation.matrix": [[[1.0, 2.0], [3.0, 4.0]]] * steps,
            "action": pa.array(np.arange(steps, dtype=np.float32)),
            "observation.images.top": [image] * steps,
            "weather": ["sunny"] * steps,
            "phase": pa.array(np.full(steps, 77.0)),
            "timestamp": pa.array((frame_index / 20).astype(np.float32)),
            "frame_index": frame_index,
            "episode_index": np.repeat([0, 1], lengths),
            "index": np.arange(steps),
            "task_index": np.repeat([1, 0], lengths),
        }
    )
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": ["a", "b"]},
        "observation.matrix": {"dtype": "float64", "shape": [2, 2], "names": None},
        "action": {"dtype": "float32", "shape": [1], "names": {"motors": ["m"]}},
        "observation.images.top": {"dtype": "image", "shape": [24, 24, 3], "names": ["height", "width", "channels"]},
        "phase": {"dtype": "float64", "shape": [1]},
        "weather": {"dtype": "string", "shape": [1], "names": None},
        **{n: {"dtype": "int64", "shape": [1]} for n in ("frame_index", "episode_index", "index", "task_index")},
        "timestamp": {"dtype": "float32", "shape": [1]},
    }
    info = {
        "codebase_version": "v3.0",
        "robot_type": "so 101",
        "fps": 20,
        "features": features,
        "total_episodes": 2,
        "total_frames": steps,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "someone_elses_field": 1,
    }
    for folder in ("data/chunk-000", "meta/episodes/chunk-000"):
        (root / folder).mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    pq.write_table(table, root / "data/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [0, 1], "task": ["drop it", "Lift it!"]}), root / "meta/tasks.parquet")
    zeros = [0, 0]
    episodes = {"episode_index": [0, 1], "length": list(lengths), "data/chunk_index": zeros, "data/file_index": zeros}
    pq.write_table(pa.table(episodes), root / "meta/episodes/chunk-000/file-000.parquet")
    return root


def test_foreign_dataset_becomes_demonstrations(tmp_path: Path) -> None:
    done = bring_in(foreign(tmp_path / "set"), tmp_path / "store")
    assert (done.episodes, done.steps, done.skipped_features) == (2, 43, ("phase", "weather"))
    long, short = read_store(tmp_path / "store").values()
    assert (
        long.header.source is EpisodeSource.DEMO
        and long.header.task == "Lift-it"
        and long.header.sentence == "Lift it!"
    )
    assert long.header.robot == "so-101" and long.chunk_steps == (32, 8)
    assert long.header.end is not None and long.header.end.success is True
    assert long.columns["reward"].tolist() == [0.0] * 39 + [1.0]
    assert long.columns["terminated"].tolist() == [False] * 39 + [True]
    assert set(long.columns["phase"]) == {Phase.TELEOP} and set(long.columns["policy_version"]) == {-1}
    assert long.columns["t_capture_ns"][2] == pytest.approx(100_000_000, abs=10)
    assert long.columns["action"].shape == (40, 1) and long.columns["observation.matrix"].shape == (40, 2, 2)
    np.testing.assert_array_equal(long.columns["action.applied"], long.columns["action"])
    np.testing.assert_array_equal(short.columns["observation.state"], np.arange(80, 86).reshape(3, 2))
    np.testing.assert_array_equal(short.final["observation.state"], [84, 85])
    shown = long.frames["observation.images.top"]
    np.testing.assert_array_equal(shown[0], picture("front", 0))
    assert shown[1] is None and shown[32] is not None  # each chunk is self-contained
    np.testing.assert_array_equal(long.captured_ns["observation.images.top"], long.columns["t_capture_ns"])


def test_import_options_fill_in_missing_values(tmp_path: Path) -> None:
    options = ImportOptions(
        robot="left", task="lift", embodiment="0123", success=False, source=EpisodeSource.ONLINE, frames="jpeg"
    )
    bring_in(foreign(tmp_path / "set"), tmp_path / "store", options)
    episode = next(iter(read_store(tmp_path / "store").values()))
    header = episode.header
    assert (header.robot, header.task, header.embodiment, header.source) == (
        "left",
        "lift",
        "0123",
        EpisodeSource.ONLINE,
    )
    assert header.end is not None and header.end.success is False
    assert episode.columns["truncated"][-1] and not episode.columns["terminated"].any()
    assert not episode.columns["reward"].any() and set(episode.columns["phase"]) == {Phase.POLICY}
    assert isinstance(episode.frames["observation.images.top"][0], bytes)


@pytest.mark.parametrize(
    "sentences",
    [
        ("\u62ff\u8d77\u7ea2\u8272\u65b9\u5757", "\u6253\u5f00\u62bd\u5c49"),
        tuple(f"carefully pick up the small red wooden cube and then place it in a {each}" for each in ("box", "bag")),
        ("place it on the caf\u00e9", "place it on the caf\u00e8"),
    ],
    ids=["other alphabet", "long", "accents"],
)
def test_other_sentences_of_a_dataset_are_other_tasks(sentences: tuple[str, str]) -> None:
    names = [valid_name(sentence) for sentence in sentences]
    assert names[0] != names[1] and all(NAME_PATTERN.fullmatch(name) for name in names)
    assert [valid_name(plain) for plain in ("Lift it!", "", "a" * 60)] == ["Lift-it", "imported", "a" * 60]


def test_foreign_dataset_without_actions_becomes_demonstrations_without_actions(tmp_path: Path) -> None:
    root = foreign(tmp_path / "set")
    info = json.loads((root / "meta/info.json").read_text())
    del info["features"]["action"]
    (root / "meta/info.json").write_text(json.dumps(info))
    bring_in(root, tmp_path / "store")
    episode = next(iter(read_store(tmp_path / "store").values()))
    assert not {"action", "action.applied"} & episode.columns.keys()
    assert len(episode.frames["observation.images.top"]) == episode.steps == 40


def arm_in_rad(folder: Path) -> RobotSpec:
    """The spec of the arm of `foreign`, recorded in the store `folder`."""
    state = ArraySpec.from_rows("observation.state", [("a", "rad", -3.14, 3.14), ("b", "%", 0.0, 100.0)])
    action = ArraySpec.from_rows("action", [("m", "rad", -3.14, 3.14)])
    spec = RobotSpec(model="so-101", rate_hz=20.0, observation=(state,), action=action)
    save_robot_record(folder / "robots", "arm-0", spec)
    return spec


def test_degrees_of_a_dataset_become_rad_or_are_refused(tmp_path: Path) -> None:
    root, store = foreign(tmp_path / "set"), tmp_path / "store"
    options = ImportOptions(embodiment=arm_in_rad(store).embodiment)
    with pytest.raises(DataSetError, match=r"in observation.state, a is 78, and its bound 3.14 rad; .* --use-degrees"):
        bring_in(root, store, options)
    assert bring_in(root, store, replace(options, use_degrees=True)).episodes == 2
    long, short = read_store(store).values()
    np.testing.assert_allclose(long.columns["observation.state"][:, 0], np.radians(np.arange(0, 80, 2)), rtol=1e-6)
    np.testing.assert_array_equal(long.columns["observation.state"][:, 1], np.arange(1, 81, 2))
    for name in ("action", "action.applied"):
        np.testing.assert_allclose(long.columns[name][:, 0], np.radians(np.arange(40)), rtol=1e-6)
    np.testing.assert_allclose(short.final["observation.state"], [np.radians(84), 85], rtol=1e-6)


def test_degrees_of_an_unknown_robot_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataSetError, match="needs the spec of embodiment 0123: import into the store of a run"):
        bring_in(foreign(tmp_path / "set"), tmp_path / "store", ImportOptions(embodiment="0123", use_degrees=True))


def add_feature(root: Path, name: str, column: object, **declared: object) -> None:
    """Adds a feature, or replaces its values and what is declared of it."""
    set_feature(name, **declared)(root)
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    others = table.drop_columns([name] if name in table.column_names else [])
    pq.write_table(others.append_column(name, pa.array(column)), path)


def images(camera: str) -> list[dict[str, object]]:
    return [{"bytes": encode_png(picture(camera, 0)), "path": "x.png"}] * 43


SPOKEN = pa.array([[{"role": "user", "content": "hi"}], *[[]] * 42])


@pytest.mark.parametrize(
    ("name", "column", "declared"),
    [
        ("observation.images.depth", images("front"), {"shape": [24, 24, 3], "info": {"is_depth_map": True}}),
        ("observation.depth", images("front"), {"shape": [24, 24, 3], "info": {"video.is_depth_map": True}}),
        ("observation.depth", images("front"), {"shape": [24, 24, 3], "video_info": {"video.is_depth_map": True}}),
        ("observation.images.depth", images("front"), {"shape": [24, 24, 1]}),
        ("observation.images.depth", images("front"), {"shape": [1, 24, 24]}),
        ("observation.images.mask", images("front"), {"shape": [24, 24]}),
        ("observation.language", ["lift"] * 43, {"dtype": "string"}),
        ("language_events", SPOKEN, {"dtype": "language"}),
        ("observation.events", SPOKEN, {"dtype": "language"}),
        ("quality", [None, *[1.0] * 42], {}),
    ],
)
def test_features_without_a_column_are_skipped(
    tmp_path: Path, name: str, column: object, declared: dict[str, object]
) -> None:
    root = foreign(tmp_path / "set")
    is_picture = name.startswith(("observation.images", "observation.depth"))
    add_feature(root, name, column, **({"dtype": "image"} if is_picture else {}) | declared)
    done = bring_in(root, tmp_path / "store")
    assert done.episodes == 2 and name in done.skipped_features
    episode = next(iter(read_store(tmp_path / "store").values()))
    assert [*episode.frames] == ["observation.images.top"] and name not in episode.columns


def test_camera_may_be_declared_with_its_channels_first(tmp_path: Path) -> None:
    root, axes = foreign(tmp_path / "set"), ["channels", "height", "width"]
    add_feature(root, "observation.images.top", images("wrist"), shape=[3, 32, 48], names=axes)
    assert bring_in(root, tmp_path / "store").skipped_features == ("phase", "weather")
    shown = next(iter(read_store(tmp_path / "store").values())).frames["observation.images.top"]
    np.testing.assert_array_equal(shown[0], picture("wrist", 0))


def test_episode_with_several_tasks_is_an_error(tmp_path: Path) -> None:
    root = foreign(tmp_path / "set")
    add_feature(root, "task_index", np.array([1] * 20 + [0] * 23), dtype="int64")
    with pytest.raises(DataSetError, match="episode 0 has several tasks: 'Lift it!', then 'drop it'; .* divide it"):
        bring_in(root, tmp_path / "store")


def test_foreign_dataset_is_recognised_after_a_move(tmp_path: Path) -> None:
    foreign(tmp_path / "set")
    bring_in(tmp_path / "set", tmp_path / "store")
    (tmp_path / "set").rename(tmp_path / "moved")
    assert bring_in(tmp_path / "moved", tmp_path / "store").already_stored == 2


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize(
    "told",
    [
        {"embodiment": "0123"},
        {"task": "lift"},
        {"source": EpisodeSource.ONLINE},
        {"success": False},
        {"success": None},
        {"frames": "jpeg"},
    ],
    ids=str,
)
def test_wrong_import_can_be_corrected(tmp_path: Path, told: dict[str, Any], compacted: bool) -> None:
    root, store = foreign(tmp_path / "set"), tmp_path / "store"
    assert bring_in(root, store).episodes == 2
    add_labels(store, [DeleteLabel(episode=name, labeller="ada", at_unix_ns=1) for name in read_store(store)])
    if compacted:
        compact_store(store)
    for expected in ((2, 0), (0, 2)):
        done = bring_in(root, store, ImportOptions(**told))
        assert (done.episodes, done.already_stored) == expected
    assert bring_in(root, store).deleted == 2
    for each in read_store(store).values():
        header, (first, *_) = each.header, each.frames["observation.images.top"]
        assert header.end is not None
        found = {"success": header.end.success, "frames": "jpeg" if isinstance(first, bytes) else "raw"}
        assert {name: found[name] if name in found else getattr(header, name) for name in told} == told


def test_imports_of_one_dataset_at_two_sites_are_merged(tmp_path: Path) -> None:
    stores = [tmp_path / name for name in ("a", "b")]
    root = foreign(tmp_path / "set")
    for written_unix_s, store in enumerate(stores, 1_700_000_000):
        for path in root.rglob("*"):
            os.utime(path, (written_unix_s, written_unix_s))  # as after a download
        bring_in(root, store, ImportOptions(source=EpisodeSource.ONLINE))
    report = merge_stores(stores, tmp_path / "all")
    assert (report.chunks, report.duplicates) == (3, 3)
    started = {each.header.started_unix_ns for each in read_store(tmp_path / "all").values()}
    assert started == {0}, "before the start of every run, in whose success they do not count"


def film(root: Path, shown: int) -> Path:
    """A dataset of pictures only: each shows ``picture("front", shown)``."""
    info = json.loads((foreign(root) / "meta/info.json").read_text())
    for name in ("observation.state", "observation.matrix", "action", "phase", "weather"):
        del info["features"][name]
    (root / "meta/info.json").write_text(json.dumps(info))
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    frames = pa.array([{"bytes": encode_png(picture("front", shown)), "path": "x.png"}] * len(table))
    column = table.column_names.index("observation.images.top")
    pq.write_table(table.set_column(column, "observation.images.top", frames), path)
    return root


def test_films_of_one_task_are_told_apart_by_their_pictures(tmp_path: Path) -> None:
    for shown, expected in ((0, (2, 0)), (9, (2, 0)), (0, (0, 2))):
        root = film(tmp_path / f"set-{len(list(tmp_path.iterdir()))}", shown)
        done = bring_in(root, tmp_path / "store")
        assert (done.episodes, done.already_stored) == expected
    assert len(read_store(tmp_path / "store")) == 4


def set_info(**changes: object) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        info = json.loads((root / "meta/info.json").read_text())
        (root / "meta/info.json").write_text(json.dumps(info | changes))

    return change


def set_feature(name: str, **changes: object) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        info = json.loads((root / "meta/info.json").read_text())
        info["features"].setdefault(name, {"dtype": "float32", "shape": [1]}).update(changes)
        (root / "meta/info.json").write_text(json.dumps(info))

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()


def truncate(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:-40])


def drop_rows(root: Path) -> None:
    path = root / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 8), path)


def empty_episode(root: Path) -> None:
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    number = table.column_names.index("length")
    pq.write_table(table.set_column(number, "length", pa.array([10, 0, 5])), path)


def rename_source(root: Path) -> None:
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    number = table.column_names.index("source")
    pq.write_table(table.set_column(number, "source", pa.array(["moon"] * len(table))), path)


WRIST = "observation.images.wrist"


def set_video_start(value: float | None) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "meta/episodes/chunk-000/file-000.parquet"
        table = pq.read_table(path)
        name = f"videos/{WRIST}/from_timestamp"
        starts = pa.array([value] * len(table), pa.float64())
        pq.write_table(table.set_column(table.column_names.index(name), name, starts), path)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("meta/info.json"), "is not a LeRobot dataset, or an unfinished one"),
        (remove("meta/tasks.parquet"), "tasks.parquet cannot be read: it is missing"),
        (remove("data/chunk-000/file-000.parquet"), "file-000.parquet cannot be read: it is missing"),
        (remove("meta/episodes/chunk-000/file-000.parquet"), "has no file; the dataset is incomplete"),
        (remove(f"videos/{WRIST}/chunk-000/file-000.mp4"), "is not a readable video"),
        (truncate("data/chunk-000/file-000.parquet"), "data/.*file-000.parquet cannot be read: .*again"),
        (truncate("meta/episodes/chunk-000/file-000.parquet"), "episodes/.*file-000.parquet cannot be read"),
        (lambda root: (root / "meta/info.json").write_text("{}"), "is not valid for LeRobot v3"),
        (lambda root: (root / "meta/info.json").write_bytes(b'{"fps": "\x90"}'), "is not valid for LeRobot v3"),
        (set_info(codebase_version="v2.1"), "v2.1; v3 is required. Convert it"),
        (set_info(fps=0), "says 0.* frames a second"),
        (set_info(data_path="{chunk_index:0999999999d}"), "has an unknown field"),
        (set_info(data_path="{chunk_index.real}"), "has an unknown field"),
        (set_info(data_path="{file_index"), "has an unknown field"),
        (set_info(data_path="../{file_index}"), "'../0' is outside the dataset"),
        (set_info(data_path="/{file_index}"), "'/0' is outside the dataset"),
        (set_feature("observation.state", dtype="S999999999"), "'observation.state' has the dtype 'S999999999'"),
        (set_feature("observation.state", shape=[4]), "'observation.state' does not hold float32 .4,. per step"),
        (set_feature("observation.force"), "has no column 'observation.force'"),
        (set_feature(WRIST, shape=[64, 64, 3]), "has a frame of .32, 48.; meta/info.json declares .64, 64."),
        (empty_episode, "episode 1 has 0 steps"),
        (rename_source, "has the unknown source 'moon'; give --source demo.online.evaluation"),
        *(
            (set_video_start(each), f"episode 0: its video of '{WRIST}' starts at {text} s; download or export")
            for each, text in ((None, "None"), (math.nan, "nan"), (math.inf, "inf"), (-1e30, "-1e.30"), (1e30, "1e.30"))
        ),
        (set_video_start(1e8), "ends before|damaged"),
        (drop_rows, "fewer than the 10 steps|has fewer steps than"),
    ],
)
def test_broken_dataset_is_an_error(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    export(usual_store(tmp_path / "store"), tmp_path / "set", video=True)
    damage(tmp_path / "set")
    with pytest.raises(DataSetError, match=message) as caught:
        bring_in(tmp_path / "set", tmp_path / "again")
    assert "\n" not in str(caught.value)


def test_old_dataset_is_an_error_with_the_commands_that_convert_it(tmp_path: Path) -> None:
    """LeRobot 0.4 expects the folder below ``--root``; none uploads it."""
    root = foreign(tmp_path / "old-set")
    set_info(codebase_version="v2.1")(root)
    with pytest.raises(DataSetError) as caught:
        LerobotDataset.open(root)
    command = "convert_dataset_v21_to_v30 --push-to-hub false --repo-id old-set --root"
    assert f"python -m lerobot.scripts.{command} {root};" in str(caught.value)
    assert str(caught.value).endswith(f"python -m lerobot.datasets.v30.{command} {tmp_path}")


@pytest.mark.parametrize("column", ["success", "reward_source"])
def test_column_missing_beside_complete_means_unknown(tmp_path: Path, column: str) -> None:
    export(usual_store(tmp_path / "store"), tmp_path / "set")
    path = tmp_path / "set/meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).drop_columns([f"user/{column}"]), path)
    bring_in(tmp_path / "set", tmp_path / "again")
    end = read_store(tmp_path / "again")["a"].header.end
    assert end is not None and getattr(end, column) == {"success": None, "reward_source": "import"}[column]


def test_short_video_is_an_error(tmp_path: Path) -> None:
    for name, steps in (("short", 4), ("long", 9)):
        store = make_store(tmp_path / f"{name}.store", episode_chunks("a", steps, cameras=("wrist",)))
        export(store, tmp_path / name, video=True)
    video = f"videos/{WRIST}/chunk-000/file-000.mp4"
    (tmp_path / "long" / video).write_bytes((tmp_path / "short" / video).read_bytes())
    with pytest.raises(DataSetError, match="ends before 0.4"):
        bring_in(tmp_path / "long", tmp_path / "again")
