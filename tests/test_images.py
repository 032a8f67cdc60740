"""The images' dependencies fit together: resolved by what the Dockerfile itself runs. Nothing is installed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from images import parse

from user_sys.config import load
from user_sys.run.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
EXTRAS = sorted(set(re.findall(r"(?:\bEXTRAS=|RUN docker/install )([a-z0-9,]+)", DOCKERFILE)))
"""Of every image: those that it is built with by default, and those that the Dockerfile offers."""
QUICK = ("edge,lerobot", "edge,ros2", "edge,sim,learner,interchange,backup")
"""Resolved by default: other constraints, another index, and most packages."""
MINE = {
    "edge": "user-sys",
    "lerobot": "lerobot",
    "ur": "ur-rtde",
    "franka": "franky-control",
    "learner": "torch",
    "ros2": "ros-jazzy-rclpy",
}


@pytest.fixture(scope="module")
def uv() -> dict[str, str]:
    """An environment for `docker/install`, with this site's packages; skips the test if none can be had."""
    found = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    settings = subprocess.run(
        [sys.executable, ROOT / ".ci" / "uv-settings"], capture_output=True, text=True, check=True
    )
    told = dict(line.split("\t", 1) for line in settings.stdout.splitlines())
    environment = {**told, **os.environ, "UV": found}
    command = [found, "pip", "compile", "--quiet", "--python", sys.executable, "-"]
    if subprocess.run(command, input="six", env=environment, capture_output=True, text=True).returncode:
        pytest.skip("no package index can be reached")
    return environment


def resolve(extras: str, folder: Path, environment: dict[str, str]) -> str:
    options = ["--dry-run", "--python", sys.executable, "--target", str(folder)]
    command = [ROOT / "docker" / "install", extras, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return re.sub(r"\x1b\[\d*m", "", done.stderr)


@pytest.mark.parametrize(
    "extras",
    [pytest.param(extras, marks=() if extras in QUICK else pytest.mark.slow) for extras in EXTRAS],
)
def test_versions_of_an_image_fit(extras: str, tmp_path: Path, uv: dict[str, str]) -> None:
    resolved = resolve(extras, tmp_path, uv)
    wanted = [package for extra, package in MINE.items() if extra in extras.split(",")]
    assert set(wanted) <= set(re.findall(r"^ \+ (\S+?)(?:==| @ )", resolved, re.MULTILINE)), resolved


def test_each_image_is_built_by_what_is_tested() -> None:
    ways = re.findall(r"^(?:RUN| &&) .*(?:docker/install|pip install).*$", DOCKERFILE, re.MULTILINE)
    built = {way.split()[-1] for way in ways if "docker/install" in way}
    whole = "edge,sim,learner,interchange"
    assert built == {'"$EXTRAS"', "edge,ros2", "edge,lerobot", "console,interchange", whole, f"{whole},backup"}
    assert not [way for way in ways if "docker/install" not in way and "pip install uv==" not in way]
    assert {"edge", "edge,ur", *(built - {'"$EXTRAS"'})} <= set(EXTRAS)
    copied = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)).split()
    install = (ROOT / "docker" / "install").read_text()
    assert set(re.findall(r"(?:--constraint|--override) ([^\s\"]+)", install)) <= set(copied)
    let_in = re.findall(r"^!(.*)$", (ROOT / "docker" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert set(copied) == set(let_in)


def test_no_image_runs_as_root_or_without_a_health_check() -> None:
    stages = {name: stage for name, stage in parse(DOCKERFILE).items() if not name.endswith("build")}
    assert {"cloud", "simulation", "edge", "edge-ros2", "edge-lerobot", "console", "proxy"} <= set(stages)
    for stage in stages.values():
        words = {word for word, _ in stage.steps}
        base = stage
        while base.base in stages:
            base = stages[base.base]
            words |= {word for word, _ in base.steps}
        assert "@sha256:" in base.base
        assert stage.name in ("base",) or {"USER", "HEALTHCHECK", "ENTRYPOINT"} <= words, stage.name


@pytest.mark.parametrize("has_run", [False, True])
def test_container_that_starts_again_has_its_options(has_run: bool, tmp_path: Path) -> None:
    if has_run:
        (tmp_path / "runs" / "latest").mkdir(parents=True)
        (tmp_path / "runs" / "latest" / "run.json").touch()
    (tmp_path / "user-sys").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "user-sys").chmod(0o755)
    argv = [ROOT / "docker" / "resume-or-start", "cloud", "configs/cloud.yaml", "--ray.address=10.0.0.9:6379"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.check_output(argv, cwd=tmp_path, env=environment, text=True)
    run = "--resume runs/latest" if has_run else "configs/cloud.yaml"
    assert said == f"cloud --any-result {run} --ray.address=10.0.0.9:6379\n"


def manifest() -> dict[str, Any]:
    """The objects of the Kubernetes manifest, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((ROOT / "docker" / "kuberay.yaml").read_text())}


def test_run_on_kubernetes_requests_the_workers_gpu() -> None:
    (head,) = manifest()["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    words = shlex.split(re.search(r"resume-or-start cloud (.*) &&", head["args"][0].replace("\\\n", ""))[1])  # type: ignore[index]
    config = load(RunConfig, ROOT / words[0], [word.replace("$POD_IP", "10.0.0.2") for word in words[1:]])
    assert config.ray.address == "10.0.0.2:6379" and [each.is_learner_gpu for each in config.resources] == [True]
    assert "startupProbe" not in head and "6379" in str(head["readinessProbe"]), (
        "the run waits for the worker, and the worker for a head that is ready"
    )


@pytest.mark.parametrize(("age_s", "asked"), [(None, ""), (60.0, ""), (-1.0, "status --alive runs/latest\n")])
def test_kubernetes_probes_a_run_once_it_has_its_status(tmp_path: Path, age_s: float | None, asked: str) -> None:
    (head,) = manifest()["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    started, status = tmp_path / "started", tmp_path / "runs" / "latest" / "status.json"
    started.touch()
    if age_s is not None:
        status.parent.mkdir(parents=True)
        status.touch()
        os.utime(status, (0.0, started.stat().st_mtime - age_s))
    (tmp_path / "user-sys").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "user-sys").chmod(0o755)
    probe = [word.replace("/tmp/started", str(started)) for word in head["livenessProbe"]["exec"]["command"]]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.check_output(probe, cwd=tmp_path, env=environment, text=True) == asked
    assert "touch /tmp/started\n" in head["args"][0]


def test_kubernetes_keeps_the_modes_of_private_keys() -> None:
    """At each mount kubelet may let the group read all files, and USER refuses such a private key."""
    cluster = manifest()["RayCluster"]["spec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_kubernetes_accepts_the_manifest() -> None:
    """All but the fields of the RayCluster itself, whose pods are checked."""
    validate = pytest.importorskip("kubernetes_validate")
    found = manifest()
    cluster = found.pop("RayCluster")["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [{"apiVersion": "v1", "kind": "Pod", **group["template"]} for group in groups]
    for each in (*found.values(), *pods):
        validate.validate(each, validate.latest_version(), strict=True)


def test_services_of_the_cloud_share_a_network_that_no_restart_replaces() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.cloud.yaml").read_text())["services"]
    owner = services.pop("network")
    assert owner["command"] == ["sleep", "infinity"] and "network_mode" not in owner
    assert {service["network_mode"] for service in services.values()} == {"service:network"}
    assert owner["ports"] and not any("ports" in service for service in services.values())


def test_container_of_a_robot_may_open_serial_ports_and_cameras() -> None:
    """The engine looks the names up in the image, whose groups have Debian's fixed numbers, as the computer's have."""
    edge = yaml.safe_load((ROOT / "docker" / "compose.edge.yaml").read_text())["services"]["edge"]
    assert edge["group_add"] == ["dialout", "video"]


def test_compose_files_build_stages_that_exist() -> None:
    targets = set()
    for path in sorted((ROOT / "docker").glob("compose*.yaml")):
        for service in yaml.safe_load(path.read_text())["services"].values():
            targets.add(service["build"]["target"].replace("${TARGET:-edge}", "edge"))
    assert targets == {"simulation", "cloud", "console", "proxy", "edge"} <= set(parse(DOCKERFILE))
