"""The settings of a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from user_sys.store.maintenance import Retention
from user_sys.tunnel.endpoint import check_listen_endpoint
from user_sys.tunnel.limits import TunnelLimits


@dataclass(frozen=True)
class GatewayConfig:
    """The gateway's settings.

    Attributes:
        endpoint: the address on which it listens. Port 0 selects a free port at the first start; later starts reuse it.
        lease_ttl_s: a session that is silent for longer loses its lease.
        commit_bytes: the most bytes of one sync, which bounds the delay of acknowledgements.
        weights_kept: number of weight versions on disk, to which a person can return; old ones are further apart.
        report_s: interval of reports to the consoles.
        retry_s: pause before it retries a write to a full disk.
        retention: the size limit of the store, and the rules of deletion.
        upkeep_s: interval of size checks and compaction of the store.
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
