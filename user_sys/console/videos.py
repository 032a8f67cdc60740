"""Episodes as H.264 videos, which browsers play: ``python -m user_sys.console.videos STORE EPISODE RATE_HZ FILE``.

A video shows all cameras in a grid, with one frame for each step. The console encodes it once, in a process of the
lowest priority: a thread of that priority would delay e-stops while it held the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from hal.errors import install_hint
from hal.process_supervisor import bound_argv
from user_sys.errors import DataSetError, StoreError, UserSysError
from user_sys.interchange.episodes import EpisodeReader
from user_sys.interchange.frames import decode_frame, frame_size
from user_sys.store.store import StoreReader

MAX_CACHE_BYTES = 1 << 30
WAIT_S = 30.0  # for the video before
MAX_WAITING = 2
ENCODE_TIMEOUT_S = 300.0
COLUMNS = 2


class EpisodeVideos:
    """The videos of a store's complete episodes, in a folder. Any thread may call it.

    Args:
        store: the folder of the store.
        folder: the least recently played videos in it are deleted when all take over `max_bytes`.
    """

    def __init__(self, store: Path, folder: Path, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._store, self._folder, self._max_bytes = store, folder, max_bytes
        self._encoding, self._places = threading.Lock(), threading.Semaphore(1 + MAX_WAITING)

    def file(self, episode: str, rate_hz: float) -> Path:
        """The MP4 file of a complete episode, whose steps it shows at `rate_hz`. Blocks while it is encoded.

        Raises:
            StoreError: it cannot be encoded, or other videos are being encoded for `WAIT_S`, or `MAX_WAITING` wait.
        """
        path = self._folder / f"{hashlib.blake2b(episode.encode(), digest_size=16).hexdigest()}.mp4"
        with contextlib.suppress(OSError):  # it has to be encoded
            os.utime(path)
            return path
        if not self._places.acquire(blocking=False):  # waiting would take a thread of the pool from other requests
            raise StoreError("other videos are being encoded; try again")
        is_alone = False
        try:
            if not (is_alone := self._encoding.acquire(timeout=WAIT_S)):
                raise StoreError(f"other videos have been encoded for {WAIT_S:.0f} s; try again")
            if not path.exists():
                self._encode(episode, rate_hz, path)
            os.utime(path)
            self._delete_old(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error}") from None
        finally:
            if is_alone:
                self._encoding.release()
            self._places.release()
        return path

    def _encode(self, episode: str, rate_hz: float, path: Path) -> None:
        self._folder.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        arguments = ["-m", __name__, str(self._store), episode, f"{rate_hz:g}", str(part)]
        program = bound_argv(sys.executable, [sys.executable, *arguments])  # it ends with a killed console
        try:
            done = subprocess.run(
                ["nice", "-n", "19", *program], capture_output=True, text=True, timeout=ENCODE_TIMEOUT_S, check=False
            )
            if done.returncode:
                reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
                raise StoreError(f"{episode} cannot be shown as a video: {reason}")
            part.replace(path)
        except subprocess.TimeoutExpired:
            raise StoreError(f"the video of {episode} takes over {ENCODE_TIMEOUT_S:.0f} s to encode") from None
        finally:
            part.unlink(missing_ok=True)

    def _delete_old(self, newest: Path) -> None:
        found = sorted((each.stat().st_mtime_ns, each.stat().st_size, each) for each in self._folder.glob("*.mp4"))
        size = sum(each[1] for each in found)
        for _, each_size, path in found:
            if size > self._max_bytes and path != newest:
                path.unlink()
                size -= each_size


def write_video(store: Path, episode: str, rate_hz: float, path: Path) -> None:
    """Encodes an episode. Before a camera's first frame its part is black.

    Raises:
        StoreError: the store cannot be read.
        DataSetError: it has no pictures, or a frame or the encoder fails.
    """
    from user_sys.video import VideoWriter  # imports PyAV

    with StoreReader.open(store) as reader:
        stored = EpisodeReader(reader).read(episode)
    cameras = [frames for _, frames in sorted(stored.frames.items()) if any(each is not None for each in frames)]
    if not cameras:
        raise DataSetError(f"{episode} has no pictures")
    sizes = [frame_size(next(each for each in frames if each is not None)) for frames in cameras]
    height, width = (2 * -(-max(side) // 2) for side in zip(*sizes, strict=True))  # even
    rows, columns = -(-len(cameras) // COLUMNS), min(COLUMNS, len(cameras))
    picture = np.zeros((rows * height, columns * width, 3), np.uint8)
    writer = VideoWriter(path, picture.shape[0], picture.shape[1], rate_hz)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.abort)
        for step in range(stored.steps):
            for number, frames in enumerate(cameras):
                if (frame := frames[step]) is not None:
                    top, left = number // COLUMNS * height, number % COLUMNS * width
                    shown = decode_frame(frame)
                    picture[top : top + shown.shape[0], left : left + shown.shape[1]] = shown
            writer.write(picture)
        stack.pop_all()
        writer.close()


def main(argv: list[str]) -> int:
    """Writes one video; prints why not."""
    try:
        write_video(Path(argv[0]), argv[1], float(argv[2]), Path(argv[3]))
    except ImportError as error:
        sys.stderr.write(f"{error}: {install_hint('interchange')}\n")
        return 2
    except (UserSysError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
