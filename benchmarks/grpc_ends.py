"""A peer for `benchmarks.tunnel`: gRPC as LeRobot moves transitions from actor to learner, unencrypted.

A message goes up a stream as pieces of at most 2 MB, each in a protobuf message of a state (begin, middle, end) and
bytes; the far end joins them. One answer comes when the stream is over. The far end is a process of its own:
``python -m benchmarks.grpc_ends``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from benchmarks.tunnel_ends import announce, far_end

PIECE_BYTES = 2 << 20
MAX_MESSAGE_BYTES = 4 << 20
BEGIN, MIDDLE, END = 1, 2, 3
DEADLINE_S = 60.0
METHOD = "/peer.Learner/Send"


def _message_type() -> Any:
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="peer.proto", package="peer", syntax="proto3")
    piece = file.message_type.add(name="Piece")
    piece.field.add(name="state", number=1, type=kind.TYPE_INT32, label=kind.LABEL_OPTIONAL)
    piece.field.add(name="body", number=2, type=kind.TYPE_BYTES, label=kind.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("peer.Piece"))


Piece = _message_type()
OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]


def pieces(message: bytes) -> Iterator[Any]:
    """`message` in pieces. One that fits into one piece is its own end."""
    for start in range(0, len(message), PIECE_BYTES):
        last = start + PIECE_BYTES >= len(message)
        yield Piece(state=END if last else BEGIN if start == 0 else MIDDLE, body=message[start : start + PIECE_BYTES])


def _receive(stream: Iterator[Any], context: grpc.ServicerContext) -> Any:
    whole, joined = 0, io.BytesIO()
    for piece in stream:
        joined.write(piece.body)
        if piece.state == END:
            whole += len(joined.getvalue())
            joined = io.BytesIO()
    return Piece(state=END, body=str(whole).encode())


def serve() -> None:
    call = grpc.stream_unary_rpc_method_handler(_receive, Piece.FromString, Piece.SerializeToString)
    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("peer.Learner", {"Send": call}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    announce(f"127.0.0.1:{port}", "")
    server.stop(0).wait(DEADLINE_S)


class GrpcPeer:
    """A channel to `serve`."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._send = channel.stream_unary(METHOD, Piece.SerializeToString, Piece.FromString)

    def stream(self, message: bytes, count: int) -> None:
        """Sends `message` `count` times over one stream, and waits for the answer. Raises grpc.RpcError."""
        answer = self._send((piece for _ in range(count) for piece in pieces(message)), timeout=DEADLINE_S)
        if int(answer.body) != count * len(message):
            raise ValueError(f"{answer.body!r} bytes arrived of {count * len(message)}")


@contextmanager
def grpc_peer() -> Iterator[GrpcPeer]:
    with far_end(module="benchmarks.grpc_ends") as (endpoint, _), grpc.insecure_channel(endpoint, OPTIONS) as channel:
        yield GrpcPeer(channel)


if __name__ == "__main__":
    serve()
