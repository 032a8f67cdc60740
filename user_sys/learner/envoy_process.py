"""The envoy's process: ``python -m user_sys.learner.envoy_process DESCRIPTOR``, started by `envoy.Envoy` alone.

It has the learner's connection to the gateway and its signing key, and compares, hashes, compresses, signs and sends
what the learner publishes. It ends when the learner says so, or is no more.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from user_sys.codec import Array
from user_sys.errors import LinkDown, Refused, RunError, UserSysError
from user_sys.hardware.devices import DeviceWatch
from user_sys.learner.envoy_wire import (
    Failure,
    Farewell,
    Fetching,
    Line,
    Memory,
    Report,
    Setup,
    Slots,
    Snapshot,
    Status,
    Steps,
    Stopped,
    Word,
)
from user_sys.logs import configure_logging
from user_sys.messages import DevicesReport, StopRun
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.keys import load_keypair
from user_sys.weights.publisher import Publisher
from user_sys.weights.records import NO_VERSION, Life
from user_sys.weights.runs import next_life
from user_sys.weights.signing import LEARNER, ensure_signer

log = logging.getLogger(__name__)

WAIT_S = 0.5
TELL_EVERY_S = 0.1  # of what no learner waits for in the midst of its training
SETUP_S = 30.0
TELL_S = 60.0  # a learner that does not listen for so long is stuck


def main(argv: list[str]) -> int:
    """Serves the learner at the other end of the socket `argv` names. The exit status is 0 once it said farewell."""
    configure_logging()
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the learner says when to end
        signal.signal(number, signal.SIG_IGN)
    line = Line(socket.socket(fileno=int(argv[0])))
    try:
        first = line.receive(SETUP_S)
        if first is None or not isinstance(first[0], Setup):
            raise RunError("the learner did not say whom to speak for; this process is started by it, not by hand")
        _serve(line, first[0])
    except LinkDown:
        log.warning("envoy.learner_gone")
        os._exit(1)  # nothing here is worth keeping, and no thread may keep the process alive
    except (UserSysError, OSError) as error:
        log.error("envoy.failed %s: %s", type(error).__name__, error)
        return 2
    return 0


def _serve(line: Line, setup: Setup) -> None:
    keys = Path(setup.signing)
    signer, life = ensure_signer(keys, LEARNER), Life(setup.run, next_life(keys))
    with TunnelClient(setup.endpoint, load_keypair(Path(setup.key)), setup.gateway_key, setup.hello) as client:
        desk = _Desk(line, client, at_once=setup.publish.max_lead > 0)
        desk.publisher = Publisher(client, signer, setup.publish, desk.changed, life)
        with desk.publisher, DeviceWatch(lambda records: client.send(DevicesReport(records=records))):
            threading.Thread(target=desk.listen, name="inbox", daemon=True).start()
            while not desk.leaving:
                if (received := line.receive(TELL_EVERY_S)) is not None:
                    desk.take(*received)
                desk.tell_rest()
                if client.state is TunnelState.REFUSED and not desk.leaving:
                    raise Refused(f"nothing can be published: {client.reason}")


class _Desk:
    """Takes in what the learner says, and tells it what becomes of its versions.

    Args:
        at_once: the learner waits for the robots, and hears of each change.
    """

    publisher: Publisher

    def __init__(self, line: Line, client: TunnelClient, at_once: bool) -> None:
        self.leaving = False
        self._line, self._client, self._at_once = line, client, at_once
        self._told, self._told_s = NO_VERSION, 0.0  # the newest version that was told to be ready, and when
        self._untold = False
        self._fetching, self._told_share = False, 1.0
        self._slots: Slots | None = None
        self._former: dict[str, Array] = {}
        self._telling = threading.Lock()  # so that the last status that is told is the newest

    def take(self, word: Word, descriptor: int | None) -> None:
        match word:
            case Steps(steps=steps):
                for ended_s, seconds in steps:
                    self.publisher.governor.observe(seconds, ended_s)
            case Memory() if descriptor is not None:
                self._slots = Slots(descriptor, word)
            case Fetching() if not self._fetching:
                self._fetching = True
                self.publisher.governor.begin()
            case Snapshot() if self._slots is not None:
                self._fetched(word.fetch_s)
                self._publish(word, self._slots)
            case Report(report=report):
                self._client.send(report)
            case Farewell(flush_s=flush_s):
                self._client.flush(flush_s)
                self.leaving = True

    def listen(self) -> None:
        """Passes on what the gateway says to the learner, until the process ends."""
        while not self.leaving:
            if isinstance(message := self._client.receive(WAIT_S), StopRun):
                self._tell(Stopped(message.reason))

    def changed(self) -> None:
        """Called by the publisher's threads."""
        if self._at_once or self.publisher.ready != self._told or self.publisher.failure is not None:
            self._tell_status()
        else:
            self._untold = True

    def tell_rest(self) -> None:
        """Tells what has changed since it told last, if that is some time ago."""
        moved = self._fetching and self.publisher.governor.share != self._told_share
        if (self._untold or moved) and time.monotonic() - self._told_s >= TELL_EVERY_S:
            self._tell_status()

    def _fetched(self, worked_s: float) -> None:
        if self._fetching:
            self._fetching = False
            self.publisher.governor.end(worked_s)

    def _tell_status(self) -> None:
        with self._telling:
            self._untold, self._told_s = False, time.monotonic()
            publisher, error = self.publisher, self.publisher.failure
            self._told, self._told_share = publisher.ready, publisher.governor.share
            self._tell(
                Status(
                    ready=self._told,
                    confirmed=publisher.confirmed,
                    oldest=publisher.oldest,
                    published=publisher.published,
                    open_s=publisher.open_s,
                    scalars=publisher.governor.scalars(),
                    failure=None if error is None else Failure(type(error).__name__, str(error)),
                    ordered=publisher.ordered,
                    share=self._told_share,
                )
            )

    def _publish(self, snapshot: Snapshot, slots: Slots) -> None:
        unchanged = frozenset(snapshot.unchanged)
        arrays = {
            name: self._former[name] if place in unchanged else view.copy()
            for place, (name, view) in enumerate(slots.views[snapshot.slot].items())
        }
        self._former = arrays
        if self.publisher.failure is None:
            self.publisher.publish(dict(arrays), snapshot.version, snapshot.updates, snapshot.rounding)
        else:
            self._tell_status()

    def _tell(self, word: Word) -> None:
        if not self._line.send(word, TELL_S):
            log.error("envoy.not_heard the learner does not listen; a new one is its business")
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
