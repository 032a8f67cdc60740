"""What a run needs, in a config's words: some of the robots that it lists, and GPUs and processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from hal.placement_words import listed
from hal.request import Request
from hal.resource import Kind
from user_sys.errors import ConfigError

MAX_COUNT = 256


@dataclass(frozen=True)
class NeedConfig:
    """`count` resources of one sort (`hal.request.Request`); robots are chosen from those that the run lists.

    Attributes:
        use: what a GPU or a computer is for: the run's learners, or the process in which its policies act.
        memory_gb: of each GPU or computer, at least.
        near: needs with the same word are met in one place: on one computer, or at one site (`near_by`).
    """

    kind: Literal["robot", "gpu", "compute"]
    count: int = 1
    name: str = ""
    model: str = ""
    memory_gb: float = 0.0
    cores: int = 0
    capabilities: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    near: str = ""
    near_by: Literal["node", "site"] = "node"
    use: Literal["learner", "policy"] = "learner"

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_COUNT or self.cores < 0 or not 0 <= self.memory_gb < math.inf:
            raise ConfigError(f"needs: count must be at least 1, at most {MAX_COUNT}; cores and memory_gb at least 0")
        if self.name and self.count > 1:
            raise ConfigError(f"needs: there is one {self.name}; leave out count, or name each")
        if (self.cores and self.kind != "compute") or (self.memory_gb and self.kind == "robot"):
            what = "cores" if self.cores else "memory_gb"
            raise ConfigError(f"needs: a {self.kind} has no {what}; ask for them apart")
        if self.use == "policy" and self.kind == "robot":
            raise ConfigError("needs: use says what a GPU or a computer is for; a robot is for itself")

    @property
    def trains(self) -> bool:
        """It is a GPU that learners train on."""
        return self.kind == "gpu" and self.use == "learner"

    def request(self) -> Request:
        return Request(
            kind=Kind(self.kind),
            count=self.count,
            name=self.name,
            model=self.model,
            memory_bytes=round(self.memory_gb * 1e9),
            cores=self.cores,
            capabilities=self.capabilities,
            labels=self.labels,
            near=self.near,
            near_by=self.near_by,
        )


def require_one_place(needs: Sequence[NeedConfig]) -> None:
    """Raises ConfigError where one word of `near` means a computer in one need and a site in another."""
    meant: dict[str, str] = {}
    for need in needs:
        if need.near and meant.setdefault(need.near, need.near_by) != need.near_by:
            raise ConfigError(f"needs: near {need.near!r} is by node in one and by site in another; use two words")


def require_candidates(needs: Sequence[NeedConfig], robots: Sequence[str]) -> None:
    """Raises ConfigError where robots are asked for that the run's list of `robots` cannot give, whoever uses them."""
    wanted = [need for need in needs if need.kind == "robot"]
    if not wanted:
        return
    if not robots:
        raise ConfigError("needs: robots are chosen from those that `robots` lists, and it lists none")
    names = [need.name for need in wanted if need.name]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"needs: {twice[0]} is asked for twice, and there is one")
    if unknown := [name for name in names if name not in robots]:
        near = get_close_matches(unknown[0], robots, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it lists {listed(sorted(robots))}"
        raise ConfigError(f"needs: `robots` lists no {unknown[0]}; {hint}")
    if (count := sum(need.count for need in wanted)) > len(robots):
        raise ConfigError(f"needs: {count} robots are asked for, and `robots` lists {len(robots)} to choose from")


def require_one_policy_process(needs: Sequence[NeedConfig], is_started: bool) -> None:
    """Raises ConfigError where there is to be room for other than the one policy process that a run may have.

    Args:
        is_started: the run starts one.
    """
    asked = sum(need.count for need in needs if need.use == "policy")
    if asked and not is_started:
        raise ConfigError("needs: use: policy, but the run starts no policy process; that takes policy.at: site")
    if asked > 1:
        raise ConfigError(f"needs: {asked} are asked for with use: policy; a run's policies act in one process")


def require_whole_learners(needs: Sequence[NeedConfig], processes: int) -> None:
    """Raises ConfigError where GPUs are asked for, and fewer of them than a learner has `processes`."""
    gpus = sum(need.count for need in needs if need.trains)
    if 0 < gpus < processes:
        raise ConfigError(
            f"learner.processes is {processes}, each trains on a GPU of its own, and needs asks for {gpus}: "
            f"needs: [{{kind: gpu, count: {processes}}}]"
        )
