"""``python -m user_sys.gateway --run DIR``: the gateway's process. SIGTERM stops it cleanly."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from pathlib import Path

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.errors import HalError
from hal.signals import stop_on_signals
from user_sys.errors import RunError, StoreFull, UserSysError
from user_sys.gateway.config import GatewayConfig
from user_sys.gateway.gateway import Gateway
from user_sys.logs import configure_logging
from user_sys.robot_records import CONFIG_FILE

logger = logging.getLogger("user_sys.gateway")


class _RunFile(msgspec.Struct, frozen=True):
    """The gateway's part of a run's ``config.yaml``."""

    gateway: GatewayConfig = GatewayConfig()


def read_gateway_config(path: Path) -> GatewayConfig:
    """The gateway's settings in a run's ``config.yaml``; the defaults if there is none. Raises RunError: not valid."""
    if not path.exists():
        return GatewayConfig()
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=_RunFile).gateway
    except (OSError, *DECODE_ERRORS) as error:
        raise RunError(f"{path}: {error}") from None


def main(argv: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Returns 2 and logs the reason if it cannot."""
    parser = argparse.ArgumentParser(prog="python -m user_sys.gateway", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="the run's folder")
    args = parser.parse_args(argv)
    configure_logging()
    stop = threading.Event()
    stop_on_signals(stop)
    try:
        config, logged = read_gateway_config(args.run / CONFIG_FILE), ""
        while not stop.is_set():
            try:
                Gateway(config, args.run).run(stop)
                return 0
            except StoreFull as error:
                if str(error) != logged:
                    logged = str(error)
                    logger.error("gateway.disk_full %s", logged)
                stop.wait(config.retry_s)
    except (UserSysError, HalError) as error:
        logger.error("gateway.failed %s: %s", type(error).__name__, error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
