"""The shell blocks of the documentation: each is run by a test, or has a reason not to be."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from docs_kit import code_blocks
from run_folder_kit import make_run
from run_kit import Launch, until, user_sys
from site_kit import headers

from user_sys.commands.main import main
from user_sys.console.progress import RunView
from user_sys.logs import LogFile
from user_sys.run.prepare import free_port
from user_sys.run.status import StatusFile
from user_sys.store.log_reader import LogReader
from user_sys.tunnel.keys import load_public_key

ROOT = Path(__file__).resolve().parent.parent
HERE = "tests/test_docs_blocks.py"
HOURS = "trains for minutes to hours; shorter runs of the same verbs are tested"
ROOT_RIGHTS = "changes the computer as root"
RUN_BY = {  # page and first line of the block: a test's file, or why no test runs it
    ("README.md", "make demo "): "tests/test_readme.py",
    ("algorithms.md", "make demo-pixels"): f"{HOURS}: tests/test_demo_pixels.py",
    ("bring-your-robot.md", "cp -r docs/template"): "tests/test_readme.py",
    ("bring-your-robot.md", "user-sys train CONFIG"): "tests/test_readme.py",
    ("deployment.md", "sudo mkdir"): HERE,
    ("deployment.md", "user-sys keys new gateway"): HERE,
    ("deployment.md", "scp cloud:keys/gateway.pub"): HERE,
    ("deployment.md", "sudo install -d"): f"{ROOT_RIGHTS}, and starts a systemd unit",
    ("deployment.md", "HOST=lab.example.org"): "needs a container engine; see tests/images.py",
    ("deployment.md", "user-sys keys rotate"): HERE,
    ("deployment.md", "# on the relay's computer"): HERE,
    ("extend.md", "cp -r docs/template"): "tests/test_extend.py",
    ("extend.md", "user-sys store relabel"): "tests/test_extend.py",
    ("first-arm.md", "source .venv/bin/activate"): ROOT_RIGHTS,
    ("first-arm.md", "user-sys hardware doctor"): "needs a real arm; a simulated one: tests/robots/test_ur.py",
    ("hardware.md", "user-sys hardware list"): HERE,
    ("hardware.md", "user-sys hardware quarantine"): "needs a run's gateway: tests/commands/test_hardware.py",
    ("hardware.md", "sudo install -d"): ROOT_RIGHTS,
    ("hardware.md", "user-sys hardware audit"): HERE,
    ("hardware.md", "user-sys stop"): "needs a driven robot: tests/edge/test_stop_command.py",
    ("hardware.md", "user-sys node head"): "needs two computers: tests/test_learner_failover.py",
    ("inference.md", "user-sys keys new policy"): "needs a gateway and a policy: tests/inference",
    ("operations.md", "user-sys status"): HERE,
    ("operations.md", "user-sys train configs/demo.yaml --logging"): "needs Prometheus: tests/observe.py",
    ("operations.md", "jq "): HERE,
    ("operations.md", "user-sys debug bundle"): HERE,
    ("people.md", "ssh -L"): "needs another computer",
    ("people.md", "user-sys console user add"): "asks for a password: tests/console/test_accounts.py",
    ("people.md", "user-sys train tidy.yaml"): "a person drives: tests/test_person.py",
    ("rewards.md", "user-sys reward train"): "needs a labelled run: tests/rewards",
    ("rewards.md", "user-sys store relabel"): "needs a labelled run: tests/rewards",
    ("rewards.md", "user-sys reward audit"): "needs a model server: tests/rewards has one",
    ("store.md", "user-sys store inspect"): HERE,
    ("store.md", "user-sys store label"): HERE,
    ("store.md", "user-sys store compact"): HERE,
    ("store.md", "user-sys store merge"): HERE,
    ("store.md", "user-sys store backup"): HERE,
    ("vla.md", "pip install"): "downloads a model's package: tests/policies",
    ("weights.md", "user-sys weights list"): "needs a run's gateway: tests/commands/test_weights.py",
}  # fmt: skip
SHOWN_ONLY = re.compile(r"(sudo|python3 -m venv|environment/bin/pip) ")  # lines that make an environment, or need root


PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def blocks() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for text in code_blocks(page):
            yield page.name, text


def find(page: str, first: str) -> str:
    (text,) = [text for name, text in blocks() if name == page and text.startswith(first)]
    return text


def test_each_shell_block_is_run_or_has_a_reason() -> None:
    matched = []
    for page, text in blocks():
        keys = [key for key in RUN_BY if key[0] == page and text.startswith(key[1])]
        assert len(keys) == 1, f"{page}: name in {HERE} what runs the block that begins with {text.splitlines()[0]!r}"
        matched += keys
    assert set(matched) == set(RUN_BY), "an entry has no block any more"
    for page in PAGES:
        assert not re.search(r"^ *```\n *(user-sys|make|pip) ", page.read_text(), re.MULTILINE), f"{page}: write ```sh"
    for named in re.findall(r"tests/[\w/.]+", " ".join(RUN_BY.values())):
        assert (ROOT / named).exists(), named


def type_lines(text: str, folder: Path, **filled: str) -> list[str]:
    """Types a block in `folder`, line by line. Returns its lines that start a program which goes on.

    Args:
        filled: what stands for a placeholder. Copies from other computers become copies from folders beside this one.
    """
    text = re.sub(r"scp (\w+):(\S+) (\S+).*", r"cp ../\1/\2 \3", text)
    for word, value in filled.items():
        text = text.replace(word, value)
    text = "".join(line for line in text.splitlines(keepends=True) if not SHOWN_ONLY.match(line))
    lasting = re.findall(r"^(?:environment/bin/)?user-sys ((?:edge|cloud|relay) .*)", text, re.MULTILINE)
    script = re.sub(r"^(?:environment/bin/)?user-sys (?:edge|cloud|relay) .*\n", "", text, flags=re.MULTILINE)
    command = f'{sys.executable} -m user_sys.commands.main "$@"'
    script = f"set -e\nuser-sys() {{ {command}; }}\n{script.replace('environment/bin/user-sys', 'user-sys')}"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1 if "hardware" in text else 0), f"{script}\n{done.stdout}{done.stderr}"
    return lasting


def public(folder: Path, name: str) -> str:
    return load_public_key(folder / "keys" / f"{name}.pub")


def start(stack: ExitStack, folder: Path, line: str, *more: str) -> Launch:
    return stack.enter_context(user_sys(folder, *line.split(), *more, env={"PYTHONPATH": str(ROOT)}))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_deployment_step_by_step(tmp_path: Path) -> None:
    """Cloud, robot and relay are folders beside each other. The robot changes its key, then goes through the relay."""
    cloud, robot, relay = (tmp_path / name for name in ("cloud", "robot", "relay"))
    for folder in (cloud, robot, relay):
        folder.mkdir()
    (cloud / "configs").symlink_to(ROOT / "configs")
    port, inner = free_port("127.0.0.1"), free_port("127.0.0.1")
    type_lines(find("deployment.md", "sudo mkdir"), robot)
    (line,) = type_lines(find("deployment.md", "user-sys keys new gateway"), cloud, KEY=public(robot, "panda-0"))
    with ExitStack() as stack:
        quiet = ("--console.port=0", "--logging.wandb.mode=disabled")
        start(stack, cloud, line, f"--gateway.endpoint=tcp://127.0.0.1:{port}", *quiet)
        until(lambda: (cloud / "runs" / "latest" / "status.json").exists(), "the cloud runs")
        store = cloud / "runs" / "latest" / "store"
        until(lambda: (cloud / "keys" / "learner.verify").exists() or store.exists(), "the store is there")
        (cloud / "keys" / "learner.verify").touch()  # as the page says, it exists once a learner has run
        text = find("deployment.md", "scp cloud:keys/gateway.pub").replace("scp cloud:keys/learner.verify", "true")
        (line,) = type_lines(text, robot, HOST="127.0.0.1")
        line = line.replace("5555", str(port))
        edge = start(stack, robot, line)
        until(lambda: len(headers(store)) > 20, "its demonstrations arrive")
        rotate = find("deployment.md", "user-sys keys rotate").splitlines()
        type_lines(rotate[0] + "\n", robot)
        fresh = next(path for path in (robot / "keys").iterdir() if "next" in path.name and path.suffix == ".pub")
        type_lines(rotate[1] + "\n", cloud, NEWKEY=load_public_key(fresh))
        type_lines(rotate[2] + "\n", robot)
        until(lambda: "it has a new key" in edge.out, "the edge takes the new key")
        edge.interrupt()
        assert edge.wait() == 0, edge.err
        text = find("deployment.md", "# on the relay's computer")
        at_relay, _, rest = text.partition("# in the cloud")
        in_cloud, _, rest = rest.partition("# on the relay's")
        start_relay, _, at_robot = rest.partition("# on the robots'")
        type_lines(at_relay, relay, KEY=public(robot, "panda-0"))
        type_lines(f"#{in_cloud}", cloud, **{"KEY OF lab": public(relay, "lab")})
        (line,) = type_lines(f"#{start_relay}", relay)
        (relay / "relay.yaml").write_text((relay / "relay.yaml").read_text().replace("5556", str(inner)))
        start(stack, relay, line.replace("HOST:5555", f"127.0.0.1:{port}"))
        (again,) = type_lines(f"#{at_robot}", robot)
        stored = len(headers(store))
        last = start(stack, robot, again.replace("RELAY:5556", f"127.0.0.1:{inner}"))
        until(lambda: len(headers(store)) > stored + 5, f"steps arrive through the relay: {last.out}")


def test_commands_on_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of operations.md and store.md, in this process."""
    run = make_run(tmp_path / "runs", "latest", [True, False, True])
    StatusFile(run.path).write("training", RunView(run="latest"), {}, {})
    for site in ("site-a", "site-b"):
        shutil.copytree(run.store, tmp_path / site / "store")
    monkeypatch.chdir(tmp_path)
    filled = {"EPISODE EPISODE": "0000 0002", "EPISODE": "0001", "panda-0-1795414533713-6eb2406ba0": "0001"}
    filled |= {"10-19": "0-1", "/mnt/nas/demo": "nas", "s3://lab/demo": "nas"}
    for (page, first), by in RUN_BY.items():
        if page not in ("operations.md", "store.md") or by != HERE or first == "jq ":
            continue
        text = find(page, first)
        for word, value in filled.items():
            text = text.replace(word, value)
        for line in text.splitlines():
            words = shlex.split(line)
            if words[1] != "top":  # it ends with Ctrl-C
                assert main(words[1:]) == 0, line
    with LogReader.open(tmp_path / "restored" / "store") as restored, LogReader.open(run.store) as own:
        assert len(list(restored.records())) == len(list(own.records()))
    assert (tmp_path / "debug-latest.tar.gz").exists()


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq: apt-get install jq")
def test_jq_shows_the_warnings_of_logs(tmp_path: Path) -> None:
    with LogFile(tmp_path / "runs" / "latest" / "logs" / "launcher.log", process="launcher"):
        logging.getLogger("x").info("event.usual")
        logging.getLogger("x").warning("event.rare")
    line = find("operations.md", "jq ")
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip().split("\t")[1:] == ["launcher", "", "event.rare"]


@pytest.mark.slow
def test_hardware_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    text = find("hardware.md", "user-sys hardware list")
    lines = [line for line in text.splitlines(keepends=True) if not re.search(r"user-sys (stop|hardware watch)", line)]
    filled = {
        "[CONFIG]": str(ROOT / "configs/fleet.yaml"),
        "CONFIG": str(ROOT / "configs/fleet.yaml"),
        "[--run RUN]": "",
    }
    for line in lines:  # `stop` would press e-stops, and `watch` ends with Ctrl-C
        type_lines(line, tmp_path, **filled)
    audit = find("hardware.md", "user-sys hardware audit")
    type_lines(audit.replace("[ROBOT] [--run RUN] [--json]", "--json"), tmp_path)
