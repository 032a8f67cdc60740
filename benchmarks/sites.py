"""Two sites: what stays at a site against what goes through a central channel; and a hundred robots that come back.

``python -m benchmarks.sites`` prints a table and writes ``benchmarks/out/sites.json`` (goal 8).

At each of two sites a robot shows pictures to a policy at the same site and waits for each action, which takes one
control period to carry out. The channel between the two is a gateway at their site, or one for both sites beyond an
emulated link (`sim.link`) of `DELAY_MS` one way and `MBIT_S` each way. An episode's length is the time of its steps.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness import Row, compare, report
from benchmarks.tunnel_ends import announce, far_end
from sim.link import Link
from sim.link_config import LinkConfig
from user_sys.errors import RunError
from user_sys.messages import PROTOCOL_VERSION, Hello, OperatorCommand, Preview, PreviewAck
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import KeyPair, Keyring, Role, new_keypair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.server import Peer, TunnelServer
from user_sys.tunnel.states import TunnelState
from user_sys.tunnel.wire import AnyMessage, Payload

DELAY_MS, MBIT_S = 50.0, 20.0  # as in configs/two-sites.yaml
SITES = 2
STEPS = 20
PERIOD_S = 0.1
PICTURES = bytes(2 * 128 * 128 * 3)  # two cameras, as the policy reads them
ROBOTS = 100
DEADLINE_S = 60.0
LOOK_S = 0.01
MOMENT_S = 0.1


class Channel:
    """A TunnelHandler between robots and the policies named after them: pictures one way, actions the other."""

    def __init__(self) -> None:
        self.server: TunnelServer

    def objection(self, hello: Hello) -> str:
        return ""

    def peer_opened(self, peer: Peer) -> None:
        return

    def peer_closed(self, peer: Peer, reason: str) -> None:
        return

    def received(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        match message:
            case Preview():
                self.server.send(peer.name, PreviewAck(robot=message.robot, camera=message.camera))
                self.server.send(policy_of(peer.name), message, payload)
            case OperatorCommand():
                self.server.send(message.robot, message)


def policy_of(robot: str) -> str:
    return f"policy-{robot}"


def serve_channel(endpoint: str, own: KeyPair, peers: Sequence[str]) -> None:
    """A far end that lets in ``NAME:ROLE:KEY``, for as long as its input is open."""
    with tempfile.TemporaryDirectory() as folder:
        ring, channel = Keyring(Path(folder)), Channel()
        for peer in peers:
            name, role, key = peer.split(":", 2)
            ring.allow(key, name, "robot" if role == "robot" else "console")
        with TunnelServer(endpoint, own, ring, channel) as server:
            channel.server = server
            announce(server.endpoint, own.public)


class Fleet:
    """Robots and their policies: each a name, a role and a key pair."""

    def __init__(self, robots: int, policies: bool = True) -> None:
        self.own = new_keypair()
        self.robots = [f"robot-{number}" for number in range(robots)]
        roles: dict[str, Role] = dict.fromkeys(self.robots, "robot")
        if policies:
            roles |= dict.fromkeys(map(policy_of, self.robots), "console")
        self.keys = {name: (role, new_keypair()) for name, role in roles.items()}

    def channel(self, endpoint: str = "tcp://127.0.0.1:0") -> AbstractContextManager[tuple[str, str]]:
        """A far end that lets them in; yields its endpoint and public key."""
        peers = [f"{name}:{role}:{keys.public}" for name, (role, keys) in self.keys.items()]
        return far_end(endpoint, self.own.public, self.own.secret, *peers, module="benchmarks.sites")

    def client(self, name: str, endpoint: str) -> TunnelClient:
        role, keys = self.keys[name]
        hello = Hello(protocol=PROTOCOL_VERSION, role=role, name=name)
        return TunnelClient(endpoint, keys, self.own.public, hello)


class Site:
    """One robot and its policy, at two ends of a channel."""

    def __init__(self, robot: TunnelClient, policy: TunnelClient) -> None:
        self._robot, self._policy, self._step = robot, policy, 0

    def act(self, stop: threading.Event) -> None:
        """The policy: an action for each observation."""
        name = self._robot.hello.name
        while not stop.is_set():
            if self._policy.take_preview(0.1) is not None:
                self._policy.send(OperatorCommand(robot=name, operator="policy", order="drive", twist=(0.0,) * 7))

    def episode(self) -> None:
        """Raises RunError where no action came."""
        name = self._robot.hello.name
        for _ in range(STEPS):
            self._step += 1
            while not self._robot.offer_preview(Preview(robot=name, camera="all", step=self._step), PICTURES):
                time.sleep(1e-3)  # the acknowledgement of the last observation is still on its way
            if self._robot.receive(DEADLINE_S) is None:
                raise RunError(f"{name}: no action came within {DEADLINE_S} s")
            time.sleep(PERIOD_S)


@contextmanager
def sites(central: bool) -> Iterator[list[Site]]:
    """`SITES` sites that are at work, with a channel each or one for all of them beyond a link."""
    link = LinkConfig(delay_ms=DELAY_MS, up_mbit_s=MBIT_S, down_mbit_s=MBIT_S)
    fleet, stop, found = Fleet(SITES), threading.Event(), list[Site]()
    with ExitStack() as stack:
        shared = stack.enter_context(fleet.channel())[0] if central else ""
        for robot in fleet.robots:
            if central:
                endpoint = stack.enter_context(Link(shared.removeprefix("tcp://"), link)).endpoint
            else:
                endpoint = stack.enter_context(fleet.channel())[0]
            ends = [stack.enter_context(fleet.client(name, endpoint)) for name in (robot, policy_of(robot))]
            for end in ends:
                end.wait_open(DEADLINE_S)
            found.append(Site(*ends))
        pool = stack.enter_context(ThreadPoolExecutor(SITES))
        acting = [pool.submit(site.act, stop) for site in found]
        try:
            yield found
        finally:
            stop.set()
            for done in acting:
                done.result(DEADLINE_S)


def episode_s(found: list[Site]) -> float:
    """The mean length of an episode, all sites at work at the same time."""

    def one(site: Site) -> float:
        start = time.perf_counter()
        site.episode()
        return time.perf_counter() - start

    with ThreadPoolExecutor(len(found)) as pool:
        return sum(pool.map(one, found)) / len(found)


def two_sites_row() -> Row:
    with sites(central=False) as local, sites(central=True) as central:
        return compare(
            f"two sites: episode of {STEPS} steps, channels kept local; bound: one central channel "
            f"({DELAY_MS:g} ms, {MBIT_S:g} Mbit/s)",
            lambda: episode_s(local),
            lambda: episode_s(central),
            goal=8,
            unit="s",
            target=3.2,
            more_is_better=False,
        )


def one_site_row() -> Row:
    """Without an emulated link both are on this machine: what locality costs when there is nothing to gain."""

    @contextmanager
    def site(over: Callable[[str], str]) -> Iterator[list[Site]]:
        fleet, stop = Fleet(1), threading.Event()
        with ExitStack() as stack:
            endpoint = over(stack.enter_context(fleet.channel())[0])
            ends = [stack.enter_context(fleet.client(name, endpoint)) for name in fleet.keys]
            for end in ends:
                end.wait_open(DEADLINE_S)
            found = Site(*ends)
            acting = stack.enter_context(ThreadPoolExecutor(1)).submit(found.act, stop)
            try:
                yield [found]
            finally:
                stop.set()
                acting.result(DEADLINE_S)

    with site(lambda near: near) as local, site(lambda near: near.replace("127.0.0.1", "127.1")) as central:
        return compare(
            f"one site: episode of {STEPS} steps by the short way; bound: over TCP",
            lambda: episode_s(local),
            lambda: episode_s(central),
            goal=8,
            unit="s",
            target=1.0,
            more_is_better=False,
        )


def herd_rows() -> list[Row]:
    """A gateway is killed and comes back; all its robots find it again by themselves, and not all at once."""
    fleet = Fleet(ROBOTS, policies=False)
    with ExitStack() as stack:
        with fleet.channel() as (endpoint, _):
            robots = [stack.enter_context(fleet.client(name, endpoint)) for name in fleet.robots]
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
        Row(8, f"{ROBOTS} robots after a gateway's restart: all are back; bound: the longest pause", "s", back[-1],
            limit, limit / back[-1]),
        Row(8, f"{ROBOTS} robots after a gateway's restart: most sessions opened within {MOMENT_S:g} s", "", at_once,
            None, None),
    ]  # fmt: skip


def _until(robots: Sequence[TunnelClient], holds: Callable[[TunnelClient], bool]) -> list[float]:
    """When it first held for each. Raises RunError where it does not within `DEADLINE_S`."""
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
