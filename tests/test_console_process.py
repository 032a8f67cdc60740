"""The console's own process: it follows a run, and robots go on while it is killed and restarted."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from run_folder_kit import make_run
from wait_kit import until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from hal.process_supervisor import ProcessState, ProcessStatus
from user_sys.commands.main import main
from user_sys.compose import RobotConfig
from user_sys.console import hub
from user_sys.console.config import ConsoleConfig
from user_sys.console.hub import ConsoleHub
from user_sys.console.progress import RunProgress, RunView
from user_sys.edge.robot_processes import module_argv
from user_sys.errors import RunError
from user_sys.gateway.config import GatewayConfig
from user_sys.messages import EpisodeReport
from user_sys.run import console_process
from user_sys.run.config import RunConfig, RunFolder, create_run_folder, open_run_folder
from user_sys.run.prepare import free_endpoint, gateway_client, prepare_run_folder
from user_sys.run.report import run_episodes
from user_sys.run.status import StatusFile
from user_sys.run.topology import CONSOLE, topology
from user_sys.store.index import EpisodeSummary
from user_sys.tunnel.keys import GATEWAY_NAME
from user_sys.tunnel.protocol import TunnelState

DEADLINE_S = 90.0
pytestmark = pytest.mark.long(20)


class Run:
    """The gateway, console and robot of a run, as a launcher starts them."""

    def __init__(self, path: Path, enabled: bool = True) -> None:
        robot = RobotConfig(name="fake-0", driver="fake", task="reach", real_time=True)
        config = RunConfig(runs=path, robots=(robot,), console=ConsoleConfig(enabled=enabled, port=0))
        self.folder, metadata = create_run_folder(config, "run", free_endpoint(GatewayConfig().endpoint))
        prepare_run_folder(config, self.folder, metadata)
        self.folder = RunFolder(self.folder.path.resolve())
        self._specs = {spec.name: spec for spec in topology(config, self.folder, "here", lambda _: True)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in self._specs:
            self.start(name)

    def start(self, name: str) -> None:
        spec = self._specs[name]
        spec.log.parent.mkdir(exist_ok=True)
        with spec.log.open("ab") as log:
            self.processes[name] = subprocess.Popen(spec.argv, stdout=log, stderr=log)

    def address(self) -> str:
        path = self.folder.console_address
        return str(until(lambda: path.exists() and path.read_text(), f"no address; see {self.folder.log(CONSOLE)}"))

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            process.wait(DEADLINE_S)


def test_console_whose_port_is_taken_leaves_the_address_of_the_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_process, "stop_on_signals", lambda stop: None)
    config = RunConfig(runs=tmp_path, console=ConsoleConfig(enabled=False))
    folder, metadata = create_run_folder(config, "run", free_endpoint(GatewayConfig().endpoint))
    prepare_run_folder(config, folder, metadata)
    folder.console_address.write_text("http://127.0.0.1:8088/?token=abc")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RunError, match="is in use"):
        console_process.serve_console(folder.path, taken.getsockname()[1], lambda address: None)
    assert folder.console_address.read_text() == "http://127.0.0.1:8088/?token=abc"


def test_console_learns_from_the_status_which_processes_have_ended_and_which_version_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, ended, warnings = threading.Event(), list[set[str]](), list[str]()

    class Progress(RunProgress):
        def set_ended(self, processes: Iterable[str]) -> None:
            ended.append(set(processes))
            warnings.append(self.view("run", 0.0, ()).warning)
            if len(ended) == 2:
                stop.set()
            write_status({})

    monkeypatch.setattr(hub, "RunProgress", Progress)
    config = RunConfig(runs=tmp_path, console=ConsoleConfig(port=0))
    folder, metadata = create_run_folder(config, "run", free_endpoint(GatewayConfig().endpoint))
    prepare_run_folder(config, folder, metadata)
    states = {"learner": ProcessState.RUNNING, "learner-b": ProcessState.FAILED, "learner-c": ProcessState.STOPPED}

    def write_status(scalars: dict[str, float]) -> None:
        statuses = {name: ProcessStatus(state=state) for name, state in states.items()}
        StatusFile(folder.path).write("training", RunView(run="run", metrics={"run": scalars}), statuses, {})

    write_status({"acting_with_version/learner": 880.0})
    monkeypatch.setattr(console_process, "STATUS_POLL_S", 0.0)
    console_process.ConsoleProcess(folder, config, metadata, is_restart=False).serve(stop)
    assert ended == [{"learner-b", "learner-c"}] * 2
    assert warnings == ["newer versions succeed less often: robots act with version 880", ""]


@pytest.mark.parametrize("error, episodes", [(None, 4), (OSError("the disk failed"), 2)])
def test_console_is_open_while_it_reads_a_long_history_and_counts_no_episode_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, episodes: int
) -> None:
    folder, config, metadata = open_run_folder(make_run(tmp_path, "run", [True] * 3).path)
    config = replace(config, console=ConsoleConfig(port=0))
    read, reports, hubs = threading.Event(), queue.SimpleQueue[EpisodeReport](), list[ConsoleHub]()

    class Hub(ConsoleHub):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            hubs.append(self)

    def stored(folder: RunFolder) -> list[EpisodeSummary]:
        assert read.wait(DEADLINE_S)
        if error is not None:
            raise error
        return run_episodes(folder)

    def receive(timeout_s: float) -> EpisodeReport | None:
        with suppress(queue.Empty):
            return reports.get(timeout=timeout_s)
        return None

    def nothing(timeout_s: float) -> None:
        read.wait(timeout_s)

    client = SimpleNamespace(
        send=lambda message: True, start=lambda: None, close=lambda: None, receive=receive, state=TunnelState.OPEN,
        receive_preview=nothing, receive_stop=nothing,
    )  # fmt: skip
    monkeypatch.setattr(console_process, "ConsoleHub", Hub)
    monkeypatch.setattr(console_process, "gateway_client", lambda *_: client)
    monkeypatch.setattr(console_process, "run_episodes", stored)
    console, stop = console_process.ConsoleProcess(folder, config, metadata, is_restart=False), threading.Event()
    serving = threading.Thread(target=console.serve, args=(stop,))
    serving.start()
    try:
        for episode in ("0002", "new"):  # the first is in the store already
            reports.put(
                EpisodeReport(
                    robot="panda-0", episode=episode, source="online", steps=2, success=True,
                    intervention_steps=0, episode_return=1.0, policy_version=1,
                )
            )  # fmt: skip
        Page(console.address).close()
        assert hubs[0].view().episodes == 0
        read.set()
        until(lambda: hubs[0].view().episodes == episodes, "the earlier episodes and the new ones", 30)
    finally:
        read.set()
        stop.set()
        serving.join()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


class Page:
    """A page as a program, with the cookie of a browser that opened the address."""

    def __init__(self, address: str) -> None:
        self.address, parts = address, urlsplit(address)
        self._cookie = httpx.get(address, trust_env=False, timeout=60).headers["set-cookie"].partition(";")[0]
        self._netloc = parts.netloc
        self._origin, self._sockets = f"http://{parts.netloc}", ExitStack()
        self.open()

    def close(self) -> None:
        self._sockets.close()

    def _connection(self, path: str) -> Any:
        headers = {"Cookie": self._cookie, "Origin": self._origin}
        url = f"ws://{self._netloc}{path}"
        return connect(url, additional_headers=headers, proxy=None, open_timeout=60, close_timeout=1)

    def open(self) -> None:
        self.socket = self._sockets.enter_context(self._connection("/ws"))
        self.socket.send(json.dumps({"type": "hello", "operator": "ana"}))

    def reopens(self) -> bool:
        try:
            self.open()
        except OSError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        """The newest status of the robot; {} before its first."""
        while (message := json.loads(self._receive()))["type"] != "state":
            pass
        return message["view"]["robots"][0]["status"] or {}

    def view(self) -> dict[str, Any]:
        """The robot as the page gets it."""
        while (message := json.loads(self._receive()))["type"] != "state":
            pass
        return dict(message["view"]["robots"][0])

    def stops(self, number: int) -> bool:
        """Presses the e-stop on its own connection; whether the driver confirms it within a second."""
        with self._connection("/stop") as stops, suppress(TimeoutError):
            stops.send(json.dumps({"type": "stop", "operator": "ana", "presses": {"fake-0": number}}))
            return bool(json.loads(stops.recv(timeout=1.0))["confirmed"])
        return False

    def order(self, order: str) -> dict[str, Any]:
        self.socket.send(json.dumps({"type": "order", "robot": "fake-0", "order": order}))
        while (message := json.loads(self._receive()))["type"] != "reply":
            pass
        return dict(message)

    def _receive(self) -> str:
        while isinstance(frame := self.socket.recv(timeout=60), bytes):
            pass
        return frame


def test_robot_holds_while_console_or_gateway_is_killed_and_restarts(run: Run) -> None:
    page = Page(run.address())
    until(page.status, "the robot reports, and so answers orders")
    until(lambda: page.order("take-over")["accepted"], "the person has the arm")
    until(lambda: page.status()["authority"] in ("human", "hold"), "its status")
    assert run.folder.console_address.stat().st_mode & 0o077 == 0, "the address has a secret"

    run.processes[CONSOLE].send_signal(signal.SIGKILL)
    run.processes[CONSOLE].wait(DEADLINE_S)
    with pytest.raises(ConnectionClosed):
        while True:
            page.status()
    others = [process for name, process in run.processes.items() if name != CONSOLE]
    assert all(process.poll() is None for process in others), "no other process ended"

    run.start(CONSOLE)
    until(page.reopens, "an open page connects again, with its cookie")
    until(lambda: page.status().get("authority") == "hold", "the robot holds, and says who drove it")
    assert page.status()["operator"] == "ana"
    assert page.order("hand-back")["accepted"]
    assert run.address() == page.address

    assert page.order("take-over")["accepted"]
    run.processes[GATEWAY_NAME].send_signal(signal.SIGKILL)
    run.processes[GATEWAY_NAME].wait(DEADLINE_S)
    until(lambda: page.view()["silent_s"] > 1.0, "the page names the robot's silence")
    page.close()
    until(lambda: page.stops(7), "the driver on this computer is stopped without the gateway")
    run.start(GATEWAY_NAME)
    page.open()
    until(lambda: page.status().get("authority") == "stopped", "the robot is stopped")
    page.close()


def test_console_of_a_run_without_one(tmp_path: Path) -> None:
    run = Run(tmp_path, enabled=False)
    argv = module_argv("user_sys.commands.main", "console", run.folder.path, "--port=0")
    console = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert console.stdout is not None and console.stdout.readline().startswith("watch and take over: http://127")
        page = Page(run.address())
        until(lambda: page.status().get("robot") == "fake-0", "the robot reports")
        page.close()
        console.send_signal(signal.SIGINT)
        assert console.wait(DEADLINE_S) == 0
        assert '"process": "console"' in run.folder.log("console").read_text()
    finally:
        console.kill()
        console.communicate()
        run.close()


def test_console_that_another_one_replaced_ends(run: Run) -> None:
    page = Page(run.address())
    until(page.status, "the console is connected")
    folder, _, metadata = open_run_folder(run.folder.path)
    other = gateway_client(folder, metadata, CONSOLE)
    other.start()
    try:
        assert run.processes[CONSOLE].wait(DEADLINE_S) == 2
        assert "another session of console has taken over" in run.folder.log(CONSOLE).read_text()
    finally:
        page.close()
        other.close()


def test_console_refuses_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["console", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "none" in error
