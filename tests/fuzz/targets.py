"""Fuzz targets: parsers of untrusted bytes, the errors that they may raise, and valid examples."""

from __future__ import annotations

import hashlib
import random
import socket
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import mutations
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zmq
from blake3 import blake3
from msgspec.structs import replace

from hal import audit, estop, lease, registry, safety
from hal.errors import HalError
from hal.resource import Kind, ResourceRecord
from hal.spec import STATE, ArraySpec, CameraSpec, RobotSpec
from user_sys import messages as m
from user_sys.codec import decode_packet, encode_packet
from user_sys.config import load
from user_sys.console import protocol as console
from user_sys.edge import driver_client as driver
from user_sys.edge.outbox import DropRecord, read_drop_record, write_drop_record
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
from user_sys.learner import checkpoint, publisher_protocol
from user_sys.messages import PatchInfo, PinnedVersion, SignedRecord, WeightsManifest, check_patch, decode_record
from user_sys.replay.batches import ObservationFeatures
from user_sys.replay.reader import FRAME_DTYPE, VerifiedChunk
from user_sys.robot_records import read_robot_records, save_robot_record
from user_sys.run.config import METADATA_FILE, RUN_FORMAT, RunConfig, RunMetadata, open_run_folder
from user_sys.store import labels
from user_sys.store.files import OS_FILES
from user_sys.store.index_block import TABLES, decode_block, summarise_records
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
from user_sys.weights.patches import Patch, apply_delta, delta_patch, full_patch, table_patch
from user_sys.weights.state import TensorSet, build_manifest, build_tensor_set, with_tensor_table

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
    block = decode_block(summarise_records([(RecordRef(0, 0, len(raw), CHUNK_KIND), memoryview(raw))]))
    assert len(block.chunks["steps"]) == 1 and not block.damaged
    cameras = [name for name in chunk.columns if name.startswith(IMAGE_PREFIX) and not name.endswith(FRAME_SUFFIXES)]
    for name in cameras:
        assert len(frames_of(chunk, name)) == len(chunk.columns[name + CAPTURE_TIME_SUFFIX]) == chunk.header.steps
    shapes = dict.fromkeys((IMAGE_PREFIX + "f", *cameras), (8, 8, 3))
    rows = VerifiedChunk(parse_chunk(raw), ObservationFeatures(vectors={STATE: 3}, action_size=2, cameras=shapes))
    rows.vectors()
    for name in shapes:
        rows.frames(name, 0, partial(np.zeros, (), FRAME_DTYPE))


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
    return summarise_records(
        (RecordRef(0, place, len(raw), kind), memoryview(raw)) for place, (kind, raw) in enumerate(records)
    )


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


def _states() -> tuple[TensorSet, TensorSet]:
    """Two versions of the same weights: a few values of one tensor changed, all of another, none of the third."""
    base = {
        "few": np.zeros(600, np.float32),
        "all": np.zeros((2, 3), np.float64),
        "none": np.ones(2, np.uint8),
    }
    few = base["few"].copy()
    few[::50] = 1
    return build_tensor_set(base), build_tensor_set({**base, "few": few, "all": base["all"] + 1})


def _parcels() -> tuple[Patch, Patch]:
    base, new = _states()
    small = delta_patch(0, base, 1, new)
    assert small is not None
    return full_patch(new, 1), small


_BASE, _NEW = _states()
_PARCELS = _parcels()
_TABLE = table_patch(_NEW, 1)
_MANIFEST = build_manifest(_NEW, 1, 0, 0, (0.0, 0.0))
_ORDER = PinnedVersion(serial=1, version=1, by="b", reason="r", given_unix_ns=0)
_SIGNED = SignedRecord(msgspec.msgpack.encode(_MANIFEST), bytes(64))
_RECORDS = (PatchInfo, WeightsManifest, PinnedVersion, SignedRecord)


def _record(raw: bytes) -> None:
    """The first byte selects the kind."""
    found = decode_record(raw[1:], _RECORDS[(raw[:1] or b"\0")[0] % len(_RECORDS)])
    if isinstance(found, PatchInfo):
        check_patch(found)


def _kinds_of_records() -> Iterable[bytes]:
    for record in (_PARCELS[0].info, _PARCELS[1].info, _TABLE.info, _MANIFEST, _ORDER, _SIGNED):
        yield bytes([_RECORDS.index(type(record))]) + msgspec.msgpack.encode(record)


def _on_its_channel(envelope: Envelope) -> bytes:
    """Inputs of `_message`."""
    channel = list(Channel).index(channel_of(envelope.message))
    return bytes([channel | (128 if envelope.payload else 0)]) + bytes(encode_envelope(envelope)[0])


_ALONE: tuple[protocol.AnyMessage, ...] = (
    m.Hello(protocol=1, role="robot", name="r"),
    m.Hello(protocol=3, oldest=2, role="robot", name="r", holder="h", stream="s", spec=_SPEC),
    m.Welcome(protocol=3, gateway="g", resume_after=7),
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
    m.WeightsOffer(manifests=(_SIGNED,), parcels=tuple(p.info for p in _PARCELS), signer=bytes(32), order=_SIGNED),
    m.WeightsRequest(parcel=b"p", first=0, count=1),
    m.WeightsGone(parcel=b"p"),
    m.WeightsProgress(oldest=1),
    m.WeightsReceived(version=1),
    m.WeightsApplied(robot="r", version=1, seconds=0.1),
)  # fmt: skip
_ENVELOPES = (
    *map(Envelope, _ALONE),
    Envelope(m.ChunkOffer(sequence=1, episode="e", index=0), b"chunk"),
    Envelope(m.Preview(robot="r", camera="c", step=1), b"jpeg"),
    Envelope(m.WeightsBlocks(parcel=b"p", first=0), b"w"),
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
    return lease.LeaseTable(path).acquire("r", "h")


def _run(path: Path) -> object:
    path.with_name("config.yaml").write_text("robots: [{name: a}]")
    return open_run_folder(path.parent)


# Files that programs read at their start: the reader, and an example.
_STATE: tuple[tuple[str, Callable[[Path], object], bytes], ...] = (
    ("leases.json", _leases, _made("leases.json", _leases)),
    ("fence", lease.Fence, _made("fence", lambda path: lease.Fence(path).check_token(7))),
    (
        "latch.json",
        lambda path: safety.SafetyKernel(_SPEC, latch_path=path),
        _made("latch.json", lambda path: estop.EstopLatch(path).press(estop.new_emergency_stop("ana", "seen"))),
    ),
    (
        "orders.json",
        lambda path: registry.OperatorOverrides(path).read(),
        _made(
            "orders.json",
            lambda path: registry.OperatorOverrides(path).set_override("r", "quarantined", "ana", "it sticks"),
        ),
    ),
    (
        "registry.json",
        lambda path: registry.read_registry(path.parent),
        msgspec.json.encode((ResourceRecord(kind=Kind.ROBOT, name="r", model="m", node="n"),)),
    ),
    (
        "audit.jsonl",
        audit.read_audit_log,
        msgspec.json.encode(audit.AuditEntry(time="t", event="granted", robot="r", peer="h", token=1)),
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
        _made(
            "dropped",
            lambda path: write_drop_record(OS_FILES, path, DropRecord(episodes=1, chunks=2, ranges=((3, 4),))),
        ),
    ),
)


def _state(raw: bytes) -> None:
    """The first byte selects the file."""
    name, read, _ = _STATE[(raw[:1] or b"\0")[0] % len(_STATE)]
    _in_file(f"state/{name}", read)(raw[1:])


def _changed_state(raw: bytes, rng: random.Random) -> bytes:
    return raw[:1] + (mutations.json if raw[1:2] in b"{[" else mutations.msgpack)(raw[1:], rng)


_CHECKPOINT = checkpoint.Checkpoint(3, {"position": 7, "policy": "ab"}, {"w": np.ones((2, 3), np.float32)})


_CHECKPOINT_INDEX = checkpoint.save_checkpoint(_FOLDER / "checkpoints", _CHECKPOINT, keep=1) / "index.json"


def _changed_checkpoint(raw: bytes, rng: random.Random) -> bytes:
    """With a corrected digest."""
    sealed = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    index = mutations.json(bytes(sealed["index"]), rng)
    digest = hashlib.blake2b(index, digest_size=32).hexdigest()
    return b'{"format":%s,"blake2b":"%s","index":%s}' % (bytes(sealed["format"]), digest.encode(), index)


def _word(raw: bytes) -> object:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(raw[: publisher_protocol.MAX_RECORD_BYTES] or b"\0")
        return publisher_protocol.MessageSocket(theirs).receive(0.0)


_WORDS: tuple[publisher_protocol.PublisherMessage, ...] = (
    publisher_protocol.SharedMemoryInfo(8, 64),
    publisher_protocol.DeviceCopyStarted(),
    publisher_protocol.SnapshotReady(1, 2, 3, (4,)),
    publisher_protocol.StepTimes(((0.5, 0.1),)),
    publisher_protocol.ScalarReport(m.MetricsReport(node="n", count=1, scalars={"s": 1.0})),
    publisher_protocol.PublisherStatus(
        1, 1, -1, 1, 0.5, {"s": 1.0}, publisher_protocol.PublishFailure("NotFinite", "t")
    ),
)


def _policy_requests() -> Iterable[bytes]:
    base: dict[str, Any] = {"number": 1, "session": bytes(asking.SESSION_BYTES)}
    slot, digest = base | {"slot": 0}, bytes(asking.DIGEST_BYTES)
    yield asking.encode(asking.SessionHeartbeat(**base, protocol=asking.POLICY_PROTOCOL_VERSION, slots=(0,)))
    yield asking.encode(asking.OpenSlot(**slot, kind="mlp", features=(STATE,), seed=0, spec=_SPEC))
    yield asking.encode(asking.LoadSlotWeights(**slot, digest=digest, size_bytes=9))
    yield asking.encode(asking.WeightsPart(**slot, digest=digest, offset=0), {asking.PART_ARRAY: np.zeros(9, np.uint8)})
    act = asking.ActionRequest(**slot, digest=digest, sentence="go", deterministic=False)
    yield asking.encode(act, {STATE: np.zeros(2, np.float32)})


def _policy_answers() -> Iterable[bytes]:
    yield asking.encode(asking.ServerInfo(number=1, instance_id=b"life", device="cpu"))
    yield asking.encode(asking.NextPart(number=1, offset=0))
    yield asking.encode(asking.RequestRejected(number=1, reason="no"))
    arrays = {asking.ACTIONS: np.zeros((1, 2), np.float32), asking.LOG_PROB: np.zeros(1, np.float32)}
    yield asking.encode(asking.ActionResponse(number=1), arrays)


_REQUEST = driver.DriverRequest(order="command", session="s", token=1)
_REPLY = driver.DriverReply(spec=_SPEC, task=driver.TaskInfo(name="n", sentence="s", max_steps=1), hand="twist")

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
    "parcel": Target(_record, (WireError,), tuple(_kinds_of_records()), mutations.after_first(mutations.msgpack)),
    "delta": Target(
        lambda raw: apply_delta(_BASE.tensors, raw), (WireError,), (bytes(_PARCELS[1].payload),), mutations.packet
    ),
    "table": Target(
        lambda raw: with_tensor_table(replace(_MANIFEST, digest=blake3(raw).digest()), raw),
        (WireError,),
        (bytes(_TABLE.payload),),
        mutations.msgpack,
    ),
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
    "checkpoint": Target(
        _in_file(str(_CHECKPOINT_INDEX), lambda path: checkpoint.read_checkpoint(path.parent)),
        (WireError,),
        (_CHECKPOINT_INDEX.read_bytes(),),
        _changed_checkpoint,
    ),
    "request": Target(
        lambda raw: decode_packet(raw, driver.DriverRequest),
        (WireError,),
        (encode_packet(_REQUEST, {"action": np.zeros(4, np.float32)}),),
        mutations.packet,
    ),
    "reply": Target(
        lambda raw: decode_packet(raw, driver.DriverReply),
        (WireError, HalError),
        (encode_packet(_REPLY, {STATE: np.zeros(3, np.float32)}),),
        mutations.packet,
    ),
    "word": Target(_word, (WireError,), tuple(map(msgspec.msgpack.encode, _WORDS)), mutations.msgpack),
    "config": Target(
        _in_file("run.yaml", lambda path: load(RunConfig, path)),
        (ConfigError, HalError),
        (b"robots: [{name: a}]", _RUN.read_bytes()),
        mutations.yaml,
    ),
}
