"""How soon a person's e-stop and a person's absence reach the driver, from a page in a real browser.

``python -m benchmarks.estop [--presses 100] [--leaves 5]``: a fake robot at 10 Hz in real time behind its real driver
process, session, gateway and console; the page runs in headless Chromium. Each press is timed by the browser, from the
key to the line in which the driver logs its latch, and to the confirmation on the page. Under flood, another program
sends orders over the page's connection as fast as it can, and reconnects when it is closed.

A person leaves while a key is held: the browser is killed, or stopped so that its connection stays open. The time is
that to the end of the last control period in which the driver moved the robot for that person.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from playwright.sync_api import Browser, Page, Playwright, sync_playwright
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from benchmarks.control import NAME, _client, _takes_steps
from benchmarks.harness import LEAVE_S, Row, at_most, report, running
from user_sys.compose import RobotConfig
from user_sys.console.config import ConsoleConfig
from user_sys.edge.robot_processes import module_argv, robot_process_argv
from user_sys.episode import Phase, decode_chunk
from user_sys.errors import RunError
from user_sys.messages import StopRun
from user_sys.run.config import RunConfig, RunFolder, create_run_folder
from user_sys.run.prepare import free_endpoint, prepare_run_folder
from user_sys.run.topology import CONSOLE
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND

GOAL = 21
IDLE_MS, FLOOD_MS = 50.0, 100.0
STATED_PRESSES, STATED_LEAVES = 100, 5
RATE_HZ = 10.0
WAIT_MS = 30_000
LEFT_S = 2.0  # by then the robot holds
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage --remote-debugging-port=0"
).split()
TIME_PRESSES = """() => {
  const first = !window.presses;
  window.presses = [];
  if (first) addEventListener("keydown", (event) => {
    if (event.code === "Space") presses.push(Date.now() - (performance.now() - event.timeStamp));
  }, { capture: true });
}"""
_LATCHED = re.compile(r"^(\S+ \S+) W \S+ estop\.latched ", re.MULTILINE)
_CONFIRMED = re.compile(r"confirmed by its driver after (\d+) ms")


def flood(url: str) -> None:
    """Sends orders as fast as it can, without end, and reconnects when the connection closes."""
    parts = urlsplit(url)
    orders = json.dumps({"type": "order", "robot": NAME, "order": "reset"})
    while True:
        with contextlib.suppress(WebSocketException, OSError):
            with connect(f"ws://{parts.netloc}/ws?{parts.query}", proxy=None) as socket:
                socket.send(json.dumps({"type": "hello", "operator": "flood"}))
                while True:
                    socket.send(orders)


class Site:
    """A run's processes, with its console. `robots`: their number; `options`: of each robot's driver."""

    def __init__(self, stack: ExitStack, robots: int = 1, **options: Any) -> None:
        options = {"rate_hz": RATE_HZ, "cameras": ["front"], "image_size": 128} | options
        robot = RobotConfig(name=NAME, driver="fake", real_time=True, realtime_scheduling="off", options=options)
        others = (replace(robot, name=f"fake-{number}") for number in range(1, robots))
        runs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="us-")))
        config = RunConfig(robots=(robot, *others), runs=runs, console=ConsoleConfig(port=0))
        self.folder, card = create_run_folder(config, "run", free_endpoint("tcp://127.0.0.1:0"))
        prepare_run_folder(config, self.folder, card)
        self.driver_log, self._stack, self._endpoint = self.folder.path / "driver.log", stack, card.endpoint
        self._start("gateway", module_argv("user_sys.gateway", "--run", self.folder.path))
        for name in [each.name for each in config.robots[::-1]]:  # NAME is the last one
            (_, driver), (_, session) = robot_process_argv(name, self.folder.edge(name))
            self._start("driver", driver)
            self._session = self._start("session", session)
        with _client(CONSOLE, self.folder.keys, card.endpoint) as console:
            if not _takes_steps(console, self._session):
                raise RunError(f"the robot takes no steps; see the logs in {self.folder.path}")
        self.console = self._start("console", module_argv("user_sys.run.console_process", self.folder.path))
        address = self.folder.console_address
        self.url = str(_await(lambda: address.exists() and address.read_text(), "the console's address"))

    def _start(self, name: str, argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        return self._stack.enter_context(running(argv, self.folder.path / f"{name}.log"))

    def latched_ms(self) -> list[float]:
        """When the driver latched each e-stop, in milliseconds of the epoch."""
        found = _LATCHED.findall(self.driver_log.read_text())
        return [1e3 * datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp() for at in found]

    def end(self) -> RunFolder:
        """Lets the session deliver its recorded steps."""
        self.console.terminate()
        self.console.wait(LEAVE_S)
        with _client(CONSOLE, self.folder.keys, self._endpoint) as console:
            console.send(StopRun(reason="measured"))
            self._session.wait(LEAVE_S)
        return self.folder


def _await(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_MS / 1e3
    while not (result := found()):
        if time.monotonic() > deadline:
            raise RunError(f"not within {WAIT_MS / 1e3:g} s: {what}")
        time.sleep(0.02)
    return result


@contextmanager
def chromium(tools: Playwright) -> Iterator[tuple[Browser, int]]:
    """A browser, and the process group that it is."""
    with tempfile.TemporaryDirectory(prefix="us-chromium-", ignore_cleanup_errors=True) as profile:
        installed = map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))
        path = next(filter(None, installed), tools.chromium.executable_path)
        process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={profile}"], stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            listening = Path(profile) / "DevToolsActivePort"
            port = _await(lambda: listening.exists() and listening.read_text().split(), "a browser")[0]
            yield tools.chromium.connect_over_cdp(f"http://127.0.0.1:{port}"), process.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _open(browser: Browser, url: str) -> Page:
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    page.wait_for_selector("#link[data-state=up]")
    page.wait_for_selector("canvas[aria-label*=front]")
    return page


def press(site: Site, page: Page, times: int) -> tuple[list[float], list[float]]:
    """Presses the e-stop so often; milliseconds from each press to the latch in the driver, and to the confirmation."""
    page.evaluate(TIME_PRESSES)
    before, confirmed = len(site.latched_ms()), []
    for _ in range(times):
        page.wait_for_timeout(random.uniform(50, 250))  # no press keeps step with a period of the robot's
        page.keyboard.press("Space")
        page.wait_for_selector(".badge[data-state=stopped]")
        confirmed.append(float(_await(lambda: _CONFIRMED.search(page.inner_text("#events li")), "a confirmation")[1]))
        page.get_by_role("button", name="Re-arm").click()
        page.wait_for_selector(".badge[data-state=hold]")
        page.get_by_role("button", name="Hand back").click()
        page.wait_for_selector(".badge[data-state=policy]")
    latched = site.latched_ms()[before:]
    pressed = page.evaluate("presses")
    if len(latched) != times or len(pressed) != times:
        raise RunError(f"{times} presses, {len(pressed)} of them seen in the page; the driver latched {len(latched)}")
    return [after - at for at, after in zip(pressed, latched, strict=True)], confirmed


def leave(site: Site, tools: Playwright, number: signal.Signals) -> int:
    """Drives, and sends `number` to the browser meanwhile; when, by the monotonic clock in nanoseconds."""
    with chromium(tools) as (browser, group):
        page = _open(browser, site.url)
        page.keyboard.press("t")
        page.wait_for_selector(".badge[data-state=you]")
        page.keyboard.down("w")
        page.wait_for_timeout(random.uniform(500, 700))
        at_ns = time.monotonic_ns()
        os.killpg(group, number)
        time.sleep(LEFT_S)
    return at_ns


def held_after_ms(folder: RunFolder, left_ns: list[int]) -> list[float]:
    """From each time to the end of the last control period that a person moved the robot in."""
    by_hand: list[int] = []
    with LogReader.open(folder.store) as reader:
        for ref in reader.records():
            if ref.kind == CHUNK_KIND:
                columns = decode_chunk(reader.read(ref)).columns
                person = np.isin(columns["phase"], (Phase.TELEOP, Phase.CORRECTION))
                by_hand += [int(at) for at in columns["t_command_ns"][person]]
    commands = np.sort(np.array(by_hand))
    last = [commands[(commands < at + LEFT_S * 1e9)].max() for at in left_ns]
    return [(end - at) / 1e6 + 1e3 / RATE_HZ for end, at in zip(last, left_ns, strict=True)]


def rows(presses: int, leaves: int) -> list[Row]:
    found: list[Row] = []
    with ExitStack() as stack:
        tools = stack.enter_context(sync_playwright())
        site = Site(stack)
        with chromium(tools) as (browser, _):
            page = _open(browser, site.url)
            press(site, page, 3)  # the first presses load modules that the later ones need
            for name, target_ms, flooded in (("idle", IDLE_MS, False), ("flood", FLOOD_MS, True)):
                with ExitStack() as during:
                    if flooded:
                        argv = module_argv("benchmarks.estop", "--flood", site.url)
                        during.enter_context(running(argv, site.folder.path / "flood.log"))
                        page.wait_for_timeout(2000)
                    latched, confirmed = press(site, page, presses)
                found += _figures(name, latched, confirmed, target_ms)
        ways = {"a browser that is killed": signal.SIGKILL, "a browser that falls silent": signal.SIGSTOP}
        left = {name: [leave(site, tools, number) for _ in range(leaves)] for name, number in ways.items()}
        folder = site.end()
        for name, at_ns in left.items():
            held = held_after_ms(folder, at_ns)
            found.append(Row(GOAL, f"{name}, to the hold, median", "ms", float(np.median(held))))
            found.append(Row(GOAL, f"{name}, to the hold, worst", "ms", max(held)))
    return found


def _figures(name: str, latched: list[float], confirmed: list[float], target_ms: float) -> list[Row]:
    p99 = float(np.quantile(latched, 0.99))
    path = f"press in the page to latch in the driver, {name}"
    return [
        at_most(GOAL, f"{path}, p99; bound: as stated", "ms", p99, target_ms),
        Row(GOAL, f"{path}, median", "ms", float(np.median(latched))),
        Row(GOAL, f"{path}, worst", "ms", max(latched)),
        Row(
            GOAL,
            f"press to confirmation on the page, {name}, p99",
            "ms",
            float(np.quantile(confirmed, 0.99)),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presses", type=int, default=STATED_PRESSES, help="idle, and as many under flood")
    parser.add_argument("--leaves", type=int, default=STATED_LEAVES, help="of each kind")
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if args.flood:
        return flood(args.flood)
    less = [
        f"{done} of {stated} {what}"
        for done, stated, what in ((args.presses, STATED_PRESSES, "presses"), (args.leaves, STATED_LEAVES, "leaves"))
        if done < stated
    ]
    report("estop", rows(args.presses, args.leaves), reduced=", ".join(less))


if __name__ == "__main__":
    main()
