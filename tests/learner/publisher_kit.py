"""A gateway for the tests of the learner's publisher process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from wait_kit import until

from user_sys.codec import Array
from user_sys.gateway import Gateway, GatewayConfig
from user_sys.gateway.gateway import GatewayAddress, read_gateway_address
from user_sys.learner.publisher_client import PublisherClient
from user_sys.learner.publisher_protocol import PublisherSettings
from user_sys.messages import PROTOCOL_VERSION, Hello, WeightsManifest
from user_sys.tunnel.keys import Keyring, new_keypair, save_keypair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.signing import TrustedLearnerKey
from user_sys.weights.state import build_tensor_set
from user_sys.weights.version_store import VersionStore

DEADLINE_S = 120.0
QUICK = TunnelLimits(heartbeat_s=0.1, backoff_min_s=0.01, backoff_max_s=0.1)


def weights(number: int, **more: Array) -> dict[str, Array]:
    rng = np.random.default_rng(number)
    return {"w": rng.normal(size=(30, 7)).astype(np.float32), "n": np.array(number), "none": np.empty(0), **more}


def digest(arrays: Mapping[str, Array]) -> bytes:
    return build_tensor_set({name: array.copy() for name, array in arrays.items()}).digest


def signal_publisher(learner: PublisherClient, number: int) -> None:
    assert learner.pid is not None
    os.kill(learner.pid, number)


class PublisherSite:
    """A gateway in a thread of the test, with the keys and settings of a learner."""

    def __init__(self, run: Path) -> None:
        self.run, self.keys, self.stops = run, run / "keys", list[str]()
        pair = new_keypair()
        save_keypair(pair, self.keys, "learner")
        Keyring(self.keys).allow(pair.public, "learner", "learner")

    @contextmanager
    def serving(self) -> Iterator[None]:
        stop, self.gateway = threading.Event(), Gateway(GatewayConfig(tunnel=QUICK, report_s=0.05), self.run)
        thread = threading.Thread(target=self.gateway.run, args=(stop,))
        thread.start()
        try:
            until(lambda: read_gateway_address(self.run) is not None, "the gateway listens")
            yield
        finally:
            stop.set()
            thread.join(DEADLINE_S)

    def settings(self, key: str = "learner.key") -> PublisherSettings:
        address = read_gateway_address(self.run)
        assert isinstance(address, GatewayAddress)
        hello = Hello(protocol=PROTOCOL_VERSION, role="learner", name="learner")
        return PublisherSettings(
            address.endpoint, str(self.keys / key), address.public_key, hello, str(self.keys), PublishConfig()
        )

    def client(self) -> PublisherClient:
        return PublisherClient(self.settings(), self.stops.append)

    def manifests(self) -> list[WeightsManifest]:
        """Returns the manifests on the gateway's disk, after verifying their signatures."""
        key = TrustedLearnerKey(self.keys / "learner.verify")
        return [
            key.verify(version.signed, WeightsManifest)
            for version in VersionStore(self.run / "weights").load().versions.values()
        ]

    def digests(self) -> dict[int, bytes]:
        """Returns the digests of the versions on the gateway's disk, by number."""
        return {manifest.version: manifest.digest for manifest in self.manifests()}
