"""LeRobot reads our exports, and we read LeRobot's datasets. Needs ``make test-lerobot``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from interchange_kit import bring_in, export, pictures, read_store, usual_store

from user_sys.codec import Array
from user_sys.episode import EpisodeSource, Phase

pytestmark = pytest.mark.lerobot

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("USER_SYS_LEROBOT_PYTHON", ROOT / ".venv-lerobot/bin/python"))
PEER = Path(__file__).with_name("lerobot_peer.py")
PEER_TIMEOUT_S = 240


def peer(tmp_path: Path, *arguments: object) -> None:
    assert PYTHON.exists(), f"{PYTHON} is missing: `make test-lerobot` sets it up"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": ""}
    done = subprocess.run(
        [str(PYTHON), str(PEER), *map(str, arguments)],
        env=environment,
        timeout=PEER_TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def read_by_lerobot(tmp_path: Path, root: Path) -> dict[str, Array]:
    peer(tmp_path, "read", root, tmp_path / "items.npz")
    with np.load(tmp_path / "items.npz") as found:
        return dict(found)


@pytest.mark.parametrize(("video", "frames_within"), [(False, 1.0), (True, 6.0)])
def test_lerobot_reads_our_export(tmp_path: Path, video: bool, frames_within: float) -> None:
    store = usual_store(tmp_path / "store")
    export(store, tmp_path / "set", video=video, file_mb=0.012)
    found = read_by_lerobot(tmp_path, tmp_path / "set")
    episodes = list(read_store(store).values())

    def column(name: str) -> Array:
        return np.concatenate([episode.columns[name] for episode in episodes])

    for ours, theirs in {
        **{name: name for name in ("observation.state", "action", "phase", "safety", "policy_version", "log_prob")},
        **{"action.applied": "applied_action", "reward": "next.reward", "terminated": "next.terminated"},
        **{"truncated": "next.truncated", "t_capture_ns": "t_capture_ns", "t_command_ns": "t_command_ns"},
    }.items():
        np.testing.assert_array_equal(found[theirs], column(ours), err_msg=theirs)
    assert found["task"].tolist() == ["lift the cube"] * 10 + ["push the cube"] * 7 + ["lift the cube"] * 5
    assert found["source"].tolist() == ["online"] * 10 + ["demo"] * 7 + ["online"] * 5
    assert set(found["robot"]) == {"panda-0"} and set(found["embodiment"]) == {"e1"}
    for camera in ("wrist", "front"):
        times = np.concatenate([each.captured_ns[f"observation.images.{camera}"] for each in episodes])
        np.testing.assert_array_equal(found[f"t_capture_ns.{camera}"], times)
        shown = found[f"observation.images.{camera}"].transpose(0, 2, 3, 1) * 255
        for ours, theirs in zip([p for each in episodes for p in pictures(each, camera)], shown, strict=True):
            assert np.abs(ours - theirs).mean() <= frames_within


def test_lerobot_reads_windows_episodes_and_policy_features(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    export(store, tmp_path / "set")
    found = read_by_lerobot(tmp_path, tmp_path / "set")
    action = read_store(store)["a"].columns["action"]
    np.testing.assert_array_equal(found["windows"][3], action[3:6])
    np.testing.assert_array_equal(found["windows"][9], action[[9, 9, 9]])  # padded at the episode's end
    assert found["second_episode_only"] == 7
    assert set(found["policy_features"].tolist()) == {
        "observation.state=STATE",
        "action=ACTION",
        "observation.images.wrist=VISUAL",
        "observation.images.front=VISUAL",
    }
    state = np.concatenate([each.columns["observation.state"] for each in read_store(store).values()])
    np.testing.assert_allclose(found["state_mean"], state.astype(float).mean(0))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_import_of_a_lerobot_recording(tmp_path: Path, kind: str) -> None:
    peer(tmp_path, "write", tmp_path / "set", kind)
    done = bring_in(tmp_path / "set", tmp_path / "store")
    assert (done.episodes, done.steps, done.skipped_features) == (2, 45, ())
    short, long = read_store(tmp_path / "store").values()
    assert (short.steps, long.steps, long.header.task, long.header.robot) == (5, 40, "task-1", "so101")
    assert long.header.source is EpisodeSource.DEMO and set(long.columns["phase"]) == {Phase.TELEOP}
    np.testing.assert_array_equal(long.columns["observation.state"], [[1, step, 0.5] for step in range(40)])
    np.testing.assert_array_equal(long.columns["action"], [[step, -step] for step in range(40)])
    np.testing.assert_array_equal(long.columns["reward"], np.arange(40, dtype=np.float32) / 10)
    for step, image in enumerate(pictures(long, "top")):
        expected = np.array([5 * step, 100, 40])
        within = 0 if kind == "image" else 12
        assert np.abs(image.reshape(-1, 3).mean(0) - expected).max() <= within
    assert bring_in(tmp_path / "set", tmp_path / "store").already_stored == 2
