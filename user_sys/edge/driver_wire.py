"""What a session and its driver process say to each other, over one local socket. Nothing here crosses a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from hal.errors import EmergencyStopped, HalError, HardwareLost, LeaseHeld, SpecError, StaleObservation, StaleToken
from hal.lease import runtime_folder
from hal.spec import RobotSpec
from hal.task import Outcome
from user_sys.errors import RunError

MAX_SOCKET_PATH_BYTES = 100  # sun_path holds 108, ZeroMQ appends a few

WAITING = "robot.waiting "
"""How a driver's log line starts whose words say for whom the robot is driven while it waits for its turn."""

LATCH = "e-stop.json"
"""Where in a robot's state folder the e-stop's latch is kept."""


Order = Literal["describe", "attach", "reset", "command", "hold", "e-stop", "re-arm"]

ERRORS: dict[str, type[HalError]] = {
    kind.__name__: kind
    for kind in (StaleToken, LeaseHeld, SpecError, HardwareLost, StaleObservation, EmergencyStopped, HalError)
}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One order. `token` fences it; ``e-stop`` is obeyed from anyone. ``command`` carries the array ``action``.

    `owner` is the state folder of the session's robot: the driver of another run refuses to be attached to.
    `reduced` asks for the speed that is allowed while a person drives or is near.
    `turn` counts a session's e-stops and re-arms as people gave them: a re-arm lifts no e-stop of a later turn.
    `until_ns`, where it is not 0, is when the sender stops waiting, by ``time.monotonic_ns()``: what would move or arm
    the robot after that is refused.
    """

    order: Order
    session: str
    token: int = 0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    real_time: bool = False
    reduced: bool = False
    person: str = ""
    owner: str = ""
    turn: int = 0
    until_ns: int = 0


class TaskCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a session must know of the task."""

    name: str
    sentence: str
    max_steps: int


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request: an error by name, or what a `driver.Tick` holds (its arrays travel beside it).

    `newest_token` is the newest that the driver has seen, under whichever run.
    `hand` says what the array ``hand`` is, where a person's hand is on an input device.
    `t_frames_ns` tells by camera when each picture that travels along was captured.
    """

    error: str = ""
    message: str = ""
    spec: RobotSpec | None = None
    task: TaskCard | None = None
    refused_realtime: str = ""
    newest_token: int = 0
    t_capture_ns: int = 0
    t_frames_ns: dict[str, int] = {}
    t_command_ns: int = 0
    reasons: int = 0
    reward: float = 0.0
    terminated: bool = False
    success: bool | None = None
    source: str = "rule"
    held: int = 0
    stopped: bool = False
    stopped_by: str = ""
    hand: Literal["", "twist", "target"] = ""

    @property
    def outcome(self) -> Outcome:
        return Outcome(reward=self.reward, terminated=self.terminated, success=self.success, source=self.source)


def endpoint(robot: str) -> str:
    """The local socket of `robot`'s driver process on this machine.

    Raises:
        RunError: the path is too long for a Unix socket.
    """
    path = str(runtime_folder() / f"{robot}.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise RunError(f"socket path is too long: {path}; set USER_SYS_RUNTIME_DIR to a shorter folder")
    return f"ipc://{path}"


def shared_latch(robot: str, simulated: bool) -> Path | None:
    """Where the drivers of `robot` on this machine keep the e-stop's latch besides, whichever run they belong to; None
    for a simulated one, which each run begins anew."""
    return None if simulated else runtime_folder() / f"{robot}.{LATCH}"
