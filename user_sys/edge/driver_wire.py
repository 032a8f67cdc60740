"""What a session and its driver process say to each other, over one local socket. Nothing here crosses a network."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec

from hal.errors import EmergencyStopped, HalError, HardwareLost, LeaseHeld, SpecError, StaleObservation, StaleToken
from hal.machine import runtime_folder
from hal.spec import RobotSpec
from hal.task import Outcome
from user_sys.errors import RunError

MAX_SOCKET_PATH_BYTES = 100  # sun_path holds 108, ZeroMQ appends a few

WAITING = "robot.waiting "
"""How a driver's log line starts whose words say for whom the robot is driven while it waits for its turn."""

LATCH = "e-stop.json"
"""Where in a run's folder of a simulated robot its e-stop's latch is kept. That of a real one is the computer's
(`hal.machine.RobotPlace.latch`)."""


Order = Literal["describe", "attach", "reset", "command", "hold", "e-stop", "re-arm", "renew"]

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
    `lease_until_ns` is when the lease under `token` runs out, by `hal.lease.lease_clock_ns`. After that the driver
    holds, unless a request has brought a later time: ``renew`` does nothing else, and is answered at once.
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
    lease_until_ns: int = 0


class TaskCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a session must know of the task."""

    name: str
    sentence: str
    max_steps: int


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request: an error by name, or what a `driver.Tick` holds (its arrays travel beside it).

    `newest_token` is the newest that the driver has seen, under whichever run.
    `latch` is the file of the e-stop's latch that the driver finds at its next start.
    `hand` says what the array ``hand`` is, where a person's hand is on an input device.
    `t_frames_ns` tells by camera when each picture that travels along was captured.
    """

    error: str = ""
    message: str = ""
    spec: RobotSpec | None = None
    task: TaskCard | None = None
    refused_realtime: str = ""
    newest_token: int = 0
    latch: str = ""
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
        raise RunError(f"socket path is too long: {path}; give the robot a shorter name")
    return f"ipc://{path}"
