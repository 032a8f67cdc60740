"""The console's page in a real browser: take-over, input, e-stop and state."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import console_kit
import msgspec
import pytest
import simplejpeg
from browser_kit import CHROMIUM, FLAGS, picture, require_playwright
from console_kit import SPEC, SimulatedRun, until, write_episode
from joint_arm_kit import joint_spec

from hal.resource import Health, Kind, ResourceRecord
from hal.spec import CameraSpec
from user_sys.compose import RobotConfig, robot_spec
from user_sys.console.accounts import AccountStore
from user_sys.console.config import ConsoleConfig
from user_sys.console.scene_process import PROMISED_RGB
from user_sys.console.server import ConsoleServer
from user_sys.edge.control_authority import ToolDrive
from user_sys.messages import OperatorCommand
from user_sys.store.labels import (
    ALL_STEPS,
    DeleteLabel,
    SuccessLabel,
    TrimLabel,
    UndoLabel,
    queued_files,
    read_queued_labels,
    remove_queued,
)
from user_sys.store.maintenance import add_labels

pytestmark = [pytest.mark.browser, pytest.mark.long(40)]

DESKTOP = {"width": 1280, "height": 800}
TIMEOUT_MS = 120_000
PHONE = {"width": 390, "height": 844}
SMALL = {"width": 800, "height": 600}  # a processor draws the scene
JOINTED = joint_spec("joint_delta")
IWER = Path(__file__).with_name("vendor") / "iwer.min.js"
"""Meta's Immersive Web Emulation Runtime 2.5.0 (MIT), ``build/iwer.min.js`` of its npm package: a headset for tests."""
IWER_SHA256 = "23d8640949f19db4b1e70398b30e084e4aa555f3a81e4329da3fac1a70b39542"
HEADSET = """
  window.device = new IWER.XRDevice(IWER.metaQuest3);
  device.installRuntime({ forceInstall: true });
  device.position.set(0, 1.6, 0);
  const controller = device.controllers.right;
  const { gripSpace } = controller.inputSource;
  const inner = Object.getOwnPropertySymbols(gripSpace).find((symbol) => symbol.description === "@iwer/xr-space");
  window.track = (lost = false) => (gripSpace[inner].emulated = lost);
  track(); // IWER calls each position an estimate, as a headset does that has lost its controller
  window.press = (button, value = 1) => controller.updateButtonValue(button, value);
  window.move = (x, y, z) => {
    const { position } = controller;
    position.set(position.x + x, position.y + y, position.z + z);
  };
  const count = () => {
    window.frames_shown += 1;
    requestAnimationFrame(count);
  };
  count();
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with require_playwright().sync_playwright() as tools:
        chromium = tools.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def simulated() -> Iterator[SimulatedRun]:
    simulated = SimulatedRun().start()
    yield simulated
    simulated.close()


@pytest.fixture
def url(simulated: SimulatedRun, tmp_path: Path) -> Iterator[str]:
    server = ConsoleServer(simulated.hub, store=tmp_path / "store")
    yield server.start()
    server.stop()


@pytest.fixture
def page(browser: Any, url: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    context = browser.new_context(viewport=getattr(request, "param", DESKTOP))
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    complaints: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.wait_for_selector(".badge[data-state=policy]")
    yield page
    context.close()
    own = [text for text in complaints if "GL Driver Message" not in text]  # of drawing without a GPU
    assert not own, own


def badge(page: Any, state: str) -> str:
    return str(page.wait_for_selector(f".badge[data-state={state}]").inner_text())


def test_operator_takes_over_by_keyboard_and_hands_back(page: Any, simulated: SimulatedRun) -> None:
    simulated.learn(120)
    page.wait_for_selector("canvas[aria-label*=front]")
    page.wait_for_selector("canvas[aria-label*=wrist]")
    assert "token" not in page.url
    page.wait_for_selector("#p-episodes:text-is('120')")
    page.wait_for_selector("#link[data-state=up]")
    picture(page, "policy", after_ms=2200)  # the curves of a second update

    page.keyboard.press("t")
    assert badge(page, "you") == "YOU"
    page.keyboard.down("w")
    page.keyboard.press("g")
    until(lambda: simulated.authority.twist()[0] > 0.5 and simulated.authority.twist()[3] == -1)
    assert page.locator("[data-code=KeyW]").get_attribute("class") == "lit"
    picture(page, "you")
    page.keyboard.up("w")
    until(lambda: not simulated.authority.twist()[:3].any())
    inputs = len(simulated.orders("drive"))
    until(lambda: len(simulated.orders("drive")) > inputs + 10)  # the heartbeat continues without a key

    page.keyboard.down("b")
    until(lambda: simulated.orders("drive")[-1].rewind)
    page.keyboard.up("b")
    until(lambda: not simulated.orders("drive")[-1].rewind)
    assert simulated.orders("drive")[-1].twist[3] == 0, "the gripper stays as the path back has left it"

    page.keyboard.press("h")
    assert badge(page, "policy") == "POLICY"
    assert len(simulated.orders("hand-back")) == 1


def test_card_names_quarantine_missing_cameras_and_active_limit(page: Any, simulated: SimulatedRun) -> None:
    arm = ResourceRecord(kind=Kind.ROBOT, name="panda-0", model="panda", node="desk", note="by ana: oil")
    simulated.hub.update_resource(msgspec.structs.replace(arm, health=Health.QUARANTINED))
    assert badge(page, "quarantined") == "QUARANTINED"
    assert page.locator(".note", has_text="quarantined by ana: oil").count() == 1
    picture(page, "quarantined")
    simulated.hub.update_resource(msgspec.structs.replace(arm, health=Health.READY))
    badge(page, "policy")
    simulated.hub.set_robot_spec("cart-0", SPEC)
    page.wait_for_selector("[aria-label='Robot cart-0'] .empty:text-is('no cameras')")
    page.keyboard.press("t")
    badge(page, "you")
    page.get_by_role("button", name="panda-0", exact=True).click()
    simulated.limits = ("workspace",)
    page.wait_for_selector("#limit-words:text-is('edge of the workspace')")
    page.wait_for_selector("#traces .uplot >> nth=4")
    page.wait_for_selector(".note:has-text('at its limit: edge of the workspace')")
    picture(page, "limit")


def test_silent_robot_that_a_person_took_out_of_use_is_not_shown_as_lost(page: Any, simulated: SimulatedRun) -> None:
    for name, health in (("arm-0", Health.QUARANTINED), ("arm-1", Health.DRAINING)):
        simulated.add(name)
        page.wait_for_selector(f"[aria-label='Robot {name}'] .badge[data-state=policy]")
        arm = ResourceRecord(kind=Kind.ROBOT, name=name, model="panda", node="desk", note="by ana: oil", health=health)
        simulated.hub.update_resource(arm)
    simulated.close()  # no robot reports any more
    for name, word in (("panda-0", "LOST"), ("arm-0", "QUARANTINED"), ("arm-1", "DRAINING")):
        page.wait_for_selector(f"[aria-label='Robot {name}'].lost .badge:text-is('{word}')")
    assert page.locator("#warning").inner_text() == "no report from panda-0: check the robot's computer and its network"


def test_fleet_of_eight_fits_and_a_robot_opens_alone(page: Any, simulated: SimulatedRun) -> None:
    others = [simulated.add(f"arm-{number}") for number in range(7)]
    page.wait_for_selector("#robots.fleet .card:nth-of-type(8) .badge[data-state=policy]")
    page.wait_for_selector("[aria-label='Robot arm-6'] canvas")
    picture(page, "fleet", after_ms=1000)
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    assert page.evaluate("[...document.querySelectorAll('.card')].every((e) => e.scrollWidth <= e.clientWidth)")
    page.get_by_role("button", name="arm-3", exact=True).click()
    assert page.locator(".card:visible").count() == 1
    page.get_by_role("button", name="All robots").click()
    assert page.locator(".card:visible").count() == 8
    page.get_by_label("Robot arm-5").get_by_role("button", name="Take over").click()
    until(lambda: others[5].authority.operator)
    page.wait_for_selector("[aria-label='Robot arm-5'] .badge[data-state=you]")
    assert page.locator(".card:visible").count() == 1
    page.keyboard.press("Escape")
    assert page.locator(".card:visible").count() == 8


def test_start_of_the_task_lies_over_each_camera_while_the_scene_is_reset(
    page: Any, simulated: SimulatedRun, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    for episode, task in (("wanted", "lift"), ("deleted", "lift"), ("other-task", "peg")):
        write_episode(store, episode, task=task, robot="arm-0")
    add_labels(store, [DeleteLabel(episode="deleted", labeller="bob", at_unix_ns=1)])
    for other in ("arm-1", "arm-2"):
        simulated.add(other)
    page.wait_for_selector("#robots.fleet .card:nth-of-type(3)")
    cameras = tuple(CameraSpec(name=name, height=120, width=160, rate_hz=10.0) for name in ("front", "wrist"))
    simulated.hub.set_robot_spec("arm-0", msgspec.structs.replace(SPEC, cameras=cameras))
    simulated.add("arm-0").authority.request_help("put the cube back", for_reset=True)

    def starts() -> list[str]:
        """Of each camera in view with a picture: the place of its start, if that is drawn as the live picture is."""
        found = page.eval_on_selector_all(
            "[aria-label='Robot arm-0'] figure",
            """all => all.filter((figure) => figure.checkVisibility()).map((figure) => {
              const [live, start] = [figure.querySelector("canvas"), figure.querySelector(".start")];
              const place = (node) => JSON.stringify([node.getBoundingClientRect(), getComputedStyle(node).objectFit]);
              return start && place(start) === place(live) ? new URL(start.src).pathname : "";
            })""",
        )
        return [str(each) for each in found]

    folder = "/api/episodes/wanted/pictures"
    until(lambda: starts() == [f"{folder}/observation.images.front/0"])
    page.get_by_role("button", name="arm-0", exact=True).click()
    until(lambda: starts() == [f"{folder}/observation.images.front/0", f"{folder}/observation.images.wrist/0"])
    picture(page, "start")


def test_second_robot_is_not_taken_over_while_the_page_drives_one(page: Any, simulated: SimulatedRun) -> None:
    other = simulated.add("zeta-0")
    page.get_by_label("Robot zeta-0").get_by_role("button", name="Take over").click()
    page.wait_for_selector("[aria-label='Robot zeta-0'] .badge[data-state=you]")
    page.keyboard.press("Escape")
    page.get_by_label("Robot panda-0").get_by_role("button", name="Take over").click()
    page.wait_for_selector("#events li:has-text('panda-0: hand back zeta-0 first')")
    page.keyboard.press("h")
    until(lambda: other.orders("hand-back"))
    assert not simulated.orders("take-over") and not simulated.orders("hand-back")


def test_keyboard_leaves_a_robot_that_is_lost_while_the_page_drives_it(page: Any, simulated: SimulatedRun) -> None:
    lost = simulated.add("arm-0")
    page.get_by_label("Robot arm-0").get_by_role("button", name="Take over").click()
    page.wait_for_selector("[aria-label='Robot arm-0'] .badge[data-state=you]")
    page.keyboard.press("2")
    assert page.locator(".chosen").get_attribute("aria-label") == "Robot arm-0", "it is released first"
    lost.close()  # its computer has failed: no report shows that it is released
    page.wait_for_selector("[aria-label='Robot arm-0'] .badge[data-state=lost]")
    page.keyboard.press("2")
    page.wait_for_selector("[aria-label='Robot panda-0'].chosen")
    page.keyboard.press("t")
    until(lambda: simulated.orders("take-over"))


def test_name_of_another_robot_leaves_the_driven_one_in_view_and_under_the_keys(
    page: Any, simulated: SimulatedRun
) -> None:
    other = simulated.add("zeta-0")
    page.get_by_role("button", name="zeta-0", exact=True).focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='Robot zeta-0'].chosen")
    page.keyboard.press("t")
    page.wait_for_selector("[aria-label='Robot zeta-0'] .badge[data-state=you]")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="panda-0", exact=True).click()
    page.wait_for_selector("#events li:has-text('panda-0: hand back zeta-0 first')")
    assert page.locator(".card:visible").get_attribute("aria-label") == "Robot zeta-0", "it moves"
    page.keyboard.press("h")
    page.wait_for_selector("[aria-label='Robot zeta-0'] .badge[data-state=policy]")
    page.keyboard.press("o")
    until(lambda: other.orders("success"))
    assert not simulated.orders("success")


def test_label_from_the_episodes_page_names_the_person(page: Any, tmp_path: Path) -> None:
    write_episode(tmp_path / "store", "panda-0-1")
    page.fill("#operator", "ana")
    page.keyboard.press("Enter")
    until(lambda: page.evaluate("sessionStorage.getItem('operator')") == "ana")
    with page.context.expect_page(timeout=TIMEOUT_MS) as opened:
        page.get_by_role("link", name="Episodes").click()
    opened.value.locator("tbody button").first.click()
    opened.value.get_by_role("button", name="Failure").click()
    until(lambda: queued_files(tmp_path / "store"))
    (label,) = read_queued_labels(queued_files(tmp_path / "store")[0])
    remove_queued(queued_files(tmp_path / "store")[0])
    opened.value.wait_for_selector(".answer:text-is('The label is stored.')")
    assert label.labeller == "ana"


def test_label_that_waits_for_the_gateway_can_be_undone(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("user_sys.console.episodes.STORE_TIMEOUT_S", 0.0)  # no gateway stores the labels
    write_episode(tmp_path / "store", "panda-0-1")
    page.goto(f"{page.url}episodes")
    page.locator("tbody button").first.click()
    undo = page.get_by_role("button", name="Undo")
    page.wait_for_selector(".badge:text-is('SUCCESS')")
    assert undo.is_disabled()
    page.get_by_role("button", name="Delete").click()
    page.wait_for_selector(".labels li:has-text('deleted (waits for the gateway)')")
    undo.click()
    page.wait_for_selector(".labels li", state="detached")
    deletion, reverted = [read_queued_labels(file)[0] for file in queued_files(tmp_path / "store")]
    assert isinstance(reverted, UndoLabel) and reverted.undone_at_unix_ns == deletion.at_unix_ns


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Pacific/Pago_Pago"])  # 14 hours ahead of UTC, and 11 behind
def test_date_finds_the_episodes_that_the_list_shows_with_it(browser: Any, url: str, tmp_path: Path, zone: str) -> None:
    write_episode(tmp_path / "store", "panda-0-1")
    context = browser.new_context(viewport=DESKTOP, timezone_id=zone)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    page.goto(f"{page.url}episodes")
    shown = page.locator("tbody button").first.inner_text()
    page.fill("input[name=date]", shown[:10])
    page.wait_for_selector("#count:text-is('1 episodes')")
    page.fill("input[name=date]", "1999-01-01")
    page.wait_for_selector("#count:text-is('0 episodes')")
    page.fill("input[name=date]", shown[:10])
    page.wait_for_selector("#count:text-is('1 episodes')")
    context.close()


def test_episode_is_found_played_stepped_and_labelled(page: Any, tmp_path: Path) -> None:
    for number in range(3):
        write_episode(tmp_path / "store", f"panda-0-{number}", success=number != 1)
    page.goto(f"{page.url}episodes")
    page.wait_for_selector("tbody tr:nth-of-type(3)")
    page.select_option("select[name=success]", "no")
    page.wait_for_selector("#count:text-is('1 episodes')")
    page.get_by_role("button", name=re.compile("^20")).click()
    page.wait_for_selector("[aria-label='Episode panda-0-1'] .badge:text-is('FAILURE')")
    page.get_by_role("button", name="One step forward").click()
    page.wait_for_selector("figcaption:text-is('front · step 0')")
    page.wait_for_selector("output:has-text('step 1 of 11 · policy')")
    page.wait_for_selector(".player video")
    film = "document.querySelector('.player video')"
    until(lambda: page.evaluate(f"!{film}.seeking && {film}.currentTime === 0.15"))  # 10 steps a second
    page.wait_for_selector("figcaption:text-is('front · step 0')")
    page.get_by_role("button", name="Play").click()
    page.wait_for_selector("output:text-is('step 11 of 11 · correction')")
    until(lambda: page.evaluate(f"{film}.paused && {film}.currentTime === 1.15"))
    page.wait_for_selector("figcaption:text-is('wrist · step 11')")
    page.wait_for_selector(".traces .uplot >> nth=3")
    page.select_option("select[name=success]", "")
    page.wait_for_selector("tbody tr:nth-of-type(3)")
    page.locator("tbody tr:nth-of-type(1)").click(modifiers=["Shift"])
    page.wait_for_selector("[aria-label='Episode panda-0-2'] .badge:text-is('SUCCESS')")
    assert page.locator(".player").count() == 2
    picture(page, "episodes", after_ms=500)
    page.get_by_label("Episode panda-0-1").get_by_role("button", name="Success").click()
    until(lambda: queued_files(tmp_path / "store"))
    (label,) = read_queued_labels(queued_files(tmp_path / "store")[0])
    assert isinstance(label, SuccessLabel) and label.success and label.episode == "panda-0-1"
    remove_queued(queued_files(tmp_path / "store")[0])
    page.wait_for_selector(".answer:text-is('The label is stored.')")
    page.get_by_label("Episode panda-0-2").get_by_role("button", name="Keep from here").click()
    until(lambda: queued_files(tmp_path / "store"))
    (label,) = read_queued_labels(queued_files(tmp_path / "store")[0])
    assert isinstance(label, TrimLabel) and (label.first_step, label.steps) == (0, ALL_STEPS)


def test_person_signs_in_over_https_and_out(browser: Any, simulated: SimulatedRun, tmp_path: Path) -> None:
    accounts = AccountStore(tmp_path)
    accounts.add("ana", "viewer", "correct horse")
    server = ConsoleServer(simulated.hub, ConsoleConfig(host="0.0.0.0", port=0), accounts=accounts)
    address = f"https://127.0.0.1:{urlsplit(server.start()).port}/"
    context = browser.new_context(viewport=DESKTOP, ignore_https_errors=True)
    try:
        page = context.new_page()
        page.goto(address)
        for size in (DESKTOP, PHONE):
            for scheme in ("dark", "light"):
                page.set_viewport_size(size)
                page.emulate_media(color_scheme=scheme)
                assert not serious_problems(page, "sign-in")
        page.set_viewport_size(DESKTOP)
        page.get_by_label("Name").fill("ana")
        page.get_by_label("Password").fill("wrong horse")
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_selector("#problem:text-is('the name or the password is wrong')")
        picture(page, "sign-in")
        page.get_by_label("Password").fill("correct horse")
        page.get_by_role("button", name="Sign in").click()
        badge(page, "policy")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.input_value("#operator") == "ana" and page.locator("#operator").is_disabled()
        assert page.get_by_role("button", name="Take over").count() == 0, "a viewer watches"
        picture(page, "viewer")
        page.keyboard.press("Space")
        badge(page, "stopped")
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_selector("h1:text-is('Sign in')")
    finally:
        context.close()
        server.stop()


@pytest.mark.parametrize("stops", [False, True])
def test_page_whose_sign_in_ends_while_it_is_disconnected_leads_to_the_sign_in(
    browser: Any, simulated: SimulatedRun, tmp_path: Path, stops: bool
) -> None:
    """Not while an e-stop is unconfirmed: the page then keeps its warning."""
    accounts = AccountStore(tmp_path)
    accounts.add("ana", "operator", "correct horse")
    server = ConsoleServer(simulated.hub, ConsoleConfig(host="0.0.0.0", port=0), accounts=accounts)
    port = urlsplit(server.start()).port
    assert port is not None
    context = browser.new_context(viewport=DESKTOP, ignore_https_errors=True)
    try:
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(f"https://127.0.0.1:{port}/")
        page.get_by_label("Name").fill("ana")
        page.get_by_label("Password").fill("correct horse")
        page.get_by_role("button", name="Sign in").click()
        badge(page, "policy")
        server.stop()
        badge(page, "unknown")
        if stops:
            page.keyboard.press("Space")
            badge(page, "stopping")
        (tmp_path / "sign-ins.json").write_text("{}")  # 12 hours later
        server = ConsoleServer(simulated.hub, ConsoleConfig(host="0.0.0.0", port=port), accounts=accounts)
        server.start()
        if stops:
            page.wait_for_selector("#alarm:text-matches('NOT CONFIRMED: panda-0.*reload this page to sign in again')")
            page.reload()
        page.wait_for_selector("h1:text-is('Sign in')")
    finally:
        context.close()
        server.stop()


@pytest.mark.slow  # a processor draws it
def test_scene_shows_the_joints_to_signed_in_people_only(browser: Any, simulated: SimulatedRun, tmp_path: Path) -> None:
    pytest.importorskip("viser", reason="the extra `scene` is not installed")
    spec = robot_spec(RobotConfig())
    simulated.hub.set_robot_spec("panda-0", spec)
    simulated.state = (0.0, -0.8, 0.0, -2.4, 0.0, 1.6, 0.8, *(0.0,) * 14, 0.08)
    accounts = AccountStore(tmp_path)
    accounts.add("ana", "viewer", "correct horse")
    config = ConsoleConfig(host="0.0.0.0", port=0)
    server = ConsoleServer(simulated.hub, config, accounts=accounts, drawing_sources={"panda-0": "panda"})
    address = f"https://127.0.0.1:{urlsplit(server.start()).port}/"
    context = browser.new_context(viewport=DESKTOP, ignore_https_errors=True)
    try:
        page, requested = context.new_page(), []
        page.set_default_timeout(TIMEOUT_MS)
        context.on("request", lambda request: requested.append(request.url))
        page.goto(f"{address}scene/panda-0/")
        page.get_by_label("Name").fill("ana")
        socket = f"""() => new Promise((done) => {{
          const socket = new WebSocket("{address.replace("https", "wss")}scene/panda-0", "viser-v1.1.1");
          socket.onopen = () => done("open");
          socket.onclose = () => done("refused");
        }})"""
        assert page.evaluate(socket) == "refused"
        page.get_by_label("Password").fill("correct horse")
        page.get_by_role("button", name="Sign in").click()
        badge(page, "policy")
        with context.expect_page(timeout=TIMEOUT_MS) as opened:
            page.get_by_role("link", name="3D view").click()
        scene = opened.value
        scene.set_default_timeout(TIMEOUT_MS)
        scene.set_viewport_size(SMALL)
        complaints: list[str] = []
        scene.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        scene.wait_for_selector("canvas")
        seen: list[bytes] = [b""]

        def is_still() -> bool:
            seen.append(scene.screenshot())
            return seen[-1] == seen[-2]

        until(is_still, seconds=120)
        picture(scene, "scene")
        simulated.state = (1.0, *simulated.state[1:])
        simulated.promised = ((0.02, 0.0, -0.01, 0.08),) * 10
        until(lambda: scene.screenshot() != seen[-1], seconds=120)
        seen.append(b"")
        until(is_still, seconds=120)
        picture(scene, "scene-moved")

        def shows_the_path() -> bool:
            rgb = simplejpeg.decode_jpeg(scene.screenshot(type="jpeg")).astype(int)
            return bool((abs(rgb[:, 40:] - PROMISED_RGB).max(-1) < 40).any())  # viser's own note has an orange margin

        until(shows_the_path, seconds=120)
        simulated.close()  # the robot is lost
        until(lambda: not shows_the_path(), seconds=120)
        picture(scene, "scene-lost", after_ms=3000)
        assert not complaints, complaints
        assert [url for url in requested if not url.startswith((address, "data:", "blob:"))] == []
    finally:
        context.close()
        server.stop()


def test_gamepad_moves_toggles_the_gripper_and_rewinds(page: Any, simulated: SimulatedRun) -> None:
    page.evaluate("""() => {
      const buttons = [{ pressed: false }, { pressed: false }];
      window.pad = { id: "test pad", connected: true, axes: [0, 0, 0, 0], buttons };
      navigator.getGamepads = () => [window.pad];
      window.dispatchEvent(new Event("gamepadconnected"));
    }""")
    page.wait_for_selector("#gamepad:text-is('gamepad: test pad')")
    page.keyboard.press("t")
    badge(page, "you")
    page.evaluate("window.pad.axes = [0, -1, 0, 0.05]; window.pad.buttons[0].pressed = true")
    until(lambda: simulated.authority.twist()[0] > 0.5 and simulated.authority.twist()[3] == -1)
    assert simulated.authority.twist()[2] == 0, "a stick at rest"
    page.evaluate("window.pad.axes = [0, 0, 0, 0]; window.pad.buttons[1].pressed = true")
    until(lambda: simulated.orders("drive")[-1].rewind)
    page.evaluate("window.pad.buttons[1].pressed = false; window.pad.axes = [0, 0, 0, -1]")
    page.get_by_text("Input settings").click()
    page.select_option("#input-stick", "right")
    until(lambda: simulated.authority.twist()[0] > 0.5)
    page.evaluate("window.pad.axes = [0, 0, 0, 0]; window.pad.buttons[0].pressed = false")
    page.get_by_text("Pause, take out of use").click()
    page.get_by_role("button", name="Pause", exact=True).click()
    badge(page, "hold")
    page.evaluate("window.pad.axes = [0, 0, 0, -1]")
    badge(page, "you")
    until(lambda: simulated.authority.twist()[0] > 0.5)
    page.evaluate("window.pad.connected = false")
    until(lambda: not simulated.authority.twist()[:3].any())


def put_on(page: Any) -> Callable[[str], None]:
    """Puts a headset on, and returns a function that presses or moves, and waits until frames and inputs show it."""
    page.add_init_script(IWER.read_text())
    page.add_init_script(HEADSET)
    page.reload()
    badge(page, "policy")
    page.get_by_role("button", name="Drive with a headset").click()
    page.wait_for_selector("#headset-hint:text-matches('hold the grip')")

    def act(script: str) -> None:
        page.evaluate(f"window.frames_shown = 0; {script}")
        until(lambda: page.evaluate("window.frames_shown") > 3)

    return act


def test_headset_drives_while_its_grip_is_held(page: Any, simulated: SimulatedRun) -> None:
    def drives() -> list[tuple[float, ...]]:
        return [order.twist[:3] for order in simulated.orders("drive")]

    def moves(script: str, seen: Callable[[tuple[float, ...]], bool]) -> None:
        """Repeats the motion, with a new grip, until its input is seen.

        Only the newest input counts, so a busy machine misses a short one; motions that it shows in one frame are a
        jump, after which the person grips again.
        """
        inputs, until_s = len(drives()), time.monotonic() + 60
        while True:
            assert time.monotonic() < until_s, f"inputs since: {drives()[inputs:]}; page: {page.inner_text('body')}"
            act(script)
            with contextlib.suppress(AssertionError):
                until(lambda: any(map(seen, drives()[inputs:])), 3)
                return
            act("press('squeeze', 0)")
            act("press('squeeze')")

    act = put_on(page)
    act("press('a-button')")
    assert badge(page, "you") == "YOU"
    act("press('a-button', 0); move(0, 0, -0.3)")  # without the grip
    act("press('squeeze')")
    inputs = len(drives())
    until(lambda: len(drives()) > inputs + 3)
    assert not any(any(shares) for shares in drives())
    moves("move(0, 0.05, -0.05)", lambda shares: shares[0] > 0.1 and shares[2] > 0.1)  # up and ahead
    until(lambda: max(drives()[-1]) < 0.01)  # the tool has followed
    assert not any(abs(left) > 0.02 for _, left, _ in drives())
    act("press('squeeze', 0); device.quaternion.set(0, Math.SQRT1_2, 0, Math.SQRT1_2)")
    act("press('squeeze')")
    moves("move(-0.05, 0, 0)", lambda shares: shares[0] > 0.1)  # ahead, for a person who has turned to the left
    act("track(true); move(-0.1, 0, 0)")
    until(lambda: not any(drives()[-1]))
    act("track(); press('squeeze', 0)")
    act("press('squeeze')")
    act("press('trigger')")
    until(lambda: simulated.authority.twist()[3] == -1)
    act("press('thumbstick')")
    until(lambda: simulated.orders("drive")[-1].rewind)
    act("press('thumbstick', 0); press('squeeze', 0); press('a-button')")
    badge(page, "policy")
    act("press('b-button')")
    assert badge(page, "stopped") == "STOPPED"
    page.evaluate("document.getElementById('headset').click()")
    page.wait_for_selector("button:text-is('Drive with a headset')")


def test_tool_makes_the_way_of_the_headsets_controller(page: Any, simulated: SimulatedRun) -> None:
    page.add_init_script("""
      window.way = [0, 0, 0];
      window.sent_ms = 0;
      const { send } = WebSocket.prototype;
      WebSocket.prototype.send = function (text) {
        const { type, move } = JSON.parse(text);
        if (type === "drive") {
          const now = performance.now();
          const seconds = Math.min((now - window.sent_ms) / 1000, 0.1);  // as the headset counts them
          window.sent_ms = now;
          window.move_sent = move;
          const speed = 0.2 / Math.max(1, Math.hypot(...move));  // m/s of this robot, which limits the step's length
          window.way = window.way.map((metres, i) => metres + move[i] * speed * seconds);
        }
        send.call(this, text);
      };
    """)
    act = put_on(page)
    page.keyboard.press("t")
    badge(page, "you")
    page.fill("#speed", "80")
    ways, until_s = list[list[float]](), time.monotonic() + 60
    while not any(way == pytest.approx([0.1] * 3, rel=0.1) for way in ways):
        assert time.monotonic() < until_s, f"ways: {ways}"
        page.evaluate("window.way = [0, 0, 0]")
        act("press('squeeze')")
        act("move(-0.1, 0.1, -0.1)")  # ahead, left and up
        with contextlib.suppress(AssertionError):  # a busy machine shows the motion in one frame: a jump
            until(lambda: page.evaluate("way[0] > 0.01 && Math.max(...move_sent) < 0.005"), 5)
        ways.append(page.evaluate("way"))
        act("press('squeeze', 0)")


def test_headset_that_is_taken_off_holds(page: Any, simulated: SimulatedRun) -> None:
    act = put_on(page)
    page.keyboard.press("t")
    badge(page, "you")
    act("press('squeeze')")
    page.evaluate("device.updateVisibilityState('hidden')")
    with simulated.clock.running():
        badge(page, "hold")
    act("device.updateVisibilityState('visible'); press('squeeze', 0)")
    act("press('squeeze')")
    badge(page, "you")


def test_emulated_headset_is_unchanged() -> None:
    assert hashlib.sha256(IWER.read_bytes()).hexdigest() == IWER_SHA256


def test_keys_and_speed_are_the_persons_own_and_stay(page: Any, simulated: SimulatedRun) -> None:
    page.keyboard.press("t")
    badge(page, "you")
    page.get_by_text("Input settings").click()
    page.get_by_role("button", name="Change a key").click()
    page.locator("[data-code=KeyW]").click()
    page.wait_for_selector("#input-hint:text-is('press the key for forward')")
    page.keyboard.press("t")  # it has a meaning of its own
    page.keyboard.press("ArrowUp")
    page.wait_for_selector("[data-code=KeyW] kbd:text-is('↑')")
    page.fill("#speed", "100")
    picture(page, "input-settings")
    page.reload()
    badge(page, "hold")
    page.keyboard.press("t")
    badge(page, "you")
    assert page.inner_text("#speed-value") == "100%"
    page.keyboard.down("ArrowUp")
    until(lambda: simulated.authority.twist()[0] == 1)
    page.keyboard.up("ArrowUp")
    page.keyboard.press("w")
    assert not page.locator("[data-code=KeyW].lit").count()
    page.get_by_text("Input settings").click()
    page.get_by_role("button", name="Usual keys").click()
    page.keyboard.down("w")
    until(lambda: simulated.authority.twist()[0] == 1)
    page.keyboard.down("a")
    until(lambda: simulated.authority.twist()[:2] == pytest.approx([0.5**0.5] * 2))
    page.keyboard.up("a")
    page.keyboard.up("w")


def test_typed_reason_commands_no_robot(page: Any, simulated: SimulatedRun) -> None:
    page.get_by_text("Pause, take out of use").click()
    page.get_by_label("Reason").click()
    page.keyboard.type("hot box")
    assert page.get_by_label("Reason").input_value() == "hot box"
    page.keyboard.press("Tab")
    page.keyboard.press("t")
    badge(page, "you")
    assert [message.order for message in simulated.sent if isinstance(message, OperatorCommand)][0] == "take-over"


def test_key_that_the_page_let_go_moves_nothing_until_it_is_pressed_anew(page: Any, simulated: SimulatedRun) -> None:
    page.keyboard.press("t")
    badge(page, "you")
    lit = page.locator("[data-code=KeyW].lit")
    page.get_by_text("Input settings").click()
    for let_go in (
        lambda: page.get_by_role("button", name="Usual keys").click(),
        lambda: page.keyboard.press("Meta"),
        lambda: page.evaluate("window.dispatchEvent(new Event('blur'))"),
        lambda: page.locator("#run").click(button="right"),  # the menu gets the key's release
        lambda: page.evaluate("document.querySelector('a').dispatchEvent(new Event('dragstart', { bubbles: true }))"),
        lambda: (page.locator("#input-view").click(), page.keyboard.press("Escape")),  # its list gets it
    ):
        page.keyboard.down("w")
        assert lit.count()
        let_go()
        assert not lit.count()
        page.keyboard.down("w")  # the key repeats
        assert not lit.count()
        page.keyboard.up("w")
    page.keyboard.down("w")
    page.locator("[data-code=KeyR]").dispatch_event("contextmenu", {"cancelable": True})
    assert lit.count(), "a long press opens no menu there"


def test_joint_robot_is_driven_joint_by_joint(page: Any, simulated: SimulatedRun) -> None:
    arm = msgspec.structs.replace(SPEC, tool_delta=(), joint_delta=(0, 1, 2))
    simulated.hub.set_robot_spec("panda-0", arm)
    page.keyboard.press("t")
    badge(page, "you")
    page.get_by_text("Input settings").click()
    page.select_option("#input-view", "1")  # of the tool: joints have no direction that it could turn
    page.select_option("#joint", "dy")
    page.keyboard.down("w")
    until(lambda: simulated.authority.twist()[1] > 0.5 and not simulated.authority.twist()[[0, 2]].any())
    page.keyboard.press("j")
    until(lambda: simulated.authority.twist()[2] > 0.5 and not simulated.authority.twist()[:2].any())
    page.keyboard.up("w")
    assert page.locator("#joint option").all_inner_texts() == ["dx", "dy", "dz"]
    simulated.authority.tool_drive = ToolDrive(arm)
    page.wait_for_selector("#joint-refusal:text-matches('name no `description`')")
    simulated.authority.tool_drive = ToolDrive(JOINTED, "ur5e")
    page.wait_for_selector("#joint option:text-is('the tool')", state="attached")
    page.select_option("#joint", "the tool")
    page.keyboard.down("a")
    until(lambda: simulated.orders("drive")[-1].tool == (0.6, 0.0, 0.0))
    assert not any(simulated.orders("drive")[-1].twist[:3])
    page.keyboard.up("a")


def test_scene_is_prepared_over_the_start_picture(page: Any, simulated: SimulatedRun, tmp_path: Path) -> None:
    write_episode(tmp_path / "store", "panda-0-1")
    page.wait_for_selector("canvas[aria-label*=wrist]")
    simulated.authority.request_help("put the cube on the mark", for_reset=True)
    assert badge(page, "requesting") == "RESET"
    page.wait_for_selector(".note:text-is('put the cube on the mark')")
    page.wait_for_selector("img[alt='start of an episode: front']")
    assert page.get_by_role("button", name="Success").is_disabled()
    picture(page, "reset", after_ms=500)
    simulated.authority.emergency_stop("ana")
    assert badge(page, "stopped") == "STOPPED"
    page.get_by_role("button", name="Re-arm").click()
    assert badge(page, "hold") == "RESET"
    page.wait_for_selector(".note:text-matches('^put the cube on the mark · held')")
    assert page.locator(".start").count() and page.get_by_role("button", name="Success").is_disabled()
    page.get_by_role("button", name="Reset done").click()
    badge(page, "policy")
    page.wait_for_selector(".start", state="detached")


def test_space_stops_from_any_state_until_re_arm(page: Any, simulated: SimulatedRun) -> None:
    page.get_by_role("button", name="Take over").click()  # Space must not click the focused button
    badge(page, "you")
    page.keyboard.press("Space")
    assert badge(page, "stopped") == "STOPPED"
    picture(page, "stopped")
    page.keyboard.press("t")
    assert page.get_by_role("button", name="Take over").is_disabled()
    page.get_by_role("button", name="Re-arm").click()
    assert badge(page, "hold") == "HOLD"
    page.get_by_role("button", name="Hand back").click()
    badge(page, "policy")


@pytest.mark.parametrize("told", [True, False], ids=["told", "silent"])
def test_hidden_page_holds_until_a_new_key_press(page: Any, simulated: SimulatedRun, told: bool) -> None:
    page.keyboard.press("t")
    badge(page, "you")
    tell = "document.dispatchEvent(new Event('visibilitychange'))" if told else ""
    page.evaluate(f"Object.defineProperty(document, 'hidden', {{value: true, configurable: true}}); {tell}")
    if told:
        badge(page, "hold")
    with simulated.clock.running():
        badge(page, "hold")
    picture(page, "hold")
    page.evaluate(f"Object.defineProperty(document, 'hidden', {{value: false}}); {tell}")
    page.keyboard.down("a")
    badge(page, "you")
    page.keyboard.up("a")
    assert bool(simulated.orders("release")) is told


def test_second_page_requests_control_and_gets_it(page: Any, browser: Any, url: str, simulated: SimulatedRun) -> None:
    page.fill("#operator", "alice")
    page.keyboard.press("Enter")
    page.keyboard.press("t")
    badge(page, "you")
    context = browser.new_context(viewport=DESKTOP)
    other = context.new_page()
    other.set_default_timeout(TIMEOUT_MS)
    other.goto(url)
    assert badge(other, "human") == "alice"
    other.get_by_role("button", name="Request control").click()
    page.wait_for_selector(".request:has-text('requests control')")
    picture(page, "request")
    assert other.get_by_role("button", name="Requested …").is_disabled()
    page.get_by_role("button", name="Decline").click()
    other.get_by_role("button", name="Request control").click()
    page.get_by_role("button", name="Accept").click()
    badge(page, "hold")
    badge(other, "hold")  # before that it ignores the key
    other.keyboard.down("w")
    badge(other, "you")
    other.keyboard.up("w")
    assert badge(page, "human").startswith("guest-")
    page.get_by_role("button", name="E-STOP", exact=True).click()
    assert badge(other, "stopped") == "STOPPED"
    other.fill("#operator", "alice")
    other.keyboard.press("Enter")
    until(lambda: other.input_value("#operator") == "alice 2")
    assert other.evaluate("sessionStorage.getItem('operator')") == "alice", "so that no reconnection adds a suffix"
    context.close()


def test_driver_answers_a_request_for_control_in_the_fleet_view(page: Any, simulated: SimulatedRun) -> None:
    for name in ("arm-0", "arm-1"):
        simulated.add(name)
    page.wait_for_selector("#robots.fleet")
    page.keyboard.press("t")
    badge(page, "you")
    page.keyboard.press("Escape")
    page.wait_for_selector("#robots.fleet")
    simulated.hub.send_order("panda-0", "bob", "request-control")
    page.wait_for_selector(".request:has-text('bob requests control')")
    picture(page, "request-fleet")
    assert page.locator(".request button:visible").all_inner_texts() == ["Accept", "Decline"]
    assert page.evaluate("[...document.querySelectorAll('.card')].every((e) => e.scrollWidth <= e.clientWidth)")
    page.get_by_role("button", name="Accept").click()
    until(lambda: simulated.authority.operator == "bob")


def test_resumed_robot_keeps_its_gripper(page: Any, simulated: SimulatedRun) -> None:
    page.keyboard.press("t")
    badge(page, "you")
    for share in (-1, 1):  # closed, open
        page.keyboard.press("g")
        until(lambda share=share: simulated.authority.twist()[3] == share)
    page.keyboard.press("h")
    badge(page, "policy")  # which may grasp something
    page.get_by_text("Pause, take out of use").click()
    page.get_by_role("button", name="Pause", exact=True).click()
    badge(page, "hold")
    page.keyboard.press("t")
    badge(page, "you")
    inputs = len(simulated.orders("drive"))
    until(lambda: len(simulated.orders("drive")) > inputs + 3)
    assert simulated.orders("drive")[-1].twist[3] == 0


def test_request_for_help_is_shown_and_answered(page: Any, simulated: SimulatedRun) -> None:
    simulated.authority.request_help("no success after 40 steps")
    assert badge(page, "requesting") == "HELP"
    page.wait_for_selector("#warning:text-is('panda-0 requests help: no success after 40 steps.')")
    picture(page, "help")
    page.get_by_role("button", name="Take over").click()
    badge(page, "you")
    page.wait_for_selector("#warning", state="hidden")
    page.get_by_text("Pause, take out of use").click()
    page.get_by_role("button", name="Pause", exact=True).click()
    badge(page, "hold")


def test_e_stop_repeats_until_confirmed_across_a_reload(page: Any, simulated: SimulatedRun) -> None:
    simulated.away = True
    page.keyboard.press("Space")
    assert badge(page, "stopping") == "STOPPING …"
    page.wait_for_selector(".badge:text-is('NOT CONFIRMED')")
    assert "NOT CONFIRMED: panda-0 (the console has no connection" in page.inner_text("#alarm")
    picture(page, "not-confirmed")
    page.reload()
    page.wait_for_selector(".badge:text-is('NOT CONFIRMED')")
    simulated.away = False
    assert badge(page, "stopped") == "STOPPED"
    page.wait_for_selector("#events li:has-text('e-stop confirmed by its driver')")
    page.wait_for_selector("#alarm", state="hidden")
    assert len({order.press for order in simulated.orders("e-stop")}) == 1


def test_unconfirmed_e_stop_is_shown_though_the_clock_is_set_back(page: Any, simulated: SimulatedRun) -> None:
    simulated.away = True
    page.keyboard.press("Space")
    page.evaluate("const now = Date.now; Date.now = () => now() - 3_600_000")
    page.wait_for_selector(".badge:text-is('NOT CONFIRMED')", timeout=20_000)
    page.evaluate("""() => {
      const [[robot, press]] = JSON.parse(sessionStorage.getItem("stops"));
      sessionStorage.setItem("stops", JSON.stringify([[robot, { ...press, atMs: press.atMs + 3_600_000 }]]));
    }""")
    page.reload()
    page.wait_for_selector(".badge:text-is('NOT CONFIRMED')", timeout=20_000)
    page.get_by_role("button", name="Cancel the stop").click()
    badge(page, "policy")


def test_second_press_of_an_unconfirmed_e_stop_is_a_new_press(page: Any, simulated: SimulatedRun) -> None:
    """Its confirmation may be lost, and another person may have re-armed the robot."""
    simulated.away = True
    page.keyboard.press("Space")
    page.wait_for_selector(".badge:text-is('NOT CONFIRMED')")
    ((_, first),) = json.loads(page.evaluate("sessionStorage.getItem('stops')"))
    page.keyboard.press("Space")
    ((_, second),) = json.loads(page.evaluate("sessionStorage.getItem('stops')"))
    assert second["press"] > first["press"] and second["atMs"] == first["atMs"]
    simulated.away = False
    badge(page, "stopped")
    assert {order.press for order in simulated.orders("e-stop")} == {second["press"]}


def await_round_trip(page: Any, sent: list[str], received: list[str]) -> None:
    """Waits until the server has handled what this link has sent so far: until a later ping is answered."""
    before, deadline_s = len(sent), time.monotonic() + TIMEOUT_MS / 1000
    while not ({at_ms(f, "ping") for f in sent[before:]} & {at_ms(f, "pong") for f in received}) - {None}:
        assert time.monotonic() < deadline_s, "the link is up"
        page.wait_for_timeout(20)


def at_ms(frame: str, kind: str) -> float | None:
    message = json.loads(frame)
    return message["sent_ms"] if message["type"] == kind else None


def test_unconfirmed_e_stop_ends_by_cancel_only(page: Any, simulated: SimulatedRun) -> None:
    sent, received = list[str](), list[str]()

    def record(link: Any) -> None:
        if link.url.endswith("/stop"):
            link.on("framesent", lambda frame: sent.append(frame))
            link.on("framereceived", lambda frame: received.append(frame))

    page.on("websocket", record)
    page.reload()
    badge(page, "policy")
    simulated.away = True
    page.get_by_role("button", name="E-STOP", exact=True).click()
    page.get_by_role("button", name="Cancel the stop").click()
    badge(page, "policy")
    page.wait_for_selector("#alarm", state="hidden")
    await_round_trip(page, sent, received)  # a press that is on its way counts as sent before the cancel
    simulated.away = False
    page.keyboard.press("o")
    until(lambda: simulated.orders("success"))
    assert not simulated.orders("e-stop")


def test_page_that_stays_open_shows_the_robots_of_the_next_run(browser: Any, simulated: SimulatedRun) -> None:
    first = ConsoleServer(simulated.hub, token="of both")
    address = first.start()
    page = browser.new_context(viewport=DESKTOP).new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(address)
    simulated.add("arm-0")
    simulated.away = True
    page.get_by_label("Robot arm-0").get_by_role("button", name="E-STOP").click()
    page.wait_for_selector("[aria-label='Robot arm-0'] .badge:text-is('NOT CONFIRMED')")
    page.get_by_label("Robot panda-0").get_by_role("button", name="panda-0").click()
    first.stop()
    following = SimulatedRun("panda-1").start()
    second = ConsoleServer(following.hub, ConsoleConfig(port=urlsplit(address).port or 0), token="of both")
    second.start()
    try:
        page.wait_for_selector("[aria-label='Robot panda-1'].chosen .badge[data-state=policy]")
        assert not page.locator("[aria-label='Robot panda-0']").count()
        stopping = page.get_by_label("Robot arm-0")
        for _ in range(2):
            page.wait_for_selector("#alarm:text-matches('NOT CONFIRMED: arm-0 .no robot .arm-0. in this run')")
            assert stopping.get_by_role("button", name="Take over").is_disabled()
            assert stopping.locator(".badge").inner_text() == "NOT CONFIRMED"
            page.reload()
        stopping.get_by_role("button", name="Cancel the stop").click()
        stopping.wait_for(state="detached")
        page.keyboard.press("Space")
        assert badge(page, "stopped") == "STOPPED"
        page.wait_for_selector("#alarm", state="hidden")
    finally:
        page.context.close()
        second.stop()
        following.close()


def test_labels_and_reset_have_keys(page: Any, simulated: SimulatedRun) -> None:
    for key, order in (("o", "success"), ("x", "failure"), ("Backspace", "reset")):
        page.keyboard.press(key)
        until(lambda order=order: simulated.orders(order))
        page.wait_for_selector(f"#events li:has-text('{order}')")


@pytest.mark.parametrize("page", [PHONE], indirect=True)
def test_touch_input_drives(page: Any, simulated: SimulatedRun) -> None:
    simulated.learn(60)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.get_by_role("button", name="Take over").click()
    badge(page, "you")
    picture(page, "phone")
    page.locator("[data-code=KeyR]").scroll_into_view_if_needed()
    page.locator("[data-code=KeyR]").hover()
    page.mouse.down()
    until(lambda: simulated.authority.twist()[2] > 0)
    picture(page, "phone-drive")
    page.mouse.up()
    until(lambda: not simulated.authority.twist().any())


def test_touch_sticks_and_tilt_drive_as_the_person_looks(browser: Any, url: str, simulated: SimulatedRun) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    badge(page, "policy")
    page.get_by_role("button", name="Take over").click()
    badge(page, "you")
    fingers = context.new_cdp_session(page)

    def touch(kind: str, *points: tuple[float, float]) -> None:
        found = [{"x": x, "y": y} for x, y in points]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": found})

    def centre(selector: str) -> tuple[float, float]:
        box = page.locator(selector).bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def twist() -> list[float]:
        return [round(float(share), 1) for share in simulated.authority.twist()[:3]]

    x, y = centre("#stick-plane")
    touch("touchStart", (x, y))
    touch("touchMove", (x, y - 100))
    until(lambda: twist() == [0.6, 0, 0])
    touch("touchStart", (x, y - 100), (x + 40, y))  # the palm
    touch("touchMove", (x, y - 99), (x + 40, y))
    until(lambda: len(simulated.orders("drive")) > 10)
    assert twist() == [0.6, 0, 0]
    touch("touchEnd", (x, y - 99))
    picture(page, "phone-stick")
    assert page.locator(".drive").bounding_box()["height"] < PHONE["height"] / 2, "the pictures stay in view"
    touch("touchEnd")
    until(lambda: twist() == [0, 0, 0])
    page.get_by_text("Input settings").click()
    page.select_option("#input-view", "1")
    page.locator("#tilt").scroll_into_view_if_needed()
    touch("touchStart", centre("#tilt"))
    tilt = "window.dispatchEvent(new DeviceOrientationEvent('deviceorientation', { alpha: 0, beta: %s, gamma: %s }))"
    page.evaluate(tilt % (40, 0))
    page.evaluate(tilt % (10, 0))
    until(lambda: twist() == [0, -0.6, 0], 20)
    page.evaluate("Object.defineProperty(screen.orientation, 'angle', { value: 90 })")
    page.evaluate(tilt % (0, -40))
    until(lambda: twist() == [0, 0, 0])
    touch("touchEnd")
    touch("touchStart", centre("#tilt"))
    page.evaluate(tilt % (0, -40))
    page.evaluate(tilt % (0, -10))
    until(lambda: twist() == [0, -0.6, 0], 20)
    touch("touchEnd")
    until(lambda: twist() == [0, 0, 0])
    assert page.inner_text("#latency").startswith("latency: page ")
    context.close()


class FarDesk:
    """A simulated run in its own process, which can be stopped, killed and restarted at the same address."""

    def __init__(self) -> None:
        self._port = "0"
        self.start()

    def start(self) -> None:
        argv = [sys.executable, console_kit.__file__, self._port]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # its kit imports others
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self._port = self.url.rpartition("/")[0].rpartition(":")[2]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def far_desk() -> Iterator[FarDesk]:
    simulated = FarDesk()
    yield simulated
    simulated.kill()


@pytest.fixture
def far_page(browser: Any, far_desk: FarDesk) -> Iterator[Any]:
    context = browser.new_context(viewport=DESKTOP)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(far_desk.url)
    page.wait_for_selector(".badge[data-state=policy]")
    page.wait_for_selector("canvas[aria-label*=wrist]")
    yield page
    context.close()


def enabled(page: Any) -> set[str]:
    """The usable controls, by name."""
    return set(
        page.eval_on_selector_all(
            "button:enabled:not([hidden]), input:enabled", "all => all.map((e) => e.id || e.innerText)"
        )
    )


def unknown_after_ms(page: Any, cut: Callable[[], object]) -> float:
    """Milliseconds from the page's last reply before `cut` until it shows the unknown state."""
    page.evaluate(
        """() => {
          window.seenAt = new Promise((done) => new MutationObserver((_, observer) => {
            if (!document.body.classList.contains("unknown")) return;
            observer.disconnect();
            done(performance.timeOrigin + performance.now());
          }).observe(document.body, { attributes: true }));
        }"""
    )
    before = page.evaluate("performance.timeOrigin + performance.now()")
    cut()
    return float(page.evaluate("window.seenAt")) - float(before)


def test_hanging_server_leaves_only_the_e_stop(far_page: Any, far_desk: FarDesk) -> None:
    page = far_page
    page.keyboard.press("t")
    badge(page, "you")
    assert {"T", "Take over", "operator", "speed"} & enabled(page)
    took_ms = unknown_after_ms(page, lambda: far_desk.process.send_signal(signal.SIGSTOP))
    assert took_ms < 1000, "750 ms without a reply, and one look at the clock"
    assert badge(page, "unknown") == "UNKNOWN"
    assert page.inner_text("#link").startswith("no reply for") and page.input_value("#operator") == ""
    assert enabled(page) == {"stop-all", "E-STOP"}
    page.wait_for_selector("figcaption small:text-matches('s old')")
    assert "grayscale" in page.eval_on_selector(".cameras canvas", "c => getComputedStyle(c).filter")
    picture(page, "unknown")

    page.keyboard.press("Space")
    page.wait_for_selector(".badge:text-is('NOT CONFIRMED')")
    picture(page, "unknown-not-confirmed")
    far_desk.process.send_signal(signal.SIGCONT)
    assert badge(page, "stopped") == "STOPPED"
    page.wait_for_selector("#alarm", state="hidden")
    page.wait_for_selector("#link[data-state=up]")
    for control in ("#operator", "#speed", "button:text-is('Re-arm')"):
        page.wait_for_selector(f"{control}:enabled")


def test_e_stop_without_a_server_reaches_its_successor(far_page: Any, far_desk: FarDesk) -> None:
    page = far_page
    far_desk.kill()
    page.wait_for_selector("#alarm:not([hidden])")
    assert "emergency stop" in page.inner_text("#alarm")
    badge(page, "unknown")
    page.keyboard.press("Space")
    badge(page, "stopping")
    far_desk.start()
    page.goto(far_desk.url)  # the cookie belonged to the earlier server
    assert badge(page, "stopped") == "STOPPED"


PAGES = {"robots": "", "episodes": "episodes"}
SERIOUS = {"serious", "critical"}


def serious_problems(page: Any, name: str) -> list[str]:
    """What axe-core finds serious on a page."""
    page.evaluate(Path(pytest.importorskip("axe_playwright_python").__file__).with_name("axe.min.js").read_text())
    return [
        f"{name}: {each['id']}: {node['target']}: {node['failureSummary'][:200]}"
        for each in page.evaluate("axe.run()")["violations"]
        if each["impact"] in SERIOUS
        for node in each["nodes"]
    ]


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        pytest.param(DESKTOP, "dark", id="desktop-dark"),
        pytest.param(PHONE, "light", id="phone-light"),
        pytest.param(DESKTOP, "light", id="desktop-light", marks=pytest.mark.slow),
        pytest.param(PHONE, "dark", id="phone-dark", marks=pytest.mark.slow),
    ],
)
def test_pages_are_accessible_and_stay_at_their_origin(
    browser: Any, url: str, simulated: SimulatedRun, tmp_path: Path, size: dict[str, int], scheme: str
) -> None:
    write_episode(tmp_path / "store", "panda-0-1")
    simulated.learn(30)
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    requested: set[str] = set()
    page.on("request", lambda request: requested.add(urlsplit(request.url).netloc or request.url.partition(":")[0]))
    page.on("websocket", lambda socket: requested.add(urlsplit(socket.url).netloc))
    page.goto(url)
    problems = []
    for name, path in PAGES.items():
        page.goto(url.partition("?")[0] + path)
        if path:
            page.locator("tbody button").first.click()
            page.wait_for_selector(".player .uplot >> nth=3")
        else:
            page.wait_for_selector(".badge[data-state=policy]")
            page.wait_for_selector("#traces .uplot >> nth=4")
            page.keyboard.press("t")
            badge(page, "you")
        picture(page, f"{name}-{scheme}-{size['width']}", after_ms=500)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        problems += serious_problems(page, name)
        page.keyboard.press("h")
    context.close()
    assert not problems, "\n".join(problems)
    assert requested == {urlsplit(url).netloc}
