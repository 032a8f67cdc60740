"""What is fuzzed: parsers of bytes that others may have written, the errors they may raise, and valid examples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zmq

from hal.errors import HalError
from user_sys.codec import decode_packet
from user_sys.config import load
from user_sys.episode import Chunk, ChunkHeader, Source, decode_chunk
from user_sys.errors import ConfigError, DataSetError, RunError, StoreError, WireError
from user_sys.interchange.frames import decode, decode_file, encode_jpeg, encode_png
from user_sys.interchange.lerobot_format import INFO, TASKS
from user_sys.interchange.lerobot_read import LerobotDataSet
from user_sys.messages import ChunkOffer, Heartbeat, Hello, WeightsGrains
from user_sys.store.block import decode_block, summarise_records
from user_sys.store.frame import RecordRef
from user_sys.store.labels import DeleteLabel, RewardLabel, SuccessLabel, decode_label, encode_label
from user_sys.store.log_reader import LogReader
from user_sys.store.log_writer import LogWriter
from user_sys.store.store import CHUNK
from user_sys.topology import RunConfig
from user_sys.tunnel import wire
from user_sys.tunnel.keys import Keyring, load_keypair, load_public_key
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.wire import Channel, Envelope, channel_of, encode, protocol_of_hello
from user_sys.weights.records import ParcelInfo, check_parcel, decode_record

_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
_LIMITS = TunnelLimits()


@dataclass(frozen=True)
class Target:
    """`parse` takes any bytes, and raises nothing but `allowed`."""

    parse: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    examples: tuple[bytes, ...] = ()


def _chunk() -> bytes:
    header = ChunkHeader(episode="e", index=0, first_step=0, steps=2, robot="r", embodiment="m", task="t", sentence="s",
                         source=Source.ONLINE, seed=0, started_unix_ns=0)  # fmt: skip
    return Chunk(header, {"reward": np.zeros(2, np.float32)}, {}).encode()


def _block() -> bytes:
    chunk = _chunk()
    return summarise_records([(RecordRef(0, 0, len(chunk), CHUNK), memoryview(chunk))])


_SAID: Any = {"episode": "e", "labeller": "l", "at_unix_ns": 0}
_LABELS = (
    SuccessLabel(success=True, **_SAID),
    RewardLabel(first_step=0, rewards=(0.0, 1.0), **_SAID),
    DeleteLabel(**_SAID),
)


def _on_its_channel(envelope: Envelope) -> bytes:
    """What `_message` takes."""
    channel = list(Channel).index(channel_of(envelope.message))
    return bytes([channel | (128 if envelope.payload else 0)]) + bytes(encode(envelope)[0])


def _messages() -> Iterable[Envelope]:
    yield Envelope(Hello(protocol=1, role="robot", name="r"))
    yield Envelope(Heartbeat(t_client_ns=1))
    yield Envelope(ChunkOffer(sequence=1, episode="e", index=0), b"chunk")
    yield Envelope(WeightsGrains(parcel=b"p", first=0), b"w")


def _message(raw: bytes) -> None:
    """The first byte says which channel and how many frames."""
    first, rest = raw[:1] or b"\0", raw[1:]
    channel = list(Channel)[(first[0] & 127) % 3]
    frames: list[bytes | memoryview] = [rest, b"payload"] if first[0] & 128 else [rest]
    wire.decode(channel, frames, _LIMITS)


def _in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    path = _FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)

    def parse(raw: bytes) -> object:
        path.write_bytes(raw)
        path.chmod(0o600)
        return read(path)

    return parse


def _ring(path: Path) -> None:
    ring = Keyring(path.parent.parent)
    ring.list()
    ring.find("x" * 40)


def _written_log() -> Path:
    """A log with one segment and a manifest, to be damaged."""
    path = _FOLDER / "log"
    if not path.exists():
        with LogWriter.open(path) as log:
            for number in range(3):
                log.append(1, bytes([number]) * 40)
            log.sync()
    return path


def _log(path: Path) -> None:
    with LogReader.open(path.parent) as reader:
        for ref in reader.records():
            reader.read(ref)


def _log_file(glob: str) -> tuple[Callable[[bytes], object], tuple[bytes, ...]]:
    found = sorted(_written_log().glob(glob))
    assert found, f"a log has {glob}"
    return _in_file(f"log/{found[0].name}", _log), (found[0].read_bytes(),)


def _data_set() -> tuple[Callable[[bytes], object], tuple[bytes, ...]]:
    """What a LeRobot data set says of itself, beside a valid table of tasks."""
    root = _FOLDER / "data-set"
    (root / TASKS).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"task_index": [0], "task": ["lift"]}), root / TASKS)
    feature = {"dtype": "float32", "shape": [2], "names": ["a", "b"]}
    info = {"codebase_version": "v3.0", "fps": 10, "robot_type": "r", "features": {"action": feature},
            "total_episodes": 1, "total_frames": 9}  # fmt: skip
    read = _in_file(f"data-set/{INFO}", lambda path: LerobotDataSet.open(root).cameras())
    return read, (msgspec.json.encode(info),)


_BLACK = np.zeros((8, 8, 3), np.uint8)
_info, _info_examples = _data_set()
_segment, _segment_examples = _log_file("*.seg*")
_manifest, _manifest_examples = _log_file("*[Mm][Aa][Nn][Ii][Ff]*")
_public, _secret = (key.decode() for key in zmq.curve_keypair())
_key = msgspec.json.encode({"public": _public, "secret": _secret})
_entry = msgspec.json.encode({"public": _public, "name": "r", "role": "robot"})

TARGETS = {
    "packet": Target(lambda raw: decode_packet(raw, ChunkHeader), (WireError,), (_chunk(),)),
    "chunk": Target(decode_chunk, (WireError,), (_chunk(),)),
    "block": Target(decode_block, (WireError,), (_block(),)),
    "label": Target(decode_label, (WireError,), tuple(map(encode_label, _LABELS))),
    "message": Target(_message, (WireError,), tuple(map(_on_its_channel, _messages()))),
    "hello": Target(protocol_of_hello, (), tuple(bytes(encode(envelope)[0]) for envelope in _messages())),
    "parcel": Target(lambda raw: check_parcel(decode_record(raw, ParcelInfo)), (WireError,)),
    "segment": Target(_segment, (StoreError,), _segment_examples),
    "manifest": Target(_manifest, (StoreError,), _manifest_examples),
    "key": Target(_in_file("r.key", load_keypair), (RunError,), (_key,)),
    "public-key": Target(_in_file("r.pub", load_public_key), (RunError,), (_public.encode(),)),
    "ring": Target(_in_file("allowed/r.json", _ring), (), (_entry,)),
    "picture": Target(
        lambda raw: decode(decode_file(raw)), (DataSetError,), (encode_jpeg(_BLACK), encode_png(_BLACK))
    ),
    "data-set": Target(_info, (DataSetError,), _info_examples),
    "config": Target(
        _in_file("run.yaml", lambda path: load(RunConfig, path)), (ConfigError, HalError), (b"robots: [{name: a}]",)
    ),
}  # fmt: skip
