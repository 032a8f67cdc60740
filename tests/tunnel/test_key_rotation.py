"""Key changes by command while a gateway runs, and their effect on connected peers."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import zmq
from tunnel_kit import CONFIG, QUICK, GatewaySite, hello, prepare, serving, until

from hal.state_database import STATE_FILE, read_audit_log
from user_sys.commands.main import main
from user_sys.errors import SessionRefused
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.keys import KeyPair, fingerprint, load_keypair, new_keypair
from user_sys.tunnel.router import NO_HANDSHAKE


def keys(run: Path, *argv: str) -> None:
    assert main(["keys", *argv, "--folder", str(run / "keys")]) == 0


def dial(site: GatewaySite, name: str, pair: KeyPair) -> TunnelClient:
    client = TunnelClient(site.address.endpoint, pair, site.address.public_key, hello(name), limits=QUICK)
    site.clients.append(client)
    client.start()
    return client


def test_rotated_key_is_allowed_until_its_overlap_ends(tmp_path: Path) -> None:
    prepare(tmp_path)
    with serving(tmp_path) as site:
        old = load_keypair(tmp_path / "keys" / "panda-0.key")
        client = site.client("panda-0")
        keys(tmp_path, "rotate", "panda-0", "--overlap=24h")
        new = load_keypair(tmp_path / "keys" / "panda-0.key")
        assert new != old
        assert not _ends(client, within_s=0.8), "the old key is good for a day"
        dial(site, "panda-0", new).wait_open(120)
        until(lambda: client.state is TunnelState.REFUSED, "its newer self has taken over")
        again = dial(site, "panda-0", old)
        again.wait_open(120)
        keys(tmp_path, "allow", "panda-0", "--role=robot", f"--public={new_keypair().public}")
        until(lambda: again.state is TunnelState.REFUSED, "a key that is out is cut off at once")


def _ends(client: TunnelClient, within_s: float) -> bool:
    return threading.Event().wait(within_s) or client.state is not TunnelState.OPEN


def test_relay_is_refused_for_a_foreign_robot(tmp_path: Path) -> None:
    prepare(tmp_path)
    with serving(tmp_path) as site:
        keys(tmp_path, "new", "lab")
        keys(tmp_path, "allow", "lab", "--role=relay", "--robots", "far-0")
        lab = load_keypair(tmp_path / "keys" / "lab.key")
        far = TunnelClient(site.address.endpoint, lab, site.address.public_key, hello("far-0", "robot"), limits=QUICK)
        near = TunnelClient(site.address.endpoint, lab, site.address.public_key, hello("panda-0"), limits=QUICK)
        site.clients += [far, near]
        far.start()
        far.wait_open(120)
        near.start()
        with pytest.raises(SessionRefused, match="belongs to the relay 'lab', not to the robot 'panda-0'"):
            near.wait_open(120)
        keys(tmp_path, "allow", "lab", "--role=relay", "--robots", "far-1")
        until(lambda: far.state is TunnelState.REFUSED, "a robot taken from a relay is cut off at once")


def test_connections_without_a_key_are_audited(tmp_path: Path) -> None:
    prepare(tmp_path)
    with serving(tmp_path, replace(CONFIG, tunnel=replace(QUICK, handshake_s=0.5))) as site:
        port = urlsplit(site.address.endpoint).port
        half_open = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", port)) as garbage:
                garbage.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100))
        with zmq.Context() as context, context.socket(zmq.DEALER) as keyless:
            keyless.linger = 0
            keyless.connect(site.address.endpoint)
            until(lambda: site.gateway.server.counters["handshakes_failed"] >= 4, "the last was turned away")
        site.client("panda-0").close()
        for connection in half_open:
            connection.close()
    refused = [e for e in read_audit_log(tmp_path / STATE_FILE) if e.event == "refused"]
    assert {(e.address, e.reason) for e in refused} == {("127.0.0.1", NO_HANDSHAKE)}
    assert sum(e.count for e in refused) >= 8  # the client without a key reconnects


def test_audit_has_peers_addresses_and_refusal_reasons(tmp_path: Path) -> None:
    pairs = prepare(tmp_path)
    stranger = new_keypair()
    with serving(tmp_path) as site:
        site.client("panda-0").close()
        with pytest.raises(SessionRefused):
            dial(site, "panda-1", stranger).wait_open(120)
        with pytest.raises(SessionRefused):
            dial(site, "panda-1", pairs["panda-0"]).wait_open(120)
        site.client("panda-1")
        keys(tmp_path, "revoke", "panda-1")
        until(
            lambda: any("revoked" in entry.reason for entry in read_audit_log(tmp_path / STATE_FILE)),
            "the revocation is noted",
        )
    noted = read_audit_log(tmp_path / STATE_FILE)
    found = {(entry.event, entry.peer, entry.key): entry for entry in noted}
    assert found["opened", "panda-0", fingerprint(pairs["panda-0"].public)].role == "robot"
    assert found["refused", "", fingerprint(stranger.public)].reason == "this key is not allowed"
    assert "belongs to the robot 'panda-0'" in found["refused", "panda-1", fingerprint(pairs["panda-0"].public)].reason
    assert "revoked" in found["closed", "panda-1", fingerprint(pairs["panda-1"].public)].reason
    assert all(entry.address for entry in noted)
