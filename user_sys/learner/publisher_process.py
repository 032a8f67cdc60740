"""The publisher process of a learner: ``python -m user_sys.learner.publisher_process DESCRIPTOR``.

`publisher_client.PublisherClient` starts it. It owns the learner's connection to the gateway and its signing key; it
compares, hashes, compresses, signs and sends what the learner publishes. It ends on request, or when the learner ends.
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
    SharedTensors,
    ShutdownRequest,
    SnapshotReady,
    StepTimes,
    TrainingEnded,
)
from user_sys.logs import configure_logging
from user_sys.messages import NO_VERSION, DevicesReport, StopRun
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.keys import load_keypair
from user_sys.weights.publisher import Publisher
from user_sys.weights.signing import SIGNING_KEY_NAME, ensure_signer, next_epoch

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
STATUS_INTERVAL_S = 0.1  # for changes that no learner waits for
SETTINGS_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 60.0  # a learner that does not read for so long is stuck


def main(argv: list[str]) -> int:
    """Serves the learner at the other end of the socket in `argv`. Returns 0 after a shutdown request."""
    configure_logging()
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole process group; the learner decides
        signal.signal(number, signal.SIG_IGN)
    channel = MessageSocket(socket.socket(fileno=int(argv[0])))
    try:
        first = channel.receive(SETTINGS_TIMEOUT_S)
        if first is None or not isinstance(first[0], PublisherSettings):
            raise RunError("the learner sent no settings; a learner starts this process, do not start it by hand")
        _serve(channel, first[0])
    except LinkDown:
        log.warning("publisher.learner_gone")
        os._exit(1)  # no thread may keep the process alive
    except (UserSysError, OSError) as error:
        log.error("publisher.failed %s: %s", type(error).__name__, error)
        return 2
    return 0


def _serve(channel: MessageSocket, settings: PublisherSettings) -> None:
    keys = Path(settings.signing_folder)
    signer = ensure_signer(keys, SIGNING_KEY_NAME)
    keypair = load_keypair(Path(settings.tunnel_key))
    with TunnelClient(settings.endpoint, keypair, settings.gateway_key, settings.hello) as client:
        server = _PublisherServer(channel, client, is_immediate=settings.waits_for_robots)
        server.publisher = Publisher(client, signer, settings.publish, server.on_change, settings.run, next_epoch(keys))
        with server.publisher, DeviceMonitor(lambda records: client.send(DevicesReport(records=records))):
            threading.Thread(target=server.forward_stop, name="inbox", daemon=True).start()
            while not server.is_closing:
                if (received := channel.receive(STATUS_INTERVAL_S)) is not None:
                    server.on_message(*received)
                server.send_status_if_due()
                if client.state is TunnelState.REFUSED and not server.is_closing:
                    raise SessionRefused(f"the gateway refuses this learner: {client.reason}")


class _PublisherServer:
    """Handles the learner's messages, and sends it the status of its versions.

    Args:
        is_immediate: send each change at once, because the learner waits for robots.
    """

    publisher: Publisher

    def __init__(self, channel: MessageSocket, client: TunnelClient, is_immediate: bool) -> None:
        self.is_closing = False
        self._channel, self._client, self._is_immediate = channel, client, is_immediate
        self._sent_version, self._sent_share, self._sent_s = NO_VERSION, 1.0, 0.0
        self._has_unsent_change = False
        self._is_device_copying = False
        self._memory: SharedTensors | None = None
        self._status_lock = threading.Lock()  # the last status that is sent is the newest

    def on_message(self, message: PublisherMessage, descriptor: int | None) -> None:
        match message:
            case StepTimes(steps=steps):
                for ended_s, seconds in steps:
                    self.publisher.governor.observe(seconds, ended_s)
            case TrainingEnded():
                self.publisher.governor.share = 1.0
            case SharedMemoryInfo() if descriptor is not None:
                self._memory = SharedTensors(descriptor, message)
            case DeviceCopyStarted() if not self._is_device_copying:
                self._is_device_copying = True
                self.publisher.governor.begin_push()
            case SnapshotReady() if self._memory is not None:
                self._end_device_copy(message.fetch_s)
                self._publish(message, self._memory)
            case ScalarReport(report=report):
                self._client.send(report)
            case ShutdownRequest(flush_s=flush_s):
                self._client.flush(flush_s)
                self.is_closing = True

    def forward_stop(self) -> None:
        """Forwards the gateway's end of the run to the learner, until the process ends."""
        while not self.is_closing:
            if isinstance(message := self._client.receive(POLL_INTERVAL_S), StopRun):
                self._send(RunStopped(message.reason))

    def on_change(self) -> None:
        """Called by the publisher's threads."""
        is_ready = self.publisher.progress.ready_version != self._sent_version
        if self._is_immediate or is_ready or self.publisher.failure is not None:
            self._send_status()
        else:
            self._has_unsent_change = True

    def send_status_if_due(self) -> None:
        """Sends unsent changes, at most once per `STATUS_INTERVAL_S`."""
        has_new_share = self._is_device_copying and self.publisher.governor.share != self._sent_share
        if (self._has_unsent_change or has_new_share) and time.monotonic() - self._sent_s >= STATUS_INTERVAL_S:
            self._send_status()

    def _end_device_copy(self, worked_s: float) -> None:
        if self._is_device_copying:
            self._is_device_copying = False
            self.publisher.governor.end_push(worked_s)

    def _send_status(self) -> None:
        with self._status_lock:
            self._has_unsent_change, self._sent_s = False, time.monotonic()
            progress, governor, error = self.publisher.progress, self.publisher.governor, self.publisher.failure
            self._sent_version, self._sent_share = progress.ready_version, governor.share
            failure = None if error is None else PublishFailure(type(error).__name__, str(error))
            self._send(PublisherStatus(progress, governor.scalars(), failure, self._sent_share))

    def _publish(self, snapshot: SnapshotReady, memory: SharedTensors) -> None:
        frozen = frozenset(snapshot.frozen)
        arrays = {
            name: view if position in frozen else view.copy()
            for position, (name, view) in enumerate(memory.views.items())
        }
        if self.publisher.failure is None:
            self.publisher.publish(arrays, snapshot.version, snapshot.updates)
        else:
            self._send_status()

    def _send(self, message: PublisherMessage) -> None:
        if not self._channel.send(message, SEND_TIMEOUT_S):
            log.error("publisher.send_failed the learner does not read")
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
