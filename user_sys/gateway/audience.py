"""The robots of a desk: each is told of a new version as soon as it can hear of it, and no link is filled with news."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from user_sys.messages import WeightsApplied, WeightsOffer, WeightsRequest
from user_sys.weights.serve import Ahead

UNANSWERED = 2
"""So many offers go to a robot that says nothing; the next one, the newest by then, when it has asked for something or
says with which version it acts. An offer is some kilobytes, and twenty a second would leave a slow link no room for
weights."""
SILENT_S = 1.0
"""... or has said nothing for so long: it may not want what was offered."""


@dataclass
class _Robot:
    """`waits` is what it said when something may be sent ahead to it, with an offer."""

    waits: WeightsApplied | None = None
    offers: int = 0  # since it said something
    told_s: float = 0.0
    behind: bool = False  # it has not been told of the newest


@dataclass(frozen=True)
class News:
    """What all robots are to hear of a version, and what follows at once."""

    offer: WeightsOffer
    ahead: Ahead


class Audience:
    """One thread at a time calls it.

    Args:
        tell: sends an offer.
        hand_out: answers a request that a robot did not have to make.
    """

    def __init__(
        self,
        tell: Callable[[str, WeightsOffer], object],
        hand_out: Callable[[str, WeightsRequest], object],
        clock: Callable[[], float],
    ) -> None:
        self._tell, self._hand_out, self._clock = tell, hand_out, clock
        self._robots: dict[str, _Robot] = {}

    def opened(self, name: str, news: News | None) -> None:
        """A robot's session has begun."""
        self._robots[name] = robot = _Robot()
        if news is not None:
            robot.offers, robot.told_s = 1, self._clock()
            self._tell(name, replace(news.offer, greeting=True))

    def closed(self, name: str) -> None:
        self._robots.pop(name, None)

    def announce(self, news: News) -> None:
        for name, robot in self._robots.items():
            robot.behind = True
            if robot.offers < UNANSWERED or self._silent(robot):
                self._inform(name, robot, news)

    def heard(self, name: str, applied: WeightsApplied | None = None) -> bool:
        """A robot has said something. Returns whether it is to be told the news (`inform`)."""
        robot = self._robots.get(name)
        if robot is None:
            return False
        robot.offers = 0
        robot.waits = applied or robot.waits
        return robot.behind

    def overdue(self) -> list[str]:
        """The robots that are to be told the news although they say nothing."""
        return [name for name, robot in self._robots.items() if robot.behind and self._silent(robot)]

    def inform(self, name: str, news: News) -> None:
        self._inform(name, self._robots[name], news)

    def _silent(self, robot: _Robot) -> bool:
        return self._clock() - robot.told_s >= SILENT_S

    def _inform(self, name: str, robot: _Robot, news: News) -> None:
        requests = news.ahead.requests(robot.waits) if robot.waits is not None else ()
        robot.waits, robot.behind = None, False
        robot.offers, robot.told_s = robot.offers + 1, self._clock()
        self._tell(name, replace(news.offer, ahead=requests))
        for request in requests:
            self._hand_out(name, request)
