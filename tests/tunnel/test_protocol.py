"""Messages as frames: each channel decodes its own union, within its bounds; and the estimate of the clock."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from user_sys.episode import parse_chunk
from user_sys.errors import WireError
from user_sys.messages import (
    PREVIOUS_PROTOCOL_VERSION,
    ChunkOffer,
    EpisodeReport,
    Heartbeat,
    Hello,
    Message,
    OperatorCommand,
    Preview,
    StopRun,
    WeightsApplied,
    WeightsBlobs,
)
from user_sys.tunnel.client import CLOCK_SAMPLES, ClockEstimator
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import (
    ALLOWED_MESSAGES,
    Channel,
    Envelope,
    channel_of,
    coalescing_key,
    decode_envelope,
    encode_envelope,
)

LIMITS = TunnelLimits(max_record_bytes=4096)
MESSAGES: list[Envelope] = [
    Envelope(Hello(protocol=1, role="robot", name="panda-0")),
    Envelope(Heartbeat(t_client_ns=1)),
    Envelope(StopRun(reason="done")),
    Envelope(EpisodeReport(robot="r", episode="e", source="online", steps=3, success=None, intervention_steps=0,
                           episode_return=1.0, policy_version=2)),
    Envelope(ChunkOffer(sequence=1), b"chunk"),
    Envelope(Preview(robot="r", camera="front", step=1), b""),
    Envelope(WeightsBlobs(version=bytes(32), parts=()), b"payload"),
    Envelope(WeightsApplied(robot="r", version=1, seconds=0.1)),
]  # fmt: skip


@pytest.mark.parametrize("envelope", MESSAGES, ids=lambda envelope: type(envelope.message).__name__)
def test_message_decodes_only_on_its_channel(envelope: Envelope) -> None:
    own = channel_of(envelope.message)
    decoded = decode_envelope(own, encode_envelope(envelope), LIMITS)
    assert (decoded.message, decoded.payload) == (envelope.message, envelope.payload)
    for channel in Channel:
        if channel is not own and not isinstance(envelope.message, (Hello, Heartbeat)):
            with pytest.raises(WireError, match="not a message of"):
                decode_envelope(channel, encode_envelope(envelope), LIMITS)


def test_messages_of_the_previous_protocol_decode() -> None:
    sample = Path(__file__).with_name(f"protocol-{PREVIOUS_PROTOCOL_VERSION}.msgpack").read_bytes()
    kinds = set()
    for channel, frames in msgspec.msgpack.decode(sample):
        envelope = decode_envelope(Channel(channel), frames, TunnelLimits())
        sent, decoded = (msgspec.msgpack.decode(frame) for frame in (frames[0], encode_envelope(envelope)[0]))
        assert {**decoded, **sent} == decoded, "each field is kept"
        kinds.add(type(envelope.message))
        if isinstance(envelope.message, Hello):
            assert envelope.message.protocol == PREVIOUS_PROTOCOL_VERSION
        if isinstance(envelope.message, ChunkOffer):
            assert envelope.payload is not None and parse_chunk(envelope.payload).header.robot == "panda-0"
    assert kinds >= set(ALLOWED_MESSAGES["robot"]) | set(ALLOWED_MESSAGES["relay"])


@pytest.mark.parametrize("envelope", MESSAGES, ids=lambda envelope: type(envelope.message).__name__)
def test_wrong_number_of_frames_is_refused(envelope: Envelope) -> None:
    frames = encode_envelope(envelope)
    for wrong in ([], frames[:1] if envelope.payload is not None else [*frames, b"x"], [*frames, b"x", b"y"]):
        with pytest.raises(WireError, match="frames"):
            decode_envelope(channel_of(envelope.message), wrong, LIMITS)


@given(st.sampled_from(list(Channel)), st.lists(st.binary(max_size=200), max_size=4))
@example(Channel.CONTROL, [b"\x91" * 5000])
@example(Channel.CONTROL, [b"\x91" * 4000])
@example(Channel.CONTROL, [b"\xdf\xff\xff\xff\xff"])
@example(Channel.EXPERIENCE, [b"\xdb\xff\xff\xff\xff", b""])
@example(Channel.CONTROL, [msgspec.msgpack.encode({"type": "hello", "protocol": 2**70 if False else -(2**63)})])
def test_any_bytes_decode_or_raise_a_wire_error(channel: Channel, frames: list[bytes]) -> None:
    try:
        assert isinstance(decode_envelope(channel, list(frames), LIMITS).message, Message)
    except WireError as error:
        assert len(str(error)) < 400


@given(st.sampled_from(MESSAGES), st.data())
def test_flipped_byte_decodes_or_raises_a_wire_error(envelope: Envelope, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode_envelope(envelope)]
    at = data.draw(st.integers(0, len(frames[0]) - 1))
    frames[0][at] ^= data.draw(st.integers(1, 255))
    try:
        decode_envelope(channel_of(envelope.message), [bytes(frame) for frame in frames], LIMITS)
    except WireError:
        return


def test_contradictory_spec_is_a_wire_error() -> None:
    spec = {"model": "m", "rate_hz": 1.0, "observation": [], "action": {
        "name": "action", "labels": ["x"], "units": [], "low": [0.0], "high": [1.0]}}  # fmt: skip
    raw = msgspec.msgpack.encode({"type": "hello", "protocol": 1, "role": "robot", "name": "p", "spec": spec})
    with pytest.raises(WireError):
        decode_envelope(Channel.CONTROL, [raw], LIMITS)


def test_newest_version_of_a_robot_replaces_the_report_before() -> None:
    report = WeightsApplied(robot="r", version=1, seconds=0.1)
    assert coalescing_key(report) == coalescing_key(msgspec.structs.replace(report, version=2))
    assert coalescing_key(report) != coalescing_key(msgspec.structs.replace(report, robot="s"))


def test_drive_commands_coalesce_and_others_do_not() -> None:
    drive = OperatorCommand(robot="r", operator="al", order="drive", twist=(0.1,))
    assert coalescing_key(drive) == coalescing_key(msgspec.structs.replace(drive, twist=(0.9,), sequence=4))
    assert coalescing_key(msgspec.structs.replace(drive, order="take-over")) is None
    stop = msgspec.structs.replace(drive, order="e-stop", press=7)
    assert coalescing_key(stop) == coalescing_key(msgspec.structs.replace(stop, sequence=4))
    assert coalescing_key(stop) not in (coalescing_key(drive), coalescing_key(msgspec.structs.replace(stop, press=8)))


@given(st.integers(-(10**18), 10**18), st.lists(st.integers(0, 10**9), min_size=1, max_size=40))
def test_offset_error_is_within_half_of_the_round_trip(offset_ns: int, delays: list[int]) -> None:
    clock, now = ClockEstimator(), 0
    for delay in delays:
        sent, now = now, now + delay
        clock.add(Heartbeat(t_client_ns=sent, t_gateway_unix_ns=sent + offset_ns + delay // 3), now)
        now += 1
    estimate = clock.estimate()
    assert estimate is not None
    assert estimate.rtt_ns == min(delays[-16:])
    assert abs(estimate.gateway_unix_ns(now) - (now + offset_ns)) <= estimate.rtt_ns / 2 + 1


def test_echo_from_the_future_is_ignored() -> None:
    clock = ClockEstimator()
    clock.add(Heartbeat(t_client_ns=10, t_gateway_unix_ns=0), 5)
    assert clock.estimate() is None


@pytest.mark.parametrize("step_s", [-3.0, 3.0])
@pytest.mark.parametrize("relays", [0, 1])
def test_clock_that_was_set_is_followed_after_one_heartbeat_of_each_link(relays: int, step_s: float) -> None:
    links = [ClockEstimator() for _ in range(1 + relays)]  # a relay echoes what it estimates of the next gateway's
    offset_ns, now_ns = 1_700_000_000 * 10**9, 0

    def exchange(rtt_ns: int) -> None:
        nonlocal now_ns
        now_ns += 10**9
        for number, link in enumerate(links):
            at_ns = now_ns - rtt_ns // 2
            known = links[number - 1].estimate() if number else None
            unix_ns = at_ns + offset_ns if known is None else known.gateway_unix_ns(at_ns)
            link.add(Heartbeat(t_client_ns=now_ns - rtt_ns, t_gateway_unix_ns=unix_ns), now_ns)

    for number in range(CLOCK_SAMPLES):
        exchange(rtt_ns=(1 + number % 3) * 10**7)
    offset_ns += round(step_s * 1e9)
    for _ in links:
        exchange(rtt_ns=9 * 10**7)  # slower than each heartbeat before
    estimate = links[-1].estimate()
    assert estimate is not None
    assert abs(estimate.gateway_unix_ns(now_ns) - (now_ns + offset_ns)) <= 9 * 10**7
