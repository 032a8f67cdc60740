"""How axes move within speed, acceleration and jerk, and how they come to rest.

An *axis* is a direction of the tool or a joint. All values are per control period: a *step* is the way that an axis
moves in one, a *change* is the difference of two consecutive steps, and jerk limits the difference of two changes.

To come to rest within a way, an axis brakes at full jerk until a velocity damper takes over (Faverjon and Tournassoud,
1987): the step is at most a share of the way that is left. The share is the largest for which the damper itself is
within acceleration and jerk. So a change is allowed if the damper's bound holds after it, and after each further period
of full jerk: these bounds are linear in the change, and their minimum is exact for this way of braking.
"""

from __future__ import annotations

import numpy as np

from hal.spec import Array

ROUNDED = 3e-7  # m or rad: a position of up to 4, rounded to float32


class Motion:
    """The steps of n axes, and the limits on the next ones.

    Attributes:
        step, change: of the last period, (n,).
        least, most: the changes that acceleration and jerk allow in the next period, (n,).
        brake: the change among them that leads to rest.
        acceleration, jerk: (n,); at most what the speeds can use.
        reach: a way within which an axis can come to rest whatever it does in the next period, (n,).
    """

    def __init__(self, speed: Array, acceleration: Array, jerk: Array) -> None:
        """`speed` (n,) is the greatest step of each axis in either direction, finite. All are above 0."""
        self._speed: Array = speed
        self.acceleration: Array = np.minimum(acceleration, 2 * speed)
        self.jerk: Array = np.minimum(jerk, 4 * speed)
        greatest = np.minimum(self.acceleration, self.towards(2 * speed))
        periods = int(np.ceil((2 * greatest / self.jerk).max(initial=0.0))) + 2  # of full jerk, until the damper holds
        self._times: Array = np.arange(1.0, periods + 1)
        self._sums: Array = self._times * (self._times - 1) / 2
        self._slowed: Array = self.jerk[:, None] * self._sums
        self._shortened: Array = self._slowed * (self._times - 2) / 3
        damping = self._damping(speed)
        self.reach: Array = speed + self._way(speed, self.acceleration, damping)
        self._far: Array = np.full(len(speed), np.inf)
        self.rest()

    def rest(self) -> None:
        """All axes stand still."""
        still = np.zeros(len(self._speed))
        self._prepare(still, still)
        self._before = still, self.least, self.most

    def take(self, step: Array) -> None:
        """`step` is that of the next period. A change that exceeds acceleration or jerk counts as 0 afterwards."""
        self._before = self.step, self.least, self.most
        self.correct(step)

    def correct(self, step: Array) -> None:
        """`step` replaces that of the last period."""
        before, least, most = self._before
        change = step - before
        self._prepare(step, np.where((change >= least - ROUNDED) & (change <= most + ROUNDED), change, 0.0))

    def _prepare(self, step: Array, change: Array) -> None:
        self.step, self.change = step, change
        self.least: Array = np.maximum(change - self.jerk, -self.acceleration)
        self.most: Array = np.minimum(change + self.jerk, self.acceleration)
        self.brake: Array = self.within(self.towards(-step))

    def within(self, change: Array) -> Array:
        """`change` within acceleration and jerk."""
        found: Array = np.minimum(np.maximum(change, self.least), self.most)
        return found

    def towards(self, gap: Array) -> Array:
        """The greatest change that closes the `gap` to a step and does not pass it while it falls to 0 at full jerk.

        It solves c + (c - jerk) + (c - 2 jerk) + ... = gap over the positive terms. `gap` may be (n,) or (k, n).
        """
        size = np.abs(gap)
        falls = np.floor((np.sqrt(1 + 8 * size / self.jerk) - 1) / 2)
        found: Array = np.copysign((size + self.jerk * falls * (falls + 1) / 2) / (falls + 1), gap)
        return found

    def peaks(self, change: Array) -> Array:
        """The greatest size of each step from after `change` until that has fallen to 0 at full jerk."""
        after = self.step + change
        found: Array = np.maximum(np.abs(after), np.abs(after + self._gained(change)))
        return found

    def room_up(self, way: Array) -> Array:
        """The greatest change after which an axis can still come to rest within `way` (>= 0): at least `brake`.

        Infinite if every way is far. A way of 0 moves along with the axis, as for one that is out of its place: what it
        comes back in this period is not open to it in the next. So the step may not pass 0, and only `brake` is left.
        """
        if (way >= self.reach).all():
            return self._far
        room = self._room_for(way, self.step, self.change, self.most)
        room[way <= 0.0] = -np.inf
        return np.maximum(room, self.brake)

    def room_down(self, way: Array) -> Array:
        """As `room_up`, for a `way` (>= 0) in the other direction: at most `brake`."""
        if (way >= self.reach).all():
            return -self._far
        room = self._room_for(way, -self.step, -self.change, -self.least)
        room[way <= 0.0] = -np.inf
        return np.minimum(-room, self.brake)

    def ways(self) -> Array:
        """The ways (2, n) up and down that each axis needs to come to rest."""
        found = []
        for step, change in ((self.step, self.least), (-self.step, -self.most)):
            found.append(self._way(step, change, self._damping(step + change + self._gained(change))))
        return np.stack(found)

    def _gained(self, change: Array) -> Array:
        """How much a step goes on changing while `change` falls to 0 at full jerk."""
        size = np.abs(change)
        falls = np.floor(size / self.jerk)
        found: Array = np.copysign(falls * size - self.jerk * falls * (falls + 1) / 2, change)
        return found

    def _damping(self, fastest: Array) -> Array:
        """The share of the way left that a step may take in each period, if no step is above `fastest`.

        A damper with the share c has changes of c * step and differences of these of c * c * step.
        """
        fastest = np.minimum(np.maximum(fastest, 1e-12), self._speed)
        found: Array = np.minimum(np.minimum(self.acceleration / fastest, np.sqrt(self.jerk / fastest)), 1.0)
        return found

    def _room_for(self, way: Array, step: Array, change: Array, most: Array) -> Array:
        """The damping is that of the greatest step that can follow. If the axis must brake, it is that of the motion as
        it is; so the damping is steady while the axis comes to rest."""
        room = self._room(way, step, self._damping(step + most + self._gained(most)))
        if (room >= most).all():
            return room
        slower = np.maximum(change - self.jerk, 0.0)  # changes up to this one do not lead to greater steps
        braking = self._room(way, step, self._damping(step + self._gained(np.maximum(change, 0.0))))
        found: Array = np.maximum(room, np.minimum(braking, slower))
        return found

    def _room(self, way: Array, step: Array, damping: Array) -> Array:
        share, speed = damping[:, None], step[:, None]
        left = way[:, None] - speed * (self._times - 1) + self._shortened
        found: Array = ((share * left - speed + self._slowed) / (self._times + share * self._sums)).min(axis=1)
        return found

    def _way(self, step: Array, change: Array, damping: Array) -> Array:
        """The `way` for which `_room` is `change`."""
        speed, first = step[:, None], change[:, None]
        behind = speed * (self._times - 1) + first * self._sums - self._shortened
        found: Array = ((speed + first * self._times - self._slowed) / damping[:, None] + behind).max(axis=1)
        return found
