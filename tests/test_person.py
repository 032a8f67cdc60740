"""A person at the demo's page, in a real browser: takes the arm over, lifts the cube by keyboard, hands it back.

The person sees what the page shows and nothing else: it finds the orange cube in the wrist camera's picture and presses
keys until the fingers are around it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from user_sys.episode import Phase
from user_sys.store.store import StoreReader

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800), pytest.mark.long(50)]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
).split()
DEMO = Path(__file__).parent.parent / "configs" / "demo.yaml"
FAKE = """
robots: [{name: left, driver: fake, task: reach, real_time: true, options: {rate_hz: 20, cameras: [front]}}]
demonstrations: {episodes: 1}
learner: {max_training_s: 600, batch_size: 32, warmup_updates: 5}
"""
RUN_DEADLINE_S, LIFT_DEADLINE_S = 600.0, 240.0
MOMENT_S = 60.0  # what takes a tenth of a second on a machine that has nothing else to do
SPEED_M_S = 0.4 * 0.6  # the arm's fastest, at the page's 60%
SLOW = 0.3  # with Shift

# What the wrist camera shows when the cube is straight below the fingers: its area in pixels, the row of its middle,
# and how many pixels it moves for each metre aside. Found by looking (128 x 128 pixels).
AREA = [260, 380, 666, 1230, 2706]
ROW = [46.4, 53.0, 62.5, 76.2, 99.9]
PIXELS_PER_M = [345, 410, 500, 640, 800]
COLUMN = 63.5
BETWEEN_FINGERS = 2300  # pixels


def until(what: Callable[[], Any], deadline_s: float, why: str) -> Any:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if result := what():
            return result
        time.sleep(0.05)
    raise AssertionError(f"not within {deadline_s:g} s: {why}")


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, subprocess.Popen[bytes], str]]:
    """A run, its process and the address that it prints. The parameter is the text of its configuration."""
    printed, config = tmp_path / "printed", tmp_path / "person.yaml"
    config.write_text(request.param)
    runtime = Path(f"/tmp/us-person-{os.getpid()}")
    command = [
        sys.executable,
        "-m",
        "user_sys.commands.main",
        "train",
        str(config),
        "--name",
        "person",
        "--runs",
        str(tmp_path),
    ]
    settings = ["--console.port", "0", "--logging.wandb.mode", "disabled", "--target.success", "0"]
    with printed.open("wb") as out:
        process = subprocess.Popen(
            [*command, *settings], stdout=out, stderr=out, env={**os.environ, "USER_SYS_TEST_FOLDER": str(runtime)}
        )
    try:
        found = until(
            lambda: re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]+", printed.read_text()), RUN_DEADLINE_S, "address"
        )
        yield tmp_path / "person", process, found[0]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(RUN_DEADLINE_S)
        shutil.rmtree(runtime, ignore_errors=True)


@pytest.fixture
def page(run: tuple[Path, subprocess.Popen[bytes], str]) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(60_000)
        page.goto(run[2])
        yield page
        browser.close()


class Person:
    """Eyes and hands."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def badge(self) -> str:
        return str(self.page.locator(".card .badge").inner_text())

    def step(self) -> int:
        return int(self.page.locator('.card [data-slot="step"]').inner_text() or 0)

    def episode(self) -> str:
        return str(self.page.locator('.card [data-slot="episode"]').inner_text())

    def last(self) -> tuple[str, str]:
        """The last episode, and how it ended."""
        slot = self.page.locator('.card [data-slot="last"]')
        return str(slot.get_attribute("title")), str(slot.inner_text())

    def see(self) -> tuple[float, float, int]:
        """Column, row and area of the orange cube in the wrist camera's picture; area 0 where it is out of sight."""
        raw = self.page.evaluate(
            """() => {
              const canvas = [...document.querySelectorAll('.card canvas')].find(
                (c) => c.getAttribute('aria-label').includes('wrist'));
              if (!canvas) return null;
              const {width, height} = canvas;
              return [width, height, [...canvas.getContext('2d').getImageData(0, 0, width, height).data]];
            }"""
        )
        if raw is None:
            return 0.0, 0.0, 0
        width, height, data = raw
        red, green, blue = np.array(data, int).reshape(height, width, 4)[..., :3].transpose(2, 0, 1)
        rows, columns = np.nonzero((red > 110) & (red > 1.7 * green) & (blue < 120))
        return (columns.mean(), rows.mean(), len(rows)) if len(rows) else (0.0, 0.0, 0)

    def press(self, key: str, metres: float, slow: bool = False) -> None:
        """Holds a key for as long as the arm takes for the way."""
        if slow:
            self.page.keyboard.down("Shift")
        self.page.keyboard.down(key)
        self.page.wait_for_timeout(max(120.0, 1000 * metres / (SPEED_M_S * (SLOW if slow else 1))))
        self.page.keyboard.up(key)
        if slow:
            self.page.keyboard.up("Shift")
        self.page.wait_for_timeout(250)  # the arm arrives, and its picture

    def centre(self) -> bool:
        """One move towards above the cube; True when it is there."""
        column, row, area = self.see()
        if area == 0:
            self.press("r", 0.04)
            return False
        scale = float(np.interp(area, AREA, PIXELS_PER_M))
        ahead, left = (np.interp(area, AREA, ROW) - row) / scale, (COLUMN - column) / scale
        if max(abs(ahead), abs(left)) < 0.008:
            return True
        if abs(ahead) > abs(left):
            key, way = ("w" if ahead > 0 else "s"), abs(ahead)
        else:
            key, way = ("a" if left > 0 else "d"), abs(left)
        self.press(key, way, slow=way < 0.04)
        return False


def photograph(page: Any) -> None:
    """For the documentation."""
    if path := os.environ.get("USER_SYS_SCREENSHOT"):
        page.screenshot(path=path)


def start_with_cube_in_sight(person: Person) -> bool:
    before = person.episode()
    person.page.keyboard.press("Backspace")
    until(lambda: person.episode() != before, MOMENT_S, "a fresh start")
    person.page.wait_for_timeout(1000)
    return person.see()[2] > 100


def lifted_by_hand(person: Person) -> bool:
    """One start, until the cube is lifted, or the robot cuts the episode off as it does when orders come too late."""
    if person.badge() == "HOLD":  # the page was silent for too long
        person.page.keyboard.press("t")
    until(lambda: start_with_cube_in_sight(person), RUN_DEADLINE_S, "a start that shows the cube")
    mine = person.episode()
    lift(person, lambda: person.episode() != mine)
    episode, end = until(lambda: person.last()[0] >= mine and person.last(), MOMENT_S, "the page says how it ended")
    return episode == mine and end.startswith("success")


def lift(person: Person, ended: Callable[[], bool]) -> None:
    end = time.monotonic() + LIFT_DEADLINE_S
    while time.monotonic() < end and not ended():
        if not person.centre():
            continue
        if person.see()[2] < BETWEEN_FINGERS:
            person.press("f", 0.03, slow=person.see()[2] > 900)
            continue
        person.page.keyboard.press("g")
        person.page.wait_for_timeout(800)
        for _ in range(16):
            photograph(person.page)
            person.press("r", 0.02)
            if ended():
                return
        person.page.keyboard.press("g")
        person.page.wait_for_timeout(800)


@pytest.mark.slow
@pytest.mark.parametrize("run", [DEMO.read_text()], indirect=True, ids=["demo"])
def test_person_lifts_the_cube_by_keyboard_and_hands_back(
    run: tuple[Path, subprocess.Popen[bytes], str], page: Any
) -> None:
    folder, process, _ = run
    person = Person(page)
    until(lambda: person.badge() == "POLICY" and person.see()[2], RUN_DEADLINE_S, "the policy drives, in pictures")
    take_over_and_hand_back(
        person, lambda: until(lambda: lifted_by_hand(person), 3 * LIFT_DEADLINE_S, "the cube is lifted by hand")
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(RUN_DEADLINE_S) == 130
    check_store(folder / "store", success=True)


@pytest.mark.parametrize("run", [FAKE], indirect=True, ids=["fake"])
def test_person_drives_by_keyboard_and_hands_back(run: tuple[Path, subprocess.Popen[bytes], str], page: Any) -> None:
    folder, process, _ = run
    person = Person(page)
    until(lambda: person.badge() == "POLICY", RUN_DEADLINE_S, "the policy drives")
    take_over_and_hand_back(person, lambda: person.press("w", 0.1))
    process.send_signal(signal.SIGINT)
    assert process.wait(RUN_DEADLINE_S) == 130
    check_store(folder / "store", success=False)


def take_over_and_hand_back(person: Person, drive: Callable[[], Any]) -> None:
    page = person.page
    page.keyboard.press("t")
    until(lambda: person.badge() == "YOU", MOMENT_S, "the person has the arm")
    drive()

    page.keyboard.press("h")
    until(lambda: person.badge() == "POLICY", MOMENT_S, "the policy has it back")

    page.keyboard.press("Space")
    until(lambda: person.badge() == "STOPPED", MOMENT_S, "the stop is latched")
    page.get_by_role("button", name="Re-arm").click()
    until(lambda: person.badge() == "HOLD", MOMENT_S, "re-armed, still held")
    page.keyboard.press("h")
    until(lambda: person.badge() == "POLICY", MOMENT_S, "the policy goes on")


def check_store(path: Path, success: bool) -> None:
    """The store has an episode with the person's phase and actions; with `success`, one that the person completed."""
    with StoreReader.open(path) as reader:
        chunks = [reader.read(row) for row in reader.refresh().chunks]
        online = [each for each in reader.episodes() if each.source == "online" and each.intervention_steps]
    by_hand = {each.episode for each in online if each.success or not success}
    assert by_hand
    driven = [chunk for chunk in chunks if chunk.header.episode in by_hand]
    phases = {Phase(int(p)) for chunk in driven for p in chunk.columns["phase"]}
    assert phases & {Phase.TELEOP, Phase.CORRECTION}
    assert any(np.abs(chunk.columns["action.applied"][:, :3]).max() > 0.01 for chunk in driven)
