"""What ``user-sys node`` declares, and how it starts Ray again."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvml_kit import nvml_of

from hal import machine_folder
from hal.resource import local_node
from user_sys.commands import node
from user_sys.commands.main import main


class EndingRay:
    """Ray that ends with status 1, then by a kill, and at its third start by the signal that this process gets."""

    starts = 0

    def __init__(self, *_: object, **__: object) -> None:
        EndingRay.starts += 1
        self.status = {1: 1, 2: -signal.SIGKILL}.get(self.starts, 0)

    def __enter__(self) -> EndingRay:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def send_signal(self, number: int) -> None:
        self.status = -number

    def wait(self) -> int:
        if not self.status:
            signal.raise_signal(signal.SIGTERM)
        return self.status


@pytest.mark.parametrize(
    ("argv", "starts", "status"), [(["join", "127.0.0.1:1"], 3, -signal.SIGTERM), (["head"], 1, 1)]
)
def test_join_starts_ray_again_until_a_signal(
    argv: list[str], starts: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("a-token")
    monkeypatch.setattr(EndingRay, "starts", 0)
    monkeypatch.setattr(node, "subprocess", SimpleNamespace(Popen=EndingRay))
    monkeypatch.setattr(node, "JOIN_PAUSE_S", 0.0)
    assert main(["node", *argv, f"--token={tmp_path / 'token'}"]) == status
    assert EndingRay.starts == starts


@pytest.mark.parametrize(("driver", "is_printed"), [("ur", True), ("fake", False)])
def test_missing_machine_folder_is_printed_for_a_real_robot(
    driver: str, is_printed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("USER_SYS_TEST_FOLDER", raising=False)
    monkeypatch.setattr(machine_folder, "MACHINE_FOLDER", tmp_path / "absent")
    monkeypatch.setattr(EndingRay, "starts", 2)
    monkeypatch.setattr(node, "subprocess", SimpleNamespace(Popen=EndingRay))
    options = "{host: 192.0.2.1}" if driver == "ur" else "{}"
    (tmp_path / "lab.yaml").write_text(f"robots: [{{name: a, driver: {driver}, task: reach, options: {options}}}]\n")
    assert main(["node", "head", str(tmp_path / "lab.yaml"), f"--token={tmp_path / 'token'}"]) == -signal.SIGTERM
    line = f"no run can use the real robots of this node: {tmp_path / 'absent'} is missing. It holds the locks"
    assert (line in capsys.readouterr().out) is is_printed


LOST = "GPU-1,GPU-01234567-89ab-cdef-0123-456789abcdef"  # NVML names no UUID of a lost GPU


@pytest.mark.parametrize(
    ("visible", "declared"),
    [
        (None, (0, 1, 2)),
        ("GPU-2, GPU-0", (0, 2)),
        ("", ()),
        ("-1", ()),
        ("0", None),
        ("GPU-1,GPU-7", None),
        (LOST, (1,)),
    ],
)
def test_node_declares_the_gpus_that_are_visible(
    visible: str | None,
    declared: tuple[int, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml_of(3))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(EndingRay, "starts", 2)
    monkeypatch.setattr(node, "subprocess", SimpleNamespace(Popen=EndingRay))
    status = main(["node", "head", f"--token={tmp_path / 'token'}"])
    printed = capsys.readouterr()
    if declared is None:
        assert status == 2 and f"has '{str(visible)[-5:]}'" in printed.err and "`nvidia-smi -L`" in printed.err
    else:
        assert status == -signal.SIGTERM
        assert [n for n in range(3) if f"{local_node()}/gpu-{n} (L4)" in printed.out] == [*declared]
