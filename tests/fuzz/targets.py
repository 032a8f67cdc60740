"""Fuzz targets: parsers of untrusted bytes, the errors that they may raise, and valid examples."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import mutations
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zmq
from blake3 import blake3

from hal import estop, lease, safety
from hal.errors import HalError
from hal.spec import STATE, ArraySpec, CameraSpec, RobotSpec
from hal.state_database import STATE_FILE, StateDatabase
from user_sys import messages as m
from user_sys.codec import decode_packet, encode_packet
from user_sys.config import load
from user_sys.console import protocol as console
from user_sys.edge import driver_client as driver
from user_sys.edge.outbox import DropRecord, read_drop_record
from user_sys.episode import (
    APPLIED_ACTION,
    CAPTURE_TIME_SUFFIX,
    FRAME_SUFFIXES,
    IMAGE_PREFIX,
    Chunk,
    ChunkHeader,
    EpisodeEnd,
    EpisodeSource,
    Phase,
    decode_chunk,
    frame_columns,
    parse_chunk,
)
from user_sys.errors import ConfigError, DataSetError, RunError, StoreError, WireError
from user_sys.gateway.gateway import GatewayAddress, read_gateway_address
from user_sys.inference import protocol as asking
from user_sys.interchange.frames import decode_frame, decode_image_file, encode_jpeg, encode_png, frames_of
from user_sys.interchange.lerobot_format import INFO, TASKS
from user_sys.interchange.lerobot_import import LerobotDataset
from user_sys.messages import PinnedVersion, SignedRecord, WeightsManifest, decode_record
from user_sys.replay.batches import ObservationFeatures
from user_sys.replay.buffer import chunk_vectors, locate_frames
from user_sys.robot_records import read_robot_records, save_robot_record
from user_sys.run.config import METADATA_FILE, RUN_FORMAT, RunConfig, RunMetadata, open_run_folder
from user_sys.store import labels
from user_sys.store.files import OS_FILES
from user_sys.store.index_block import TABLES, IndexBlockBuilder, decode_block
from user_sys.store.labels import (
    DeleteLabel,
    NoteLabel,
    PhaseLabel,
    RewardLabel,
    SuccessLabel,
    decode_label,
    encode_label,
)
from user_sys.store.log_reader import LogReader
from user_sys.store.log_writer import LogWriter
from user_sys.store.record_format import RecordRef
from user_sys.store.store import CHUNK_KIND, LABEL_KIND
from user_sys.tunnel import protocol
from user_sys.tunnel.keys import Keyring, load_keypair, load_public_key
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import Channel, Envelope, channel_of, encode_envelope, hello_protocol_version
from user_sys.weights.catalog import EncodedBlob, decode_blob, encode_blob
from user_sys.weights.state import build_tensor_set, decode_table

_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
_LIMITS = TunnelLimits()
_BLACK = np.zeros((8, 8, 3), np.uint8)


@dataclass(frozen=True)
class Target:
    """`parse` accepts any bytes and raises only `allowed`; `mutate` changes inputs of the form of `examples`."""

    parse: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    examples: tuple[bytes, ...] = ()
    mutate: mutations.Mutate | None = None


def _chunk() -> bytes:
    header = ChunkHeader(episode="e", index=0, first_step=0, steps=2, robot="r", embodiment="m", task="t", sentence="s",
                         source=EpisodeSource.ONLINE, seed=0, started_unix_ns=0)  # fmt: skip
    return Chunk(header, {"reward": np.zeros(2, np.float32)}, {}).encode()


def _used_chunk(raw: bytes) -> None:
    """Every reader must accept a chunk that the gateway accepts."""
    chunk = decode_chunk(raw)
    builder = IndexBlockBuilder()
    builder.add(RecordRef(0, 0, len(raw), CHUNK_KIND), raw)
    block = decode_block(builder.encode())
    assert len(block.chunks["steps"]) == 1 and not block.damaged
    cameras = [name for name in chunk.columns if name.startswith(IMAGE_PREFIX) and not name.endswith(FRAME_SUFFIXES)]
    for name in cameras:
        assert len(frames_of(chunk, name)) == len(chunk.columns[name + CAPTURE_TIME_SUFFIX]) == chunk.header.steps
    shapes = dict.fromkeys((IMAGE_PREFIX + "f", *cameras), (8, 8, 3))
    chunk_vectors(chunk, ObservationFeatures(vectors={STATE: 3}, action_size=2, cameras=shapes))
    locate_frames(parse_chunk(raw), 0, shapes)


def _last_chunk() -> bytes:
    """One with pictures, phases and an end."""
    end = EpisodeEnd(steps=4, success=True)
    header = ChunkHeader(episode="e", index=1, first_step=2, steps=2, robot="r", embodiment="m", task="t", sentence="s",
                         source=EpisodeSource.ONLINE, seed=0, started_unix_ns=0, end=end)  # fmt: skip
    columns = {
        **frame_columns("observation.images.f", [b"\xff\xd8", None], [1, 1]),
        **frame_columns("observation.images.r", [_BLACK[:1, :2], None], [1, 1]),
        "phase": np.array([0, 2], np.uint8),
        "t_capture_ns": np.arange(2),
        STATE: np.zeros((2, 3), np.float32),
        APPLIED_ACTION: np.zeros((2, 2), np.float32),
    }
    final = {STATE: np.zeros(3, np.float32), IMAGE_PREFIX + "f": np.frombuffer(encode_jpeg(_BLACK), np.uint8)}
    return Chunk(header, columns, final).encode()


def _block() -> bytes:
    records = [
        (CHUNK_KIND, _chunk()),
        (CHUNK_KIND, _last_chunk()),
        (LABEL_KIND, encode_label(_LABELS[0])),
        (LABEL_KIND, b"damaged"),
    ]
    builder = IndexBlockBuilder()
    for place, (kind, raw) in enumerate(records):
        builder.add(RecordRef(0, place, len(raw), kind), raw)
    return builder.encode()


class _Counts(msgspec.Struct, array_like=True):
    chunks: int
    steps: int


def _changed_block(raw: bytes, rng: random.Random) -> bytes:
    """Changes the packet, or the tables within it."""
    if rng.random() < 0.5:
        return mutations.packet(raw, rng)
    counts, arrays = decode_packet(raw, _Counts)
    tables = mutations.msgpack(arrays[TABLES].tobytes(), rng)
    return encode_packet(counts, {**arrays, TABLES: np.frombuffer(tables, np.uint8)})


_SAID: Any = {"episode": "e", "labeller": "l", "at_unix_ns": 0}
_LABELS = (
    SuccessLabel(success=True, **_SAID),
    RewardLabel(first_step=0, rewards=(0.0, 1.0), **_SAID),
    PhaseLabel(first_step=0, steps=2, phase=Phase.TELEOP, **_SAID),
    DeleteLabel(**_SAID),
    NoteLabel(note="n", **_SAID),
)


_SPEC = RobotSpec(
    model="m",
    rate_hz=10,
    observation=(ArraySpec(name="observation.state", labels=("x",), units=("m",), low=(-1,), high=(1,)),),
    action=ArraySpec(name="action", labels=("x",), units=("m",), low=(-1,), high=(1,)),
    cameras=(CameraSpec(name="front", height=8, width=8, rate_hz=10),),
)


_OLD_BLOB, _NEW_BLOB = np.zeros(600, np.float32), np.zeros(600, np.float32)
_NEW_BLOB[::50] = 1
_DIFFERENCE = encode_blob(_NEW_BLOB.data.cast("B"), bytes(32), _OLD_BLOB.data.cast("B"), 4)
_TENSORS = build_tensor_set({"new": _NEW_BLOB, "none": np.ones((2, 3), np.uint8)})
_MANIFEST = WeightsManifest(
    version=1,
    updates=1,
    precision="exact",
    digest=_TENSORS.digest,
    table_bytes=len(_TENSORS.table),
    size_bytes=_TENSORS.size_bytes,
    published_unix_ns=0,
)
_ORDER = PinnedVersion(serial=1, version=1, by="b", reason="r", given_unix_ns=0)
_SIGNED = SignedRecord(msgspec.msgpack.encode(_MANIFEST), bytes(64))
_RECORDS = (WeightsManifest, PinnedVersion, SignedRecord)


def _record(raw: bytes) -> None:
    """The first byte selects the kind."""
    decode_record(raw[1:], _RECORDS[(raw[:1] or b"\0")[0] % len(_RECORDS)])


def _kinds_of_records() -> Iterable[bytes]:
    for record in (_MANIFEST, _ORDER, _SIGNED):
        yield bytes([_RECORDS.index(type(record))]) + msgspec.msgpack.encode(record)


def _decode_table(raw: bytes) -> None:
    decode_table(msgspec.structs.replace(_MANIFEST, digest=blake3(raw).digest(), table_bytes=len(raw)), raw)


def _changed_bytes(raw: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw))
    return raw[:at] + rng.randbytes(rng.randrange(3)) + raw[at + rng.randrange(3) :]


def _decode_difference(raw: bytes) -> None:
    """The first byte selects the codec."""
    codec = ("raw", "zstd", "xor")[(raw[:1] or b"\0")[0] % 3]
    encoded = EncodedBlob(bytes(32), codec, 4, memoryview(raw[1:]), 0)  # type: ignore[arg-type]
    decode_blob(encoded, _NEW_BLOB.nbytes, _OLD_BLOB.data.cast("B"))


def _on_its_channel(envelope: Envelope) -> bytes:
    """Inputs of `_message`."""
    channel = list(Channel).index(channel_of(envelope.message))
    return bytes([channel | (128 if envelope.payload else 0)]) + bytes(encode_envelope(envelope)[0])


_ALONE: tuple[protocol.AnyMessage, ...] = (
    m.Hello(protocol=1, role="robot", name="r"),
    m.Hello(protocol=3, role="robot", name="r", holder="h", stream="s", spec=_SPEC),
    m.Welcome(),
    m.Refusal(reason="r"),
    m.Heartbeat(t_client_ns=1),
    m.CreditGrant(messages=1, size_bytes=1),
    m.LeaseRequest(robot="r", holder="h", floor=1),
    m.LeaseGrant(robot="r", holder="h", token=1, ttl_s=1.0),
    m.LeaseRelease(robot="r", token=1),
    m.OperatorCommand(robot="r", operator="o", order="drive", twist=(0.0, 1.0)),
    m.OperatorReply(robot="r", operator="o", order="drive", accepted=True),
    m.PreviewRequest(robot="r", rate_hz=1.0, ttl_s=1.0),
    m.RobotStatus(robot="r", authority="a", operator="o", phase="p", episode="e", step=1, policy_version=1,
                  real_time=True, outbox_chunks=1, control_hz=10.0, safety_interventions=0),
    m.EpisodeReport(robot="r", episode="e", source="s", steps=1, success=None, intervention_steps=0,
                    episode_return=0.0, policy_version=1),
    m.MetricsReport(node="n", count=1, scalars={"s": 1.0}),
    m.StopRun(reason="r"),
    m.ChunkAck(sequence=1),
    m.ChunkRefusal(sequence=1, reason="r"),
    m.PreviewAck(robot="r", camera="c"),
    m.WeightsOfferRequest(),
    m.WeightsOffer(manifests=(_SIGNED,), tables=(_TENSORS.table,), signer=bytes(32), pin=_SIGNED),
    m.WeightsRequest(version=bytes(32), serial=1, limit_bytes=1, message_bytes=1, wants=(m.BlobWant(bytes(32)),)),
    m.WeightsGone(version=bytes(32)),
    m.WeightsProgress(oldest=1),
    m.WeightsReceived(version=1),
    m.WeightsApplied(robot="r", version=1, seconds=0.1),
)  # fmt: skip
_ENVELOPES = (
    *map(Envelope, _ALONE),
    Envelope(m.ChunkOffer(sequence=1), b"chunk"),
    Envelope(m.Preview(robot="r", camera="c", step=1), b"jpeg"),
    Envelope(m.WeightsBlobs(version=bytes(32), parts=(m.BlobPart(bytes(32), bytes(32), "xor", 4, 9, 7, 0, 1),)), b"w"),
)


def _message(raw: bytes) -> None:
    """The first byte selects the channel and the number of frames. Includes the checks of a gateway."""
    first, rest = raw[:1] or b"\0", raw[1:]
    channel = list(Channel)[(first[0] & 127) % len(Channel)]
    frames: list[bytes | memoryview] = [rest, b"payload"] if first[0] & 128 else [rest]
    message = protocol.decode_envelope(channel, frames, _LIMITS).message
    protocol.coalescing_key(message)
    if isinstance(message, m.Hello) and message.spec is not None:
        assert len(message.spec.embodiment) == 16


_PAGE = (
    console.PageHello("o"),
    console.PageOrder("r", "take-over"),
    console.DriveInput("r", (0.0, 0.5, -1.0), 1.0),
    console.PreviewsShown((("r", "c"),)),
    console.PageVisibility(True),
    console.Ping(1.0),
)


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
                log.append_record(1, bytes([number]) * 40)
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
    """The metadata of a LeRobot data set, with a valid table of tasks."""
    root = _FOLDER / "data-set"
    (root / TASKS).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"task_index": [0], "task": ["lift"]}), root / TASKS)
    feature = {"dtype": "float32", "shape": [2], "names": ["a", "b"]}
    info = {"codebase_version": "v3.0", "fps": 10, "robot_type": "r", "features": {"action": feature},
            "total_episodes": 1, "total_frames": 9}  # fmt: skip
    read = _in_file(f"data-set/{INFO}", lambda path: LerobotDataset.open(root).cameras())
    return read, (msgspec.json.encode(info),)


def _made(name: str, write: Callable[[Path], object]) -> bytes:
    """The bytes that `write` writes to its path."""
    path = _FOLDER / "made" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    return path.read_bytes()


def _leases(path: Path) -> object:
    database = StateDatabase(path)
    try:
        return lease.LeaseTable(database).acquire("r", "h")
    finally:
        database.close()


def _run(path: Path) -> object:
    path.with_name("config.yaml").write_text("{name: n, robots: [{name: a}]}")
    return open_run_folder(path.parent)


# Files that programs read at their start: the reader, and an example.
_STATE: tuple[tuple[str, Callable[[Path], object], bytes], ...] = (
    (STATE_FILE, _leases, _made(STATE_FILE, _leases)),
    ("fence", lease.Fence, _made("fence", lambda path: lease.Fence(path).check_token(7))),
    (
        "latch.json",
        lambda path: safety.SafetyKernel(_SPEC, latch_path=path),
        _made("latch.json", lambda path: estop.EstopLatch(path).press(estop.new_emergency_stop("ana", "seen"))),
    ),
    (
        "gateway.json",
        lambda path: read_gateway_address(path.parent),
        msgspec.json.encode(GatewayAddress(endpoint="tcp://127.0.0.1:1", public_key="k")),
    ),
    (
        METADATA_FILE,
        _run,
        msgspec.json.encode(RunMetadata(format=RUN_FORMAT, name="n", started_unix_s=1.0, endpoint="tcp://127.0.0.1:1")),
    ),
    (
        "cards/r.json",
        lambda path: read_robot_records(path.parent),
        _made("r.json", lambda path: save_robot_record(path.parent, "r", _SPEC)),
    ),
    ("inbox/1.labels", labels.read_queued_labels, msgspec.msgpack.encode(_LABELS)),
    (
        "dropped",
        lambda path: read_drop_record(OS_FILES, path),
        msgspec.json.encode(DropRecord(episodes=1, chunks=2, names=("000000000003_9_0000000a_0_1_0_e",))),
    ),
)


def _state(raw: bytes) -> None:
    """The first byte selects the file."""
    name, read, _ = _STATE[(raw[:1] or b"\0")[0] % len(_STATE)]
    _in_file(f"state/{name}", read)(raw[1:])


def _changed_state(raw: bytes, rng: random.Random) -> bytes:
    return raw[:1] + (mutations.json if raw[1:2] in b"{[" else mutations.msgpack)(raw[1:], rng)


def _policy_requests() -> Iterable[bytes]:
    spec = msgspec.msgpack.encode(asking.PolicyDescription(kind="mlp", options={}, features=(STATE,), spec=_SPEC))
    for description in (b"", spec):
        request = asking.ActionRequest(
            protocol=asking.POLICY_PROTOCOL_VERSION,
            number=1,
            policy=blake3(spec).digest(),
            description=description,
            instruction="go",
            deterministic=False,
            explore=False,
            timeout_s=0.1,
        )
        yield encode_packet(request, {STATE: np.zeros(2, np.float32)})


def _policy_answers() -> Iterable[bytes]:
    yield encode_packet(asking.ActionResponse(number=1, unavailable="no"), {})
    arrays = {asking.ACTIONS: np.zeros((1, 2), np.float32), asking.LOG_PROB: np.zeros(1, np.float32)}
    yield encode_packet(asking.ActionResponse(number=1, version=3), arrays)


_REQUEST = driver.DriverRequest(order="command", session="s", token=1)

_info, _info_examples = _data_set()
_segment, _segment_examples = _log_file("*.seg*")
_manifest, _manifest_examples = _log_file("*[Mm][Aa][Nn][Ii][Ff]*")
_public, _secret = (key.decode() for key in zmq.curve_keypair())
_key = msgspec.json.encode({"public": _public, "secret": _secret})
_entry = msgspec.json.encode({"public": _public, "name": "r", "role": "robot"})

_RUN = Path(__file__).parents[2] / "configs/demo-smoke.yaml"

TARGETS = {
    "packet": Target(lambda raw: decode_packet(raw, ChunkHeader), (WireError,), (_chunk(),), mutations.packet),
    "chunk": Target(_used_chunk, (WireError,), (_last_chunk(),), mutations.packet),
    "block": Target(decode_block, (WireError,), (_block(),), _changed_block),
    "label": Target(decode_label, (WireError,), tuple(map(encode_label, _LABELS)), mutations.msgpack),
    "message": Target(
        _message, (WireError,), tuple(map(_on_its_channel, _ENVELOPES)), mutations.after_first(mutations.msgpack)
    ),
    "hello": Target(
        hello_protocol_version,
        (),
        tuple(bytes(encode_envelope(envelope)[0]) for envelope in _ENVELOPES[:4]),
        mutations.msgpack,
    ),
    "policy-request": Target(asking.decode_request, (WireError,), tuple(_policy_requests()), mutations.packet),
    "policy-answer": Target(asking.decode_response, (WireError,), tuple(_policy_answers()), mutations.packet),
    "weights-manifest": Target(
        _record, (WireError,), tuple(_kinds_of_records()), mutations.after_first(mutations.msgpack)
    ),
    "blob": Target(
        _decode_difference, (WireError,), (b"\2" + bytes(_DIFFERENCE.payload),), mutations.after_first(_changed_bytes)
    ),
    "table": Target(_decode_table, (WireError,), (_TENSORS.table,), mutations.msgpack),
    "page": Target(
        lambda raw: console.decode(raw.decode(errors="replace")),
        (WireError,),
        tuple(map(msgspec.json.encode, _PAGE)),
        mutations.json,
    ),
    "stop": Target(
        lambda raw: console.decode_estop(raw.decode(errors="replace")),
        (WireError,),
        (msgspec.json.encode(console.EstopRequest("o", {"r": 7})),),
        mutations.json,
    ),
    "segment": Target(_segment, (StoreError,), _segment_examples),
    "manifest": Target(_manifest, (StoreError,), _manifest_examples),
    "key": Target(_in_file("r.key", load_keypair), (RunError,), (_key,), mutations.json),
    "public-key": Target(_in_file("r.pub", load_public_key), (RunError,), (_public.encode(),)),
    "ring": Target(_in_file("allowed/r.json", _ring), (), (_entry,), mutations.json),
    "picture": Target(
        lambda raw: decode_frame(decode_image_file(raw)), (DataSetError,), (encode_jpeg(_BLACK), encode_png(_BLACK))
    ),
    "data-set": Target(_info, (DataSetError,), _info_examples, mutations.json),
    "state": Target(
        _state,
        (HalError, ConfigError, RunError, StoreError),
        tuple(bytes([place]) + example for place, (_, _, example) in enumerate(_STATE)),
        _changed_state,
    ),
    "request": Target(
        lambda raw: decode_packet(raw, driver.DriverRequest),
        (WireError,),
        (encode_packet(_REQUEST, {"action": np.zeros(4, np.float32)}),),
        mutations.packet,
    ),
    "config": Target(
        _in_file("run.yaml", lambda path: load(RunConfig, path)),
        (ConfigError, HalError),
        (b"robots: [{name: a}]", _RUN.read_bytes()),
        mutations.yaml,
    ),
}
