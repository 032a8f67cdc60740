"""Pictures and videos of ``user-sys store inspect``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hal.spec import ArraySpec, RobotSpec
from user_sys.commands.episode_pictures import PHASE_COLOURS
from user_sys.commands.main import main
from user_sys.episode import Chunk, ChunkHeader, EpisodeEnd, EpisodeSource, Phase, frame_columns
from user_sys.interchange.frames import encode_jpeg
from user_sys.interchange.video import VideoReader
from user_sys.robot_records import save_robot_record
from user_sys.store.store import StoreWriter

STEPS = 12


def write(path: Path, episode: str, *, cameras: bool = True, embodiment: str = "e1") -> None:
    """A grey JPEG camera that misses every other frame, a square raw one, and a correction at the end."""
    pictures = [np.full((32, 48, 3), 20 * n, np.uint8) for n in range(STEPS)]
    jpeg = [encode_jpeg(picture) if n % 2 == 0 else None for n, picture in enumerate(pictures)]
    raw = [np.full((24, 24, 3), 250 - 20 * n, np.uint8) for n in range(STEPS)]
    columns = {
        "action": np.linspace([0, 1, 2], [1, 0, 2], STEPS, dtype=np.float32),
        "reward": np.eye(STEPS, dtype=np.float32)[-1],
        "phase": np.array([Phase.POLICY] * 6 + [Phase.CORRECTION] * 6, np.uint8),
        "t_capture_ns": np.arange(STEPS, dtype=np.int64) * 50_000_000,
    }
    if cameras:
        columns |= frame_columns("observation.images.front", jpeg, columns["t_capture_ns"])
        columns |= frame_columns("observation.images.wrist", raw, columns["t_capture_ns"])
    header = ChunkHeader(
        episode=episode,
        index=0,
        first_step=0,
        steps=STEPS,
        robot="panda-0",
        embodiment=embodiment,
        task="lift",
        sentence="lift the cube",
        source=EpisodeSource.ONLINE,
        seed=0,
        started_unix_ns=1,
        end=EpisodeEnd(steps=STEPS, success=True),
    )
    with StoreWriter.open(path) as writer:
        writer.append(Chunk(header, columns, {}).encode())


def share_of(picture: Path, colour: str) -> float:
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    wanted = [int(colour[n : n + 2], 16) for n in (1, 3, 5)]
    return float((pixels == wanted).all(axis=2).mean())


def test_picture_shows_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for episode in ("a", "b"):
        write(tmp_path / "store", episode)
    assert main(["store", "inspect", str(tmp_path / "store"), "--pictures", str(tmp_path / "out")]) == 0
    assert "2 episodes drawn" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["a.png", "b.png", "episodes.png"]
    for name in ("a.png", "episodes.png"):
        shares = {phase: share_of(tmp_path / "out" / name, colour) for phase, colour in PHASE_COLOURS.items()}
        assert shares["policy"] > 0.002 and shares["correction"] > 0.002
        assert shares["teleop"] == shares["recovery"] == 0
    assert (tmp_path / "out/a.png").stat().st_size < 200_000


def test_picture_without_cameras_shows_curves(tmp_path: Path) -> None:
    write(tmp_path / "store", "a", cameras=False)
    assert main(["store", "inspect", str(tmp_path / "store"), "--pictures", str(tmp_path / "out")]) == 0
    assert share_of(tmp_path / "out/a.png", "#2e7d5b") > 0.001  # the reward


def test_video_has_one_frame_per_step(tmp_path: Path) -> None:
    write(tmp_path / "store", "a")
    assert main(["store", "inspect", str(tmp_path / "store"), "--episode", "a", "--video", str(tmp_path / "out")]) == 0
    video = VideoReader(tmp_path / "out/a.mp4")
    frames = list(video.read(0.0, STEPS, 20.0))
    video.close()
    assert frames[0].shape[0] == 258 and frames[0].shape[1] >= 612
    front = [int(frame[100, 100].mean()) for frame in frames]
    expected = [20 * (n - n % 2) for n in range(STEPS)]
    np.testing.assert_allclose(front, expected, atol=8)
    assert frames[0][1, 300, 2] > frames[0][1, 300, 0] and frames[-1][1, 300, 0] > frames[-1][1, 300, 2]


def test_video_uses_rate_of_robot_spec(tmp_path: Path) -> None:
    action = ArraySpec(name="action", labels=("x",), units=("m",), low=(-1.0,), high=(1.0,))
    spec = RobotSpec(model="fast", rate_hz=4.0, observation=(), action=action, cameras=())
    save_robot_record(tmp_path / "store/robots", "panda-0", spec)
    write(tmp_path / "store", "a", embodiment=spec.embodiment)
    assert main(["store", "inspect", str(tmp_path / "store"), "--video", str(tmp_path / "out")]) == 0
    video = VideoReader(tmp_path / "out/a.mp4")
    assert len(list(video.read(0.0, STEPS, 4.0))) == STEPS  # and not 20 a second, as the clock says
    video.close()


def test_video_without_camera_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "store", "a", cameras=False)
    assert main(["store", "inspect", str(tmp_path / "store"), "--video", str(tmp_path / "out")]) == 2
    assert "no camera" in capsys.readouterr().err
