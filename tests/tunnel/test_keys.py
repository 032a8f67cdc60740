"""Key files and the ring."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from user_sys.errors import ConfigError, RunError
from user_sys.tunnel import keys_cli
from user_sys.tunnel.keys import Keyring, load_keypair, load_public_key, new_keypair, save_keypair


def run_keys(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    keys_cli.add_parser(parser.add_subparsers())
    return keys_cli.run(parser.parse_args(["keys", *argv]))


def test_a_key_pair_comes_back_as_it_was_saved_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    keys = new_keypair()
    save_keypair(keys, tmp_path / "keys", "panda-0")
    assert load_keypair(tmp_path / "keys/panda-0.key") == keys
    assert load_public_key(tmp_path / "keys/panda-0.pub") == keys.public
    assert (tmp_path / "keys/panda-0.key").stat().st_mode & 0o777 == 0o600


def test_a_secret_shows_in_no_repr() -> None:
    keys = new_keypair()
    assert keys.secret not in repr(keys)
    assert keys.public in repr(keys).replace("\\\\", "\\")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_private_key_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    save_keypair(new_keypair(), tmp_path, "panda-0")
    (tmp_path / "panda-0.key").chmod(mode)
    with pytest.raises(RunError, match="chmod 600"):
        load_keypair(tmp_path / "panda-0.key")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"public": "x", "secret": "y"}', b"\xff" * 100])
def test_a_file_that_holds_no_key_pair_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "panda-0.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(RunError, match="user-sys keys new"):
        load_keypair(path)
    with pytest.raises(RunError, match="no private key"):
        load_keypair(tmp_path / "other.key")


def test_changes_of_the_ring_are_seen_by_others(tmp_path: Path) -> None:
    ours, theirs, keys = Keyring(tmp_path), Keyring(tmp_path), new_keypair()
    assert theirs.list() == ()
    ours.allow(keys.public, "panda-0", "robot")
    assert [(entry.name, entry.role) for entry in theirs.list()] == [("panda-0", "robot")]
    assert theirs.find(keys.public) is not None
    ours.revoke("panda-0")
    theirs.refresh()
    assert theirs.find(keys.public) is None


def test_a_new_key_for_a_name_shuts_the_old_one_out(tmp_path: Path) -> None:
    ring, old, new = Keyring(tmp_path), new_keypair(), new_keypair()
    ring.allow(old.public, "panda-0", "robot")
    ring.allow(new.public, "panda-0", "robot")
    assert ring.find(old.public) is None
    assert ring.find(new.public) is not None


def test_one_key_cannot_have_two_names(tmp_path: Path) -> None:
    ring, keys = Keyring(tmp_path), new_keypair()
    ring.allow(keys.public, "panda-0", "robot")
    with pytest.raises(ConfigError, match="already belongs to 'panda-0'"):
        ring.allow(keys.public, "panda-1", "robot")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 200, "a\n"])
def test_a_name_that_could_leave_the_ring_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not a name"):
        Keyring(tmp_path).allow(new_keypair().public, name, "robot")


def test_a_damaged_entry_lets_nobody_in_and_is_reported(tmp_path: Path) -> None:
    ring, keys = Keyring(tmp_path), new_keypair()
    ring.allow(keys.public, "panda-0", "robot")
    (tmp_path / "allowed/panda-1.json").write_text("{not json")
    (tmp_path / "allowed/other.json").write_text((tmp_path / "allowed/panda-0.json").read_text())
    assert [entry.name for entry in ring.list()] == ["panda-0"]
    assert ring.unreadable == ("other.json", "panda-1.json")


def test_the_commands_make_allow_list_rotate_and_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ("--folder", str(tmp_path))
    assert run_keys("new", "panda-0", *folder) == 0
    first = load_public_key(tmp_path / "panda-0.pub")
    assert first in capsys.readouterr().out
    with pytest.raises(RunError, match="rotate"):
        run_keys("new", "panda-0", *folder)
    assert run_keys("allow", "panda-0", "--role", "robot", *folder) == 0
    assert run_keys("rotate", "panda-0", *folder) == 0
    capsys.readouterr()
    assert run_keys("list", "--json", *folder) == 0
    listed = capsys.readouterr().out
    assert "panda-0" in listed and first not in listed
    assert run_keys("revoke", "panda-0", *folder) == 0
    with pytest.raises(ConfigError, match="not allowed"):
        run_keys("revoke", "panda-0", *folder)
