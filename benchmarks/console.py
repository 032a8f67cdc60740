"""How soon a person's input reaches the robot, and the robot's state the page, by the console's own protocol.

``python -m benchmarks.console [--inputs 300] [--pages 20]``: four fake robots at 50 Hz in real time, each with two
cameras of 30 Hz and as many pixels as 640×480, behind their real driver processes, sessions, gateway and console. A
program in place of a page drives one, which it shows alone, as the page does: its pictures come at 30 Hz, and each is
decoded and acknowledged. It turns the direction of its input round. The time is that from sending the first input of
a new direction to the end of the first control period that applied one, by the clock that both processes share. Then
the same with a second page, which shows the thumbnails of all robots and whose link carries 1 Mbit/s. The e-stop's
times are those of ``benchmarks.estop``. A picture's age is that from its capture to the decoded picture, without
the way from the console to the page, both on this computer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import struct
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import simplejpeg
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from benchmarks.control import NAME
from benchmarks.estop import Site
from benchmarks.harness import Row, at_most, report
from user_sys.errors import RunError

GOAL = 21
RATE_HZ = 50.0
TARGET_MS = 2 * 1e3 / RATE_HZ
CARD_MS = 1000.0
INPUT_PERIOD_S = 0.04  # as the page sends
IMAGE_SIZE, CAMERA_HZ = 554, 30.0  # 640×480 pixels as a square
TURN_S = (0.2, 0.4)
WAIT_S = 30.0
STATED_INPUTS, STATED_PAGES = 300, 20
ROBOTS = 4
AGE_MS = {0.5: 15.0, 0.95: 30.0}  # of a picture, by quantile
CORE_SHARE = 0.15  # of the console's process, for each robot
SLOW_BPS = 1e6


class Page:
    """The protocol of a page: reads in a thread, and acknowledges pictures. A context manager.

    Args:
        link_bps: bits per second at which it reads; 0 for as fast as they come.
    """

    def __init__(self, url: str, link_bps: float = 0.0) -> None:
        self._link_bps = link_bps
        parts = urlsplit(url)
        self._address = f"ws://{parts.netloc}/ws?{parts.query}"
        self._stack = ExitStack()
        self.periods: list[tuple[float, float]] = []  # when each was applied, and its requested x
        self.authority = ""
        self.ages_ms: list[float] = []  # of the pictures of NAME, when they were decoded
        self.others = 0

    def __enter__(self) -> Page:
        self.socket: ClientConnection = self._stack.enter_context(connect(self._address, proxy=None))
        self.send(type="hello", operator="benchmark")
        self.send(type="look", on=True, large=[] if self._link_bps else [NAME], thumbnails=self._link_bps > 0)
        self.send(type="trace", robot=NAME)
        reader = threading.Thread(target=self._read)
        reader.start()
        self._stack.callback(reader.join)
        self._stack.callback(self.socket.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def send(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def _read(self) -> None:
        try:
            for frame in self.socket:
                self._take(frame)
        except ConnectionClosed:
            return

    def _take(self, frame: str | bytes) -> None:
        if self._link_bps:
            time.sleep(8 * len(frame) / self._link_bps)
        if isinstance(frame, bytes):
            received_s = time.monotonic()
            start = 4 + struct.unpack_from("<I", frame)[0]
            header = json.loads(frame[4:start])
            simplejpeg.decode_jpeg(frame[start:])
            if header["robot"] == NAME:
                self.ages_ms.append(1e3 * (header["age_s"] + time.monotonic() - received_s))
            else:
                self.others += 1
            self.send(type="seen", pictures=[[header["robot"], header["camera"]]])
            return
        message = json.loads(frame)
        if message["type"] == "trace":
            self.periods += [(each[0], each[1][0]) for each in message["periods"]]
        elif message["type"] == "state":
            status = next(each["status"] for each in message["view"]["robots"] if each["name"] == NAME)
            self.authority = status["authority"] if status else ""

    def take_over(self) -> None:
        """Raises RunError: the robot does not let it drive within `WAIT_S`."""
        end_s = time.monotonic() + WAIT_S
        while self.authority != "human":
            if time.monotonic() > end_s:
                raise RunError(f"the robot is {self.authority or 'silent'} {WAIT_S:g} s after a take-over")
            self.send(type="order", robot=NAME, order="take-over")
            for _ in range(10):  # without input it would hold
                self.send(type="drive", robot=NAME, move=[0, 0, 0], gripper=0)
                time.sleep(INPUT_PERIOD_S)

    def wait(self, authority: str) -> None:
        """Raises RunError: the robot's authority is another one after `WAIT_S`."""
        end_s = time.monotonic() + WAIT_S
        while self.authority != authority:
            if time.monotonic() > end_s:
                raise RunError(f"the robot is {self.authority or 'silent'}, not {authority}, after {WAIT_S:g} s")
            time.sleep(0.001)


@dataclass(frozen=True)
class Driven:
    """A page that has driven.

    Attributes:
        delays_ms: from each turn of the input to its control period.
        ages_ms: of the driven robot's pictures.
        pictures_hz: of both cameras of the driven robot.
        core_share: of the console's process, for each robot.
    """

    delays_ms: list[float]
    ages_ms: list[float]
    pictures_hz: float
    core_share: float


def drive(site: Site, inputs: int) -> Driven:
    with Page(site.url) as page:
        page.wait("policy")
        begun_s, begun_cpu_s, turns = time.monotonic(), _cpu_s(site.console.pid), list[tuple[float, int]]()
        for number in range(inputs):
            if page.authority != "human":  # at the start, and after a pause of this program
                page.take_over()
            direction = -1 if number % 2 else 1
            turns.append((time.monotonic(), direction))
            end_s = turns[-1][0] + random.uniform(*TURN_S)  # no turn keeps step with the robot's periods
            while time.monotonic() < end_s:
                page.send(type="drive", robot=NAME, move=[direction, 0, 0], gripper=0)
                time.sleep(INPUT_PERIOD_S)
        time.sleep(1.0)  # the newest periods arrive
        seconds = time.monotonic() - begun_s
        share = (_cpu_s(site.console.pid) - begun_cpu_s) / seconds / ROBOTS
        page.send(type="order", robot=NAME, order="hand-back")
        page.wait("policy")
    delays_ms = [_applied_ms(page.periods, *turn) for turn in turns]
    return Driven(delays_ms, page.ages_ms, len(page.ages_ms) / seconds, share)


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _applied_ms(periods: list[tuple[float, float]], sent_s: float, direction: int) -> float:
    """Infinite if no control period applied the input before the next turn."""
    for at_s, requested in periods:
        if sent_s <= at_s <= sent_s + TURN_S[1] and requested * direction > 0:
            return 1e3 * (at_s - sent_s)
    return math.inf


def card_ms(url: str) -> float:
    """Milliseconds from opening a page to the robot's state on it."""
    begun_s = time.monotonic()
    with Page(url) as page:
        page.wait("policy")
        return 1e3 * (time.monotonic() - begun_s)


def rows(inputs: int, pages: int) -> list[Row]:
    with ExitStack() as stack:
        site = Site(
            stack, ROBOTS, rate_hz=RATE_HZ, cameras=["front", "wrist"], image_size=IMAGE_SIZE, camera_hz=CAMERA_HZ
        )
        drive(site, 5)  # the first ones load modules that the later ones need
        alone = drive(site, inputs)
        with Page(site.url, SLOW_BPS) as slow:
            beside = drive(site, inputs)
            slow_hz = (len(slow.ages_ms) + slow.others) / (inputs * sum(TURN_S) / 2)
        cards = [card_ms(site.url) for _ in range(pages)]
    slowest = max(cards)
    return [
        *_driven_rows("", alone),
        *_driven_rows(", beside a page at 1 Mbit/s", beside),
        Row(GOAL, "pictures that the page at 1 Mbit/s got", "1/s", slow_hz),
        at_most(GOAL, "opened page to the robot's state, worst; bound: as stated", "ms", slowest, CARD_MS),
    ]  # fmt: skip


def _driven_rows(beside: str, driven: Driven) -> list[Row]:
    delays, share = driven.delays_ms, driven.core_share
    path = f"input of a page to the control period that applied it{beside}"
    p99 = float(np.quantile(delays, 0.99, method="higher"))  # infinite ones have no mean
    found = [
        at_most(GOAL, f"{path}, p99; bound: as stated", "ms", p99, TARGET_MS),
        Row(GOAL, f"{path}, median", "ms", float(np.median(delays))),
        Row(GOAL, f"inputs that no control period applied{beside}", "", float(np.isinf(delays).sum())),
        Row(GOAL, f"pictures of two cameras that the page got{beside}", "1/s", driven.pictures_hz),
        at_most(
            GOAL, f"the console's share of a core, a robot{beside}; bound: as stated", "share", share, CORE_SHARE
        ),
    ]  # fmt: skip
    for quantile, bound in AGE_MS.items():
        age = float(np.quantile(driven.ages_ms, quantile))
        name = f"capture of a picture to a page{beside}, p{100 * quantile:.0f}; bound: as stated"
        found.append(at_most(GOAL, name, "ms", age, bound))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=STATED_INPUTS, help="turns of the input")
    parser.add_argument("--pages", type=int, default=STATED_PAGES, help="that are opened")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    stated = ((args.inputs, STATED_INPUTS, "inputs"), (args.pages, STATED_PAGES, "pages"))
    less = [f"{done} of {wanted} {what}" for done, wanted, what in stated if done < wanted]
    report("console", rows(args.inputs, args.pages), reduced=", ".join(less))


if __name__ == "__main__":
    main()
