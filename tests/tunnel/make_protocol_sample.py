"""Writes what a robot and a relay of this checkout send: ``python make_protocol_sample.py FILE.msgpack``.

``protocol-5.msgpack`` was made by the last commit of protocol 5; `test_protocol.py` decodes it. The commit that raises
the version makes a sample of the version before, and deletes the older one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from tunnel_kit import chunk, status

from hal.resource import Kind, ResourceRecord
from robots.fake import FakeRobotConfig, fake_spec
from user_sys.messages import (
    PROTOCOL_VERSION,
    BlobWant,
    ChunkOffer,
    CreditGrant,
    DevicesReport,
    EpisodeReport,
    Heartbeat,
    Hello,
    LeaseRelease,
    LeaseRequest,
    Message,
    MetricsReport,
    OperatorReply,
    Preview,
    WeightsApplied,
    WeightsReceived,
    WeightsRequest,
)
from user_sys.tunnel.protocol import AnyMessage, Envelope, channel_of, encode_envelope

ROBOT = "panda-0"
MESSAGES: tuple[AnyMessage, ...] = (
    Hello(
        protocol=PROTOCOL_VERSION, role="robot", name=ROBOT, holder="run", stream="s", spec=fake_spec(FakeRobotConfig())
    ),
    Heartbeat(t_client_ns=1),
    CreditGrant(messages=10, size_bytes=1 << 20),
    LeaseRequest(robot=ROBOT, holder="run", token=1, floor=2, asked_ns=3),
    LeaseRelease(robot=ROBOT, token=1),
    OperatorReply(robot=ROBOT, operator="ana", order="take-over", accepted=True),
    OperatorReply(robot=ROBOT, operator="ana", order="e-stop", accepted=True, press=7),
    status(3),
    EpisodeReport(
        robot=ROBOT, episode="e", source="online", steps=3, success=True, intervention_steps=1, episode_return=1.0,
        policy_version=2,
    ),
    MetricsReport(node=ROBOT, count=5, scalars={"chunk_stalls": 2.0}),
    DevicesReport(records=(ResourceRecord(kind=Kind.CAMERA, name="front", model="D435", node="bench"),)),
    ChunkOffer(sequence=1),
    Preview(robot=ROBOT, camera="front", step=1),
    WeightsApplied(robot=ROBOT, version=3, seconds=0.1),
    WeightsReceived(version=3),
    WeightsRequest(
        version=bytes(32), serial=1, limit_bytes=100, message_bytes=50, wants=(BlobWant(digest=bytes(32), width=4),)
    ),
)  # fmt: skip
PAYLOADS: dict[type[Message], bytes] = {ChunkOffer: chunk(0), Preview: b"\xff\xd8picture"}

if __name__ == "__main__":
    sent = [
        (
            channel_of(message).value,
            [bytes(frame) for frame in encode_envelope(Envelope(message, PAYLOADS.get(type(message))))],
        )
        for message in MESSAGES
    ]
    Path(sys.argv[1]).write_bytes(msgspec.msgpack.encode(sent))
