"""What can be set about a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from user_sys.store.maintenance import Retention
from user_sys.tunnel.endpoint import check_listen_endpoint
from user_sys.tunnel.limits import TunnelLimits


@dataclass(frozen=True)
class GatewayConfig:
    """The gateway's settings.

    Attributes:
        endpoint: where it listens; port 0 takes a free one at the first start and the same one ever after.
        lease_ttl_s: a session that is silent for longer loses its robot.
        commit_bytes: at most so much is written for one sync, so that an acknowledgement is never far away.
        weights_kept: versions kept on disk, for a person to go back to: old ones further apart than new ones.
        report_s: how often it reports to the consoles.
        retry_s: pause before it tries a full disk again.
        retention: how large the store may become, and what is given up then.
        upkeep_s: how often the store's size is looked at and deleted episodes are compacted away.
    """

    endpoint: str = "tcp://127.0.0.1:0"
    lease_ttl_s: float = 30.0
    commit_bytes: int = 8 << 20
    weights_kept: int = 8
    report_s: float = 1.0
    retry_s: float = 0.5
    retention: Retention = field(default_factory=Retention)
    upkeep_s: float = 10.0
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)

    def __post_init__(self) -> None:
        check_listen_endpoint(self.endpoint)
