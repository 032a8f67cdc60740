"""What a run may ask for; what makes no sense is said before anything is looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hal.resource import Kind, ResourceRequest
from user_sys.compose import RobotConfig
from user_sys.errors import ConfigError
from user_sys.learner.config import LearnerConfig
from user_sys.run.config import ResourceRequestConfig, RunConfig
from user_sys.run.launcher import acquire_resources


def test_a_need_is_a_request_for_placement() -> None:
    need = ResourceRequestConfig(kind="gpu", count=2, memory_gb=24, near="cell", near_by="site")
    assert need.to_request() == ResourceRequest(
        kind=Kind.GPU, count=2, memory_bytes=24 * 10**9, colocate="cell", colocate_by="site"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "gpu", "count": 0}, "count must be at least 1"),
        ({"kind": "gpu", "count": 10**9}, "count must be at least 1"),
        ({"kind": "gpu", "memory_gb": float("inf")}, "memory_gb at least 0"),
        ({"kind": "gpu", "memory_gb": float("nan")}, "memory_gb at least 0"),
        ({"kind": "robot", "name": "panda-0", "count": 2}, "there is one panda-0; leave out count, or name each"),
        ({"kind": "gpu", "cores": 8}, "a gpu has no cores; ask for them apart"),
        ({"kind": "robot", "memory_gb": 8}, "a robot has no memory_gb; ask for them apart"),
    ],
)
def test_a_need_that_nothing_can_meet_is_refused_in_words(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ResourceRequestConfig(**wrong)


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ([{"count": 3}, {}], "4 robots are asked for, and `robots` lists 3 to choose from"),
        ([{"name": "arm-0"}, {"name": "arm-0"}], "arm-0 is asked for twice, and there is one"),
        ([{"name": "arm-7"}], "`robots` lists no arm-7; did you mean arm-2?"),
        ([{"name": "crane"}], "`robots` lists no crane; it lists arm-0, arm-1 and arm-2"),
    ],
)
def test_robots_that_the_list_cannot_give_are_not_asked_for(needs: list[dict[str, Any]], said: str) -> None:
    wanted = tuple(ResourceRequestConfig(kind="robot", **need) for need in needs)
    with pytest.raises(ConfigError, match=said):
        RunConfig(robots=tuple(RobotConfig(name=f"arm-{number}") for number in range(3)), needs=wanted)
    with pytest.raises(ConfigError, match="chosen from those that `robots` lists, and it lists none"):
        RunConfig(needs=wanted)


def test_one_word_is_not_two_sorts_of_places() -> None:
    by_node, by_site = (ResourceRequestConfig(kind="gpu", near="cell", near_by=by) for by in ("node", "site"))
    RunConfig(needs=(by_node, by_node))
    with pytest.raises(ConfigError, match="near 'cell' is by node in one and by site in another; use two words"):
        RunConfig(needs=(by_node, by_site))


def test_processes_that_train_together_need_a_gpu_each_wherever_that_is() -> None:
    two, one = LearnerConfig(processes=2), ResourceRequestConfig(kind="gpu", near="learner")
    RunConfig(learner=two, needs=(ResourceRequestConfig(kind="gpu", count=2), ResourceRequestConfig(kind="compute")))
    RunConfig(learner=two, needs=(one, ResourceRequestConfig(kind="gpu")))
    RunConfig(learner=two, needs=(ResourceRequestConfig(kind="compute"),))
    RunConfig(learner=LearnerConfig(processes=2, device="cpu"), needs=(one,))
    with pytest.raises(
        ConfigError, match=r"processes is 2, .* and needs asks for 1: needs: \[\{kind: gpu, count: 2\}\]"
    ):
        RunConfig(learner=two, needs=(one,))


def test_on_one_computer_a_learner_is_to_see_the_gpu_that_meets_the_need_unless_a_person_has_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cards-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: cards\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[user_sys.probes]\ncards = probe_of_two_cards:find\n")
    (tmp_path / "probe_of_two_cards.py").write_text(
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
    config = RunConfig(needs=(ResourceRequestConfig(kind="gpu", memory_gb=24),))
    with acquire_resources(config, tmp_path / "run", Console()) as places:
        assert places.learner_gpus == ("GPU-of-24-GB",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with acquire_resources(config, tmp_path / "run", Console()) as places:
        assert places.learner_gpus == ()
