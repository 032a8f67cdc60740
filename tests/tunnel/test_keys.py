"""Key files and the keyring."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from user_sys.commands.main import COMMAND
from user_sys.errors import ConfigError, RunError, UserSysError
from user_sys.tunnel.keys import (
    AuthorizedKey,
    KeyPair,
    Keyring,
    fingerprint,
    load_keypair,
    load_public_key,
    new_keypair,
    save_keypair,
    stage_keypair,
)


def run_keys(*argv: str) -> None:
    COMMAND.main(["keys", *argv], standalone_mode=False)


def test_saved_key_pair_is_private_and_loads_again(tmp_path: Path) -> None:
    keys = new_keypair()
    save_keypair(keys, tmp_path / "keys", "panda-0")
    assert load_keypair(tmp_path / "keys/panda-0.key") == keys
    assert load_public_key(tmp_path / "keys/panda-0.pub") == keys.public
    assert (tmp_path / "keys/panda-0.key").stat().st_mode & 0o777 == 0o600


def test_repr_hides_the_secret() -> None:
    keys = new_keypair()
    assert keys.secret not in repr(keys)
    assert keys.public in repr(keys).replace("\\\\", "\\")


def test_private_key_readable_by_others_is_refused(tmp_path: Path) -> None:
    save_keypair(new_keypair(), tmp_path, "panda-0")
    for mode in (0o640, 0o604, 0o620, 0o666):
        (tmp_path / "panda-0.key").chmod(mode)
        with pytest.raises(RunError, match="chmod 600"):
            load_keypair(tmp_path / "panda-0.key")


def test_file_without_a_key_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no private key"):
        load_keypair(tmp_path / "panda-0.key")
    save_keypair(KeyPair(new_keypair().public, new_keypair().secret), tmp_path, "panda-0")
    with pytest.raises(RunError, match="two different keys"):
        load_keypair(tmp_path / "panda-0.key")
    save_keypair(new_keypair(), tmp_path, "panda-0")
    path = tmp_path / "panda-0.key"
    whole = path.read_bytes().rstrip()
    for content in (b"{}", b'{"public": "x", "secret": "y"}', b"\xff" * 100, *(whole[:n] for n in range(len(whole)))):
        path.write_bytes(content)
        with pytest.raises(RunError, match="holds no key pair"):
            load_keypair(path)


def test_keyring_reads_changes_of_another_process(tmp_path: Path) -> None:
    ours, theirs, keys = Keyring(tmp_path), Keyring(tmp_path), new_keypair()
    assert theirs.list() == ()
    ours.allow(keys.public, "panda-0", "robot")
    assert [(entry.name, entry.role) for entry in theirs.list()] == [("panda-0", "robot")]
    assert theirs.find(keys.public) is not None
    ours.revoke("panda-0")
    theirs.refresh()
    assert theirs.find(keys.public) is None


def test_revocation_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, on_disk = Keyring(tmp_path), []
    ring.allow(new_keypair().public, "panda-0", "robot")
    sync = os.fsync

    def watched(fd: int) -> None:
        sync(fd)
        on_disk.append(sorted(os.listdir(fd)))

    monkeypatch.setattr(os, "fsync", watched)
    ring.revoke("panda-0")
    assert on_disk == [[]], "the folder was synced when the entry had gone"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 200, "a\n"])
def test_unsafe_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not a name"):
        Keyring(tmp_path).allow(new_keypair().public, name, "robot")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_keys_that_root_writes_belong_to_the_owner_of_the_folder(tmp_path: Path) -> None:
    """The command may run with sudo, whose files the gateway's user could not read."""
    os.chown(tmp_path, 1000, 1001)
    save_keypair(new_keypair(), tmp_path / "keys", "gateway")
    Keyring(tmp_path / "keys").allow(new_keypair().public, "panda-0", "robot")
    written = {path: path.stat() for path in (tmp_path / "keys").rglob("*")}
    assert len(written) == 4 and {(each.st_uid, each.st_gid) for each in written.values()} == {(1000, 1001)}
    folder = (tmp_path / "keys").stat()
    assert (folder.st_uid, folder.st_mode & 0o777) == (1000, 0o700)


def test_entry_with_corrected_permissions_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, path = new_keypair(), tmp_path / "allowed/panda-0.json"
    Keyring(tmp_path).allow(keys.public, "panda-0", "robot")
    path.chmod(0o000)
    ring, read = Keyring(tmp_path), Path.open

    def opened(file: Path, mode: str) -> object:
        if not file.stat().st_mode & 0o444:  # as for any user but root
            raise PermissionError(13, "Permission denied", str(file))
        return read(file, mode)

    monkeypatch.setattr(Path, "open", opened)
    assert ring.list() == () and ring.unreadable == ("panda-0.json",)
    path.chmod(0o644)
    assert ring.refresh() and ring.find(keys.public) is not None


def test_damaged_entry_is_reported_and_allows_no_key(tmp_path: Path) -> None:
    ring, keys = Keyring(tmp_path), new_keypair()
    ring.allow(keys.public, "panda-0", "robot")
    (tmp_path / "allowed/panda-1.json").write_text("{not json")
    (tmp_path / "allowed/other.json").write_text((tmp_path / "allowed/panda-0.json").read_text())
    assert [entry.name for entry in ring.list()] == ["panda-0"]
    assert ring.unreadable == ("other.json", "panda-1.json")


def test_commands_create_allow_list_rotate_and_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ("--folder", str(tmp_path))
    run_keys("new", "panda-0", *folder)
    first = load_public_key(tmp_path / "panda-0.pub")
    assert first in capsys.readouterr().out
    with pytest.raises(RunError, match="rotate"):
        run_keys("new", "panda-0", *folder)
    run_keys("allow", "panda-0", "--role", "robot", *folder)
    run_keys("rotate", "panda-0", "--overlap", "0s", *folder)
    capsys.readouterr()
    run_keys("list", "--json", *folder)
    listed = capsys.readouterr().out
    assert "panda-0" in listed and first not in listed
    run_keys("revoke", "panda-0", *folder)
    with pytest.raises(ConfigError, match="not in the keyring"):
        run_keys("revoke", "panda-0", *folder)


def test_both_keys_are_allowed_during_the_overlap(tmp_path: Path) -> None:
    now = [1000.0]
    ring, old, new = Keyring(tmp_path, unix_s=lambda: now[0]), new_keypair(), new_keypair()
    ring.allow(old.public, "panda-0", "robot")
    ring.allow(new.public, "panda-0", "robot", overlap_s=60)
    ring.allow(new.public, "panda-0", "robot")  # repeated: the overlap stays
    with pytest.raises(ConfigError, match="already belongs to 'panda-0'"):
        ring.allow(old.public, "panda-1", "robot")
    assert [entry.name for entry in ring.list()] == ["panda-0"]
    now[0] += 59
    assert ring.find(old.public) is not None and ring.find(new.public) is not None
    now[0] += 1
    assert ring.find(old.public) is None and ring.find(new.public) is not None


def test_repeated_rotation_sets_the_overlap_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = [time.time()]
    ring, old, new = Keyring(tmp_path, unix_s=lambda: now[0]), new_keypair(), new_keypair()
    ring.allow(old.public, "panda-0", "robot")
    words = ("rotate", "panda-0", f"--public={new.public}", "--folder", str(tmp_path))
    run_keys(*words, "--overlap=1h")
    run_keys(*words, "--overlap=7d")
    assert capsys.readouterr().out.count("and by the old one for") == 2
    ring.refresh()
    now[0] += 6 * 86400
    assert ring.find(old.public) is not None
    run_keys(*words, "--overlap=0s")
    assert "old one" not in capsys.readouterr().out
    ring.refresh()
    assert ring.find(old.public) is None and ring.find(new.public) is not None


def test_rotation_after_a_killed_finish_makes_a_new_key(tmp_path: Path) -> None:
    save_keypair(new_keypair(), tmp_path, "panda-0")
    staged = stage_keypair(tmp_path, "panda-0")
    assert stage_keypair(tmp_path, "panda-0") == staged, "the command may be repeated"
    save_keypair(staged, tmp_path, "panda-0")  # by `promote_keypair`, before it removes the staged pair
    assert stage_keypair(tmp_path, "panda-0") != staged


def test_relay_key_may_act_only_as_its_robots(tmp_path: Path) -> None:
    ring, keys = Keyring(tmp_path), new_keypair()
    with pytest.raises(ConfigError, match="relay"):
        ring.allow(keys.public, "lab", "relay")
    with pytest.raises(ConfigError, match="relay"):
        ring.allow(keys.public, "panda-0", "robot", robots=("panda-1",))
    lab = ring.allow(keys.public, "lab", "relay", robots=("panda-0",))
    assert lab.can_act_as("lab", "relay") and lab.can_act_as("panda-0", "robot")
    assert not lab.can_act_as("panda-1", "robot") and not lab.can_act_as("panda-0", "console")
    robot = ring.allow(new_keypair().public, "panda-1", "robot")
    assert not robot.can_act_as("lab", "relay") and not robot.can_act_as("panda-0", "robot")


def test_name_of_another_role_is_refused_until_it_is_revoked(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    relay = ring.allow(new_keypair().public, "lab", "relay", robots=("panda-0",))
    public = new_keypair().public
    with pytest.raises(ConfigError, match="'lab' is a relay here; .*`user-sys keys revoke lab`"):
        ring.allow(public, "lab", "policy")
    assert ring.list() == (relay,)
    ring.revoke("lab")
    assert ring.allow(public, "lab", "policy").former == ""


def test_relay_with_many_robots_is_allowed(tmp_path: Path) -> None:
    ring, keys = Keyring(tmp_path), new_keypair()
    ring.allow(keys.public, "lab", "relay", robots=[f"site-3-arm-{number:03d}" for number in range(1000)])
    entry = Keyring(tmp_path).list()[0]
    assert len(entry.robots) == 1000 and ring.find(keys.public) == entry and not ring.unreadable
    with pytest.raises(ConfigError, match="'lab' has 9000 robots: too many"):
        ring.allow(keys.public, "lab", "relay", robots=[f"{number:0128d}" for number in range(9000)])
    assert ring.find(keys.public) == entry


def test_policy_server_shares_no_name_with_a_peer(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    ring.allow(new_keypair().public, "panda-0", "robot")
    ring.allow(new_keypair().public, "lab", "relay", robots=("arm-0",))
    for name in ("panda", "arm"):
        with pytest.raises(ConfigError, match=f"'{name}' could act as '{name}-0'; rename"):
            ring.allow(new_keypair().public, name, "policy")
    for entry in (AuthorizedKey(public=new_keypair().public, name="panda", role="policy"),):  # of an earlier release
        (ring.folder / "panda.json").write_bytes(msgspec.json.encode(entry))
        assert ring.allow(new_keypair().public, "panda", "policy", overlap_s=60).former == entry.public
        ring.allow(new_keypair().public, "panda-0", "robot", overlap_s=60)
        with pytest.raises(ConfigError, match="could act as"):
            ring.allow(new_keypair().public, "panda-0", "relay", robots=("panda-1",))
        ring.revoke("panda")
    server = ring.allow(new_keypair().public, "policy", "policy")
    with pytest.raises(ConfigError, match="'policy' could act as 'policy-0'; rename"):
        ring.allow(new_keypair().public, "policy-0", "robot")
    assert ring.allow(server.public, "policy", "policy") == server
    assert server.can_act_as("policy-0af3", "policy") and not server.can_act_as("policy-0af3", "robot")
    for name in ("policy", "policy-/../x", "policy-" + "A" * 200):
        assert not server.can_act_as(name, "policy")


def test_key_rotation_across_two_computers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    robot, desk = tmp_path / "robot", tmp_path / "console-0"
    run_keys("new", "panda-0", "--folder", str(robot))
    old = load_keypair(robot / "panda-0.key")
    run_keys("allow", "panda-0", "--role", "robot", f"--public={old.public}", "--folder", str(desk))
    with pytest.raises(ConfigError, match="rotate it on its computer"):
        run_keys("rotate", "panda-0", "--folder", str(desk))
    run_keys("rotate", "panda-0", "--folder", str(robot))
    new = load_keypair(robot / "panda-0.next.key")
    printed = capsys.readouterr().out
    assert new.public in printed and "gateway or relay" in printed and "policy server" in printed
    assert load_keypair(robot / "panda-0.key") == old, "the old key is used until the gateway knows the new one"
    run_keys("rotate", "panda-0", f"--public={new.public}", "--overlap=30min", "--folder", str(desk))
    run_keys("rotate", "panda-0", "--finish", "--folder", str(robot))
    assert load_keypair(robot / "panda-0.key") == new and load_public_key(robot / "panda-0.pub") == new.public
    assert sorted(path.name for path in robot.iterdir()) == ["panda-0.key", "panda-0.pub"]
    ring = Keyring(desk)
    assert [entry.public for entry in ring.list()] == [new.public] and ring.find(old.public) is not None
    with pytest.raises(RunError, match="keys rotate panda-0"):
        run_keys("rotate", "panda-0", "--finish", "--folder", str(robot))
    with pytest.raises(ConfigError, match="neither a key nor a keyring entry"):
        run_keys("rotate", "panda-7", "--folder", str(desk))


@pytest.mark.parametrize("words", [("rotate", "gateway"), ("rotate", "gateway", "--finish"), ("new", "gateway")])
def test_rotation_of_the_gateways_key_is_refused(tmp_path: Path, words: Sequence[str]) -> None:
    run_keys("new", "gateway", "--folder", str(tmp_path))
    before = load_keypair(tmp_path / "gateway.key")
    with pytest.raises(UserSysError, match="copy gateway.pub to all robots and relays"):
        run_keys(*words, "--folder", str(tmp_path))
    assert load_keypair(tmp_path / "gateway.key") == before and not (tmp_path / "gateway.next.key").exists()


def test_rotation_of_a_relays_key_says_that_its_robots_need_the_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud, relay = str(tmp_path / "cloud"), str(tmp_path / "relay")
    run_keys("new", "lab", "--folder", relay)
    run_keys("allow", "panda-0", "--role", "robot", f"--public={new_keypair().public}", "--folder", relay)
    public = load_public_key(tmp_path / "relay" / "lab.pub")
    run_keys("allow", "lab", "--role", "relay", "--robots", "panda-0", f"--public={public}", "--folder", cloud)
    run_keys("rotate", "lab", "--folder", relay)
    capsys.readouterr()
    run_keys("rotate", "lab", f"--public={new_keypair().public}", "--folder", cloud)
    assert "need its new lab.pub" in capsys.readouterr().out
    run_keys("rotate", "lab", "--finish", "--folder", relay)
    assert "need its new lab.pub" in capsys.readouterr().out


def test_rotation_of_an_unknown_name_is_refused(tmp_path: Path) -> None:
    run_keys("new", "panda-0", "--folder", str(tmp_path))
    with pytest.raises(ConfigError, match="'panda-0' is not in the keyring of .* a relay, .*`user-sys keys allow`"):
        run_keys("rotate", "panda-0", f"--public={new_keypair().public}", "--folder", str(tmp_path))
    assert not (tmp_path / "panda-0.next.key").exists(), "nothing was staged"


def test_list_is_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring, key = Keyring(tmp_path), new_keypair().public
    ring.allow(key, "lab", "relay", robots=("panda-0", "panda-1"))
    ring.allow(new_keypair().public, "lab", "relay", robots=("panda-0", "panda-1"), overlap_s=3600)
    (tmp_path / "allowed" / "broken.json").write_text("{")
    run_keys("list", "--folder", str(tmp_path))
    shown = capsys.readouterr()
    assert (
        "relay for panda-0, panda-1" in shown.out and f"previous key {fingerprint(key)} is allowed until" in shown.out
    )
    assert "broken.json is damaged" in shown.err
