"""The probe of what is plugged in: serial ports of motor buses, cameras, and devices to drive robots by.

It reads sysfs and opens nothing. A device is named by its serial number, e.g. ``NODE/serial-5A46``; where it has none,
or another one before it has the same, by the port that it is plugged into. So it has the same name when it comes back.
"""

from __future__ import annotations

import contextlib
import grp
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hal.resource import Kind, ResourceRecord, local_node

# Vendor and product ids, by usb.ids, the makers' documentation and spacenavd's table; (vendor, "") is any product.
KNOWN: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("1a86", "7523"): ("CH340 adapter, as Feetech buses have", ("feetech",)),
    ("1a86", "55d3"): ("CH343 adapter, as Feetech buses have", ("feetech",)),
    ("1a86", "55d4"): ("CH9102 adapter, as Feetech buses have", ("feetech",)),
    ("0403", "6014"): ("ROBOTIS U2D2", ("dynamixel",)),
    ("0403", "6001"): ("FT232R adapter, as USB2Dynamixel", ("dynamixel",)),
    ("2f5d", ""): ("ROBOTIS board", ("dynamixel",)),
    ("0483", "5740"): ("STM32 serial port, as OpenCM and CAN adapters have", ("dynamixel", "can")),
    ("16d0", "117e"): ("CANable adapter", ("can",)),
    ("8086", "0ad3"): ("RealSense D415", ("depth",)),
    ("8086", "0b07"): ("RealSense D435", ("depth",)),
    ("8086", "0b3a"): ("RealSense D435i", ("depth",)),
    ("8086", "0b5b"): ("RealSense D405", ("depth",)),
    ("8086", "0b5c"): ("RealSense D455", ("depth",)),
    ("256f", ""): ("3Dconnexion SpaceMouse", ("spacemouse",)),
    ("046d", "c603"): ("3Dconnexion SpaceMouse Plus", ("spacemouse",)),
    ("046d", "c605"): ("3Dconnexion CadMan", ("spacemouse",)),
    ("046d", "c606"): ("3Dconnexion SpaceMouse Classic", ("spacemouse",)),
    ("046d", "c621"): ("3Dconnexion SpaceBall 5000", ("spacemouse",)),
    ("046d", "c623"): ("3Dconnexion SpaceTraveler", ("spacemouse",)),
    ("046d", "c625"): ("3Dconnexion SpacePilot", ("spacemouse",)),
    ("046d", "c626"): ("3Dconnexion SpaceNavigator", ("spacemouse",)),
    ("046d", "c627"): ("3Dconnexion SpaceExplorer", ("spacemouse",)),
    ("046d", "c628"): ("3Dconnexion SpaceNavigator for Notebooks", ("spacemouse",)),
    ("046d", "c629"): ("3Dconnexion SpacePilot Pro", ("spacemouse",)),
    ("046d", "c62b"): ("3Dconnexion SpaceMouse Pro", ("spacemouse",)),
}


@dataclass(frozen=True)
class _Class:
    """One class of devices in sysfs. Of class `folder`, nodes that begin with `prefix` are devices of `kind`."""

    folder: str
    prefix: str
    kind: Kind
    word: str
    only_known: bool = False


CLASSES = (
    _Class("tty", "tty", Kind.BUS, "serial"),
    _Class("video4linux", "video", Kind.CAMERA, "camera"),
    _Class("hidraw", "hidraw", Kind.INPUT, "hid", only_known=True),
    _Class("input", "js", Kind.INPUT, "gamepad"),
)
_FOLDER_OF_NODES = {"js": "input"}  # below /dev


def probe_usb(sys: Path = Path("/sys"), dev: Path = Path("/dev")) -> Iterator[ResourceRecord]:
    """A `hal.discovery.Probe`: one record for each USB device that has a serial port, a picture or a hand's input.

    Args:
        sys, dev: where sysfs and the device nodes are.
    """
    for each in CLASSES:
        seen: set[Path] = set()
        named: set[str] = set()
        nodes = (sys / "class" / each.folder).glob(each.prefix + "*")
        for node in sorted(nodes, key=lambda path: (len(path.name), path.name)):
            device = _usb_device(node, sys)
            if device is None or device in seen:  # a camera has several nodes; the first is that of the picture
                continue
            serial = _read(device / "serial")
            name = device.name if serial in named else serial or device.name
            record = _record(each, node, device, dev, f"{local_node()}/{each.word}-{name}")
            if record is not None:
                seen.add(device)
                named.add(serial)
                yield record


def _usb_device(node: Path, sys: Path) -> Path | None:
    """The USB device that the node belongs to; None for what is not on a USB."""
    place = (node / "device").resolve()
    for folder in (place, *place.parents):
        if folder == sys.resolve():
            return None
        if (folder / "idVendor").exists():
            return folder
    return None


def _record(each: _Class, node: Path, device: Path, dev: Path, name: str) -> ResourceRecord | None:
    vendor, product = _read(device / "idVendor"), _read(device / "idProduct")
    known = KNOWN.get((vendor, product)) or KNOWN.get((vendor, ""))
    if known is None and each.only_known:
        return None
    said = " ".join(filter(None, (_read(device / "manufacturer"), _read(device / "product"))))
    model, uses = known or (said or f"USB device {vendor}:{product}", ())
    serial = _read(device / "serial")
    path = dev / _FOLDER_OF_NODES.get(each.prefix, "") / node.name
    labels = {"device": str(path), "usb": f"{vendor}:{product}", "port": device.name}
    return ResourceRecord(
        kind=each.kind,
        name=name,
        model=model,
        node=local_node(),
        capabilities=(each.word, *uses),
        labels=labels | ({"serial": serial} if serial else {}),
        found_by="usb",
        trouble=_trouble(path),
    )


def _trouble(path: Path) -> str:
    try:
        gid = path.stat().st_gid
    except OSError:  # never made, or just pulled out
        return f"{path} is missing: no device node was made for it"
    if os.access(path, os.R_OK | os.W_OK):
        return ""
    group = str(gid)
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(gid).gr_name
    return f"{path} may not be opened by this user: add the user to the group {group}, and log in anew"


def _read(path: Path) -> str:
    """The attribute's text; empty where the device has none, or is being unplugged just now."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
