"""Pictures of ``user-sys store inspect``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from episode_kit import chunk_header
from PIL import Image

from user_sys.commands.main import main
from user_sys.commands.store_inspect import PHASE_COLOURS, REPEAT_COLOUR
from user_sys.episode import Chunk, EpisodeEnd, Phase, frame_columns
from user_sys.interchange.frames import encode_jpeg
from user_sys.run.metrics import SHEET_FRAMES, RunLogger
from user_sys.store.store import StoreWriter

STEPS = 12


@dataclass(frozen=True)
class PictureRun:
    seed: int = 1


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
    header = chunk_header(episode, STEPS, embodiment=embodiment, end=EpisodeEnd(steps=STEPS, success=True))
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
    assert share_of(tmp_path / "out/a.png", REPEAT_COLOUR) > 0, "a repeated frame names its step"
    assert (tmp_path / "out/a.png").stat().st_size < 200_000


def test_picture_without_cameras_shows_curves(tmp_path: Path) -> None:
    write(tmp_path / "store", "a", cameras=False)
    assert main(["store", "inspect", str(tmp_path / "store"), "--pictures", str(tmp_path / "out")]) == 0
    assert share_of(tmp_path / "out/a.png", "#2e7d5b") > 0.001  # the reward


def test_wandb_gets_contact_sheet_of_newest_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-files"))
    write(tmp_path / "store", "a")
    write(tmp_path / "store", "b", cameras=False)
    logger = RunLogger(tmp_path, PictureRun())
    logger.log("learner", 1, {"loss": 0.5})
    logger.close({"success": 1.0})
    (sheet,) = (tmp_path / "wandb").glob("offline-run-*/files/media/images/episodes_*.png")
    with Image.open(sheet) as row:
        assert row.size == (SHEET_FRAMES * 48, 32)
        assert row.getpixel((5, 5)) == (0, 0, 0) and row.getpixel((SHEET_FRAMES * 48 - 5, 5)) == (200, 200, 200)
