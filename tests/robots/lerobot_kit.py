"""A simulated SO-101 for LeRobot's driver: a servo bus in a separate process, and a calibration file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer_kit import REPLY_S, PeerProcess

MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
LEKIWI_MOTORS = (*(f"arm_{motor}" for motor in MOTORS), *(f"base_{side}_wheel" for side in ("left", "back", "right")))
LOW, HIGH = 1024, 3072


def allow_torchvision_import() -> None:
    """torchvision's CUDA build does not import with a torch without CUDA unless two operators are registered."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # a matching torchvision has them
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library  # collecting it would remove them


class FeetechArmSimulator(PeerProcess):
    """The bus process, and the folder with the arm's calibration."""

    def __init__(self, folder: Path, motors: tuple[str, ...] = MOTORS) -> None:
        self.motors = motors
        self.port, self.calibrations = folder / "ttyACM0", folder / "calibration"
        self.calibrations.mkdir(exist_ok=True)
        self.calibration = self.calibrations / "arm.json"
        entries = {
            motor: dict(id=number, drive_mode=0, homing_offset=0, range_min=LOW, range_max=HIGH)
            for number, motor in enumerate(motors, 1)
        }
        self.calibration.write_text(json.dumps(entries, indent=4))
        super().__init__("feetech_bus.py", str(self.port), str(len(motors)))

    @property
    def settings(self) -> dict[str, Any]:
        return {"port": str(self.port), "id": "arm", "calibration_dir": str(self.calibrations)}

    def registers(self, motor: str) -> bytes:
        return bytes(self.ask("state")[str(self.motors.index(motor) + 1)])

    def word(self, motor: str, address: int) -> int:
        return int.from_bytes(self.registers(motor)[address : address + 2], "little")

    def leaps(self) -> list[float]:
        """The distance to each motor's goal when its torque came on, in steps."""
        found: list[float] = self.ask("leaps")
        return found

    def poke(self, motor: str, address: int, value: int) -> None:
        """Set a register of two bytes."""
        self.send(f"poke {self.motors.index(motor) + 1} {address} {value % 256} {value // 256}")
        self.registers(motor)  # by now it has been processed

    def lose(self, packets: int) -> None:
        self.send(f"lose {packets}")
        self.registers(self.motors[0])

    def mute(self, motor: str) -> None:
        """The motor executes commands and responds to none."""
        self.send(f"mute {self.motors.index(motor) + 1}")
        self.registers(motor)

    def unplug(self) -> None:
        self.send("unplug")
        self.process.wait(REPLY_S)

    def plug_in(self) -> None:
        self.restart()

    def kill(self) -> None:
        super().kill()
        self.port.unlink(missing_ok=True)


@contextlib.contextmanager
def feetech_arm_simulator(folder: Path, motors: tuple[str, ...] = MOTORS) -> Iterator[FeetechArmSimulator]:
    arm = FeetechArmSimulator(folder, motors)
    try:
        yield arm
    finally:
        arm.kill()
