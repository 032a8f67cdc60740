"""The settings of a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from hal.settings import Count, Positive
from user_sys.errors import ConfigError
from user_sys.store.maintenance import Retention
from user_sys.tunnel.limits import TunnelLimits, check_listen_endpoint


@dataclass(frozen=True)
class GatewayConfig:
    """The gateway's settings.

    Attributes:
        endpoint: the address on which it listens. Port 0 selects a free port at the first start; later starts reuse it.
        lease_ttl_s: silent sessions lose their lease.
        commit_bytes: the most bytes of one sync; it bounds the delay of acknowledgements.
        weights_kept: versions kept for rollbacks; old ones are further apart.
        report_s: interval of reports to the consoles.
        retry_s: of a write to a full disk.
        retention: the size limit of the store, and the rules of deletion.
        upkeep_s: interval of the store's size checks and compaction.
        traces: OTLP collector's URL; empty for none.
    """

    endpoint: str = "tcp://127.0.0.1:0"
    lease_ttl_s: Positive = 30.0
    commit_bytes: Count = 8 << 20
    weights_kept: Count = 8
    report_s: Positive = 1.0
    retry_s: Positive = 0.5
    retention: Retention = field(default_factory=Retention)
    upkeep_s: Positive = 10.0
    traces: str = ""
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)

    def __post_init__(self) -> None:
        check_listen_endpoint(self.endpoint)
        if self.traces and not self.traces.startswith(("http://", "https://")):
            raise ConfigError(f"gateway.traces is {self.traces!r}; write http://HOST:PORT/v1/traces")
