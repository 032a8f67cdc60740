"""The robots and GPUs that a run gets, and the reasons if it gets none."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from nvml_kit import nvml_of
from rich.console import Console
from run_kit import Launch, until, user_sys

from hal.errors import PlacementError, StateError
from hal.lease import LeaseTable, driven_robots, robot_lock
from hal.ray_cluster import PlacementSlot, RayCluster, Reservation
from hal.ray_nodes import Bundle, cluster_records, node_names
from hal.registry import Registry
from hal.resource import Health, Kind, ResourceRecord, local_node
from hal.state_database import STATE_FILE, StateDatabase
from user_sys.commands.main import main
from user_sys.compose import RobotConfig
from user_sys.config import load, save
from user_sys.errors import RunError
from user_sys.gateway.gateway import ResourceService
from user_sys.messages import LeaseGrant, LeaseRefusal, LeaseRequest
from user_sys.operator_overrides import overrides_of_real_robots, overrides_of_run
from user_sys.robot_records import read_robot_records
from user_sys.run import allocation
from user_sys.run.allocation import (
    NO_GPU,
    LocalAllocation,
    merge_cluster_records,
    offered_resources,
    out_of_use,
    plan_run,
    select_robots,
)
from user_sys.run.cluster_allocation import ClusterAllocation
from user_sys.run.config import (
    GatewayConfig,
    ResourceRequestConfig,
    RunConfig,
    RunFolder,
    create_run_folder,
)
from user_sys.run.evaluate import run_evaluation
from user_sys.run.topology import ProcessSlot
from user_sys.store.store import StoreReader

GB = 10**9


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path / "runtime"))
    monkeypatch.setattr(allocation, "RETRY_INTERVAL_S", 0.0)
    yield tmp_path / "runtime"


def robot(name: str, site: str = "lab", model: str = "panda", **facts: object) -> ResourceRecord:
    labels = {"site": site}
    record = ResourceRecord(
        kind=Kind.ROBOT, name=name, model=model, node=f"{site}-desk", labels=labels, embodiment=f"embodiment of {model}"
    )
    return msgspec.structs.replace(record, **facts)


def gpu(site: str, gigabytes: int) -> ResourceRecord:
    node = f"{site}-rack"
    return ResourceRecord(
        kind=Kind.GPU, name=f"{node}/gpu-0", model="L4", node=node, labels={"site": site}, memory_bytes=gigabytes * GB
    )


def run_of(*names: str, resources: Sequence[ResourceRequestConfig], runs: Path = Path("nowhere")) -> RunConfig:
    return RunConfig(
        robots=tuple(RobotConfig(name=name, driver="fake", task="reach") for name in names),
        resources=tuple(resources),
        runs=runs,
    )


PAIR = (
    ResourceRequestConfig(kind="robot", model="panda", count=2, colocate="cell", colocate_by="site"),
    ResourceRequestConfig(kind="gpu", memory_gb=24, colocate="cell", colocate_by="site"),
)
LISTED = ("a", "b", "c", "d", "u")
THERE = [
    *(robot("u", model="ur5e"), robot("a", "hall"), robot("b"), robot("c", "hall"), robot("d")),
    *(gpu("hall", 8), gpu("lab", 24)),
]


def chosen(config: RunConfig, records: Sequence[ResourceRecord]) -> list[str]:
    assigned = plan_run(config, config.requests(), records).require()
    names = [record.name for given in assigned for record in given if record.kind is Kind.ROBOT]
    return [robot.name for robot in select_robots(config, names).robots]


def why(config: RunConfig, records: Sequence[ResourceRecord]) -> str:
    return plan_run(config, config.requests(), records).reason


def test_placement_near_a_gpu_does_not_depend_on_the_order_of_records() -> None:
    config = run_of(*LISTED, resources=PAIR)
    assert chosen(config, THERE) == chosen(config, THERE[::-1]) == ["b", "d"]
    for health in (Health.LOST, Health.LEASED, Health.QUARANTINED, Health.DRAINING):
        assert "b" not in chosen(
            run_of(*LISTED, resources=PAIR[:1]), [robot("b", health=health), *THERE[:2], *THERE[3:]]
        )


def test_run_without_robot_requests_drives_all_listed_robots() -> None:
    config = run_of(*LISTED, resources=[ResourceRequestConfig(kind="gpu")])
    assert select_robots(config, []) == config
    assert [request.name for request in config.robot_requests()] == list(LISTED)


def test_unlisted_robot_is_not_selected() -> None:
    config = run_of("a", "b", resources=[ResourceRequestConfig(kind="robot", model="panda", count=2)])
    there = [robot("a"), robot("b", health=Health.LEASED, note="by run demo"), robot("c"), robot("u", model="ur5e")]
    assert why(config, there) == "2 robot, model panda: 1 missing (a free; b leased by run demo)"


def test_resumed_run_keeps_its_robots(tmp_path: Path) -> None:
    config = run_of(*LISTED, resources=PAIR)
    had = select_robots(config, chosen(config, THERE))
    save(had, tmp_path / "config.yaml")
    again = load(RunConfig, tmp_path / "config.yaml")
    assert again == had and chosen(again, [robot("0"), *THERE]) == ["b", "d"]
    assert "d on lab lost" in why(again, [*THERE[:4], robot("d", health=Health.LOST), *THERE[5:]]), "a and c are free"


def test_robot_quarantined_in_any_run_is_not_selected(tmp_path: Path) -> None:
    config = run_of("a", "b", resources=[ResourceRequestConfig(kind="robot", count=2)], runs=tmp_path)
    book = overrides_of_real_robots(tmp_path)
    book.set_override("b", "quarantined", "ana", "the gripper sticks")
    assert "b quarantined by ana: the gripper sticks" in why(
        config, offered_resources(config, [robot("a"), robot("b")])
    )
    with LocalAllocation(replace(config, runs=Path("nowhere")), "one", tmp_path) as one, pytest.raises(PlacementError):
        one.acquire(refuse_to_wait)
    book.clear_override("b", "ana")
    assert chosen(config, offered_resources(config, [robot("a"), robot("b")])) == ["a", "b"]
    damage(tmp_path)
    with pytest.raises(StateError, match="damaged"):
        offered_resources(config, [robot("a")])


def damage(folder: Path) -> None:
    """Damages the state in the folder."""
    for file in (folder / STATE_FILE, *folder.glob(f"{STATE_FILE}-*")):
        file.write_text("{" * 200)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs; in the run a, operators have taken robots out of use, of which it simulates s."""
    folder, _ = create_run_folder(run_of("s", "s2", resources=(), runs=tmp_path / "runs"), "a", "tcp://127.0.0.1:5999")
    book = overrides_of_run(folder.path)
    for name in ("real", "s", "s2", "unlisted", "away"):
        book.set_override(name, "quarantined", "ana", "the gripper sticks")
    book.set_override("drained", "draining", "ana")
    return folder.path.parent


def lab(**settings: Any) -> RunConfig:
    names = {"real": "ur", "s": "ur", "s2": "fake", "drained": "ur", "ready": "ur"}
    return RunConfig(
        robots=tuple(RobotConfig(name=name, driver=driver, task="reach") for name, driver in names.items()),
        remote_robots=(RobotConfig(name="away", driver="ur"),),
        **settings,
    )


def test_real_robot_that_is_out_of_use_in_another_run_gets_no_lease(runs: Path) -> None:
    folder, _ = create_run_folder(lab(runs=runs), "b", "tcp://127.0.0.1:5999")
    assert [*out_of_use((*lab().robots, *lab().remote_robots), folder.path)] == ["real", "drained", "away"]
    assert out_of_use(RunConfig().robots, folder.path) == {}, "simulated robots only"
    service = resources_of(folder.path)
    answers = {}
    for name in ("real", "s", "s2", "drained", "unlisted", "ready"):
        service.registry.announce(robot(name))
        answers[name] = lease_request(service, name)
    refused = {name: answer.reason for name, answer in answers.items() if isinstance(answer, LeaseRefusal)}
    assert refused == {
        "real": "real is quarantined by ana: the gripper sticks; it cannot be leased",
        "drained": "drained is draining by ana; it cannot be leased",
        "unlisted": "unlisted is quarantined by ana: the gripper sticks; it cannot be leased",
    }


def test_quarantine_of_a_real_robot_moves_with_the_folder_of_its_run(runs: Path) -> None:
    folder, _ = create_run_folder(lab(runs=runs), "b", "tcp://127.0.0.1:5999")
    service = resources_of(folder.path)
    for name in ("ready", "s2"):
        service.registry.announce(robot(name))
        assert main(["hardware", "quarantine", name, "--run", str(folder.path), "--by", "ben", "--reason", "oil"]) == 0
    service.poll((), ())
    service.registry.close()
    moved = runs.parent / "elsewhere" / "b"
    moved.parent.mkdir()
    folder.path.rename(moved)
    command = f"user-sys hardware restore ready --run {moved.parent}"
    line = f"ready is quarantined by run b: by ben: oil: no program moves it until `{command}`"
    robots = [RobotConfig(name="ready", driver="ur")]
    for _ in range(2):
        assert out_of_use(robots, moved) == {"ready": line}
    service = resources_of(moved)
    assert isinstance(lease_request(service, "ready"), LeaseRefusal)
    assert main(["hardware", "restore", "ready", "--run", str(moved.parent), "--by", "ana"]) == 0
    service.poll((), ())
    assert out_of_use(robots, moved) == {} and isinstance(lease_request(service, "ready"), LeaseGrant)


def test_quarantine_of_a_real_robot_ends_its_lease_in_another_run_until_it_is_restored(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "bc":
        create_run_folder(lab(runs=runs), name, "tcp://127.0.0.1:5999")
    service = resources_of(runs / "b")
    for name in ("ready", "s2"):
        service.registry.announce(robot(name))
        assert isinstance(lease_request(service, name), LeaseGrant)
        assert main(["hardware", "quarantine", name, "--run", str(runs / "c"), "--by", "ben", "--reason", "oil"]) == 0
    changed, refusals = service.poll((), ())
    assert [(each.name, each.note) for each in changed] == [("ready", "by ben: oil")]
    assert [each.reason for each in refusals] == ["ready is quarantined by ben: oil"], "s2 is simulated"
    assert isinstance(lease_request(service, "ready"), LeaseRefusal)
    assert main(["hardware", "restore", "ready", "--run", str(runs / "a"), "--by", "ana"]) == 0
    assert "ready is in use again; it was quarantined by ben: oil" in capsys.readouterr().out
    service.poll((), ())
    assert service.present()[0].health is Health.READY, "without a request of its session"
    assert isinstance(lease_request(service, "ready"), LeaseGrant)


def test_damaged_overrides_refuse_a_launch(runs: Path) -> None:
    damage(runs)
    with pytest.raises(StateError, match="damaged"):
        out_of_use(lab().robots, runs / "a")
    with pytest.raises(StateError, match="damaged"):
        resources_of(runs / "a")


def resources_of(run: Path) -> ResourceService:
    """As the gateway of the run in the folder `run` has them."""
    database = StateDatabase(run / STATE_FILE)
    leases = LeaseTable(database)
    return ResourceService(leases, Registry(leases, database, overrides=overrides_of_run(run)))


def lease_request(service: ResourceService, robot: str) -> LeaseGrant | LeaseRefusal:
    peer: Any = SimpleNamespace(name=robot, session=b"1")
    return service.on_lease_request(peer, LeaseRequest(robot=robot, holder=f"session of {robot}"))


def test_robot_out_of_use_is_not_evaluated(runs: Path) -> None:
    folder, config = RunFolder(runs / "b"), lab()
    reason = "the gripper sticks: no program moves it until `user-sys hardware restore real --run .*/runs`"
    with pytest.raises(RunError, match=f"real is quarantined by ana: {reason}"):
        run_evaluation(config, folder, 1, Console(), robot=config.robots[0])
    with pytest.raises(RunError, match="has no trained policy yet"):
        run_evaluation(config, folder, 1, Console(), robot=config.robots[2])


def test_robot_out_of_use_is_not_recorded(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(lab(runs=runs), runs / "lab.yaml")
    assert main(["record", str(runs / "lab.yaml"), f"--output={runs / 'recorded'}"]) == 2
    assert "real is quarantined by ana: the gripper sticks: no program moves it" in capsys.readouterr().err
    assert not (runs / "recorded").exists()


def test_lost_compute_waits_while_overrides_cannot_be_read(tmp_path: Path) -> None:
    cluster = SimpleNamespace(
        address="127.0.0.1",
        has_resource=lambda name: True,
        records=lambda assume_unused: (),
        address_from_node=dict,
    )
    config = run_of("a", resources=[ResourceRequestConfig(kind="robot"), ResourceRequestConfig(kind="gpu")])
    allocation = ClusterAllocation(cast("RayCluster", cluster), config, "one", tmp_path)
    assert allocation.reacquire("learner") == "gpu: missing (none there)"
    damage(tmp_path)
    assert f"{tmp_path / STATE_FILE} is damaged" in str(allocation.reacquire("learner"))


class TwoComputers:
    """A cluster of this computer and another with the same host name, which declares the robot a."""

    address = "10.0.0.2"

    def __init__(self) -> None:
        facts = {"NodeManagerHostname": local_node(), "Alive": True}
        self.nodes = [
            {**facts, "NodeID": "1", "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 4.0}},
            {**facts, "NodeID": "2", "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 8.0, "robot:a": 1.0}},
        ]
        self.sees_folder = True

    def records(self, assume_unused: bool) -> tuple[ResourceRecord, ...]:
        return cluster_records(self.nodes, {}, ())

    def has_resource(self, name: str) -> bool:
        return any(name in node["Resources"] for node in self.nodes)

    def address_from_node(self) -> dict[str, str]:
        names = node_names(self.nodes)
        return {names[node["NodeID"]]: node["NodeManagerAddress"] for node in self.nodes}

    def reserve(self, name: str, bundles: Sequence[Bundle]) -> Reservation:
        return Reservation(None, tuple(bundles))

    def release(self, reservation: Reservation) -> None:
        pass

    def read_remote(self, slots: Sequence[PlacementSlot], path: Path) -> list[str]:
        return [path.read_text() if self.sees_folder else "" for _ in slots]

    def shutdown(self) -> None:
        pass


def on_two_computers(tmp_path: Path, cluster: TwoComputers, config: RunConfig) -> ClusterAllocation:
    config = replace(config, gateway=GatewayConfig(endpoint="tcp://0.0.0.0:5555"))
    return ClusterAllocation(cast("RayCluster", cluster), config, "one", tmp_path)


def test_robot_of_a_computer_with_the_same_host_name_is_on_another(tmp_path: Path) -> None:
    with on_two_computers(tmp_path, TwoComputers(), run_of("a", resources=())) as allocation:
        allocation.acquire(refuse_to_wait)
        assert allocation.robots_on_other_nodes() == (["a"], "10.0.0.2")
        (slot,) = allocation.slot_from_robot.values()
        assert allocation.launcher_address(ProcessSlot(placement=slot)) == "10.0.0.2"


@pytest.mark.parametrize(
    "config",
    [run_of("a", resources=()), run_of("b", resources=[ResourceRequestConfig(kind="compute", cores=6)])],
    ids=["robot", "compute"],
)
def test_computer_that_does_not_see_the_run_folders_is_refused(tmp_path: Path, config: RunConfig) -> None:
    cluster = TwoComputers()
    cluster.sees_folder = False
    message = rf"^10\.0\.0\.3 does not see {tmp_path}, which must be on storage that both computers have; or exclude"
    with on_two_computers(tmp_path, cluster, config) as allocation, pytest.raises(PlacementError, match=message):
        allocation.acquire(refuse_to_wait)
    assert not list(tmp_path.glob(".seen*"))


def test_lost_compute_is_acquired_again_near_the_robot_only(tmp_path: Path) -> None:
    cluster = TwoComputers()
    cluster.lost_nodes = lambda reservation: ("10.0.0.3",)  # type: ignore[attr-defined]
    near = [
        ResourceRequestConfig(kind="robot", colocate="cell"),
        ResourceRequestConfig(kind="compute", cores=4, colocate="cell"),
    ]
    with on_two_computers(tmp_path, cluster, run_of("a", resources=near)) as allocation:
        allocation.acquire(refuse_to_wait)
        assert allocation.release_lost("learner") and not allocation.learner_slots(0, 1)
        cluster.nodes[1]["Resources"] = {"CPU": 1.0, "robot:a": 1.0}
        assert "not in one place with the others" in str(allocation.reacquire("learner")), "10.0.0.2 has four free"
        cluster.nodes[1]["Resources"] = {"CPU": 8.0, "robot:a": 1.0}
        assert allocation.reacquire("learner") == ""
        assert [slot.placement and slot.placement.node for slot in allocation.learner_slots(0, 1)] == ["10.0.0.3"]


def test_computer_without_site_gets_the_common_site_of_its_robots() -> None:
    gpu_record = ResourceRecord(kind=Kind.GPU, name="desk/gpu-0", model="L4", node="desk", memory_bytes=24 * GB)
    at_lab, at_hall = robot("a", node="desk"), robot("b", "hall", node="desk")
    config = run_of(
        "a", "b", resources=(ResourceRequestConfig(kind="robot", colocate="cell", colocate_by="site"), PAIR[1])
    )
    assert chosen(config, offered_resources(config, [gpu_record, at_lab])) == ["a"]
    assert "not in one place with the others" in why(config, offered_resources(config, [gpu_record, at_lab, at_hall]))


def test_labels_of_the_file_override_those_of_the_node() -> None:
    listed = [RobotConfig(name=name, driver=driver) for name, driver in (("a", "ur"), ("s", "fake"), ("r", "ur"))]
    desk = ResourceRecord(kind=Kind.COMPUTE, name="desk", model="Ray node", node="desk", labels={"site": "desk-hall"})
    driven = msgspec.structs.replace(robot("d"), health=Health.LEASED, note="by record")
    there = merge_cluster_records(
        listed,
        [robot("a", "lab"), robot("s", "lab", labels={}), robot("r"), driven],
        [desk, robot("a", "hall", node="rack", labels={"site": "hall", "floor": "2"}), robot("d", node="desk")],
        "desk",
    )
    known = {record.name: record for record in there}
    assert (known["d"].health, known["d"].note) == (Health.LEASED, "by record"), "another program drives it"
    assert (known["a"].labels, known["a"].node) == ({"site": "lab", "floor": "2"}, "rack")
    assert (known["s"].labels, known["s"].node) == ({"site": "desk-hall"}, "desk"), "it runs on the store's node"
    assert (known["r"].health, known["r"].trouble) == (Health.LOST, "no node of the cluster has it")


# On one computer


def gpus(allocation: LocalAllocation) -> tuple[str, ...]:
    """The GPUs that the run's learner sees."""
    (slot,) = allocation.learner_slots(0, 1)
    return slot.gpus


class Waits(Exception):
    """Raised instead of waiting, with the printed reason."""


def refuse_to_wait(text: str) -> None:
    raise Waits(text)


def test_two_runs_select_different_robots() -> None:
    config = run_of("a", "b", "c", resources=[ResourceRequestConfig(kind="robot", count=2)])
    with LocalAllocation(config, "one") as one, LocalAllocation(config, "two") as two:
        one.acquire(refuse_to_wait)
        assert [robot.name for robot in one.config.robots] == ["a", "b"]
        with pytest.raises(Waits) as waits:
            two.acquire(refuse_to_wait)
        assert str(waits.value).startswith(
            "run two waits, and holds nothing meanwhile. 2 robot: 1 missing (a leased by pid "
        )
        assert " run one; b leased by " in str(waits.value)
        held(["c"], "another").close()
        assert not driven_robots(), "it holds nothing, and nothing moves"


def test_waiting_run_prints_the_reason_once_and_starts_after_the_other() -> None:
    config = run_of("a", "b", "c", resources=[ResourceRequestConfig(kind="robot", count=2)])
    printed: list[str] = []
    with ExitStack() as until_then, LocalAllocation(config, "two") as two:
        until_then.enter_context(LocalAllocation(config, "one")).acquire(refuse_to_wait)

        def print_line(text: str) -> None:
            printed.append(text)
            until_then.close()

        two.acquire(print_line)
        assert len(printed) == 1 and [robot.name for robot in two.config.robots] == ["a", "b"]


def test_robot_driven_elsewhere_is_not_selected() -> None:
    config = run_of("a", "b", "c", resources=[ResourceRequestConfig(kind="robot", count=2)])
    with robot_lock("a", "user-sys edge", simulated=True), LocalAllocation(config, "one") as one:
        one.acquire(refuse_to_wait)
        assert [robot.name for robot in one.config.robots] == ["b", "c"]


def test_robots_of_a_run_that_drives_all_are_locked_for_others() -> None:
    every, some = run_of("a", "b", resources=()), run_of("a", "b", "c", resources=[ResourceRequestConfig(kind="robot")])
    with (
        LocalAllocation(some, "some") as first,
        LocalAllocation(every, "every") as all_of_them,
        LocalAllocation(some, "other") as other,
    ):
        first.acquire(refuse_to_wait)
        all_of_them.acquire(refuse_to_wait)
        other.acquire(refuse_to_wait)
        assert [robot.name for robot in first.config.robots] == ["a"]
        assert all_of_them.config == every, "its drivers wait for what another run has"
        assert [robot.name for robot in other.config.robots] == ["c"]


def test_unbuildable_robot_is_printed_and_not_selected() -> None:
    config = run_of("a", "b", resources=[ResourceRequestConfig(kind="robot")])
    crane = RobotConfig(name="a", driver="fake", task="reach", options={"rate": 5})
    printed: list[str] = []
    with LocalAllocation(replace(config, robots=(crane, config.robots[1])), "one") as one:
        one.acquire(printed.append)
        assert [robot.name for robot in one.config.robots] == ["b"]
    assert printed == ["a cannot be selected: rate: unknown key; did you mean 'rate_hz'?"]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml_of(2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_two_runs_get_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of("a", resources=[ResourceRequestConfig(kind="gpu")])
    with ExitStack() as until_then, LocalAllocation(config, "two") as two, LocalAllocation(config, "three") as three:
        one = until_then.enter_context(LocalAllocation(config, "one"))
        one.acquire(refuse_to_wait)
        two.acquire(refuse_to_wait)
        assert (gpus(one), gpus(two)) == (("GPU-0",), ("GPU-1",))
        printed: list[str] = []

        def print_line(text: str) -> None:
            printed.append(text)
            until_then.close()

        three.acquire(print_line)
        assert gpus(three) == ("GPU-0",) and re.search(
            r"gpu-0 leased by pid \d+ of \S+ run one; .*gpu-1 leased", printed[0]
        )
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        with LocalAllocation(config, "four") as four:
            four.acquire(refuse_to_wait)
        assert gpus(four) == (), "a user who selects GPUs may share them"


@pytest.mark.usefixtures("two_gpus")
def test_policy_server_without_a_request_leaves_the_gpus_of_other_runs_alone() -> None:
    gpu, nothing = run_of("a", resources=[ResourceRequestConfig(kind="gpu")]), run_of("b", resources=[])
    with LocalAllocation(gpu, "one") as one, LocalAllocation(gpu, "two") as two, LocalAllocation(nothing, "x") as x:
        x.acquire(refuse_to_wait)
        assert x.policy_slot().gpus == ("GPU-0", "GPU-1")
        one.acquire(refuse_to_wait)
        assert (one.policy_slot().gpus, x.policy_slot().gpus) == (("GPU-0",), ("GPU-1",))
        two.acquire(refuse_to_wait)
        assert (two.policy_slot().gpus, x.policy_slot().gpus) == (("GPU-1",), NO_GPU)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("simulated", "robots_of_ben"), [(False, ["b"]), (True, ["a"])])
def test_runs_of_two_users_share_no_gpu_and_no_real_robot(
    monkeypatch: pytest.MonkeyPatch, simulated: bool, robots_of_ben: list[str]
) -> None:
    monkeypatch.setattr(RobotConfig, "simulated", simulated)
    config = run_of("a", "b", resources=[ResourceRequestConfig(kind=kind) for kind in ("robot", "gpu")])
    with LocalAllocation(config, "of-ana") as ana, LocalAllocation(config, "of-ben") as ben:
        ana.acquire(refuse_to_wait)
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        ben.acquire(refuse_to_wait)
        assert (gpus(ana), gpus(ben)) == (("GPU-0",), ("GPU-1",))
        assert [robot.name for robot in ben.config.robots] == robots_of_ben


def test_impossible_request_is_refused_at_once() -> None:
    needs = [ResourceRequestConfig(kind="robot", labels={"site": "moon"})]
    with (
        LocalAllocation(run_of("a", resources=needs), "one") as one,
        pytest.raises(PlacementError, match="site=moon: missing"),
    ):
        one.acquire(refuse_to_wait)
    here = offered_resources(run_of("a", resources=[]), [robot("a", node=local_node())])
    assert here[0].health is Health.READY


def held(names: Sequence[str], owner: str) -> ExitStack:
    """Locks that another run holds on robots, until the stack is closed."""
    others = RunConfig(robots=tuple(RobotConfig(name=name, driver="fake", task="reach") for name in names))
    stack = ExitStack()
    stack.enter_context(LocalAllocation(others, owner)).acquire(refuse_to_wait)
    return stack


LAB = """
robots:
  - {name: a, driver: fake, task: reach}
  - {name: crane, driver: nowhere, task: reach}
  - {name: b, driver: fake, task: reach, real_time: true, options: {rate_hz: 50}}
  - {name: c, driver: fake, task: reach, real_time: true, options: {rate_hz: 50}}
resources: [{kind: robot, count: 2}]
demonstrations: {episodes: 1}
learner: {max_training_s: 1, batch_size: 32, warmup_updates: 5}
evaluation: {episodes: 1, video_episodes: 0}
console: {port: 0}
logging: {wandb: {mode: disabled}}
"""


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Launch, ExitStack]]:
    """A run that waits for two of three arms: another program has a, and another run has b by the locks."""
    (tmp_path / "lab.yaml").write_text(LAB)
    runtime = Path(tempfile.mkdtemp(prefix="us-", dir="/tmp"))
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(runtime))
    with robot_lock("a", "user-sys edge", simulated=True), ExitStack() as stack:
        others = stack.enter_context(held(["b"], "other"))
        launch = stack.enter_context(user_sys(tmp_path, "train", "lab.yaml", "--name", "lab", runtime=runtime))
        until(lambda: "waits, and holds nothing meanwhile" in launch.out, "it waits")
        yield launch, others


def test_waiting_run_creates_no_folder(tmp_path: Path, waiting: tuple[Launch, ExitStack]) -> None:
    launch, _ = waiting
    assert re.search(r"2 robot: 1 missing \(a leased by pid \d+ of \S+ user-sys edge; b leased by", launch.out)
    assert "crane cannot be selected: no driver 'nowhere'" in launch.out
    launch.interrupt()
    assert launch.wait() == 130, launch.err
    launch.require_nothing_left()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_run_that_waited_drives_two_of_three_arms(tmp_path: Path, waiting: tuple[Launch, ExitStack]) -> None:
    launch, others = waiting
    others.close()
    assert launch.wait() == 0, launch.err
    launch.require_nothing_left()
    run = tmp_path / "runs" / "lab"
    config = load(RunConfig, run / "config.yaml")
    assert [robot.name for robot in config.robots] == ["b", "c"] and config.selects_robots
    assert {path.name for path in (run / "edge").iterdir()} == {"b", "c"}
    assert {record.robot for record in read_robot_records(run / "robots")} == {"b", "c"}
    with StoreReader.open(run / "store") as reader:
        reader.refresh()
        assert {episode.robot for episode in reader.episodes()} == {"b", "c"}
