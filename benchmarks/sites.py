"""Two sites: what placing a policy near its robot saves; and a hundred robots that come back.

``python -m benchmarks.sites`` (goal 8). At each of two sites a robot shows its policy what two cameras see (98 kB),
waits for the action, and carries it out for `MOVE_S`; `STEPS` steps are an episode, and its length is the time of its
steps. The policy explores in a policy process (`user_sys.inference`), through the session's own `RemotePolicy`.

The product decides where that process runs: `plan_run` gets the needs of the run and the resources of three computers,
one at each site and one with the store. Needs with ``near_by: site`` bring it to the robot's site; needs without leave
it next to the store. A robot reaches a process at another site through an emulated link (`sim.network_emulator`) of
`DELAY_MS` one way and `MBIT_S` each way, as in configs/two-sites.yaml, and one at its own site directly.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from benchmarks.harness import Row, compare, reached, report, running
from benchmarks.tunnel_ends import announce, far_end
from hal.resource import Kind, ResourceRecord
from hal.spec import ArraySpec, RobotSpec
from sim.network_emulator import EmulatedLink, LinkConfig
from user_sys.compose import PolicyConfig, RobotConfig, robot_spec
from user_sys.edge.robot_processes import module_argv
from user_sys.errors import PolicyUnavailable, RunError
from user_sys.inference.protocol import POLICY_NODE, PolicyDescription
from user_sys.inference.remote_policy import RemotePolicy, read_server_address
from user_sys.messages import PROTOCOL_VERSION, Hello
from user_sys.policies.policy import PolicyQuery
from user_sys.run.allocation import plan_run
from user_sys.run.config import ResourceRequestConfig, RunConfig
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import (
    GATEWAY_NAME,
    KeyPair,
    Keyring,
    load_keypair,
    load_public_key,
    new_keypair,
    save_keypair,
)
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import AnyMessage, Payload, TunnelState
from user_sys.tunnel.server import Peer, TunnelServer

DELAY_MS, MBIT_S = 50.0, 20.0  # as in configs/two-sites.yaml
STEPS = 20
MOVE_S = 0.1
RATE_HZ, ANSWER_WITHIN = 2.0, 0.9  # an action may take 0.45 s, so that the far policy can answer at all
PICTURES = 2 * 128 * 128 * 3 // 4  # float32 values that are as many bytes as two cameras' pictures
STORE = "store"  # the site of the computer with the store
ROBOTS = 100
DEADLINE_S = 60.0
LOOK_S = 0.01
MOMENT_S = 0.1


# Two sites ------------------------------------------------------------------------------------------------------------


def site_of_policy(site: str, sites: Sequence[str], *, near: bool) -> str:
    """The site that the product chooses for the policy process of the robot at `site`."""
    word = {"colocate": "cell", "colocate_by": "site"} if near else {}
    robot = RobotConfig(name=f"robot-{site}", driver="fake")
    needs = (
        ResourceRequestConfig("robot", name=robot.name, **word),
        ResourceRequestConfig("compute", use="policy", cores=1, **word),
    )  # type: ignore[arg-type]
    config = RunConfig(robots=(robot,), policy=PolicyConfig(location="server"), resources=needs)
    computers = [
        ResourceRecord(kind=Kind.COMPUTE, name=each, model="x86_64", node=each, cores=8, labels={"site": each})
        for each in dict.fromkeys((*sites, STORE))
    ]
    robots = [
        ResourceRecord(kind=Kind.ROBOT, name=f"robot-{each}", model="fake", node=each, labels={"site": each})
        for each in sites
    ]
    plan = plan_run(config, config.requests(), [*robots, *computers], store_nodes=(STORE,))
    return plan.require()[-1][0].labels["site"]


def pictured() -> RobotSpec:
    """A robot whose policy reads as many bytes as two cameras give."""
    numbers = tuple(map(str, range(PICTURES)))
    zeros, ones = (0.0,) * PICTURES, (1.0,) * PICTURES
    seen = ArraySpec(name="observation.pictures", labels=numbers, units=("1",) * PICTURES, low=zeros, high=ones)
    return replace(robot_spec(RobotConfig(driver="fake")), rate_hz=RATE_HZ, observation=(seen,))


class Site:
    """One robot and its policy."""

    def __init__(self, policy: RemotePolicy, spec: RobotSpec) -> None:
        self._policy, self._spec = policy, spec
        self._await()

    def _await(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self._acts():
            if time.monotonic() > deadline:
                raise RunError(f"the policy did not act within {DEADLINE_S:g} s")
            time.sleep(LOOK_S)

    def _acts(self) -> bool:
        try:
            self._policy.act(PolicyQuery({"observation.pictures": np.zeros(PICTURES, np.float32)}, "", False))
        except PolicyUnavailable:
            return False
        return True

    def episode(self) -> float:
        """Seconds. A step whose action does not come in time holds for a control period, and is tried again."""
        start = time.perf_counter()
        for _ in range(STEPS):
            while not self._acts():
                time.sleep(self._spec.period_s)
            time.sleep(MOVE_S)
        return time.perf_counter() - start


@contextmanager
def sites(names: Sequence[str], *, near: bool, linked: bool = True) -> Iterator[list[Site]]:
    """Robots at work at these sites, each with the policy process that placement gives its run."""
    spec, link = pictured(), LinkConfig(delay_ms=DELAY_MS, up_mbit_s=MBIT_S, down_mbit_s=MBIT_S)
    found = []
    with ExitStack() as stack:
        for name in names:
            keys = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            endpoint = stack.enter_context(policy_process(keys, name))
            if linked and site_of_policy(name, names, near=near) != name:
                endpoint = stack.enter_context(EmulatedLink(endpoint.removeprefix("tcp://"), link)).endpoint
            own, server = load_keypair(keys / f"{name}.key"), load_public_key(keys / f"{POLICY_NODE}.pub")
            description = PolicyDescription(kind="mlp", options={}, features=(), spec=spec)
            timeout_s = ANSWER_WITHIN / RATE_HZ
            policy = RemotePolicy(description, own, server, lambda at=endpoint: at, timeout_s, explore=True)  # type: ignore[misc]
            found.append(Site(stack.enter_context(policy), spec))
        yield found


@contextmanager
def policy_process(folder: Path, robot: str) -> Iterator[str]:
    """The endpoint of a policy process that lets `robot` in with the keys in `folder`."""
    for name in (POLICY_NODE, GATEWAY_NAME, robot):
        save_keypair(new_keypair(), folder, name)
    Keyring(folder).allow(load_keypair(folder / f"{robot}.key").public, robot, "robot")
    address = folder / "address"
    settings = {"listen": "tcp://127.0.0.1:0", "gateway": "tcp://127.0.0.1:1", "keys": folder, "policy.device": "cpu"}
    options = [f"--{key}={value}" for key, value in {**settings, "announce": address}.items()]
    with running(module_argv("user_sys.inference", *options), folder / "log") as process:
        deadline = time.monotonic() + DEADLINE_S
        while not (endpoint := read_server_address(address)):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RunError(f"the policy process did not start: {(folder / 'log').read_text()}")
            time.sleep(LOOK_S)
        yield endpoint


def episode_s(found: list[Site]) -> float:
    """The mean length of an episode, all sites at work at the same time."""
    with ThreadPoolExecutor(len(found)) as pool:
        return sum(pool.map(Site.episode, found)) / len(found)


def two_sites_row() -> Row:
    names = ("left", "right")
    with sites(names, near=True) as local, sites(names, near=False) as central:
        return compare(
            f"two sites: episode of {STEPS} steps, policies placed near their robots; bound: placed next to the store "
            f"({DELAY_MS:g} ms, {MBIT_S:g} Mbit/s)",
            lambda: episode_s(local),
            lambda: episode_s(central),
            goal=8,
            unit="s",
            target=3.2,
            more_is_better=False,
        )


def one_site_row() -> Row:
    """Everything is at the store's site: what asking for a place near the robot costs when there is nothing to gain."""
    with sites((STORE,), near=True) as local, sites((STORE,), near=False) as central:
        row = compare(
            f"one site: episode of {STEPS} steps, policy placed near its robot; bound: placed next to the store",
            lambda: episode_s(local),
            lambda: episode_s(central),
            goal=8,
            unit="s",
            target=1.0,
            more_is_better=False,
        )
    assert row.ratio is not None
    return replace(
        row, met=reached(round(row.ratio, 2), row.target)
    )  # the two do the same, so half of all pairs are below


# A hundred robots -----------------------------------------------------------------------------------------------------


class Channel:
    """A TunnelHandler that lets robots in."""

    def refusal_reason(self, hello: Hello) -> str:
        return ""

    def on_peer_opened(self, peer: Peer) -> None:
        return

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        return

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        return


def serve_channel(endpoint: str, own: KeyPair, peers: Sequence[str]) -> None:
    """A far end that lets in robots, ``NAME:KEY``, for as long as its input is open."""
    with tempfile.TemporaryDirectory() as folder:
        ring = Keyring(Path(folder))
        for peer in peers:
            name, key = peer.split(":", 1)
            ring.allow(key, name, "robot")
        with TunnelServer(endpoint, own, ring, Channel()) as server:
            announce(server.endpoint, own.public)


class Fleet:
    """Robots, each a name and a key pair."""

    def __init__(self) -> None:
        self.own = new_keypair()
        self.keys = {f"robot-{number}": new_keypair() for number in range(ROBOTS)}

    def channel(self, endpoint: str = "tcp://127.0.0.1:0") -> AbstractContextManager[tuple[str, str]]:
        """A far end that lets them in; yields its endpoint and public key."""
        peers = [f"{name}:{keys.public}" for name, keys in self.keys.items()]
        return far_end(endpoint, self.own.public, self.own.secret, *peers, module="benchmarks.sites")

    def client(self, name: str, endpoint: str) -> TunnelClient:
        hello = Hello(protocol=PROTOCOL_VERSION, role="robot", name=name)
        return TunnelClient(endpoint, self.keys[name], self.own.public, hello)


def herd_rows() -> list[Row]:
    """A gateway is killed and comes back; all its robots find it again by themselves, and not all at once."""
    fleet = Fleet()
    with ExitStack() as stack:
        with fleet.channel() as (endpoint, _):
            robots = [stack.enter_context(fleet.client(name, endpoint)) for name in fleet.keys]
            for robot in robots:
                robot.wait_open(DEADLINE_S)
        _until(robots, lambda robot: robot.state is not TunnelState.OPEN)
        time.sleep(DEADLINE_S / 6)  # by now each waits for its longest pause
        with fleet.channel(endpoint):
            start = time.monotonic()
            back = sorted(at - start for at in _until(robots, lambda robot: robot.state is TunnelState.OPEN))
    at_once = max(sum(first <= at < first + MOMENT_S for at in back) for first in back)
    limit = TunnelLimits().backoff_max_s
    return [
        Row(0, f"{ROBOTS} robots after a gateway's restart: all are back; bound: the longest pause", "s", back[-1],
            limit, limit / back[-1]),
        Row(0, f"{ROBOTS} robots after a gateway's restart: most sessions opened within {MOMENT_S:g} s", "", at_once),
    ]  # fmt: skip


def _until(robots: Sequence[TunnelClient], holds: Callable[[TunnelClient], bool]) -> list[float]:
    """The time when it first held for each. Raises RunError if it does not within `DEADLINE_S`."""
    since: dict[str, float] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(since) < len(robots):
        if time.monotonic() > deadline:
            raise RunError(f"{len(robots) - len(since)} of {len(robots)} robots did not get there")
        for robot in robots:
            if robot.hello.name not in since and holds(robot):
                since[robot.hello.name] = time.monotonic()
        time.sleep(LOOK_S)
    return list(since.values())


def main() -> None:
    if len(sys.argv) > 3:
        endpoint, public, secret, *peers = sys.argv[1:]
        serve_channel(endpoint, KeyPair(public, secret), peers)
        return
    report("sites", [two_sites_row(), one_site_row(), *herd_rows()])


if __name__ == "__main__":
    main()
