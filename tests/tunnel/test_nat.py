"""A robot's computer behind a real NAT: three network namespaces, without a route to the edge's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tunnel_kit import prepare, stored, until

from user_sys.gateway.gateway import GatewayAddress, read_gateway_address
from user_sys.tunnel.keys import new_keypair, save_keypair

CLOUD, PORT = "10.77.2.2", 5555
SITE, ROUTER = "10.77.1.2", "10.77.1.1"
OUTER, NEW_OUTER = "10.77.2.1", "10.77.2.9"
MASQUERADE = """
table ip site {
  chain out { type nat hook postrouting priority srcnat; oifname "outer" masquerade; }
  chain through { type filter hook forward priority filter; policy drop;
    ct state established,related accept
    iifname "inner" oifname "outer" tcp dport 5555 accept; }
}
"""
EDGE = """
import sys, time
from dataclasses import replace
from pathlib import Path
sys.path[:0] = [sys.argv[4], str(Path(sys.argv[4]).parent)]
from tunnel_kit import QUICK, chunk, hello
from user_sys.edge.outbox import Outbox
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import load_keypair

run, endpoint, public = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
keys = load_keypair(run / "keys/panda-0.key")
alert = replace(QUICK, dead_after_s=2.0, handshake_s=5.0)
with Outbox.open(run / "outbox") as outbox:
    with TunnelClient(endpoint, keys, public, hello("panda-0"), outbox=outbox, limits=alert) as client:
        while not (run / "enough").exists():
            outbox.append(chunk(outbox.next_sequence))
            time.sleep(0.01)
        (run / "recorded").write_text(str(outbox.next_sequence))
        sys.exit(client.drain(240))
"""
ESTABLISHED, LISTENING = "01", "0A"


def command(*words: str, stdin: str | None = None) -> None:
    subprocess.run(words, input=stdin, text=True, check=True, capture_output=True, timeout=120)


@dataclass
class Sites:
    """A cloud, a site, and the router between them with network address translation."""

    cloud: str
    router: str
    site: str

    def build(self) -> None:
        for name in (self.cloud, self.router, self.site):
            command("ip", "netns", "add", name)
            command("ip", "-n", name, "link", "set", "lo", "up")
        self._join(self.site, SITE, ROUTER, "inner")
        self._join(self.cloud, CLOUD, OUTER, "outer")
        command("ip", "-n", self.site, "route", "add", "default", "via", ROUTER)
        self.at(self.router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        command("ip", "netns", "exec", self.router, "nft", "-f", "-", stdin=MASQUERADE)

    def _join(self, name: str, address: str, router_address: str, at_router: str) -> None:
        command(
            "ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", at_router, "netns", self.router
        )
        for where, device, own in ((name, "eth0", address), (self.router, at_router, router_address)):
            command("ip", "-n", where, "addr", "add", f"{own}/24", "dev", device)
            command("ip", "-n", where, "link", "set", device, "up")

    def at(self, name: str, *words: str) -> None:
        command("ip", "netns", "exec", name, *words)

    def start(self, name: str, log: Path, *words: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(["ip", "netns", "exec", name, sys.executable, *words], stdout=out, stderr=out)

    def change_address(self) -> None:
        """Gives the site another public address: the kernel drops its translations to the old one."""
        command("ip", "-n", self.router, "addr", "del", f"{OUTER}/24", "dev", "outer")
        command("ip", "-n", self.router, "addr", "add", f"{NEW_OUTER}/24", "dev", "outer")

    def remove(self) -> None:
        for name in (self.cloud, self.router, self.site):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=10)


@pytest.fixture
def sites() -> Iterator[Sites]:
    for program in ("ip", "nft", "sysctl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed; .ci/system-packages names what it is in")
    built = Sites(*(f"us-{os.getpid()}-{name}" for name in ("cloud", "router", "site")))
    try:
        try:
            built.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace with a NAT may be made here: {' '.join(error.stderr.split())}")
        yield built
    finally:
        built.remove()


def sockets_of(process: subprocess.Popen[bytes], state: str) -> list[tuple[str, str]]:
    """Local and remote address of the TCP and UDP sockets in a process's network namespace, from /proc.

    Unconnected UDP sockets have state 07; they count as listening.
    """
    states = {state, "07"} if state == LISTENING else {state}
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{process.pid}/net/{kind}").read_text().splitlines()[1:]:
            _, local, remote, current, *_ = line.split()
            if current in states:
                found.append((local, remote))
    return found


def seen_from(process: subprocess.Popen[bytes]) -> Counter[str]:
    """The addresses from which the gateway's connections come."""
    addresses = [remote.split(":")[0] for _, remote in sockets_of(process, ESTABLISHED)]
    return Counter(".".join(str(byte) for byte in reversed(bytes.fromhex(address))) for address in addresses)


def test_edge_behind_a_nat_survives_an_address_change(tmp_path: Path, sites: Sites) -> None:
    prepare(tmp_path)
    save_keypair(new_keypair(), tmp_path / "keys", "gateway")
    (tmp_path / "config.yaml").write_text(f"gateway: {{endpoint: 'tcp://{CLOUD}:{PORT}'}}\n")
    gateway = sites.start(sites.cloud, tmp_path / "gateway.log", "-m", "user_sys.gateway", "--run", str(tmp_path))
    try:
        until(lambda: read_gateway_address(tmp_path), "the gateway listens")
        address = read_gateway_address(tmp_path)
        assert address is not None
        stream(sites, tmp_path, address, gateway)
    finally:
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(120) == 0, (tmp_path / "gateway.log").read_text()[-2000:]
    counts = Counter(stored(tmp_path))
    recorded = int((tmp_path / "recorded").read_text())
    assert sorted(counts) == [("episode-0", index) for index in range(recorded)], "none lost"
    assert set(counts.values()) == {1}, "none twice"


def stream(sites: Sites, run: Path, address: GatewayAddress, gateway: subprocess.Popen[bytes]) -> None:
    argv = ["-c", EDGE, str(run), address.endpoint, address.public_key, str(Path(__file__).parent)]
    edge = sites.start(sites.site, run / "edge.log", *argv)
    try:
        grows(run)
        assert seen_from(gateway) == {OUTER: 4}, "the site has one address and one port is dialled"
        assert {remote.split(":")[1] for _, remote in sockets_of(edge, ESTABLISHED)} == {f"{PORT:04X}"}
        assert sockets_of(edge, LISTENING) == [], "nothing listens on the edge"
        sites.change_address()
        until(lambda: seen_from(gateway)[NEW_OUTER] == 4, "the edge comes back from the site's new address")
        grows(run)
    finally:
        (run / "enough").touch()
        try:
            left = edge.wait(120)
        finally:
            edge.kill()
    assert left == 0, (run / "edge.log").read_text()[-2000:]


def grows(run: Path) -> None:
    """Returns once the store has grown for a while."""
    sizes = {size_of_store(run)}
    deadline = time.monotonic() + 120
    while len(sizes) < 20:
        assert time.monotonic() < deadline, "the store does not grow"
        time.sleep(0.01)
        sizes.add(size_of_store(run))


def size_of_store(run: Path) -> int:
    return sum(path.stat().st_size for path in (run / "store").rglob("*") if path.is_file())
