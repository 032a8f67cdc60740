"""Builds the images of docker/Dockerfile without a container engine, and runs their programs: ``make images-test``.

Each stage is a folder on an overlay file system; mmdebstrap makes the base image's content. Its steps run in there
with chroot, so root is needed, Debian's packages mmdebstrap and iproute2, and package indexes. Then each image's
program runs as the image's user in a network namespace: it must answer its HEALTHCHECK, and end within `END_S` of
SIGTERM. The digest of the base image is not tried, nor CUDA: torch is the CPU build if pip's settings name one.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from wait_kit import until

from user_sys.tunnel.keys import load_public_key

ROOT = Path(__file__).resolve().parents[1]
NETWORK, INSIDE = "us-images", "--inside"
END_S, HEALTHY_S = 5.0, 240.0
BASE_PACKAGES = "ca-certificates"
ROBOT = "robots:\n  - {name: NAME, driver: fake, task: reach, real_time: true, options: {rate_hz: 20}}\n"
RUN = ROBOT.replace("NAME", "arm") + "learner: {max_training_s: 100000}\nlogging: {wandb: {mode: disabled}}\n"


@dataclass
class Stage:
    """A stage of the Dockerfile, and what its instructions have set so far."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    path: Path = Path()
    layers: list[Path] = field(default_factory=list)  # the newest first
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)


def parse(text: str) -> dict[str, Stage]:
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    stages: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, lines)):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = Stage(name, base)
        else:
            stage.steps.append((word, rest.strip()))
    return stages


class Builder:
    """Builds stages into folders below `work`."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.stages = parse((ROOT / "docker" / "Dockerfile").read_text())
        self.settings, self.shared = site_settings()

    def build(self, name: str) -> Stage:
        stage = self.stages[name]
        if stage.layers:
            return stage
        began = time.monotonic()
        if parent := self.stages.get(stage.base):
            self.build(stage.base)
            for each in ("variables", "entrypoint", "command", "health", "shell"):
                setattr(stage, each, getattr(parent, each).copy())
            stage.folder, stage.user, below = parent.folder, parent.user, parent.layers
        else:
            below = [self.debian()]
        for step, rest in stage.steps:
            if step == "COPY" and (copied := re.match(r"--from=(\S+)", rest)):
                self.build(copied[1])
        top, scratch, stage.path = (self.work / f"{name}-{each}" for each in ("layer", "work", "root"))
        done = self.work / f"{name}-done"
        for each in (top, scratch, stage.path):
            if not done.exists():
                shutil.rmtree(each, ignore_errors=True)
            each.mkdir(exist_ok=True)
        stage.layers = [top, *below]
        lower = ":".join(map(str, below))
        mount("-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={top},workdir={scratch}", stage.path)
        for each in ("proc", "dev", "dev/shm"):
            mount("--bind", f"/{each}", stage.path / each)
        for shared in self.shared:
            (stage.path / shared.relative_to("/")).mkdir(parents=True, exist_ok=True)
            mount("--bind", "-o", "ro", shared, stage.path / shared.relative_to("/"))
        for file in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
            shutil.copy(f"/{file}", stage.path / file)
        for step, rest in stage.steps:
            if not done.exists() or step not in ("RUN", "COPY"):
                self.perform(stage, step, rest)
        done.touch()
        print(f"images: {name}: built in {time.monotonic() - began:.0f} s", flush=True)
        return stage

    def debian(self) -> Path:
        root = self.work / "debian"
        if root.exists():
            return root
        root.mkdir()
        command = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={BASE_PACKAGES}", "bookworm", str(root)]
        subprocess.run(command, check=True)
        return root

    def perform(self, stage: Stage, step: str, rest: str) -> None:
        match step:
            case "RUN":
                done = subprocess.run(
                    self.inside(stage, [*stage.shell, rest], "0", self.settings), stdout=subprocess.PIPE, stderr=-2
                )
                if done.returncode:
                    raise SystemExit(f"{stage.name}: RUN {rest[:200]}\n{done.stdout.decode()[-4000:]}")
            case "COPY":
                self.copy(stage, shlex.split(rest))
            case "ENV" | "ARG":
                pairs = dict(pair.split("=", 1) for pair in shlex.split(rest))
                stage.variables |= pairs
            case "WORKDIR":
                stage.folder = rest
                (stage.path / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                stage.user = rest
            case "ENTRYPOINT" | "CMD" | "SHELL":
                name = {"ENTRYPOINT": "entrypoint", "CMD": "command", "SHELL": "shell"}[step]
                setattr(stage, name, json.loads(rest))
            case "HEALTHCHECK":
                stage.health = json.loads(rest.partition("CMD ")[2])
            case "EXPOSE":
                pass
            case _:
                raise SystemExit(f"{stage.name}: {step} is not known here")

    def copy(self, stage: Stage, words: list[str]) -> None:
        source = ROOT
        if words[0].startswith("--from="):
            source = self.stages[words.pop(0).removeprefix("--from=")].path
        *names, target = words
        into = stage.path / (target if target.startswith("/") else f"{stage.folder}/{target}").lstrip("/")
        is_folder = target.endswith("/")
        for name in names:
            found = source / name.lstrip("/")
            if found.is_dir():
                into.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", f"{found}/.", into], check=True)
            else:
                (into if is_folder else into.parent).mkdir(parents=True, exist_ok=True)
                shutil.copy(found, into / found.name if is_folder else into)

    def inside(self, stage: Stage, argv: list[str], user: str, more: dict[str, str] | None = None) -> list[str]:
        """The command line that runs `argv` in the image."""
        home = "/root" if user == "0" else "/home/user"
        variables = {"HOME": home, "TINI_SUBREAPER": "1"} | stage.variables | (more or {})
        if "UV_FIND_LINKS" in variables:
            variables.pop("UV_TORCH_BACKEND", None)  # the site's own build of torch
        given = [f"{name}={value}" for name, value in variables.items()]
        enter = ["chroot", f"--userspec={user}:{user}", "--groups=", str(stage.path)]
        return [*enter, "env", "-i", "-C", stage.folder, *given, *argv]


def site_settings() -> tuple[dict[str, str], list[Path]]:
    """Variables that give pip and uv this site's packages, and the folders that they name."""
    listed = subprocess.run([sys.executable, ROOT / ".ci" / "uv-settings"], capture_output=True, text=True, check=True)
    found = dict(line.split("\t", 1) for line in listed.stdout.splitlines())
    found |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    config = subprocess.run(["pip", "config", "list"], capture_output=True, text=True).stdout
    if index := re.search(r"\.extra-index-url=(.*)", config):
        found["PIP_EXTRA_INDEX_URL"] = ast.literal_eval(index[1])
    paths = re.findall(r"(?:file://)?(/[^\s,:]+)", " ".join(v for k, v in found.items() if "CERT" not in k))
    folders = {Path("/", *Path(path).parts[1:3]) for path in paths}
    return found, [folder for folder in folders if folder.is_dir()]


def mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


class Machine:
    """Runs programs of built images in one network namespace."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def run(self, stage: Stage, *argv: str, text: str = "", check: bool = True) -> str:
        """Runs a command of the image to its end; with `check`, its status must be 0."""
        command = self.inside(stage, [*stage.entrypoint, *argv])
        return subprocess.run(command, check=check, input=text, stdout=subprocess.PIPE, text=True).stdout

    def is_healthy(self, stage: Stage) -> bool:
        return not subprocess.run(self.inside(stage, stage.health), capture_output=True).returncode

    @contextmanager
    def program(self, stage: Stage, *command: str) -> Iterator[Path]:
        """Its log, once it is healthy. Ends it by SIGTERM; fails if that takes too long or its user is root."""
        assert stage.user != "0" and stage.health, f"{stage.name} runs as root or has no HEALTHCHECK"
        log = self._builder.work / f"{stage.name}.log"
        assert not self.is_healthy(stage), f"{stage.name} is healthy before its start"
        with log.open("wb") as out:
            argv = self.inside(stage, [*stage.entrypoint, *(command or stage.command)])
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:

            def answers() -> bool:
                assert process.poll() is None, f"{stage.name} has ended: {log.read_text()[-3000:]}"
                return self.is_healthy(stage)

            began = time.monotonic()
            until(answers, f"{stage.name} is healthy", HEALTHY_S)
            print(f"images: {stage.name}: healthy after {time.monotonic() - began:.0f} s", flush=True)
            yield log
            began = time.monotonic()
            process.terminate()
            status = process.wait(60)
            took = time.monotonic() - began
            print(f"images: {stage.name}: ended {took:.1f} s after SIGTERM with status {status}", flush=True)
            assert took <= END_S, f"{stage.name} ended {took:.1f} s after SIGTERM; {END_S} s are allowed"
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)

    def inside(self, stage: Stage, argv: list[str]) -> list[str]:
        return ["ip", "netns", "exec", NETWORK, *self._builder.inside(stage, argv, stage.user)]


def write(stage: Stage, name: str, content: str | bytes) -> None:
    path = stage.path / "app" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    for each in (path, path.parent):
        os.chown(each, 1000, 1000)


def check_cloud(builder: Builder, machine: Machine) -> None:
    cloud, console, proxy = (builder.build(name) for name in ("cloud", "console", "proxy"))
    edges = [builder.build(name) for name in ("edge", "edge-ros2", "edge-lerobot")]
    if "UV_FIND_LINKS" in builder.settings:  # torch for the CPU beside a torchvision for CUDA: .ci/set-up
        for file in (ROOT / ".ci").glob("torchvision_beside_cpu_torch.p*"):
            shutil.copy(file, edges[2].path / "opt/venv/lib/python3.11/site-packages")
    for module, edge in (("rclpy", edges[1]), ("lerobot.robots", edges[2])):
        subprocess.run(builder.inside(edge, ["python", "-c", f"import {module}"], edge.user), check=True)
    machine.run(cloud, "keys", "new", "gateway")
    for edge in edges:
        shown = machine.run(edge, "keys", "new", edge.name)
        public = load_public_key(edge.path / "app" / "keys" / f"{edge.name}.pub")
        machine.run(cloud, "keys", "allow", edge.name, "--role", "robot", f"--public={public}")
        write(edge, "keys/gateway.pub", (cloud.path / "app" / "keys" / "gateway.pub").read_bytes())
        write(edge, "robots.yaml", ROBOT.replace("NAME", edge.name))
        assert public in shown
    machine.run(console, "console", "user", "add", "ana", "--role=operator", "--password-stdin", text="long-enough-1\n")
    pem = proxy.path / "app" / "tls"
    pem.mkdir()
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=lab -days 2".split()
    files = ["-keyout", str(pem / "certificate.key"), "-out", str(pem / "certificate.pem")]
    subprocess.run([*command, *files], check=True, capture_output=True)
    write(proxy, "tls/certificate.key", (pem / "certificate.key").read_bytes())
    for shared in ("runs", "keys"):
        mount("--bind", cloud.path / "app" / shared, console.path / "app" / shared)
    with ExitStack() as programs:
        page = ("--console.enabled=false", "--console.public_url=https://127.0.0.1:8443")
        programs.enter_context(machine.program(cloud, *cloud.command, *page, "--logging.wandb.mode=disabled"))
        programs.enter_context(machine.program(console))
        programs.enter_context(machine.program(proxy))
        fetch = (
            "import ssl, urllib.request as r; "
            "c = ssl._create_unverified_context(); print(r.urlopen('https://127.0.0.1:8443/sign-in', context=c).status)"
        )
        assert "200" in subprocess.check_output(machine.inside(console, ["python", "-c", fetch]), text=True)
        print("images: the proxy serves the console's sign-in page", flush=True)
        for edge in edges:
            programs.enter_context(machine.program(edge, "edge", "robots.yaml", "--connect", "tcp://127.0.0.1:5555"))

            def is_connected(edge: Stage = edge) -> bool:
                return "connected to tcp" in machine.run(edge, "status", "edge", check=False)

            until(is_connected, "it connects", 60)
            print(f"images: {edge.name}: its robot is connected to the cloud", flush=True)


def check_simulation(builder: Builder, machine: Machine) -> None:
    stage = builder.build("simulation")
    subprocess.run(builder.inside(stage, ["python", "-c", "import sim.robot, mujoco, torch, ray"], "1000"), check=True)
    write(stage, "run.yaml", RUN)
    with machine.program(stage, "train", "run.yaml"):
        pass


def end_programs(work: str) -> None:
    """Kills what still runs in an image of this test: its root is below `work`."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "root").startswith(f"{work}/"):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # it has ended
            continue


def main() -> int:
    if os.geteuid() or not shutil.which("mmdebstrap") or not shutil.which("ip"):
        print("make images-test needs root, and Debian's packages mmdebstrap and iproute2")
        return 2
    if sys.argv[1:2] != [INSIDE]:
        # Mounts belong to the child's namespace and vanish with it, so that nothing mounted is removed below.
        kept = os.environ.get("IMAGES_WORK", "")  # stages that an earlier run has built there are taken as they are
        work = kept or tempfile.mkdtemp(prefix="us-images-", dir="/var/tmp")
        Path(work).mkdir(exist_ok=True)
        child = ["unshare", "--mount", "--propagation=private", sys.executable, __file__, INSIDE, work, *sys.argv[1:]]
        subprocess.run(["ip", "netns", "add", NETWORK], check=True)
        try:
            subprocess.run(["ip", "-n", NETWORK, "link", "set", "lo", "up"], check=True)
            return subprocess.run(child).returncode
        finally:
            end_programs(work)
            subprocess.run(["ip", "netns", "delete", NETWORK], check=False)
            if not kept:
                shutil.rmtree(work, ignore_errors=True)
    builder = Builder(Path(sys.argv[2]))
    machine = Machine(builder)
    wanted = sys.argv[3:] or ["simulation", "cloud"]
    if "simulation" in wanted:
        check_simulation(builder, machine)
    if "cloud" in wanted:
        check_cloud(builder, machine)
    print("images: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
