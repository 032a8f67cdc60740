from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from wait_kit import ClockNs

from hal.errors import SpecError
from hal.estop import EmergencyStop, EstopLatch, new_emergency_stop
from hal.robot import Observation, StopLevel
from hal.safety import SafetyKernel, SafetyReason
from hal.spec import STATE, Array, ArraySpec, RobotSpec, SafetyLimits

BOUND = (0.05, 0.05, 0.05, 0.08)
RATE = (0.02, 0.02, 0.02, 0.04)
BOX_LOW, BOX_HIGH = (0.3, -0.3, 0.0), (0.7, 0.3, 0.5)
ROUNDING = 1e-6

SPEC = RobotSpec(
    model="arm",
    rate_hz=10.0,
    observation=(
        ArraySpec(
            name=STATE,
            labels=("q0", "q1", "v0", "v1", "x", "y", "z"),
            units=("rad", "rad", "rad/s", "rad/s", "m", "m", "m"),
            low=(-10.0,) * 7,
            high=(10.0,) * 7,
        ),
    ),
    action=ArraySpec(
        name="action",
        labels=("dx", "dy", "dz", "width"),
        units=("m",) * 4,
        low=(-0.05, -0.05, -0.05, 0.0),
        high=BOUND,
    ),
    limits=SafetyLimits(
        workspace_low=BOX_LOW,
        workspace_high=BOX_HIGH,
        tool_position=(4, 5, 6),
        joint_position=(0, 1),
        joint_low=(-2.0, -1.0),
        joint_high=(2.0, 1.0),
        joint_velocity=(2, 3),
        joint_velocity_max=(2.0, 3.0),
        action_rate_max=RATE,
    ),
    neutral=(0.0, 0.0, 0.0, 0.08),
    tool_delta=(0, 1, 2),
    gripper=3,
)


class Bench:
    """A kernel with its clock, and a robot in the middle of its ranges by default."""

    def __init__(self, spec: RobotSpec = SPEC, latch_path: Path | None = None) -> None:
        self.clock = ClockNs()
        self.kernel = SafetyKernel(spec, self.clock, latch_path)

    def state(self, **values: float) -> Observation:
        labels = SPEC.feature(STATE).labels
        usual = dict.fromkeys(labels, 0.0) | {"x": 0.5, "z": 0.25} | values
        return Observation({STATE: np.array([usual[k] for k in labels], np.float32)}, self.clock())


def act(*values: float) -> Array:
    return np.array(values, np.float32)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_action_within_limits_is_applied_unchanged(bench: Bench) -> None:
    proposed = act(0.01, -0.02, 0.0, 0.03)
    decision = bench.kernel.filter(proposed, bench.state())
    assert decision.applied is not None and decision.applied is not proposed
    np.testing.assert_array_equal(decision.applied, proposed)
    assert (decision.stop, decision.reasons, decision.text) == (None, SafetyReason(0), "")


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (act(np.nan, 0, 0, 0), SafetyReason.NOT_FINITE),
        (act(0, np.inf, 0, 0), SafetyReason.NOT_FINITE),
        (act(0, 0, 0), SafetyReason.SHAPE),
        (act(0, 0, 0, 0)[None], SafetyReason.SHAPE),
        (np.zeros(4), SafetyReason.DTYPE),
        (np.zeros(4, np.int32), SafetyReason.DTYPE),
        (np.zeros(4, ">f4"), SafetyReason.DTYPE),
        (np.array([None] * 4), SafetyReason.DTYPE),
        (np.ma.masked_array(np.zeros(4, np.float32), True), SafetyReason.DTYPE),
        ([0.0, 0.0, 0.0, 0.0], SafetyReason.DTYPE),
        (None, SafetyReason.DTYPE),
    ],
)
def test_invalid_action_makes_robot_hold(bench: Bench, action: object, reason: SafetyReason) -> None:
    decision = bench.kernel.filter(action, bench.state())
    assert (decision.applied, decision.stop, decision.reasons) == (None, StopLevel.HOLD, reason)
    assert "float32 (4,)" in decision.text
    assert bench.kernel.reason_counts[str(reason.name).lower()] == 1


def test_action_beyond_bounds_is_clipped(bench: Bench) -> None:
    decision = bench.kernel.filter(act(0, 0, 0, 1e30), bench.state())
    np.testing.assert_array_equal(decision.applied, act(0, 0, 0, 0.08))
    assert decision.reasons == SafetyReason.BOUND
    assert decision.text.startswith("bound: [0.0, 0.0, 0.0, ")


def test_action_at_bound_is_within_limits(bench: Bench) -> None:
    bench.kernel.filter(act(0.02, 0, 0, 0.08), bench.state())
    bench.kernel.filter(act(0.04, 0, 0, 0.08), bench.state())
    decision = bench.kernel.filter(act(0.05, 0, 0, 0.08), bench.state())
    np.testing.assert_array_equal(decision.applied, act(0.05, 0, 0, 0.08))
    assert decision.reasons == 0


def test_speed_changes_no_faster_than_rate_limit(bench: Bench) -> None:
    applied = [bench.kernel.filter(act(0.05, 0, 0, 0), bench.state()).applied for _ in range(3)]
    assert [round(float(a[0]), 4) for a in applied if a is not None] == [0.02, 0.04, 0.05]
    braked = bench.kernel.filter(act(-0.05, 0, 0, 0), bench.state())
    assert braked.reasons == SafetyReason.RATE
    np.testing.assert_allclose(braked.applied, act(0.03, 0, 0, 0), atol=ROUNDING)


def test_stop_ends_motion_and_keeps_gripper(bench: Bench) -> None:
    for _ in range(2):
        bench.kernel.filter(act(0.05, 0, 0, 0.08), bench.state())
    bench.kernel.filter(None, bench.state())
    decision = bench.kernel.filter(act(0.05, 0, 0, 0), bench.state())
    np.testing.assert_allclose(decision.applied, act(0.02, 0, 0, 0.04), atol=ROUNDING)


def test_reset_frees_gripper_and_starts_motion_from_rest(bench: Bench) -> None:
    bench.kernel.filter(act(0.02, 0, 0, 0.08), bench.state())
    bench.kernel.reset()
    decision = bench.kernel.filter(act(0.04, 0, 0, 0.0), bench.state())
    np.testing.assert_allclose(decision.applied, act(0.02, 0, 0, 0), atol=ROUNDING)


def test_clipped_action_is_new_base_of_rate_limit(bench: Bench) -> None:
    bench.kernel.filter(act(0.02, 0, 0, 0), bench.state())
    bench.kernel.set_applied(act(0.005, 0, 0, 0))
    decision = bench.kernel.filter(act(0.05, 0, 0, 0), bench.state())
    np.testing.assert_allclose(decision.applied, act(0.025, 0, 0, 0), atol=ROUNDING)


def test_tool_stays_in_workspace(bench: Bench) -> None:
    decision = bench.kernel.filter(act(0.02, 0, -0.02, 0), bench.state(x=0.69, z=0.005))
    np.testing.assert_allclose(decision.applied, act(0.01, 0, -0.005, 0), atol=ROUNDING)
    assert decision.reasons == SafetyReason.WORKSPACE


def test_tool_outside_workspace_comes_back_within_limits(bench: Bench) -> None:
    outward = bench.kernel.filter(act(0.02, 0, 0, 0), bench.state(x=0.9))
    np.testing.assert_array_equal(outward.applied, act(0, 0, 0, 0))
    inward = bench.kernel.filter(act(-0.02, 0, 0, 0), bench.state(x=0.9))
    np.testing.assert_array_equal(inward.applied, act(-0.02, 0, 0, 0))


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        ({"q0": 2.0}, SafetyReason.JOINT_POSITION, "q0 is at 2.0000 rad"),
        ({"q1": -1.5}, SafetyReason.JOINT_POSITION, "q1 is at -1.5000 rad"),
        ({"v1": -3.5}, SafetyReason.JOINT_VELOCITY, "v1 moves at 3.500 rad/s; the limit is 3.000"),
        ({"x": np.nan}, SafetyReason.NOT_FINITE, "unusable"),
    ],
)
def test_robot_at_joint_limits_holds(bench: Bench, state: dict[str, float], reason: SafetyReason, text: str) -> None:
    decision = bench.kernel.filter(act(0, 0, 0, 0), bench.state(**state))
    assert (decision.applied, decision.stop, decision.reasons) == (None, StopLevel.HOLD, reason)
    assert text in decision.text


@pytest.mark.parametrize("age_s", [0.6, 1e6, -0.6])
def test_stale_or_misdated_observation_is_refused(bench: Bench, age_s: float) -> None:
    observation = bench.state()
    bench.clock.now_s += age_s
    bench.kernel.reset()
    decision = bench.kernel.filter(act(0, 0, 0, 0), observation)
    assert (decision.stop, decision.reasons) == (StopLevel.HOLD, SafetyReason.STALE)
    assert "s old" in decision.text


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({}, SafetyReason.SHAPE),
        ({STATE: np.zeros(3, np.float32)}, SafetyReason.SHAPE),
        ({STATE: [0.0] * 7}, SafetyReason.SHAPE),
        ({STATE: np.array([None] * 7)}, SafetyReason.DTYPE),
    ],
)
def test_invalid_observation_is_refused(bench: Bench, arrays: Any, reason: SafetyReason) -> None:
    decision = bench.kernel.filter(act(0, 0, 0, 0), Observation(arrays, bench.clock()))
    assert (decision.applied, decision.reasons) == (None, reason)
    assert STATE in decision.text


def test_robot_without_observation_holds(bench: Bench) -> None:
    decision = bench.kernel.filter(act(0, 0, 0, 0), None)
    assert (decision.stop, decision.reasons, decision.text) == (
        StopLevel.HOLD,
        SafetyReason.STALE,
        "there is no observation yet",
    )


def test_silence_leads_to_hold_then_to_safe_stop(bench: Bench) -> None:
    bench.kernel.filter(act(0, 0, 0, 0), bench.state())
    bench.clock.now_s += 0.19
    assert bench.kernel.check_watchdog() is None
    bench.clock.now_s += 0.02
    decision = bench.kernel.check_watchdog()
    assert decision is not None and (decision.stop, decision.reasons) == (StopLevel.HOLD, SafetyReason.WATCHDOG)
    assert decision.text == "no command was applied for 0.210 s"
    bench.clock.now_s += 5.0
    decision = bench.kernel.check_watchdog()
    assert decision is not None and decision.stop is StopLevel.SAFE
    assert bench.kernel.filter(act(0, 0, 0, 0), bench.state()).stop is None
    assert bench.kernel.check_watchdog() is None


@pytest.mark.parametrize(("rate_hz", "early_s"), [(10.0, 0.008), (100.0, 0.002), (1000.0, 0.0002)])
def test_watchdog_holds_shortly_before_two_periods_end(rate_hz: float, early_s: float) -> None:
    bench = Bench(msgspec.structs.replace(SPEC, rate_hz=rate_hz))
    bench.kernel.filter(act(0, 0, 0, 0), bench.state())
    bench.clock.now_s += 2 / rate_hz - 1.1 * early_s
    assert bench.kernel.check_watchdog() is None
    bench.clock.now_s += 0.2 * early_s
    decision = bench.kernel.check_watchdog()
    assert decision is not None and decision.stop is StopLevel.HOLD


def test_refused_action_does_not_reset_watchdog(bench: Bench) -> None:
    for _ in range(60):
        bench.clock.now_s += 0.1
        decision = bench.kernel.filter(act(np.nan, 0, 0, 0), bench.state())
    assert decision.stop is StopLevel.SAFE
    assert bench.kernel.check_watchdog() is not None


def test_requested_hold_has_no_time_limit(bench: Bench) -> None:
    for _ in range(2):
        bench.kernel.filter(act(0.05, 0, 0, 0), bench.state())
    for _ in range(100):
        bench.clock.now_s += 0.1
        assert bench.kernel.check_watchdog() is None
        assert bench.kernel.hold().stop is StopLevel.HOLD
    decision = bench.kernel.filter(act(0.05, 0, 0, 0), bench.state())
    np.testing.assert_allclose(decision.applied, act(0.02, 0, 0, 0), atol=ROUNDING)
    bench.kernel.emergency_stop("alice")
    assert bench.kernel.hold().stop is StopLevel.SAFE


def test_emergency_stop_lasts_until_named_person_rearms(bench: Bench) -> None:
    bench.kernel.emergency_stop("alice", "smoke")
    bench.kernel.emergency_stop("bob")
    decision = bench.kernel.filter(act(0, 0, 0, 0), bench.state())
    assert (decision.applied, decision.stop, decision.reasons) == (None, StopLevel.SAFE, SafetyReason.ESTOP)
    assert "alice pressed the e-stop" in decision.text
    tick = bench.kernel.check_watchdog()
    assert tick is not None and tick.stop is StopLevel.SAFE
    with pytest.raises(SpecError, match="needs the name of a person"):
        bench.kernel.rearm("  ")
    assert bench.kernel.latched_estop is not None
    bench.kernel.rearm("carol")
    assert bench.kernel.latched_estop is None
    assert bench.kernel.filter(act(0, 0, 0, 0), bench.state()).applied is not None


def test_emergency_stop_survives_driver_restart(tmp_path: Path) -> None:
    path = tmp_path / "estop.json"
    Bench(latch_path=path).kernel.emergency_stop("alice", "smoke")
    kernel = Bench(latch_path=path).kernel
    assert kernel.latched_estop is not None and (kernel.latched_estop.by, kernel.latched_estop.why) == (
        "alice",
        "smoke",
    )
    kernel.rearm("carol")
    assert Bench(latch_path=path).kernel.latched_estop is None


def test_shared_latch_stops_next_run(tmp_path: Path) -> None:
    first, second, shared = (tmp_path / name / "e-stop.json" for name in ("first", "second", "shared"))
    SafetyKernel(SPEC, latch_path=first, shared_latch=shared).emergency_stop("alice", "smoke")
    kernel = SafetyKernel(SPEC, latch_path=second, shared_latch=shared)
    assert kernel.latched_estop is not None and kernel.latched_estop.by == "alice"
    kernel.rearm("carol")
    assert EstopLatch(second).read() is EstopLatch(shared).read() is None
    assert SafetyKernel(SPEC, latch_path=second, shared_latch=shared).latched_estop is None
    assert SafetyKernel(SPEC, latch_path=first).latched_estop is not None, "that latch has not been cleared"


def interrupt(monkeypatch: pytest.MonkeyPatch, method: str, once: Callable[[], object]) -> None:
    """Calls `once` after the next call of a latch's method, as another process may."""
    real = getattr(EstopLatch, method)

    def call(*args: Any) -> Any:
        found = real(*args)
        monkeypatch.setattr(EstopLatch, method, real)
        once()
        return found

    monkeypatch.setattr(EstopLatch, method, call)


def test_press_while_the_latch_is_loaded_is_applied_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latch = EstopLatch(tmp_path / "e-stop.json")
    kernel = SafetyKernel(SPEC, shared_latch=latch.path)
    interrupt(monkeypatch, "read", lambda: latch.press(new_emergency_stop("alice")))
    kernel.load_latched_estop()
    assert kernel.latched_estop is None and kernel.has_new_press()
    kernel.load_latched_estop()
    assert kernel.latched_estop is not None and not kernel.has_new_press()


def test_press_while_another_is_acknowledged_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latch = EstopLatch(tmp_path / "e-stop.json")
    kernel = SafetyKernel(SPEC, shared_latch=latch.path)
    kernel.emergency_stop("alice")
    interrupt(monkeypatch, "acknowledge", lambda: latch.press(new_emergency_stop("bob")))
    kernel.acknowledge("pid 7")
    assert kernel.has_new_press()
    kernel.load_latched_estop()
    kernel.acknowledge("pid 7")
    found = latch.read()
    assert found is not None and (found.presses, found.acknowledged) == (2, "pid 7")


def test_press_while_the_latch_is_written_again_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, own, shared = [10**12], tmp_path / "full" / "e-stop.json", EstopLatch(tmp_path / "e-stop.json")
    kernel = SafetyKernel(SPEC, lambda: now_ns[0], latch_path=own, shared_latch=shared.path)
    press = EstopLatch.press

    def fail_on_full_disk(self: EstopLatch, stop: EmergencyStop) -> EmergencyStop:
        if self.path == own:
            raise OSError("no space left on device")
        return press(self, stop)

    monkeypatch.setattr(EstopLatch, "press", fail_on_full_disk)
    kernel.emergency_stop("alice")
    kernel.acknowledge("pid 7")
    assert not kernel.has_new_press()
    shared.press(new_emergency_stop("bob"))
    now_ns[0] += 10**10
    kernel.retry_latch()
    assert kernel.has_new_press()
    kernel.load_latched_estop()
    kernel.acknowledge("pid 7")
    found = shared.read()
    assert found is not None and (found.presses, found.acknowledged) == (2, "pid 7")


@pytest.mark.parametrize("presses_again", [True, False])
def test_latch_that_could_not_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, presses_again: bool
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("input/output error")

    path = tmp_path / "e-stop.json"
    bench = Bench(latch_path=path)
    with monkeypatch.context() as patch:
        patch.setattr(EstopLatch, "press", fail)
        bench.kernel.emergency_stop("alice")
    bench.kernel.retry_latch()
    assert EstopLatch(path).read() is None, "it waits for a second"
    if presses_again:
        bench.kernel.emergency_stop("bob")
    else:
        bench.clock.now_s += 1.0
        bench.kernel.retry_latch()
    latched = Bench(latch_path=path).kernel.latched_estop
    assert latched is not None and latched.by == "alice"


@pytest.mark.parametrize("content", [b"\x00\x00", b'{"by": "\x90"}'])
def test_unreadable_latch_counts_as_latched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "estop.json"
    path.write_bytes(content)
    assert Bench(latch_path=path).kernel.latched_estop is not None


def test_emergency_stop_works_on_full_disk(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where the folder should be")
    kernel = Bench(latch_path=tmp_path / "blocked").kernel
    kernel.rearm("carol")
    (tmp_path / "blocked").write_text("again")
    kernel = SafetyKernel(SPEC, latch_path=tmp_path / "absent" / "estop.json")
    (tmp_path / "absent").write_text("a file where the folder should be")
    kernel.emergency_stop("alice")
    assert kernel.latched_estop is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"limits": SafetyLimits(action_rate_max=(1.0,))},
        {"limits": SafetyLimits(tool_position=(7, 8, 9))},
        {"limits": SafetyLimits(tool_position=(4,))},
        {"limits": SafetyLimits(tool_position=(4, 5, 6), workspace_low=(1,) * 3, workspace_high=(0,) * 3)},
        {"limits": SafetyLimits(joint_position=(0, 1), joint_low=(0.0,), joint_high=(1.0, 1.0))},
        {"limits": SafetyLimits(joint_velocity=(2,))},
        {"limits": SafetyLimits(action_rate_max=(-1.0,) * 4)},
        {"limits": SafetyLimits(joint_position=(0, 1), joint_low=(np.nan, 0.0), joint_high=(1.0, 1.0))},
        {"limits": SafetyLimits(joint_position=(0, 1), joint_low=(0.0, 2.0), joint_high=(1.0, 1.0))},
        {"limits": SafetyLimits(stale_after_s=np.inf)},
        {"limits": SafetyLimits(stale_after_s=0.0)},
        {"limits": SafetyLimits(safe_stop_after_s=np.nan)},
        {"limits": SafetyLimits(watchdog_periods=0)},
        {"limits": SafetyLimits(watchdog_periods=1)},
        {"neutral": (0.0, 0.0)},
        {"neutral": (0.0, 0.01, 0.0, 0.0)},
        {"neutral": (0.5, 0.0, 0.0, 0.0), "tool_delta": ()},
        {"gripper": 4},
    ],
)
def test_contradictory_limits_are_refused(wrong: dict[str, Any]) -> None:
    base = {name: getattr(SPEC, name) for name in SPEC.__struct_fields__}
    with pytest.raises(SpecError):
        SafetyKernel(RobotSpec(**(base | wrong)))


def test_robot_without_limits_keeps_action_bounds() -> None:
    action = ArraySpec(name="action", labels=("q",), units=("rad",), low=(-1.0,), high=(1.0,))
    bench = Bench(RobotSpec(model="joint", rate_hz=10.0, observation=(), action=action))
    observation = Observation({}, bench.clock())
    for value in (3.0, -3.0):
        decision = bench.kernel.filter(act(value), observation)
        np.testing.assert_array_equal(decision.applied, act(np.sign(value)))


def check_limits(applied: Array, before: Array | None, observation: Observation) -> None:
    """Checks every limit of SPEC independently of the kernel."""
    assert applied.dtype == np.float32 and applied.shape == (4,)
    assert (applied >= np.array(SPEC.action.low, np.float32)).all()
    assert (applied <= np.array(SPEC.action.high, np.float32)).all()
    state = observation.arrays[STATE].astype(np.float64)
    assert np.isfinite(state).all() and (np.abs(state[2:4]) <= (2.0, 3.0)).all()
    assert (np.abs(state[:2]) < (2.0, 1.0)).all()
    tool, goal = state[4:], state[4:] + applied[:3]
    assert (goal >= np.minimum(BOX_LOW, tool) - ROUNDING).all()
    assert (goal <= np.maximum(BOX_HIGH, tool) + ROUNDING).all()
    if before is not None:
        far = np.abs(applied - before) > np.array(RATE) + ROUNDING
        braking = (applied[:3] * before[:3] >= 0) & (np.abs(applied[:3]) <= np.abs(before[:3]))
        assert not far[3] and (~far[:3] | braking).all()


any_action = st.one_of(
    hnp.arrays(np.float32, 4, elements=st.floats(width=32, allow_nan=True, allow_infinity=True)),
    hnp.arrays(np.float32, 4, elements=st.floats(-0.125, 0.125, width=32)),
    hnp.arrays(hnp.floating_dtypes() | hnp.integer_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=5)),
    st.lists(st.floats(), max_size=5),
    st.none() | st.text() | st.binary(),
)
any_state = hnp.arrays(np.float32, 7, elements=st.floats(-2.5, 2.5, width=32) | st.just(float("nan")))
near_state = hnp.arrays(np.float32, 7, elements=st.floats(0, 0.75, width=32))


@given(st.lists(st.tuples(any_action, any_state | near_state, st.sampled_from([0.0, 0.1, 0.4, 0.6])), max_size=30))
def test_applied_action_is_within_every_limit(moves: list[tuple[Any, Array, float]]) -> None:
    bench, before = Bench(), np.array([0, 0, 0, np.nan])
    for action, state, wait_s in moves:
        observation = Observation({STATE: state}, bench.clock())
        bench.clock.now_s += wait_s
        decision = bench.kernel.filter(action, observation)
        assert (decision.applied is None) != (decision.stop is None)
        if decision.applied is None:
            assert decision.text and decision.reasons
            before[:3] = 0
            continue
        check_limits(decision.applied, before, observation)
        same = np.array_equal(decision.applied, action)
        assert same == (decision.reasons == 0)
        before = decision.applied.astype(np.float64)
