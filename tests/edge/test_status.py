"""What a robot says of itself is what it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hal.task import Outcome
from user_sys.compose import RobotConfig, robot_spec
from user_sys.edge.authority import Authority
from user_sys.edge.driver import Tick
from user_sys.edge.outbox import Outbox
from user_sys.edge.publisher import StatusPublisher
from user_sys.edge.recorder import Decision
from user_sys.episode import Phase
from user_sys.messages import ControlMessage, RobotStatus


class Heard:
    """The end of the tunnel that a status goes into."""

    def __init__(self) -> None:
        self.said: list[ControlMessage] = []

    def send(self, message: ControlMessage) -> bool:
        self.said.append(message)
        return True

    def offer_preview(self, preview: object, jpeg: bytes) -> bool:
        return False

    def scalars(self) -> dict[str, float]:
        return {}


def test_the_version_is_the_one_that_acted_last_also_after_an_order_to_go_back(tmp_path: Path) -> None:
    spec, heard = robot_spec(RobotConfig(name="fake-0", driver="fake")), Heard()
    tick = Tick({}, {}, 0, None, 0, 0, Outcome(0.0, False), 0, False)
    action = np.zeros(len(spec.action.labels), np.float32)
    with Outbox.open(tmp_path) as outbox:
        status = StatusPublisher(
            "fake-0",
            heard,
            outbox,
            Authority("fake-0", spec),
            lambda: "e",
            lambda: "",
            "",
            dict,  # type: ignore[arg-type]
        )
        shown = []
        for version, phase in ((10, Phase.POLICY), (-1, Phase.TELEOP), (5, Phase.POLICY)):
            status.on_step(tick, Decision(action, phase, policy_version=version))
            status.publish()
            newest = heard.said[-1]
            assert isinstance(newest, RobotStatus)
            shown.append(newest.policy_version)
    assert shown == [10, 10, 5], "a person's steps change no weights"
