"""The USB probe on a sysfs tree."""

from __future__ import annotations

import grp
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hal.discovery import discover, probe_usb
from hal.resource import Kind, ResourceRecord


class Computer:
    """A sysfs and a /dev in a folder."""

    def __init__(self, folder: Path) -> None:
        self.sys, self.dev = folder / "sys", folder / "dev"
        (self.dev / "input").mkdir(parents=True)
        (self.sys / "class").mkdir(parents=True)

    def plug(self, port: str, ids: str, *, product: str = "", serial: str = "") -> Path:
        device = self.sys / "devices/pci0000:00/0000:00:14.0/usb1" / port
        device.mkdir(parents=True)
        vendor, number = ids.split(":")
        given = {"idVendor": vendor, "idProduct": number, "product": product, "serial": serial}
        for name, text in given.items():
            if text:
                (device / name).write_text(text + "\n")
        return device

    def node(self, device: Path, kind: str, name: str, *, interface: str = "1.0", path: str = "") -> Path:
        """Creates the node `name` of class `kind` below one of the device's interfaces, and its file in /dev."""
        at = device / f"{device.name}:{interface}"
        place = at / kind / name
        place.mkdir(parents=True)
        (place / "device").symlink_to(at)
        links = self.sys / "class" / kind
        links.mkdir(exist_ok=True)
        (links / name).symlink_to(place)
        file = self.dev / (path or name)
        file.touch()
        return file

    def look(self) -> list[ResourceRecord]:
        found = discover({"usb": lambda: probe_usb(self.sys, self.dev)})
        assert not found.failures
        return list(found.records)


@pytest.fixture
def computer(tmp_path: Path) -> Computer:
    return Computer(tmp_path)


def test_motor_bus_keeps_name_in_another_port(computer: Computer) -> None:
    path = computer.node(computer.plug("1-2", "1a86:55d3", serial="5A46"), "tty", "ttyACM0")
    [bus] = computer.look()
    assert (bus.kind, bus.found_by, bus.trouble) == (Kind.BUS, "usb", "")
    assert bus.name.endswith("/serial-5A46") and "Feetech" in bus.model and "feetech" in bus.capabilities
    assert bus.labels == {"device": str(path), "usb": "1a86:55d3", "port": "1-2", "serial": "5A46"}


def test_device_without_serial_number_is_named_by_port(computer: Computer) -> None:
    for port, name in (("1-1", "ttyUSB0"), ("1-3.2", "ttyUSB1")):
        computer.node(computer.plug(port, "0403:6014"), "tty", name)
    assert [record.name.rpartition("/")[2] for record in computer.look()] == ["serial-1-1", "serial-1-3.2"]
    assert {record.model for record in computer.look()} == {"ROBOTIS U2D2"}


def test_devices_with_equal_serial_numbers_are_named_by_port(computer: Computer) -> None:
    for port, name in (("1-1", "ttyUSB0"), ("1-2", "ttyUSB1")):
        computer.node(computer.plug(port, "0403:6001", serial="A50285BI"), "tty", name)
    names = {record.labels["device"][-4:]: record.name.rpartition("/")[2] for record in computer.look()}
    assert names == {"USB0": "serial-A50285BI", "USB1": "serial-1-2"}


def test_camera_with_several_nodes_is_one_record(computer: Computer) -> None:
    camera = computer.plug("2-1", "8086:0b07", serial="839")
    for number in (10, 9, 8):
        computer.node(camera, "video4linux", f"video{number}", interface=f"1.{number}")
    computer.node(computer.plug("2-2", "046d:0825", product="Webcam C270"), "video4linux", "video2")
    webcam, realsense = sorted(computer.look(), key=lambda record: record.model, reverse=True)
    assert (realsense.model, realsense.labels["device"]) == ("RealSense D435", str(computer.dev / "video8"))
    assert "depth" in realsense.capabilities
    assert (webcam.kind, webcam.model) == (Kind.CAMERA, "Webcam C270")


def test_spacemouse_and_gamepad_are_inputs(computer: Computer) -> None:
    computer.node(computer.plug("1-4", "256f:c635"), "hidraw", "hidraw0")
    computer.node(computer.plug("1-5", "046d:c077", product="Mouse"), "hidraw", "hidraw1")
    computer.node(computer.plug("1-6", "045e:028e", product="Controller"), "input", "js0", path="input/js0")
    assert [(record.kind, record.model) for record in computer.look()] == [
        (Kind.INPUT, "Controller"),
        (Kind.INPUT, "3Dconnexion SpaceMouse"),
    ]


def test_devices_on_other_buses_are_skipped(computer: Computer) -> None:
    board = computer.sys / "devices/platform/serial8250"
    board.mkdir(parents=True)
    computer.node(board, "tty", "ttyS0")
    assert computer.look() == []


def test_missing_node_or_permission_is_trouble(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = computer.node(computer.plug("1-2", "1a86:7523"), "tty", "ttyUSB0")
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who may open all
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name="dialout"))
    assert "add the user to the group dialout, and log in again" in computer.look()[0].trouble
    path.unlink()
    assert "no device node" in computer.look()[0].trouble


def test_device_of_root_needs_a_udev_rule(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    computer.node(computer.plug("1-4", "256f:c635"), "hidraw", "hidraw0")
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name="root"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert computer.look()[0].trouble.endswith('with a udev rule, such as KERNEL=="hidraw*", TAG+="uaccess"')
    assert "add the user to the group" not in computer.look()[0].trouble


def test_spacemouse_needs_no_write_permission(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    computer.node(computer.plug("1-4", "256f:c635"), "hidraw", "hidraw0")
    computer.node(computer.plug("1-2", "1a86:7523"), "tty", "ttyUSB0")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert [record.kind for record in computer.look() if record.trouble] == [Kind.BUS]


def test_computer_without_usb_has_no_records(tmp_path: Path) -> None:
    assert list(probe_usb(tmp_path, tmp_path)) == []
