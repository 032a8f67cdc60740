"""The robots of a desk: each is told of a new version as soon as it can hear of it, and no link is filled with news."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from user_sys.messages import WeightsApplied, WeightsOffer, WeightsRequest
from user_sys.weights.offers import OfferPace
from user_sys.weights.serve import Ahead


@dataclass
class _Robot:
    """`waits` is what it said when something may be sent ahead to it, with an offer."""

    pace: OfferPace = field(default_factory=OfferPace)
    waits: WeightsApplied | None = None


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
            robot.pace.told(self._clock())
            self._tell(name, replace(news.offer, greeting=True))

    def closed(self, name: str) -> None:
        self._robots.pop(name, None)

    def announce(self, news: News) -> None:
        for name, robot in self._robots.items():
            robot.pace.behind = True
            if robot.pace.due(self._clock()):
                self._inform(name, robot, news)

    def heard(self, name: str, applied: WeightsApplied | None = None) -> None:
        """A robot has said something: it is to be told the news, where it is `behind`."""
        if (robot := self._robots.get(name)) is not None:
            robot.pace.heard()
            robot.waits = applied or robot.waits

    def behind(self, name: str) -> bool:
        return name in self._robots and self._robots[name].pace.behind

    def overdue(self) -> list[str]:
        """The robots that are to be told the news although they say nothing."""
        return [name for name, robot in self._robots.items() if robot.pace.due(self._clock())]

    def inform(self, name: str, news: News) -> None:
        if (robot := self._robots.get(name)) is not None:
            self._inform(name, robot, news)

    def _inform(self, name: str, robot: _Robot, news: News) -> None:
        requests = news.ahead.requests(robot.waits) if robot.waits is not None else ()
        robot.waits = None
        robot.pace.told(self._clock())
        self._tell(name, replace(news.offer, ahead=requests))
        for request in requests:
            self._hand_out(name, request)
