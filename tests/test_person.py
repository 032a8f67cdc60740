"""Two people at the console of a real run: four simulated robots, over HTTPS, with accounts, in a real browser."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_kit import CHROMIUM, FLAGS, picture, require_playwright
from run_kit import Launch, user_sys
from wait_kit import until

from benchmarks.harness import ROOT
from benchmarks.interventions import EXPERT_FORMAT, TASK, WATCH_PORT, Bench
from user_sys.episode import Phase
from user_sys.store.store import StoreReader

# tests/console has the quick variant: the same pages and control authority with a simulated robot.
pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(1800)]

ARM = "{{name: {name}, driver: sim, task: {task}, real_time: true, options: {{image_height: 240, image_width: 320}}}}"
FLEET = f"""
robots:
{"".join(f"  - {ARM.format(name=f'arm-{n}', task='lift' if n else TASK)}{chr(10)}" for n in range(4))}
demonstrations: {{episodes: 5}}
learner: {{max_training_s: 1500, batch_size: 64, warmup_updates: 5}}
target: {{success: 0}}
evaluation: {{episodes: 0}}
console: {{host: 0.0.0.0, port: 0}}
logging: {{wandb: {{mode: disabled}}}}
"""
MINUTE_MS = 60_000
PASSWORD = "correct horse"
DEAD_ZONE = 0.15  # of a gamepad's stick
SPEED = 0.5  # of the expert's: an input takes effect a control period late
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
# The newest applied action of the robot whose signals the page shows.
APPLIED = """
  const Native = WebSocket;
  window.applied = [0, 0, 0, 0];
  window.WebSocket = class extends Native {
    constructor(...args) {
      super(...args);
      this.addEventListener("message", ({ data }) => {
        const message = typeof data === "string" ? JSON.parse(data) : {};
        if (message.type === "trace" && message.periods.length) window.applied = message.periods.at(-1)[2];
      });
    }
  };
"""
GAMEPAD = """() => {
  window.pad = { id: "test pad", connected: true, axes: [0, 0, 0, 0], buttons: [{ pressed: false }] };
  navigator.getGamepads = () => [window.pad];
  window.dispatchEvent(new Event("gamepadconnected"));
}"""


HELPED_SUCCESSES = """() => {
  const rows = [...document.querySelectorAll("#list tr")];
  return rows.length && rows.every((tr) => tr.cells[3].innerText === "yes" && tr.cells[4].innerText.includes("("));
}"""


@dataclass
class Fleet:
    """A run: its folder, its process, the address of its console, and where the expert's actions arrive."""

    folder: Path
    launch: Launch
    address: str
    expert: socket.socket


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    Bench(tmp_path, 0.0, 0).install_task()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as expert:
        expert.bind(("127.0.0.1", 0))
        env = {"PYTHONPATH": f"{ROOT}:{tmp_path / 'plugin'}", WATCH_PORT: str(expert.getsockname()[1])}
        for name, role in (("ana", "admin"), ("ben", "operator")):
            add_account(name, role)
        with user_sys(tmp_path, "train", "fleet.yaml", "--name", "fleet", "--runs", tmp_path, env=env) as launch:
            found = until(
                lambda: re.search(r"https://\S+:(\d+)/", launch.out + launch.err) or launch.process.poll() is not None,
                f"the run prints its console's address: {launch.err[-2000:]}",
            )
            assert isinstance(found, re.Match), launch.err[-2000:]
            yield Fleet(tmp_path / "fleet", launch, f"https://127.0.0.1:{found[1]}/", expert)


def add_account(name: str, role: str) -> None:
    command = [sys.executable, "-m", "user_sys.commands.main", "console", "user", "add", name, "--role", role]
    subprocess.run([*command, "--password-stdin"], input=PASSWORD, text=True, check=True)


def sign_in(browser: Any, fleet: Fleet, name: str, **settings: Any) -> Any:
    """The console's page of this person, in a browser of its own."""
    context = browser.new_context(ignore_https_errors=True, **settings)
    context.set_default_timeout(5 * MINUTE_MS)
    page = context.new_page()
    page.add_init_script(APPLIED)
    page.goto(fleet.address)
    page.get_by_label("Name").fill(name)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    return page


def card(page: Any, robot: str) -> Any:
    return page.get_by_label(f"Robot {robot}")


def await_badge(page: Any, robot: str, state: str) -> None:
    page.wait_for_selector(f"[aria-label='Robot {robot}'] .badge[data-state={state}]")


def test_people_drive_lift_label_and_export(fleet: Fleet) -> None:
    with require_playwright().sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = sign_in(browser, fleet, "ana", viewport=DESKTOP)
        for number in range(4):
            await_badge(page, f"arm-{number}", "policy")
            page.wait_for_selector(f"[aria-label='Robot arm-{number}'] canvas[aria-label*=front]")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("[...document.querySelectorAll('.card')].every((e) => e.scrollWidth <= e.clientWidth)")
        picture(page, "console-fleet", after_ms=60_000)  # the learner succeeds by then

        drive_by_keyboard(page)
        lift_by_gamepad(page, fleet)
        page.keyboard.press("h")
        await_badge(page, "arm-0", "policy")
        open_scene(page)
        drive_by_touch(sign_in(browser, fleet, "ben", viewport=PHONE, has_touch=True, is_mobile=True))
        label_and_export(page, fleet)
        stop_and_resume(page)
        browser.close()
    fleet.launch.interrupt()
    assert fleet.launch.wait() == 130
    check_store(fleet.folder / "store")


def take_over_again(page: Any) -> None:
    if card(page, "arm-0").locator("[data-slot=badge]").inner_text() == "HOLD":
        page.keyboard.press("t")  # the machine was busy: no input for a moment


def drive_by_keyboard(page: Any) -> None:
    card(page, "arm-0").get_by_role("button", name="Take over").click()
    await_badge(page, "arm-0", "you")

    def moves() -> bool:
        take_over_again(page)
        page.keyboard.down("w")
        page.wait_for_timeout(500)
        moved = bool(page.evaluate("window.applied[0] > 0.005"))
        page.keyboard.up("w")
        return moved

    until(moves, "the arm moves forward")
    phase = card(page, "arm-0").locator("[data-slot=phase]")

    def rewinds() -> bool:
        take_over_again(page)
        for key in ("w", "b"):
            page.keyboard.down(key)
            page.wait_for_timeout(500)
            shown = phase.inner_text()
            page.keyboard.up(key)
        return bool(shown == "recovery")

    until(rewinds, "the arm goes back along its path")


def lift_by_gamepad(page: Any, fleet: Fleet) -> None:
    """Drives as the task's expert shows until an episode of arm-0 succeeds with a person's help."""
    page.evaluate(GAMEPAD)
    page.wait_for_selector("#gamepad:text-is('gamepad: test pad')")
    page.fill("#speed", "100")
    last = card(page, "arm-0").locator("[data-slot=last]")
    grip = page.locator("#grip")

    def lifted() -> bool:
        take_over_again(page)
        if (action := newest_action(fleet.expert)) is None:
            return False
        x, y, z, opening = action
        axes = [-(np.sign(v) * DEAD_ZONE + v * SPEED * (1 - DEAD_ZONE)) for v in (y, x, z)]
        page.evaluate("([left, ahead, up]) => (window.pad.axes = [left, ahead, 0, up])", [float(a) for a in axes])
        if grip.inner_text() != ("gripper open" if opening > 0 else "gripper closed"):
            page.keyboard.press("g")
        return re.match(r"success · \d+ steps, \d+ by hand", last.inner_text()) is not None

    until(lifted, "a person lifts the cube", within_s=300)
    picture(page, "console")
    page.evaluate("window.pad.axes = [0, 0, 0, 0]; window.pad.connected = false")


def newest_action(expert: socket.socket) -> tuple[float, ...] | None:
    """The expert's action for the newest observation, in shares of the range: x, y, z and the gripper's opening."""
    newest = None
    with contextlib.suppress(TimeoutError, BlockingIOError):
        expert.settimeout(0.5)
        while True:
            newest = expert.recv(64)
            expert.settimeout(0.0)
    return newest and tuple(min(1.0, max(-1.0, share)) for share in struct.unpack(EXPERT_FORMAT, newest))


def open_scene(page: Any) -> None:
    with page.context.expect_page() as opened:
        card(page, "arm-0").get_by_role("link", name="3D view").click()
    scene = opened.value
    scene.wait_for_selector("canvas")
    drawn: list[bytes] = [b""]

    def changes() -> bool:  # an empty scene stands still
        drawn.append(scene.screenshot())
        return len(set(drawn[-4:])) == 4

    until(changes, "the arm moves in the 3D view")
    for notice in scene.locator(".mantine-Notification-closeButton").all():  # of drawing without a GPU
        notice.click()
    picture(scene, "console-scene")
    scene.close()


def drive_by_touch(page: Any) -> None:
    card(page, "arm-1").get_by_role("button", name="Take over").click()
    await_badge(page, "arm-1", "you")
    page.locator("#stick-plane").scroll_into_view_if_needed()
    box = page.locator("#stick-plane").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    fingers = page.context.new_cdp_session(page)
    for kind, points in (("touchStart", [(x, y)]), ("touchMove", [(x - 100, y)])):
        points = [{"x": x, "y": y} for x, y in points]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    until(lambda: page.evaluate("window.applied[1] > 0.005"), "the arm moves to the left")
    fingers.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    card(page, "arm-1").get_by_role("button", name="Hand back").click()
    await_badge(page, "arm-1", "policy")
    page.context.close()


def label_and_export(page: Any, fleet: Fleet) -> None:
    """Finds the newest success with a person's help, plays it, labels it a failure and exports it."""
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="Episodes").click()
    episodes = opened.value
    episodes.select_option("select[name=phase]", "person")
    episodes.select_option("select[name=success]", "yes")
    until(lambda: episodes.evaluate(HELPED_SUCCESSES), "the list has the person's success")
    episodes.locator("tbody button").first.click()
    episodes.wait_for_selector(".player .badge:text-is('SUCCESS')")
    episodes.wait_for_selector(".player video")
    episodes.get_by_role("button", name="Play").click()
    episodes.wait_for_selector(".player output:text-matches('^step ([1-9]\\\\d*) of \\\\1 ')")
    episodes.wait_for_selector(".traces .uplot >> nth=3")
    episodes.get_by_role("button", name="One step back").click()
    picture(episodes, "console-episodes")
    episodes.get_by_role("button", name="Failure").click()
    episodes.wait_for_selector(".answer:text-is('The label is stored.')")
    episodes.wait_for_selector(".player .badge:text-is('FAILURE')")
    for form in ("LeRobot", "MCAP"):
        episodes.get_by_role("button", name=f"Export {form}").click()
        episodes.wait_for_selector(f".answer:text-matches('exported to .*-{form.lower()}-')")
    assert len(list((fleet.folder / "exports").iterdir())) == 2
    episodes.close()


def stop_and_resume(page: Any) -> None:
    page.bring_to_front()
    page.keyboard.press("Escape")
    page.keyboard.press("Space")
    for number in range(4):
        await_badge(page, f"arm-{number}", "stopped")
    for number in range(4):
        card(page, f"arm-{number}").get_by_role("button", name="Re-arm").click()
        await_badge(page, f"arm-{number}", "hold")
        card(page, f"arm-{number}").get_by_role("button", name="Hand back").click()
        await_badge(page, f"arm-{number}", "policy")


def check_store(path: Path) -> None:
    """The store has an episode with the person's phase and actions, and the label that a person gave."""
    with StoreReader.open(path) as reader:
        chunks = [reader.read(row) for row in reader.refresh().chunks]
        episodes = reader.episodes()
        labels = [label for each in episodes for label in reader.index.labels(each.episode)]
    by_hand = {each.episode for each in episodes if each.source == "online" and each.intervention_steps}
    assert by_hand
    driven = [chunk for chunk in chunks if chunk.header.episode in by_hand]
    phases = {Phase(int(p)) for chunk in driven for p in chunk.columns["phase"]}
    assert phases & {Phase.TELEOP, Phase.CORRECTION}
    assert any(np.abs(chunk.columns["action.applied"][:, :3]).max() > 0.01 for chunk in driven)
    assert "ana" in {label.labeller for label in labels}
