"""What weight pushes are measured against: bare CURVE, torch.save over gRPC as LeRobot does it, Ray's object store."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import torch
import zmq

from user_sys.codec import BF16, Array
from user_sys.tunnel.keys import new_keypair

MESSAGE_BYTES = 1 << 20
GRPC_CHUNK_BYTES = 2 << 20
STORE_BYTES = 3_000_000_000  # of Ray's, taken from the system as it fills; three pushes of the largest policy
_METHOD = "/weights/Pull"


class BareCurve:
    """The same bytes in messages of a megabyte over CURVE, from a thread to this one, and nothing else."""

    def __init__(self) -> None:
        keys, ours = new_keypair(), new_keypair()
        self._contexts: list[zmq.Context[zmq.Socket[bytes]]] = [zmq.Context(), zmq.Context()]
        self._sender = self._contexts[0].socket(zmq.PAIR)
        self._sender.curve_server, self._sender.curve_secretkey = True, keys.secret.encode()
        self._sender.bind("tcp://127.0.0.1:0")
        self._receiver = self._contexts[1].socket(zmq.PAIR)
        self._receiver.curve_publickey, self._receiver.curve_secretkey = ours.public.encode(), ours.secret.encode()
        self._receiver.curve_serverkey = keys.public.encode()
        self._sender.sndhwm = self._receiver.rcvhwm = 64
        self._receiver.connect(self._sender.getsockopt_string(zmq.LAST_ENDPOINT))
        self.seconds(b"warm")

    def seconds(self, payload: bytes) -> float:
        started = time.perf_counter()
        thread = threading.Thread(target=self._send, args=(payload,))
        thread.start()
        left = len(payload)
        while left > 0:
            left -= len(self._receiver.recv(copy=False))
        thread.join()
        return time.perf_counter() - started

    def _send(self, payload: bytes) -> None:
        view = memoryview(payload)
        for start in range(0, len(view), MESSAGE_BYTES):
            self._sender.send(view[start : start + MESSAGE_BYTES], copy=False)

    def close(self) -> None:
        for socket in (self._sender, self._receiver):
            socket.close(0)
        for context in self._contexts:
            context.term()


def tensors(weights: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.array(a).view(np.int16)).view(torch.bfloat16) if a.dtype == BF16
        else torch.from_numpy(np.array(a))
        for name, a in weights.items()
    }  # fmt: skip


class GrpcPeer:
    """The whole state dict by torch.save, streamed in chunks of 2 MB; torch.load and load_state_dict at the end."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self._source, self._target = tensors(weights), tensors(weights)
        handler = grpc.unary_stream_rpc_method_handler(self._stream)
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("weights", {"Pull": handler}),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        limits = [("grpc.max_receive_message_length", 2 * GRPC_CHUNK_BYTES)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", limits)
        self._pull = self._channel.unary_stream(_METHOD)

    def _stream(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        buffer = io.BytesIO()
        torch.save(self._source, buffer)
        view = buffer.getbuffer()
        for start in range(0, len(view), GRPC_CHUNK_BYTES):
            yield bytes(view[start : start + GRPC_CHUNK_BYTES])

    def push(self) -> float:
        """Seconds. Without encryption, digest or signature."""
        started = time.perf_counter()
        received = io.BytesIO(b"".join(self._pull(b"")))
        for name, tensor in torch.load(received, weights_only=True).items():
            self._target[name].copy_(tensor)
        return time.perf_counter() - started

    def close(self) -> None:
        self._channel.close()
        self._server.stop(None).wait()


class RayPeer:
    """`ray.put` here, `ray.get` and a copy in an actor: another process on this machine, through shared memory.

    To be made before this process is large: Ray forks it, and gives its own processes 30 s to start.
    """

    def __init__(self) -> None:
        import ray

        self._ray = ray
        ray.init(
            address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=STORE_BYTES
        )
        self._actor = ray.remote(_Holder).remote()

    def push(self, weights: Mapping[str, Array]) -> float:
        """Seconds."""
        known = {name: a.view(np.uint16) if a.dtype == BF16 else a for name, a in weights.items()}
        started = time.perf_counter()
        self._ray.get(self._actor.load.remote(self._ray.put(known)))
        return time.perf_counter() - started

    def close(self) -> None:
        self._ray.shutdown()


class _Holder:
    def __init__(self) -> None:
        self.weights: dict[str, Array] = {}

    def load(self, weights: dict[str, Array]) -> None:
        for name, array in weights.items():
            if name in self.weights:
                np.copyto(self.weights[name], array)
            else:
                self.weights[name] = array.copy()
