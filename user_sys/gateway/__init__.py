"""The gateway: ingests experience, grants leases, and distributes weights, operator commands and reports."""

from user_sys.gateway.config import GatewayConfig
from user_sys.gateway.gateway import Gateway

__all__ = ["Gateway", "GatewayConfig"]
