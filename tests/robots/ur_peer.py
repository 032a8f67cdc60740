"""A simulated e-Series controller in a separate process: ``python ur_peer.py HOST``.

It implements RTDE protocol 2 on port 30004 (with the watchdog on input updates), the script interface on 30003, the
dashboard on 29999, and a Robotiq gripper's URCap on 63352. It does not interpret URScript: it follows the register
protocol of the control script that ur_rtde uploads. It has no kinematics: the tool and the joints move independently.
Commands on stdin, one per line; each is answered by a line of JSON:

    state              print the arm and its commands as one line of JSON
    set NAME VALUE     an attribute of `Arm`, e.g. ``set safety_mode 3`` (protective stop); a list as ``[1, 2]``
    reset              a new arm, at its home
    unplug             close every connection
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

STEP_S = 0.004
FORMATS = {"DOUBLE": "d", "UINT32": "I", "INT32": "i", "VECTOR6D": "6d"}
TYPES = {
    "timestamp": "DOUBLE",
    "actual_q": "VECTOR6D",
    "actual_qd": "VECTOR6D",
    "actual_TCP_pose": "VECTOR6D",
    "actual_TCP_force": "VECTOR6D",
    "robot_mode": "INT32",
    "safety_mode": "INT32",
    "robot_status_bits": "UINT32",
    "safety_status_bits": "UINT32",
    "runtime_state": "UINT32",
    "external_force_torque": "VECTOR6D",
}
NO_CMD, SERVOJ, SERVOL, SERVO_STOP, STOPJ, WATCHDOG, STOP_SCRIPT = 0, 11, 24, 16, 34, 35, 255
READY, DONE = 1, 2
RUNNING, NORMAL, PROTECTIVE_STOP, EMERGENCY_STOP = 7, 1, 3, 7
HOME = (0.0, -1.57, 1.57, -1.57, -1.57, 0.0)
TOOL = (-0.492, -0.133, 0.488, 2.221, 2.221, 0.0)  # of a UR5e at HOME, by UR's DH parameters


@dataclass
class Arm:
    """The robot and its controller.

    Attributes:
        lag_s: lag of a servoed joint or tool behind its target.
        program: the uploaded script runs.
        commands: number of starts of each command of the script, by its number.
        watchdog_hz: the least rate of updates of the command register; 0 for no watchdog.
        updated_s: time of the last write to the command register.
    """

    q: list[float] = field(default_factory=lambda: list(HOME))
    tool: list[float] = field(default_factory=lambda: list(TOOL))
    qd: list[float] = field(default_factory=lambda: [0.0] * 6)
    force: list[float] = field(default_factory=lambda: [0.0] * 6)
    lag_s: float = 0.05
    robot_mode: int = RUNNING
    safety_mode: int = NORMAL
    remote: int = 1
    program: bool = False
    uploads: int = 0
    watchdog_hz: float = 0.0
    watchdog_stops: int = 0
    updated_s: float = 0.0
    servo: list[float] | None = None
    servo_tool: bool = False
    commands: dict[int, int] = field(default_factory=dict)
    gripper: int = 3
    gripper_target: int = 3
    gripper_active: int = 3

    def stop_program(self) -> None:
        self.program, self.servo, self.watchdog_hz = False, None, 0.0


class Controller:
    """The arm's program: follows the registers like the uploaded script."""

    def __init__(self) -> None:
        self.arm = Arm()
        self.ints = dict.fromkeys(range(48), 0)
        self.doubles = dict.fromkeys(range(48), 0.0)
        self.out_int = dict.fromkeys(range(48), 0)
        self._executing = False

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def upload(self, script: str) -> None:
        assert re.search(r"rtde_set_watchdog\(.*\"stop\"\)", script), "the script differs from the supported one"
        if self.arm.safety_mode != NORMAL or self.arm.robot_mode != RUNNING:
            return
        self.arm.stop_program()
        self.arm.program, self._executing = True, False
        self.arm.uploads += 1
        self.out_int[0] = READY

    def write(self, names: list[str], values: list[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            if found := re.fullmatch(r"input_(int|double)_register_(\d+)", name):
                (self.ints if found[1] == "int" else self.doubles)[int(found[2])] = value
        if "input_int_register_0" in names:
            self.arm.updated_s = self.now_s
            self._execute(self.ints[0])

    def _execute(self, command: int) -> None:
        """The script's main loop: act on the command register."""
        if not self.arm.program:
            return
        if command == NO_CMD:
            self._executing, self.out_int[0] = False, READY
        elif command in (SERVOJ, SERVOL):
            self._count(command)
            self.arm.servo, self.arm.servo_tool = [self.doubles[i] for i in range(6)], command == SERVOL
            self.out_int[0] = READY
        elif not self._executing:
            self._executing = True
            self._count(command)
            self._carry_out(command)

    def _count(self, command: int) -> None:
        self.arm.commands[command] = self.arm.commands.get(command, 0) + 1

    def _carry_out(self, command: int) -> None:
        arm = self.arm
        if command == STOP_SCRIPT:
            arm.stop_program()
            return
        if command in (SERVO_STOP, STOPJ):
            assert command == SERVO_STOP or arm.servo is None, "another thread is already controlling the robot"
            arm.servo = None
        elif command == WATCHDOG:
            arm.watchdog_hz = self.doubles[0]
        self.out_int[0] = DONE

    def step(self) -> None:
        arm = self.arm
        if arm.safety_mode != NORMAL or arm.robot_mode != RUNNING:
            arm.stop_program()
        if arm.program and arm.watchdog_hz and self.now_s - arm.updated_s > 1 / arm.watchdog_hz:
            arm.stop_program()
            arm.watchdog_stops += 1
        before = np.array(arm.tool if arm.servo_tool else arm.q)
        after = before if arm.servo is None else before + (np.array(arm.servo) - before) * min(1.0, STEP_S / arm.lag_s)
        if arm.servo_tool:
            arm.tool, arm.qd = after.tolist(), [0.0] * 6
        else:
            arm.q, arm.qd = after.tolist(), ((after - before) / STEP_S).tolist()
        arm.gripper += int(np.clip(arm.gripper_target - arm.gripper, -3, 3))

    def read(self, name: str) -> Any:
        arm = self.arm
        if found := re.fullmatch(r"output_(int|double)_register_(\d+)", name):
            return self.out_int[int(found[2])] if found[1] == "int" else 0.0
        protective, stopped = arm.safety_mode == PROTECTIVE_STOP, arm.safety_mode == EMERGENCY_STOP
        return {
            "timestamp": self.now_s,
            "actual_q": arm.q,
            "actual_qd": arm.qd,
            "actual_TCP_pose": arm.tool,
            "actual_TCP_force": arm.force,
            "robot_mode": arm.robot_mode,
            "safety_mode": arm.safety_mode,
            "robot_status_bits": 1 | arm.program << 1,
            "safety_status_bits": (arm.safety_mode == NORMAL) | protective << 2 | stopped << 7,
            "runtime_state": 2 if arm.program else 1,
        }[name]


def type_of(name: str) -> str:
    if name in TYPES:
        return TYPES[name]
    return "DOUBLE" if "double_register" in name else "INT32" if "int_register" in name else "NOT_FOUND"


class RtdeConnection:
    """One client of port 30004."""

    def __init__(self, controller: Controller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._controller, self._reader, self._writer = controller, reader, writer
        self._inputs: list[list[str]] = []
        self._outputs: list[str] = []
        self._hz = 125.0
        self._pump: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        answers: dict[str, Callable[[bytes], bytes]] = {
            "V": lambda body: bytes([body == b"\x00\x02"]),
            "v": lambda body: struct.pack(">4I", 5, 12, 0, 1101319),
            "O": self._set_outputs,
            "I": self._set_inputs,
            "S": self._start,
        }
        try:
            while True:
                size, kind = struct.unpack(">HB", await self._reader.readexactly(3))
                body = await self._reader.readexactly(size - 3)
                if chr(kind) == "U":
                    names = self._inputs[body[0] - 1]
                    shape = ">" + "".join(FORMATS[type_of(name)] for name in names)
                    self._controller.write(names, list(struct.unpack(shape, body[1:])))
                else:
                    self._send(chr(kind), answers[chr(kind)](body))
        finally:
            if self._pump:
                self._pump.cancel()

    def _send(self, kind: str, body: bytes) -> None:
        self._writer.write(struct.pack(">HB", 3 + len(body), ord(kind)) + body)

    def _set_outputs(self, body: bytes) -> bytes:
        (self._hz,) = struct.unpack(">d", body[:8])
        self._outputs = [name for name in body[8:].decode().split(",") if name]
        return b"\x01" + ",".join(map(type_of, self._outputs)).encode()

    def _set_inputs(self, body: bytes) -> bytes:
        names = [name for name in body.decode().split(",") if name]
        self._inputs.append(names)
        return bytes([len(self._inputs)]) + ",".join(map(type_of, names)).encode()

    def _start(self, body: bytes) -> bytes:
        self._pump = asyncio.ensure_future(self._stream())
        return b"\x01"

    async def _stream(self) -> None:
        while True:
            body = b"\x01"
            for name in self._outputs:
                value = self._controller.read(name)
                values = value if isinstance(value, list) else [value]
                body += struct.pack(">" + FORMATS[type_of(name)], *values)
            self._send("U", body)
            await asyncio.sleep(1 / self._hz)


class Peer:
    """All servers of one controller."""

    def __init__(self) -> None:
        self.controller = Controller()
        self._writers: set[asyncio.StreamWriter] = set()

    async def run(self, host: str) -> None:
        for port, serve in ((30004, self._rtde), (30003, self._script), (29999, self._dashboard), (63352, self._grip)):
            await asyncio.start_server(self._guarded(serve), host, port)
        print("ready", flush=True)
        asyncio.ensure_future(self._live())
        await self._read_stdin()

    def _guarded(
        self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.add(writer)
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await serve(reader, writer)
            self._writers.discard(writer)
            writer.close()

        return serve_one

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self.controller.step()
            due = max(due + STEP_S, loop.time() - 10 * STEP_S)
            await asyncio.sleep(due - loop.time())

    async def _rtde(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await RtdeConnection(self.controller, reader, writer).serve()

    async def _script(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = ""
        while received := await reader.read(65536):
            script += received.decode()
            if script.rstrip().endswith("\nend"):
                self.controller.upload(script)
                script = ""

    async def _dashboard(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"Connected: Universal Robots Dashboard Server\n")
        while line := (await reader.readline()).decode().strip().lower():
            arm = self.controller.arm
            if line == "stop":
                arm.stop_program()
            answers = {
                "polyscopeversion": "URSoftware 5.12.0.1101319 (Mar 15 2022)",
                "get serial number": "20215500001",
                "is in remote control": str(bool(arm.remote)).lower(),
                "running": f"Program running: {str(arm.program).lower()}",
                "stop": "Stopped",
            }
            writer.write((answers.get(line, "could not understand: " + line) + "\n").encode())

    async def _grip(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while words := (await reader.readline()).decode().split():
            arm = self.controller.arm
            if words[0] == "SET":
                if words[1] == "POS":
                    arm.gripper_target = int(words[2])
                writer.write(b"ack\n")
            else:
                values = {"POS": arm.gripper, "STA": arm.gripper_active, "FLT": 0}
                writer.write(f"{words[1]} {values[words[1]]}\n".encode())

    async def _read_stdin(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while words := (await reader.readline()).decode().split(maxsplit=2):
            if words[0] == "set":
                setattr(self.controller.arm, words[1], json.loads(words[2]))
            elif words[0] == "reset":
                self.controller.arm = Arm()
            print(json.dumps(vars(self.controller.arm)), flush=True)
            if words[0] == "unplug":
                for writer in self._writers:
                    writer.transport.abort()
                await asyncio.sleep(0)
                os._exit(0)  # threads that serve connections must not delay the exit


if __name__ == "__main__":
    asyncio.run(Peer().run(sys.argv[1]))
