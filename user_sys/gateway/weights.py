"""Weights on their way from the learner to the robots: kept on disk, newest wins, one version under way a robot."""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from hal.durable import remove_durably, replace_durably
from user_sys.errors import TunnelError, WireError
from user_sys.messages import WeightsManifest, WeightsReceived
from user_sys.tunnel.server import Peer
from user_sys.tunnel.wire import AnyMessage, Payload

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
WAIT_S = 0.5
_LENGTH = struct.Struct("<I")
_SUFFIX = ".weights"

Send = Callable[[str, AnyMessage, Payload | None], bool]


class WeightsShelf:
    """The last versions in a folder, one file each: header length, manifest, payload. One thread calls it."""

    def __init__(self, folder: Path, kept: int) -> None:
        self._folder = folder
        self._kept = max(1, kept)
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, manifest: WeightsManifest, payload: Payload) -> None:
        """Durable on return; all but the last few are then deleted. Raises WireError: not as described, or OSError."""
        _verify(manifest, payload)
        files = self._files()
        serial = int(files[-1].name.split("-")[0]) + 1 if files else 0
        header = msgspec.msgpack.encode(manifest)
        path = self._folder / f"{serial:010d}-v{manifest.version}{_SUFFIX}"
        replace_durably(path, b"".join((_LENGTH.pack(len(header)), header, payload)))
        for old in [*files, path][: -self._kept]:
            remove_durably(old)

    def newest(self) -> tuple[WeightsManifest, bytes] | None:
        """The last version that is whole, or None. Damaged files are reported and passed over."""
        for path in reversed(self._files()):
            try:
                return self._read(path)
            except (OSError, struct.error, msgspec.MsgspecError, WireError) as error:
                logger.warning("weights.damaged file=%s: %s", path, error)
        return None

    def _files(self) -> list[Path]:
        return sorted(path for path in self._folder.glob(f"*{_SUFFIX}") if path.name[:10].isdigit())

    @staticmethod
    def _read(path: Path) -> tuple[WeightsManifest, bytes]:
        content = path.read_bytes()
        length = _LENGTH.unpack_from(content)[0]
        manifest = msgspec.msgpack.decode(content[_LENGTH.size : _LENGTH.size + length], type=WeightsManifest)
        payload = content[_LENGTH.size + length :]
        _verify(manifest, payload)
        return manifest, payload


def _verify(manifest: WeightsManifest, payload: Payload) -> None:
    if len(payload) != manifest.size_bytes:
        raise WireError(
            f"weights {manifest.version} have {len(payload)} bytes; the manifest says {manifest.size_bytes}"
        )
    if hashlib.blake2b(payload, digest_size=32).hexdigest() != manifest.digest:
        raise WireError(f"weights {manifest.version} do not have the digest that the manifest says")


class WeightsRelay:
    """Puts each published version on the shelf, confirms it, and pushes the newest to every robot.

    Disk work happens in a thread of its own; the other methods never block and may be called from any thread.
    """

    def __init__(self, shelf: WeightsShelf, send: Send) -> None:
        self.failure: BaseException | None = None
        self.pushed = 0
        self._shelf = shelf
        self._send = send
        self._newest = shelf.newest()
        self._published: tuple[Peer, WeightsManifest, Payload] | None = None
        self._under_way: dict[str, WeightsManifest | None] = {}
        self._has: dict[str, WeightsManifest] = {}
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)

    @property
    def version(self) -> int:
        """The newest version on the shelf; -1 before the first."""
        newest = self._newest
        return newest[0].version if newest else -1

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def close(self) -> None:
        """Ends after the version in hand. Raises TunnelError when the disk takes longer than `STOP_TIMEOUT_S`."""
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TunnelError(f"the weights thread did not end within {STOP_TIMEOUT_S} s: the disk is stuck")

    def publish(self, peer: Peer, manifest: WeightsManifest, payload: Payload) -> None:
        """A learner's new version; replaces one that is not on the shelf yet."""
        with self._changed:
            self._published = (peer, manifest, payload)
            self._changed.notify()

    def robot_opened(self, name: str) -> None:
        with self._changed:
            self._under_way[name] = None
            self._has.pop(name, None)
        self._push(name)

    def robot_closed(self, name: str) -> None:
        with self._changed:
            self._under_way.pop(name, None)

    def received(self, name: str, version: int) -> None:
        """A robot took `version` over and has room for the next."""
        with self._changed:
            sent = self._under_way.get(name)
            if sent is None or sent.version != version:
                return
            self._has[name] = sent
            self._under_way[name] = None
        self._push(name)

    def _push(self, name: str) -> None:
        with self._changed:
            newest = self._newest
            if newest is None or name not in self._under_way:
                return
            if self._under_way[name] is not None or self._has.get(name) is newest[0]:
                return
            if self._send(name, *newest):
                self._under_way[name] = newest[0]
                self.pushed += 1

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                published = self._next()
                if published is not None:
                    self._shelve(*published)
        except Exception as error:
            logger.exception("weights.failed")
            self.failure = error

    def _next(self) -> tuple[Peer, WeightsManifest, Payload] | None:
        with self._changed:
            if self._published is None:
                self._changed.wait(WAIT_S)
            published, self._published = self._published, None
            return published

    def _shelve(self, peer: Peer, manifest: WeightsManifest, payload: Payload) -> None:
        try:
            self._shelf.keep(manifest, payload)
        except OSError as error:  # robots get it all the same; a restarted gateway hands on an older one until the next
            logger.error("weights.not_kept version=%d: %s", manifest.version, error)
        except WireError as error:
            logger.error("weights.refused peer=%s: %s", peer.name, error)
            self._confirm(peer, manifest)
            return
        with self._changed:
            self._newest = (manifest, bytes(payload))
            robots = list(self._under_way)
        for name in robots:
            self._push(name)
        self._confirm(peer, manifest)

    def _confirm(self, peer: Peer, manifest: WeightsManifest) -> None:
        self._send(peer.name, WeightsReceived(version=manifest.version), None)
