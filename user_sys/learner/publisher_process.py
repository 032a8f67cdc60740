"""The envoy's process: ``python -m user_sys.learner.publisher_process DESCRIPTOR``, started by `envoy.Envoy` alone.

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

from hal.discovery import DeviceMonitor
from user_sys.codec import Array
from user_sys.errors import LinkDown, RunError, SessionRefused, UserSysError
from user_sys.learner.publisher_protocol import (
    DeviceCopyStarted,
    MessageSocket,
    PublisherMessage,
    PublisherSettings,
    PublisherStatus,
    PublishFailure,
    RunStopped,
    ScalarReport,
    SharedMemoryInfo,
    SharedTensorSlots,
    ShutdownRequest,
    SnapshotReady,
    StepTimes,
)
from user_sys.logs import configure_logging
from user_sys.messages import NO_VERSION, DevicesReport, PublisherEpoch, StopRun
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.keys import load_keypair
from user_sys.weights.publisher import Publisher
from user_sys.weights.signing import SIGNING_KEY_NAME, ensure_signer, next_epoch

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
STATUS_INTERVAL_S = 0.1  # of what no learner waits for in the midst of its training
SETTINGS_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 60.0  # a learner that does not listen for so long is stuck


def main(argv: list[str]) -> int:
    """Serves the learner at the other end of the socket `argv` names. The exit status is 0 once it said farewell."""
    configure_logging()
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the learner says when to end
        signal.signal(number, signal.SIG_IGN)
    line = MessageSocket(socket.socket(fileno=int(argv[0])))
    try:
        first = line.receive(SETTINGS_TIMEOUT_S)
        if first is None or not isinstance(first[0], PublisherSettings):
            raise RunError("the learner did not say whom to speak for; this process is started by it, not by hand")
        _serve(line, first[0])
    except LinkDown:
        log.warning("envoy.learner_gone")
        os._exit(1)  # nothing here is worth keeping, and no thread may keep the process alive
    except (UserSysError, OSError) as error:
        log.error("envoy.failed %s: %s", type(error).__name__, error)
        return 2
    return 0


def _serve(line: MessageSocket, setup: PublisherSettings) -> None:
    keys = Path(setup.signing_folder)
    signer, life = ensure_signer(keys, SIGNING_KEY_NAME), PublisherEpoch(setup.run, next_epoch(keys))
    with TunnelClient(setup.endpoint, load_keypair(Path(setup.tunnel_key)), setup.gateway_key, setup.hello) as client:
        desk = _PublisherServer(line, client, at_once=setup.publish.max_versions_ahead > 0)
        desk.publisher = Publisher(client, signer, setup.publish, desk.on_change, life)
        with desk.publisher, DeviceMonitor(lambda records: client.send(DevicesReport(records=records))):
            threading.Thread(target=desk.forward_stop, name="inbox", daemon=True).start()
            while not desk.is_closing:
                if (received := line.receive(STATUS_INTERVAL_S)) is not None:
                    desk.on_message(*received)
                desk.send_status_if_due()
                if client.state is TunnelState.REFUSED and not desk.is_closing:
                    raise SessionRefused(f"nothing can be published: {client.reason}")


class _PublisherServer:
    """Takes in what the learner says, and tells it what becomes of its versions.

    Args:
        at_once: the learner waits for the robots, and hears of each change.
    """

    publisher: Publisher

    def __init__(self, line: MessageSocket, client: TunnelClient, at_once: bool) -> None:
        self.is_closing = False
        self._line, self._client, self._at_once = line, client, at_once
        self._told, self._told_s = NO_VERSION, 0.0  # the newest version that was told to be ready, and when
        self._untold = False
        self._fetching, self._told_share = False, 1.0
        self._slots: SharedTensorSlots | None = None
        self._former: dict[str, Array] = {}
        self._telling = threading.Lock()  # so that the last status that is told is the newest

    def on_message(self, word: PublisherMessage, descriptor: int | None) -> None:
        match word:
            case StepTimes(steps=steps):
                for ended_s, seconds in steps:
                    self.publisher.governor.observe(seconds, ended_s)
            case SharedMemoryInfo() if descriptor is not None:
                self._slots = SharedTensorSlots(descriptor, word)
            case DeviceCopyStarted() if not self._fetching:
                self._fetching = True
                self.publisher.governor.begin_push()
            case SnapshotReady() if self._slots is not None:
                self._fetched(word.fetch_s)
                self._publish(word, self._slots)
            case ScalarReport(report=report):
                self._client.send(report)
            case ShutdownRequest(flush_s=flush_s):
                self._client.flush(flush_s)
                self.is_closing = True

    def forward_stop(self) -> None:
        """Passes on what the gateway says to the learner, until the process ends."""
        while not self.is_closing:
            if isinstance(message := self._client.receive(POLL_INTERVAL_S), StopRun):
                self._tell(RunStopped(message.reason))

    def on_change(self) -> None:
        """Called by the publisher's threads."""
        if self._at_once or self.publisher.progress.ready_version != self._told or self.publisher.failure is not None:
            self._tell_status()
        else:
            self._untold = True

    def send_status_if_due(self) -> None:
        """Tells what has changed since it told last, if that is some time ago."""
        moved = self._fetching and self.publisher.governor.share != self._told_share
        if (self._untold or moved) and time.monotonic() - self._told_s >= STATUS_INTERVAL_S:
            self._tell_status()

    def _fetched(self, worked_s: float) -> None:
        if self._fetching:
            self._fetching = False
            self.publisher.governor.end_push(worked_s)

    def _tell_status(self) -> None:
        with self._telling:
            self._untold, self._told_s = False, time.monotonic()
            publisher, error = self.publisher, self.publisher.failure
            self._told, self._told_share = publisher.progress.ready_version, publisher.governor.share
            self._tell(
                PublisherStatus(
                    ready_version=self._told,
                    stored_version=publisher.progress.stored_version,
                    oldest_in_use=publisher.progress.oldest_in_use,
                    published=publisher.progress.published,
                    next_allowed_s=publisher.progress.next_allowed_s,
                    scalars=publisher.governor.scalars(),
                    failure=None if error is None else PublishFailure(type(error).__name__, str(error)),
                    pinned_version=publisher.progress.pinned_version,
                    share=self._told_share,
                )
            )

    def _publish(self, snapshot: SnapshotReady, slots: SharedTensorSlots) -> None:
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

    def _tell(self, word: PublisherMessage) -> None:
        if not self._line.send(word, SEND_TIMEOUT_S):
            log.error("envoy.not_heard the learner does not listen; a new one is its business")
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
