"""``python -m user_sys.inference``: a policy server, which runs the policies of a site's robots.

A run with ``policy.location: server`` starts one itself. Start one by hand at each site whose robots connect with
``user-sys edge``:

    user-sys keys new policy
    python -m user_sys.inference --listen tcp://0.0.0.0:5557 --keys keys

It admits the robots of the folder's keyring (`user-sys keys allow`). It keeps weights in memory only, so it may be
killed at any time.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import threading
from pathlib import Path

from hal.discovery import probe_gpus
from hal.durable import replace_durably
from hal.errors import HalError
from hal.resource import local_node
from hal.signals import stop_on_signals
from user_sys.compose import Device, policy_factory
from user_sys.errors import ConfigError, UserSysError
from user_sys.inference.policy_server import PolicyServer
from user_sys.inference.protocol import POLICY_NODE
from user_sys.logs import configure_logging
from user_sys.tunnel.endpoint import check_listen_endpoint
from user_sys.tunnel.keys import Keyring, load_keypair

log = logging.getLogger("user_sys.inference")


def select_device(requested: Device) -> str:
    """The name of torch's device, or ``cpu``, for which torch is not imported.

    Raises:
        ConfigError: ``cuda`` is requested and not available.
    """
    if requested == "cpu" or (requested == "auto" and not any(True for _ in probe_gpus())):
        return "cpu"
    if importlib.util.find_spec("torch") is not None:
        from user_sys.policies.mlp_torch import warm_up_gpu

        if warm_up_gpu():
            return "cuda"
    why = f"torch, on {local_node()}, is not installed or finds no GPU"
    if requested == "cuda":
        raise ConfigError(f"policy.device is cuda, and {why}: install torch with CUDA, or set it to auto or cpu")
    log.warning("policy.no_gpu there is a GPU, but %s: the policies run on the CPU", why)
    return "cpu"


def main(argv: list[str] | None = None) -> int:
    """Serves until SIGTERM or Ctrl-C. Returns 2, after a line in the log, if it cannot."""
    parser = argparse.ArgumentParser(prog="python -m user_sys.inference", description="the policies of a site's robots")
    parser.add_argument("--listen", default="tcp://127.0.0.1:5557", help="tcp://ADDRESS:PORT; port 0: a free one")
    parser.add_argument(
        "--keys", type=Path, default=Path("keys"), help="the folder with policy.key and the admitted robots' keys"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--announce", type=Path, metavar="FILE", help="file to write the address to, once it listens")
    args = parser.parse_args(argv)
    configure_logging()
    stop = threading.Event()
    stop_on_signals(stop)

    def on_listening(endpoint: str) -> None:
        if args.announce is not None:
            replace_durably(args.announce, endpoint.encode())

    try:
        check_listen_endpoint(args.listen)
        device = select_device(args.device)
        keys = load_keypair(args.keys / f"{POLICY_NODE}.key")
        PolicyServer(args.listen, keys, Keyring(args.keys), policy_factory(device), device).run(stop, on_listening)
    except (UserSysError, HalError, OSError) as error:
        log.error("policy.failed %s: %s", type(error).__name__, error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
