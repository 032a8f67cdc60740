from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wait_kit import ClockNs

from hal.errors import LeaseError, LeaseHeld, SpecError, StaleToken, StateError
from hal.lease import MAX_MIN_TOKEN, Fence, LeaseTable, MachineLock
from hal.state_database import STATE_FILE, StateDatabase


@pytest.fixture
def clock() -> ClockNs:
    return ClockNs()


def test_second_session_is_refused_with_holder(tmp_path: Path, clock: ClockNs) -> None:
    table = LeaseTable(StateDatabase(tmp_path / STATE_FILE), ttl_s=10, clock=clock)
    table.acquire("panda-0", "alice@desk")
    clock.now_s += 4
    with pytest.raises(LeaseHeld, match=r"panda-0 is driven by alice@desk for at least 6\.0 s more"):
        table.acquire("panda-0", "bob@lab")


def test_lease_ends_without_renewal(clock: ClockNs) -> None:
    table = LeaseTable(StateDatabase(None), ttl_s=10, clock=clock)
    lease = table.acquire("panda-0", "alice")
    for _ in range(3):
        clock.now_s += 9
        assert table.renew("panda-0", lease.token).holder == "alice"
    clock.now_s += 10
    assert table.lease("panda-0") is None
    assert table.expire() == ("panda-0",)
    assert table.expire() == ()
    assert table.renew("panda-0", lease.token) == lease, "it is restored, since no session acquired the robot"
    table.release("panda-0", lease.token)
    with pytest.raises(LeaseError, match="has ended"):
        table.renew("panda-0", lease.token)


def test_lapsed_lease_is_restored_after_restart(tmp_path: Path, clock: ClockNs) -> None:
    lease = LeaseTable(StateDatabase(tmp_path / STATE_FILE), ttl_s=10, clock=clock).acquire("panda-0", "alice")
    clock.now_s += 11
    table = LeaseTable(StateDatabase(tmp_path / STATE_FILE), ttl_s=10, clock=clock)
    clock.now_s += 11
    assert table.expire() == ("panda-0",)
    table = LeaseTable(StateDatabase(tmp_path / STATE_FILE), ttl_s=10, clock=clock)
    assert table.lease("panda-0") is None
    assert table.renew("panda-0", lease.token) == lease == table.lease("panda-0")


def test_former_session_is_fenced_after_takeover(clock: ClockNs) -> None:
    table = LeaseTable(StateDatabase(None), ttl_s=10, clock=clock)
    old = table.acquire("panda-0", "alice")
    clock.now_s += 11
    new = table.acquire("panda-0", "bob")
    assert new.token > old.token
    for call in (table.renew, table.release):
        with pytest.raises(StaleToken):
            call("panda-0", old.token)
    assert table.renew("panda-0", new.token).holder == "bob"


def test_renewal_needs_no_write_while_another_lease_is_over(tmp_path: Path, clock: ClockNs) -> None:
    database = StateDatabase(tmp_path / STATE_FILE)
    table = LeaseTable(database, ttl_s=10, clock=clock)
    left, right = table.acquire("left", "alice"), table.acquire("right", "bob")
    clock.now_s += 9
    table.renew("left", left.token)
    clock.now_s += 2
    database.rows("PRAGMA query_only=ON")  # as on a full disk
    with pytest.raises(StateError):
        table.expire()
    assert table.renew("left", left.token) == left
    assert table.lease("right") is None
    database.rows("PRAGMA query_only=OFF")
    assert table.acquire("right", "carol").token == right.token + 1
    assert table.expire() == ()


def test_tokens_and_leases_survive_restart(tmp_path: Path, clock: ClockNs) -> None:
    path = tmp_path / STATE_FILE
    lease = LeaseTable(StateDatabase(path), clock=clock).acquire("panda-0", "alice")
    clock.now_s += 100
    table = LeaseTable(StateDatabase(path), clock=clock)
    with pytest.raises(LeaseHeld, match="alice"):
        table.acquire("panda-0", "bob")
    assert table.renew("panda-0", lease.token) == lease
    table.release("panda-0", lease.token)
    assert LeaseTable(StateDatabase(path), clock=clock).acquire("panda-0", "bob").token == 2


@pytest.mark.parametrize(("robot", "holder"), [("", "a"), ("../x", "a"), ("r", " "), ("r", "a\nb"), ("r", "a" * 999)])
def test_invalid_names_are_refused(robot: str, holder: str) -> None:
    with pytest.raises(SpecError):
        LeaseTable(StateDatabase(None)).acquire(robot, holder)


@given(st.lists(st.sampled_from(["acquire-a", "acquire-b", "renew", "release", "wait", "restart"]), max_size=40))
def test_tokens_grow_and_one_session_holds_lease(tmp_path_factory: pytest.TempPathFactory, moves: list[str]) -> None:
    clock = ClockNs()
    path = tmp_path_factory.mktemp("leases") / STATE_FILE
    table, tokens = LeaseTable(StateDatabase(path), ttl_s=10, clock=clock), [0]
    for move in moves:
        held = table.lease("r")
        try:
            if move.startswith("acquire"):
                lease = table.acquire("r", move)
                assert held is None or held.holder == move
                assert lease.token > max(tokens)
                tokens.append(lease.token)
            elif move == "renew":
                assert table.renew("r", tokens[-1]).token == max(tokens)
            elif move == "release":
                table.release("r", tokens[-1])
                assert table.lease("r") is None
        except LeaseHeld:
            assert held is not None and held.holder != move
        except LeaseError:
            assert held is None
        clock.now_s += 11 if move == "wait" else 0
        table = LeaseTable(StateDatabase(path), ttl_s=10, clock=clock) if move == "restart" else table


def test_fence_accepts_newest_token_only(tmp_path: Path) -> None:
    fence = Fence(tmp_path / "token")
    fence.check_token(3)
    fence.check_token(3)
    fence.check_token(5)
    for old in (3, 4, 0, -1):
        with pytest.raises(StaleToken, match="5"):
            fence.check_token(old)
    assert fence.newest == 5


def test_damaged_fence_raises(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("seven")
    with pytest.raises(LeaseError, match="cannot be read"):
        Fence(tmp_path / "token")


_HOLD = """
import sys; from pathlib import Path; from hal.lease import MachineLock
MachineLock(Path(sys.argv[1]) / "panda-0.lock", "demo run").acquire(); print("held", flush=True); sys.stdin.read()
"""


def test_second_driver_process_is_refused_until_first_ends(tmp_path: Path) -> None:
    folder = tmp_path
    command = [sys.executable, "-c", _HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(LeaseHeld, match=rf"panda-0 is driven on this machine by pid {other.pid} of \S+ demo run"):
            MachineLock(folder / "panda-0.lock").acquire()
        with MachineLock(folder / "panda-1.lock"):
            pass
        other.kill()
    with MachineLock(folder / "panda-0.lock"), pytest.raises(LeaseHeld, match=str(os.getpid())):
        MachineLock(folder / "panda-0.lock").acquire()


def test_is_held_does_not_take_lock(tmp_path: Path) -> None:
    mine, asker = MachineLock(tmp_path / "arm.lock"), MachineLock(tmp_path / "arm.lock")
    assert not asker.is_held()
    with mine:
        assert mine.is_held() and asker.is_held()
    assert not asker.is_held()
    with asker:
        assert asker.is_held()


def test_token_exceeds_min_token_of_driver(clock: ClockNs) -> None:
    table = LeaseTable(StateDatabase(None), clock=clock)
    assert table.acquire("panda-0", "run b", min_token=41).token == 42
    table.release("panda-0", 42)
    assert table.acquire("panda-0", "run b", min_token=7).token == 43


def test_min_token_beyond_all_granted_ones_is_refused(clock: ClockNs) -> None:
    table = LeaseTable(StateDatabase(None), clock=clock)
    with pytest.raises(LeaseError, match=f"no session got the token {MAX_MIN_TOKEN + 1} .* remove panda-0.fence"):
        table.acquire("panda-0", "thief", min_token=MAX_MIN_TOKEN + 1)
    assert table.acquire("panda-0", "thief", min_token=MAX_MIN_TOKEN).token == MAX_MIN_TOKEN + 1
    assert table.acquire("panda-0", "thief", min_token=MAX_MIN_TOKEN + 1).token == MAX_MIN_TOKEN + 2
