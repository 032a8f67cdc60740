"""``python -m user_sys.inference [CONFIG.yaml] [--KEY=VALUE ...]``: a policy server, which acts for a site's robots.

A run with ``policy.location: server`` starts one itself. Start one by hand at each site whose robots connect with
``user-sys edge``, with their ``policy:`` in CONFIG.yaml; the gateway must allow its key:

    user-sys keys new policy
    user-sys keys allow lab-gpu --role policy --public=KEY         # at the gateway; a name for each site
    python -m user_sys.inference CONFIG.yaml --name=lab-gpu --listen=tcp://0.0.0.0:5557 --gateway=tcp://HOST:5555

It admits the robots of the folder's keyring (`user-sys keys allow`), and acts with its own policy only. It keeps
weights in memory only, so it may be killed at any time.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from hal.discovery import probe_gpus
from hal.durable import replace_durably
from hal.resource import local_node
from hal.settings import Count
from hal.spec import RobotSpec
from user_sys.compose import Device, PolicyConfig, make_policy, picture_bytes
from user_sys.config import as_dict, load
from user_sys.errors import ConfigError
from user_sys.inference.live_policy import LivePolicy
from user_sys.inference.policy_server import OpenPolicy, PolicyServer
from user_sys.inference.protocol import POLICY_NODE, PolicyDescription, encode_description
from user_sys.logs import run_process
from user_sys.messages import PROTOCOL_VERSION, Hello
from user_sys.plugins import load_policy, path_options
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import GATEWAY_NAME, Keyring, load_keypair, load_public_key
from user_sys.tunnel.limits import MAX_PICTURE_BYTES, TunnelLimits, check_listen_endpoint
from user_sys.weights.receiver import DoubleBufferedPolicy, ReceiverConfig

MAX_ELEMENTS = 1 << 14  # of a robot's vectors together
MAX_VALUE_CHARS = 200  # of a setting, in a message

log = logging.getLogger("user_sys.inference")


@dataclass(frozen=True)
class PolicyServerConfig:
    """The settings of a policy server.

    Attributes:
        listen: tcp://ADDRESS:PORT; port 0 takes a free one.
        gateway: from which the weights come.
        keys: folder with ``policy.key``, ``gateway.pub`` and the admitted robots' keys.
        name: under which the gateway allows its key; servers of several sites have a name each.
        policy: kind, options and features of the only policy that robots may request, and the device.
        threads: CPU threads of torch; 1 leaves the rest of a small computer to the learner.
        announce: file to write the address to, once it listens; empty for none.
    """

    listen: str = "tcp://127.0.0.1:5557"
    gateway: str = "tcp://127.0.0.1:5555"
    keys: Path = Path("keys")
    name: str = POLICY_NODE
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    threads: Count = 1
    announce: str = ""
    weights: ReceiverConfig = field(default_factory=ReceiverConfig)
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)


def select_device(requested: Device) -> str:
    """The name of torch's device, or ``cpu``, for which torch is not imported.

    Raises:
        ConfigError: ``cuda`` is requested and not available.
    """
    if requested == "cpu" or (requested == "auto" and not any(True for _ in probe_gpus())):
        return "cpu"
    if importlib.util.find_spec("torch") is not None:
        from user_sys.policies.torch_policy import warm_up_gpu

        if warm_up_gpu():
            return "cuda"
    why = f"torch, on {local_node()}, is not installed or finds no GPU"
    if requested == "cuda":
        raise ConfigError(f"policy.device is cuda, and {why}: install torch with CUDA, or set it to auto or cpu")
    log.warning("policy.no_gpu there is a GPU, but %s: the policies run on the CPU", why)
    return "cpu"


def require_own_policy(own: PolicyConfig, requested: PolicyDescription) -> None:
    """Raises ConfigError unless a robot requests the server's own policy: a robot's key may not choose what runs here.

    Options count as they take effect, with their defaults. The server uses its own paths, which belong to its computer:
    only their last part counts. The message continues "the policy".
    """
    _require_equal("policy.kind", own.kind, requested.kind)
    _require_equal("policy.features", list(own.features), list(requested.features))
    key, sides = "policy.options", [load_policy(own.kind, each.options)[1] for each in (own, requested)]
    if own.kind == "steered":
        from user_sys.policies.steered import load_base  # imports torch, as the policy has

        _require_equal(key, *(_plain_options(replace(each, base_options={})) for each in sides))
        key, sides = f"{key}.base_options", [load_base(each)[1] for each in sides]  # of the same base
    _require_equal(key, *map(_plain_options, sides))


def _plain_options(settings: Any) -> dict[str, Any]:
    return {**as_dict(settings), **path_options(settings)}


def _require_equal(key: str, own: Any, wanted: Any) -> None:
    """Raises ConfigError with the first of two plain values that differ, below `key`."""
    if isinstance(own, dict) and isinstance(wanted, dict):
        for name in {**own, **wanted}:
            _require_equal(f"{key}.{name}", own.get(name), wanted.get(name))
        return
    if isinstance(own, Path) and isinstance(wanted, Path) and wanted.name in (own.name, own.resolve().name):
        return
    if own != wanted:
        texts = [repr(str(each) if isinstance(each, Path) else each) for each in (own, wanted)]
        start = max(0, len(os.path.commonprefix(texts)) - MAX_VALUE_CHARS // 2)
        allowed, asked = (f"{'...' if start else ''}{text[start:][:MAX_VALUE_CHARS]}" for text in texts)
        raise ConfigError(
            f"is another than the robot's: its {key} is {allowed}, the robot's {asked}; set both to the same"
        )


def require_small_robot(own: PolicyConfig, spec: RobotSpec) -> None:
    """Raises ConfigError for a spec whose policy could exhaust the memory; the message continues "the policy".

    Raises SpecError or ConfigError as `make_policy`.
    """
    elements = sum(len(each.labels) for each in (*spec.observation, spec.action))
    if elements > MAX_ELEMENTS or picture_bytes(own, spec) > MAX_PICTURE_BYTES:
        raise ConfigError(
            f"is for robots whose vectors have {MAX_ELEMENTS} elements and whose pictures have {MAX_PICTURE_BYTES} "
            "bytes at most; this robot's have more"
        )


def policy_opener(config: PolicyServerConfig) -> OpenPolicy:
    """The function that opens a policy, which receives weights through a tunnel of its own.

    Raises:
        ConfigError: there is no such device.
        RunError: a key is missing.
    """
    keys = load_keypair(config.keys / f"{POLICY_NODE}.key")
    gateway_key = load_public_key(config.keys / f"{GATEWAY_NAME}.pub")
    device = select_device(config.policy.device)

    @contextmanager
    def open_policy(description: PolicyDescription) -> Iterator[LivePolicy]:
        require_own_policy(config.policy, description)
        require_small_robot(config.policy, description.spec)
        digest = blake3(encode_description(description))
        name, spec = f"{config.name}-{digest.hexdigest(length=4)}", description.spec
        hello = Hello(protocol=PROTOCOL_VERSION, role="policy", name=name, spec=spec)
        first = make_policy(config.policy, spec, secrets.randbits(32), device)
        with (
            TunnelClient(config.gateway, keys, gateway_key, hello, limits=config.tunnel) as client,
            LivePolicy(
                DoubleBufferedPolicy(first.copy),
                client,
                name,
                config.weights,
                config.keys,
                None,
            ) as policy,
        ):
            yield policy

    return open_policy


def main(argv: list[str]) -> int:
    """Serves until SIGTERM or Ctrl-C. Returns 2, after a line in the log, if it cannot."""
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(f"{__doc__}\n{PolicyServerConfig.__doc__}\n")
        return 0
    return run_process("policy", lambda stop: _serve(argv, stop))


def _serve(argv: list[str], stop: threading.Event) -> None:
    path = Path(argv[0]) if argv and not argv[0].startswith("--") else None
    config = load(PolicyServerConfig, path, argv[1:] if path else argv)
    check_listen_endpoint(config.listen)
    os.environ["OMP_NUM_THREADS"] = str(config.threads)  # `TorchPolicy` reads it
    keys = load_keypair(config.keys / f"{POLICY_NODE}.key")
    server = PolicyServer(config.listen, keys, Keyring(config.keys), policy_opener(config))

    def announce(endpoint: str) -> None:
        if config.announce:
            replace_durably(Path(config.announce), endpoint.encode())

    server.run(stop, announce)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
