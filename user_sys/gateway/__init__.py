"""The cloud's side of the tunnel: takes in experience, keeps leases, hands on weights and what people say and see."""

from user_sys.gateway.config import GatewayConfig
from user_sys.gateway.gateway import Gateway

__all__ = ["Gateway", "GatewayConfig"]
