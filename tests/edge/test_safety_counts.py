from __future__ import annotations

from dataclasses import replace

from hal.safety import Reason
from user_sys.edge.driver import NOTHING, Tick
from user_sys.edge.publisher import SafetyCounts

FREE = Tick(
    observation={}, frames={}, t_capture_ns=0, applied=None, reasons=0, t_command_ns=0, outcome=NOTHING, held=0,
    stopped=False,
)  # fmt: skip


def test_every_intervention_is_counted_with_its_reason() -> None:
    counts = SafetyCounts()
    counts.add(FREE)
    assert counts.scalars() == {}
    for reasons in (Reason.WORKSPACE | Reason.SPEED, Reason.WORKSPACE, Reason.ESTOP):
        counts.add(replace(FREE, reasons=int(reasons)))
    counts.add(replace(FREE, held=7))
    assert counts.scalars() == {
        "safety_estop": 1.0,
        "safety_speed": 1.0,
        "safety_watchdog": 7.0,
        "safety_workspace": 2.0,
    }
