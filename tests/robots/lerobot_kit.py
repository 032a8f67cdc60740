"""A simulated SO-101 for LeRobot's driver: a servo bus in a separate process, and a calibration file."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BUS = Path(__file__).with_name("feetech_bus.py")
MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
LOW, HIGH = 1024, 3072
REPLY_S = 10.0


def allow_torchvision_import() -> None:
    """torchvision's CUDA build does not import with a torch without CUDA unless two operators are registered."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # a matching torchvision has them
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library  # collecting it would remove them


class FeetechArmSimulator:
    """The bus process, and the folder with the arm's calibration."""

    def __init__(self, folder: Path) -> None:
        self.port, self.calibrations = folder / "ttyACM0", folder / "calibration"
        self.calibrations.mkdir(exist_ok=True)
        self.calibration = self.calibrations / "arm.json"
        self.calibration.write_text(
            json.dumps(
                {
                    motor: dict(id=number, drive_mode=0, homing_offset=0, range_min=LOW, range_max=HIGH)
                    for number, motor in enumerate(MOTORS, 1)
                },
                indent=4,
            )
        )
        self._start()

    @property
    def settings(self) -> dict[str, Any]:
        return {"port": str(self.port), "id": "arm", "calibration_dir": str(self.calibrations)}

    def registers(self, motor: str) -> bytes:
        self._say("state")
        found: dict[str, list[int]] = json.loads(self._line())
        return bytes(found[str(MOTORS.index(motor) + 1)])

    def word(self, motor: str, address: int) -> int:
        return int.from_bytes(self.registers(motor)[address : address + 2], "little")

    def leaps(self) -> list[float]:
        """The distance to each motor's goal when its torque came on, in steps."""
        self._say("leaps")
        found: list[float] = json.loads(self._line())
        return found

    def poke(self, motor: str, address: int, *values: int) -> None:
        self._say(f"poke {MOTORS.index(motor) + 1} {address} {' '.join(map(str, values))}")

    def lose(self, packets: int) -> None:
        self._say(f"lose {packets}")
        self.registers(MOTORS[0])  # by now it has been processed

    def unplug(self) -> None:
        self._say("unplug")
        self._process.wait(REPLY_S)
        self._close_pipes()

    def plug_in(self) -> None:
        self._start()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(REPLY_S)
        self.port.unlink(missing_ok=True)
        self._close_pipes()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(BUS), str(self.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def _say(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], REPLY_S)[0], "the bus sends nothing"
        return self._process.stdout.readline().strip()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def feetech_arm_simulator(folder: Path) -> Iterator[FeetechArmSimulator]:
    arm = FeetechArmSimulator(folder)
    try:
        yield arm
    finally:
        arm.kill()
