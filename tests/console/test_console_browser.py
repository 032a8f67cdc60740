"""The console's page in a real browser: take-over, input, e-stop and state."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import console_kit
import pytest
from console_kit import SimulatedRun, until

from user_sys.console.server import ConsoleServer
from user_sys.messages import MetricsReport

pytestmark = [pytest.mark.browser, pytest.mark.long(40)]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
).split()
DESKTOP = {"width": 1280, "height": 800}
TIMEOUT_MS = 120_000
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as tools:
        chromium = tools.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def simulated() -> Iterator[SimulatedRun]:
    simulated = SimulatedRun().start()
    yield simulated
    simulated.close()


@pytest.fixture
def url(simulated: SimulatedRun) -> Iterator[str]:
    server = ConsoleServer(simulated.hub)
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
    assert not complaints, complaints


def picture(page: Any, name: str, after_ms: float = 0.0) -> None:
    """Saves a screenshot if CONSOLE_SHOTS names a folder."""
    folder = os.environ.get("CONSOLE_SHOTS")
    if folder:
        page.wait_for_timeout(after_ms)
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


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

    page.keyboard.press("h")
    assert badge(page, "policy") == "POLICY"
    assert simulated.authority.audit[-1].cause == "hand-back"


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
    assert [t.cause for t in simulated.authority.audit] == ["take-over", "e-stop", "re-arm", "hand-back"]


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
    assert [t.cause for t in simulated.authority.audit] == ["take-over", "release" if told else "silence", "take-over"]


def test_second_page_cannot_drive_the_robot(page: Any, browser: Any, url: str, simulated: SimulatedRun) -> None:
    page.fill("#operator", "alice")
    page.keyboard.press("Enter")
    page.keyboard.press("t")
    badge(page, "you")
    context = browser.new_context(viewport=DESKTOP)
    other = context.new_page()
    other.set_default_timeout(TIMEOUT_MS)
    other.goto(url)
    assert badge(other, "human") == "alice"
    assert other.get_by_role("button", name="Take over").is_disabled()
    picture(other, "other")
    other.get_by_role("button", name="E-STOP", exact=True).click()
    assert badge(page, "stopped") == "STOPPED"
    context.close()


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


def test_unconfirmed_e_stop_ends_by_cancel_only(page: Any, simulated: SimulatedRun) -> None:
    simulated.away = True
    page.get_by_role("button", name="E-STOP", exact=True).click()
    page.get_by_role("button", name="Cancel the stop").click()
    badge(page, "policy")
    page.wait_for_selector("#alarm", state="hidden")
    simulated.away = False
    page.keyboard.press("o")
    until(lambda: simulated.orders("success"))
    assert not simulated.orders("e-stop")


def test_labels_and_reset_have_keys(page: Any, simulated: SimulatedRun) -> None:
    for key, order in (("o", "success"), ("x", "failure"), ("Backspace", "reset")):
        page.keyboard.press(key)
        until(lambda order=order: simulated.orders(order))
        page.wait_for_selector(f"#events li:has-text('{order}')")


def test_typing_a_name_sends_no_orders(page: Any, simulated: SimulatedRun) -> None:
    page.click("#operator")
    page.keyboard.type("thox")
    page.keyboard.press("Enter")
    page.keyboard.press("t")
    until(lambda: simulated.authority.operator == "thox")
    assert not simulated.orders("success") and not simulated.orders("hand-back")


def test_page_fits_a_narrow_window(page: Any, simulated: SimulatedRun) -> None:
    simulated.hub.restore_history(episodes=120, env_steps=123_456, interventions=3, elapsed_s=3700.0)
    simulated.hub.update(MetricsReport(node="learner", count=20_000, scalars={"training_s": 3599.0}))
    page.wait_for_selector("#p-trained:text-is('59:59 / 5:00')")
    for width in (1280, 1024, 600):
        page.set_viewport_size({"width": width, "height": 600})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


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


def test_page_shows_the_warning(page: Any, simulated: SimulatedRun) -> None:
    simulated.hub.set_warning("waiting for disk space in runs/x/store: needs 5 MB, 0 MB free")
    page.wait_for_selector("#warning:not([hidden])")
    assert "waiting for disk space in runs/x/store" in page.inner_text("#warning")
    simulated.hub.set_warning("")
    page.wait_for_selector("#warning", state="hidden")


class FarDesk:
    """A simulated run in its own process, which can be stopped, killed and restarted at the same address."""

    def __init__(self) -> None:
        self._port = "0"
        self.start()

    def start(self) -> None:
        argv = [sys.executable, console_kit.__file__, self._port]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
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
