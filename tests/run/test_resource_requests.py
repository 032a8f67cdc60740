"""Resource requests of a run: impossible ones are refused before anything is looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hal.resource import Kind, ResourceRequest
from user_sys.compose import RobotConfig
from user_sys.config import build
from user_sys.errors import ConfigError
from user_sys.learner.config import LearnerConfig
from user_sys.run.cluster_allocation import acquire_resources
from user_sys.run.config import ResourceRequestConfig, RunConfig


def test_config_becomes_placement_request() -> None:
    config = ResourceRequestConfig(kind="gpu", count=2, memory_gb=24, colocate="cell", colocate_by="site")
    assert config.to_request() == ResourceRequest(
        kind=Kind.GPU, count=2, memory_bytes=24 * 10**9, colocate="cell", colocate_by="site"
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "gpu", "count": 0}, "count: expected a whole number >= 1, got 0"),
        ({"kind": "gpu", "count": 10**9}, "count: expected a whole number <= 256"),
        ({"kind": "gpu", "memory_gb": float("inf")}, "memory_gb: expected a finite number, got inf"),
        ({"kind": "robot", "name": "panda-0", "count": 2}, "only one resource is named panda-0; leave out count"),
        ({"kind": "gpu", "cores": 8}, "a gpu has no cores"),
        ({"kind": "robot", "memory_gb": 8}, "a robot has no memory_gb"),
    ],
)
def test_impossible_request_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(RunConfig, {"resources": [wrong]}, "job")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"count": 3}, {}], "4 robots are requested, but `robots` lists only 3"),
        ([{"name": "arm-0"}, {"name": "arm-0"}], "the robot arm-0 is requested twice"),
        ([{"name": "arm-7"}], "`robots` lists no arm-7; did you mean 'arm-2'"),
        ([{"name": "crane"}], "`robots` lists no crane; known are arm-0, arm-1, arm-2"),
    ],
)
def test_request_for_unlisted_robot_is_refused(items: list[dict[str, Any]], message: str) -> None:
    resources = tuple(ResourceRequestConfig(kind="robot", **item) for item in items)
    with pytest.raises(ConfigError, match=message):
        RunConfig(robots=tuple(RobotConfig(name=f"arm-{number}") for number in range(3)), resources=resources)
    with pytest.raises(ConfigError, match="robots are chosen from the list `robots`, and it is empty"):
        RunConfig(resources=resources)


def test_colocation_word_with_two_meanings_is_refused() -> None:
    by_node, by_site = (ResourceRequestConfig(kind="gpu", colocate="cell", colocate_by=by) for by in ("node", "site"))
    RunConfig(resources=(by_node, by_node))
    with pytest.raises(ConfigError, match="colocate 'cell' is by node in one item and by site in another"):
        RunConfig(resources=(by_node, by_site))


def test_learner_with_fewer_gpus_than_processes_is_refused() -> None:
    two, one_gpu = LearnerConfig(processes=2), ResourceRequestConfig(kind="gpu", colocate="learner")
    compute = ResourceRequestConfig(kind="compute")
    RunConfig(learner=two, resources=(ResourceRequestConfig(kind="gpu", count=2), compute))
    RunConfig(learner=two, resources=(one_gpu, ResourceRequestConfig(kind="gpu")))
    RunConfig(learner=two, resources=(compute,))
    RunConfig(learner=LearnerConfig(processes=2, device="cpu"), resources=(one_gpu,))
    with pytest.raises(ConfigError, match=r"1 GPUs are requested, .*; request \{kind: gpu, count: 2\}"):
        RunConfig(learner=two, resources=(one_gpu,))


def test_learner_gets_the_requested_gpu_unless_the_user_has_chosen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "gpus-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: gpus\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[user_sys.probes]\ngpus = probe_of_two_gpus:find\n")
    (tmp_path / "probe_of_two_gpus.py").write_text(
        "from hal.resource import Kind, ResourceRecord\n"
        "def find():\n"
        "    for number, size in enumerate((8, 24)):\n"
        "        name, labels = f'here/gpu-{number}', {'uuid': f'GPU-of-{size}-GB'}\n"
        "        yield ResourceRecord(\n"
        "            kind=Kind.GPU, name=name, model='x', node='here', labels=labels, memory_bytes=size * 10**9\n"
        "        )\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = RunConfig(resources=(ResourceRequestConfig(kind="gpu", memory_gb=24),))
    with acquire_resources(config, tmp_path / "run", Console()) as allocation:
        assert [slot.gpus for slot in allocation.learner_slots(0, 1)] == [("GPU-of-24-GB",)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with acquire_resources(config, tmp_path / "run", Console()) as allocation:
        assert [slot.gpus for slot in allocation.learner_slots(0, 1)] == [()]
