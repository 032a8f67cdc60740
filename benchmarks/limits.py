"""The limits of a robot's motion a second time: plain arithmetic, without the code that applies them.

`Limits.check` takes each applied action and returns the limits that it breaks. It also counts how often a limit was
reached, so that a limit that never binds is seen. The rules are those of `hal.motion_limits`: an axis may exceed its
acceleration and jerk only if every step within them leaves its place, and then takes the nearest step that does not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hal.spec import Array, Box, RobotSpec

LEAD_S = 0.5  # how far a joint's target may be ahead, at the joint's greatest speed
NEAR = 0.99  # the share of a limit from which on it counts as reached
NEAR_M = 0.001  # the distance from a forbidden box from which on that counts as reached
ROUNDED = 4e-7  # of a position to float32
CHANGE = 4 * ROUNDED
"""Of a difference of steps. Targets below 4 rad are rounded to float32 by up to 1.2e-7 each, and the difference of two
changes is made of eight of them: 9.5e-7. The kernel itself takes a change that exceeds a limit by up to 3e-7 as one
within it (`hal.motion_limits.ROUNDING`). Together that is 1.25e-6."""
FAR = float("inf")


@dataclass
class Axis:
    """A direction of the tool or a joint. Steps are per control period.

    Attributes:
        element: of the action.
        place: index of its position in the state; -1 if there is none.
        low, high: of its position.
        slowest, fastest: steps.
        acceleration, jerk: of steps.
        lead: how far a target may be ahead of its joint; infinite if the action is no target.
    """

    element: int
    place: int
    low: float
    high: float
    slowest: float
    fastest: float
    acceleration: float
    jerk: float
    tool: bool
    target: bool = False
    lead: float = FAR
    last: float | None = None  # the newest target
    step: float = 0.0
    changes: tuple[float, ...] = (0.0,)  # the last one, as it may count: see `Limits._check_change`


def axes_of(spec: RobotSpec) -> list[Axis]:
    found, limits, period_s = [], spec.limits, spec.period_s
    rate = limits.action_rate_max or (FAR,) * len(spec.action.labels)
    low, high = spec.action.low, spec.action.high
    for number, element in enumerate(spec.tool_delta):
        found.append(
            Axis(
                element=element,
                place=limits.tool_position[number] if limits.tool_position else -1,
                low=limits.workspace_low[number] if limits.workspace_low else -FAR,
                high=limits.workspace_high[number] if limits.workspace_high else FAR,
                slowest=low[element],
                fastest=high[element],
                acceleration=min((limits.tool_acceleration_max or FAR) * period_s**2, rate[element]),
                jerk=(limits.tool_jerk_max or FAR) * period_s**3,
                tool=True,
            )
        )
    for number, element in enumerate(spec.joint_target or spec.joint_delta):
        target = bool(spec.joint_target)
        speed = limits.joint_velocity_max[number] * period_s if limits.joint_velocity_max else FAR
        hasty = limits.joint_acceleration_max[number] * period_s**2 if limits.joint_acceleration_max else FAR
        found.append(
            Axis(
                element=element,
                place=limits.joint_position[number],
                low=max(limits.joint_low[number], low[element] if target else -FAR),
                high=min(limits.joint_high[number], high[element] if target else FAR),
                slowest=-min(speed, rate[element]) if target else max(-speed, low[element]),
                fastest=min(speed, rate[element]) if target else min(speed, high[element]),
                acceleration=hasty if target else min(hasty, rate[element]),
                jerk=limits.joint_jerk_max[number] * period_s**3 if limits.joint_jerk_max else FAR,
                tool=False,
                target=target,
                lead=max(LEAD_S * speed / period_s, 2 * speed) if target else FAR,
            )
        )
    return found


class Limits:
    """Checks the applied actions of one robot in turn.

    Attributes:
        checked: how many actions.
        broken, reached: by limit, how many actions broke it, and how many came to at least `NEAR` of it.
        exceeded: in how many actions an axis had to exceed its acceleration or jerk to stay in its place.
    """

    def __init__(self, spec: RobotSpec) -> None:
        self.spec = spec
        self.checked = self.exceeded = 0
        self.broken: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self._axes = axes_of(spec)
        self._far = (spec.limits.tool_speed_max or FAR) * spec.period_s

    def stopped(self) -> None:
        """The robot was stopped: its motion starts from rest."""
        for axis in self._axes:
            axis.last, axis.step, axis.changes = None, 0.0, (0.0,)

    def check(self, applied: Array, state: Array) -> set[str]:
        """The limits that `applied` breaks, for the state that it was applied in."""
        values, measured = [float(each) for each in applied], [float(each) for each in state]
        broken, reached = self._bounds(values), set[str]()
        steps = [self._step(axis, values, measured) for axis in self._axes]
        tool = [step for axis, step in zip(self._axes, steps, strict=True) if axis.tool]
        length = sum(step * step for step in tool) ** 0.5
        if length > self._far + ROUNDED:
            broken.add("velocity")
        if length >= NEAR * self._far:
            reached.add("velocity")
        exceeds = False
        for axis, step in zip(self._axes, steps, strict=True):
            exceeds |= self._check_axis(axis, step, measured, broken, reached)
            axis.last = values[axis.element]
        self._check_tool(tool, measured, broken, reached)
        self.checked += 1
        self.exceeded += exceeds
        self.broken.update(broken)
        self.reached.update(reached)
        return broken

    def _bounds(self, values: list[float]) -> set[str]:
        action, targets = self.spec.action, set(self.spec.joint_target)
        for element, (value, low, high) in enumerate(zip(values, action.low, action.high, strict=True)):
            if not low - ROUNDED <= value <= high + ROUNDED and element not in targets:
                return {"bounds"}  # that of a target is its place, and NaN is in none
        return set()

    def _step(self, axis: Axis, values: list[float], measured: list[float]) -> float:
        if not axis.target:
            return values[axis.element]
        return values[axis.element] - (measured[axis.place] if axis.last is None else axis.last)

    def _check_axis(self, axis: Axis, step: float, measured: list[float], broken: set[str], reached: set[str]) -> bool:
        """Whether it had to exceed its acceleration or jerk."""
        start = self._start(axis, measured)
        name = "workspace" if axis.tool else "position"
        low, high = min(axis.low, start), max(axis.high, start)
        if not low - ROUNDED <= start + step <= high + ROUNDED:
            broken.add(name)
        if high - axis.low < FAR and min(axis.high - start - step, start + step - axis.low) < 0.005 * (high - low):
            reached.add(name)
        if not axis.slowest - ROUNDED <= step <= axis.fastest + ROUNDED:
            broken.add("velocity")
        if step <= NEAR * axis.slowest or step >= NEAR * axis.fastest:
            reached.add("velocity")
        if axis.target and abs(start + step - measured[axis.place]) > ROUNDED + max(
            axis.lead, abs(start - measured[axis.place])
        ):
            broken.add("lead")
        return self._check_change(axis, step, self._place(axis, start, measured), broken, reached)

    def _check_change(
        self, axis: Axis, step: float, place: tuple[float, float], broken: set[str], reached: set[str]
    ) -> bool:
        """An axis that its place stops within `CHANGE` of its limits may or may not have exceeded them: rounding hides
        it. Its change counts as 0 afterwards if it has. So either is right, and a limit is broken if both break it."""
        found, counts, exceeds = set[str](), set[float](), True
        for before in axis.changes:
            wrong, exceeded = self._judge(axis, step, before, place, reached)
            if wrong:
                found |= wrong
                continue
            change = step - axis.step
            at_edge = min(abs(step - place[0]), abs(step - place[1])) <= CHANGE
            at_limit = max(abs(change) - axis.acceleration, abs(change - before) - axis.jerk) > -CHANGE
            counts |= {0.0} if exceeded else {change, 0.0} if at_edge and at_limit else {change}
            exceeds &= exceeded
        if not counts:
            broken |= found
        axis.step, axis.changes = step, tuple(sorted(counts)) or (0.0,)
        return exceeds

    def _judge(
        self, axis: Axis, step: float, before: float, place: tuple[float, float], reached: set[str]
    ) -> tuple[set[str], bool]:
        """The limits that `step` breaks after the change `before`, and whether it exceeds them."""
        change = step - axis.step
        least = axis.step + max(before - axis.jerk, -axis.acceleration)
        most = axis.step + min(before + axis.jerk, axis.acceleration)
        hasty, jerky = abs(change) - axis.acceleration, abs(change - before) - axis.jerk
        for name, over, limit in (("acceleration", hasty, axis.acceleration), ("jerk", jerky, axis.jerk)):
            if limit < FAR and over >= (NEAR - 1) * limit:
                reached.add(name)
        exceeds = hasty > CHANGE or jerky > CHANGE
        had_to = least > place[1] - CHANGE or most < place[0] + CHANGE
        nearest = place[1] if least > place[1] - CHANGE else place[0]
        if exceeds and not (had_to and abs(step - nearest) <= CHANGE):
            return {name for name, over in (("acceleration", hasty), ("jerk", jerky)) if over > CHANGE}, True
        return set(), exceeds

    def _start(self, axis: Axis, measured: list[float]) -> float:
        if axis.target and axis.last is not None:
            return axis.last
        return measured[axis.place] if axis.place >= 0 else 0.0

    def _place(self, axis: Axis, start: float, measured: list[float]) -> tuple[float, float]:
        """The steps with which the axis stays in its place."""
        low, high = min(axis.low - start, 0.0), max(axis.high - start, 0.0)
        if axis.target:
            low = max(low, min(measured[axis.place] - axis.lead - start, 0.0))
            high = min(high, max(measured[axis.place] + axis.lead - start, 0.0))
        if axis.tool:
            number = self.spec.tool_delta.index(axis.element)
            force, pressed = self._force(measured)
            if pressed and force[number] > 0:
                low = 0.0
            if pressed and force[number] < 0:
                high = 0.0
            for box in self.spec.limits.keep_out:
                if start <= box.low[number]:
                    high = min(high, box.low[number] - start)
                elif start >= box.high[number]:
                    low = max(low, box.high[number] - start)
                elif self._nearest(measured, box) == (number, False):
                    high = 0.0
                elif self._nearest(measured, box) == (number, True):
                    low = 0.0
        return low, high

    def _nearest(self, measured: list[float], box: Box) -> tuple[int, bool] | None:
        """The axis of the face that a tool in `box` is nearest to, and whether it is the upper one."""
        tool = [measured[index] for index in self.spec.limits.tool_position]
        if _depth(tool, box) <= 0:
            return None
        ways = [(at - low, n, False) for n, (at, low) in enumerate(zip(tool, box.low, strict=True))]
        ways += [(high - at, n, True) for n, (at, high) in enumerate(zip(tool, box.high, strict=True))]
        _, number, upper = min(ways)
        return number, upper

    def _force(self, measured: list[float]) -> tuple[list[float], bool]:
        force = [measured[index] for index in self.spec.limits.tool_force]
        return force, sum(each * each for each in force) ** 0.5 > (self.spec.limits.tool_force_max or FAR)

    def _check_tool(self, step: list[float], measured: list[float], broken: set[str], reached: set[str]) -> None:
        if not step:
            return
        force, pressed = self._force(measured)
        if pressed and any(way * each < -1e-12 for way, each in zip(step, force, strict=True)):
            broken.add("force")
        if force and sum(each * each for each in force) ** 0.5 >= NEAR * (self.spec.limits.tool_force_max or FAR):
            reached.add("force")
        tool = [measured[index] for index in self.spec.limits.tool_position]
        for box in self.spec.limits.keep_out:
            before = _depth(tool, box)
            after = max(_depth([a + share * s for a, s in zip(tool, step, strict=True)], box) for share in SHARES)
            if after > max(before, 0.0) + ROUNDED:
                broken.add("forbidden box")
            if abs(after) <= NEAR_M:
                reached.add("forbidden box")


SHARES = [number / 20 for number in range(21)]


def _depth(point: list[float], box: Box) -> float:
    """How deep `point` is in `box`, m; outside the negative distance along the axis that is farthest out."""
    return min(min(at - low, high - at) for at, low, high in zip(point, box.low, box.high, strict=True))
