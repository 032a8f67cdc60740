"""What the tests of weights share: random weights, signed versions, and a server and a receiver without a link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from user_sys.codec import BF16, Array
from user_sys.messages import (
    Precision,
    SignedRecord,
    WeightsBlobs,
    WeightsGone,
    WeightsManifest,
    WeightsOffer,
    WeightsRequest,
)
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.weights.catalog import BlobCache, StoredVersion, VersionCatalog, WeightsServer, build_offer
from user_sys.weights.receiver import UpdatePlanner
from user_sys.weights.signing import PUBLIC_SUFFIX, SECRET_SUFFIX, Signer, TrustedLearnerKey, ensure_signer, new_signer
from user_sys.weights.state import TensorSet, build_tensor_set, quantize


def random_weights(seed: int, rows: int = 64) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "hidden.0.weight": rng.normal(size=(rows, 48)).astype(np.float32),
        "hidden.0.bias": rng.normal(size=48).astype(np.float32),
        "adapter": rng.integers(0x3000, 0x4000, (rows, 8)).astype(np.uint16).view(BF16),
        "input.offset": rng.normal(size=5).astype(np.float32),
        "steps": np.array(seed),
        "none": np.empty(0, np.float32),
    }


def manifest_of(
    state: TensorSet, version: int, precision: Precision = "exact", run: bytes = b"run", epoch: int = 1
) -> WeightsManifest:
    return WeightsManifest(
        version=version,
        updates=10 * version,
        precision=precision,
        digest=state.digest,
        table_bytes=len(state.table),
        size_bytes=state.size_bytes,
        published_unix_ns=0,
        run=run,
        epoch=epoch,
    )


def add_version(
    catalog: VersionCatalog,
    weights: Mapping[str, Array],
    version: int,
    signer: Signer,
    precision: Precision = "exact",
    **more: object,
) -> StoredVersion:
    state = build_tensor_set(dict(quantize(weights, precision)))
    manifest = manifest_of(state, version, precision, **more)  # type: ignore[arg-type]
    return catalog.add_tensors(manifest, signer.sign(manifest), state)


def learner_key(folder: Path) -> tuple[Signer, TrustedLearnerKey]:
    """A learner's key pair, and the trust of a robot that was given the public half."""
    signer = ensure_signer(folder, "learner")
    assert (folder / f"learner{SECRET_SUFFIX}").stat().st_mode & 0o077 == 0
    return signer, TrustedLearnerKey(folder / f"learner{PUBLIC_SUFFIX}")


class DirectTransfer:
    """A server with versions and a robot. Each message arrives at once, through `tamper`.

    Attributes:
        loaded: version, precision and arrays of each load.
        requests: of the robot.
        sent_bytes: payload to the robot.
        coming: messages to the robot.
    """

    def __init__(
        self, folder: Path, precisions: tuple[Precision, ...] = ("exact",), cache_bytes: int = 1 << 30
    ) -> None:
        self.signer, self.trust = learner_key(folder)
        self.now_s = 0.0
        self.catalog = VersionCatalog(BlobCache())
        self.loaded = list[tuple[int, Precision, dict[str, Array]]]()
        self.requests, self.sent_bytes = list[WeightsRequest](), 0
        self.tamper: Callable[[AnyMessage, bytes], tuple[AnyMessage, bytes] | None] = lambda message, payload: (
            message,
            payload,
        )
        self.offered = -1
        self.coming = list[tuple[AnyMessage, bytes]]()
        self.restart_server()
        self.cache_bytes, self.precisions = cache_bytes, precisions
        self.start_robot()

    def start_robot(self) -> None:
        self.planner = UpdatePlanner(
            self.trust,
            lambda *found: self.load(*found),
            self._request,
            precisions=self.precisions,
            clock=lambda: self.now_s,
            cache_bytes=self.cache_bytes,
        )

    def restart_server(self) -> None:
        self.server = WeightsServer(self.catalog.cache, self._send, lambda: None, lambda: self.now_s)
        self.server.add_peer("robot")

    def add(self, weights: Mapping[str, Array], version: int, precision: Precision = "exact", **more: object) -> None:
        add_version(self.catalog, weights, version, self.signer, precision, **more)

    def offer(self, version: int, pin: SignedRecord | None = None, greeting: bool = False) -> WeightsOffer:
        found = build_offer(self.catalog.of_number(version), self.catalog.cache, self.signer.public_key, pin)
        assert found is not None
        return WeightsOffer(
            manifests=found.manifests, signer=found.signer, tables=found.tables, pin=found.pin, greeting=greeting
        )

    def push(self, weights: Mapping[str, Array], version: int, **more: object) -> int:
        """Publishes and transfers a version. Returns the bytes of its payload."""
        self.add(weights, version, **more)  # type: ignore[arg-type]
        before = self.sent_bytes
        self.planner.on_offer(self.offer(version))
        self.run()
        return self.sent_bytes - before

    def run(self, pauses: int = 20) -> None:
        """Delivers messages until none has come for so many pauses, so that requests are repeated."""
        while pauses:
            self.planner.step()
            pauses -= not self.coming
            self.now_s += 0.001 if self.coming else 0.5
            while self.coming:
                message, payload = self.coming.pop(0)
                if (arrived := self.tamper(message, payload)) is not None:
                    self.deliver(*arrived)

    def deliver(self, message: AnyMessage, payload: bytes) -> None:
        if isinstance(message, WeightsBlobs | WeightsGone):
            self.planner.on_reply(message, memoryview(payload))

    def load(self, manifest: WeightsManifest, arrays: Mapping[str, Array], announced_s: float) -> None:
        self.loaded.append((manifest.version, manifest.precision, dict(arrays)))

    def _request(self, request: WeightsRequest) -> bool:
        self.requests.append(request)
        self.server.on_request("robot", request)
        return True

    def _send(self, name: str, message: AnyMessage, payload: Payload | None) -> bool:
        self.sent_bytes += len(payload or b"")
        self.coming.append((message, bytes(payload or b"")))
        return True


def assert_equal_weights(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(array).tobytes(), name


def other_signer() -> Signer:
    return new_signer()
