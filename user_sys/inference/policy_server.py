"""The policy server: acts for several robots. Robots with equal policies share one copy of its weights.

One thread owns the socket. It takes the newest request of each robot, lets requests of one policy act as a batch, and
answers. Robots that have no promised actions left come first, and then those whose deadline is near. A batch is smaller
if all of the requests would make one of them late (`BatchTimes`); the others follow. The server does not answer a
request whose robot waits no longer. It reads the socket between batches, and assumes that a request that came during a
batch came in the middle of it. A second thread opens and closes policies; each
policy receives its weights by itself. No message of a peer raises out of the loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from hal.errors import HalError, SpecError
from hal.spec import IMAGES
from hal.state_database import discard_audit_event
from user_sys.codec import encode_packet
from user_sys.errors import UserSysError, WireError
from user_sys.inference.live_policy import LivePolicy
from user_sys.inference.protocol import (
    ACTIONS,
    CORRECTION,
    LOG_PROB,
    MAX_MESSAGE_BYTES,
    ActionRequest,
    ActionResponse,
    Arrays,
    PolicyDescription,
    decode_description,
    decode_request,
    request_context,
    require_digest,
)
from user_sys.messages import NO_VERSION
from user_sys.policies.policy import ChunkContext
from user_sys.trace import span
from user_sys.tunnel.connection import request_short_time_slice
from user_sys.tunnel.keys import KeyPair, Keyring
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.router import GuardedRouter, RoutedMessage

IDLE_TIMEOUT_S = 3600.0  # a policy without a request for this long is closed; a person may have the robot meanwhile
HOUSEKEEPING_PERIOD_S = 0.25
MAX_REQUESTS_PER_POLL = 64
MAX_OPENING = 8
MAX_REASON_CHARS = 1000
REMEMBERED_BATCHES = 20
OUT_OF_MEMORY = "out of memory"
GPU_FAILURES = ("CUDA", "cuDNN", OUT_OF_MEMORY)  # in RuntimeErrors that concern all robots: they end the loop

log = logging.getLogger(__name__)


OpenPolicy = Callable[[PolicyDescription], AbstractContextManager[LivePolicy]]
"""Opens a policy. Raises ConfigError or SpecError: there is no such policy."""


@dataclass(frozen=True)
class _Request:
    """A robot's request, its address at the socket, and until when the robot waits."""

    robot: str
    routing_id: bytes
    request: ActionRequest
    observation: Arrays
    context: ChunkContext | None
    until_s: float

    @property
    def urgency(self) -> tuple[bool, float]:
        """The least is the most urgent."""
        return self.context is not None and len(self.context.prefix) > 0, self.until_s


class BatchTimes:
    """The times that the last `REMEMBERED_BATCHES` batches of one policy have taken, by their size.

    Older ones are forgotten: the policy explored without weights then, or the GPU was faster.
    """

    def __init__(self) -> None:
        self._batches = 0
        self._seconds: dict[int, float] = {}
        self._added: dict[int, int] = {}  # by size: the number of its newest batch

    def add(self, size: int, seconds: float) -> None:
        """A batch of `size` requests took `seconds`."""
        self._batches += 1
        self._seconds[size] = 0.5 * (self._seconds.get(size, seconds) + seconds)
        self._added[size] = self._batches
        for old in [known for known, number in self._added.items() if number <= self._batches - REMEMBERED_BATCHES]:
            del self._seconds[old], self._added[old]

    def predict(self, size: int) -> float:
        """Returns the expected seconds of a batch; 0 before the first.

        It takes no longer than a larger batch has, nor longer in proportion than a smaller one. So one stall does not
        make a size look slow for good.
        """
        return min((took_s * max(1.0, size / known) for known, took_s in self._seconds.items()), default=0.0)

    def choose(self, waits_s: Sequence[float]) -> list[int]:
        """Returns which requests act now: as many of the first as act at once with none of them late.

        Requests that would be late even alone do not count. If all would be, the first acts, since times may improve.

        Args:
            waits_s: how long the robot of each request waits, the most urgent first; not empty.
        """
        chosen = [index for index, wait_s in enumerate(waits_s) if wait_s >= self.predict(1)] or [0]
        while len(chosen) > 1 and self.predict(len(chosen)) > min(waits_s[index] for index in chosen):
            chosen.pop()
        return chosen


class PolicyTable:
    """The open policies, and the one that each robot uses. The socket's thread calls it; `close` when done."""

    def __init__(self, open_policy: OpenPolicy, clock: Callable[[], float]) -> None:
        self._open_policy, self._clock = open_policy, clock
        self._executor = ThreadPoolExecutor(1, "policies")
        self._opened: dict[bytes, Future[tuple[LivePolicy, ExitStack]]] = {}
        self._used: dict[str, tuple[bytes, float]] = {}  # by robot: its policy, and when it used it last

    def is_known(self, digest: bytes) -> bool:
        return digest in self._opened

    def get(self, robot: str, digest: bytes, description: bytes) -> LivePolicy:
        """The robot's policy. Raises UserSysError or HalError: it is not open; the message continues "the policy"."""
        opened = self._opened.get(digest)
        if opened is None:
            require_digest(description, digest)
            before = self._opened.get(self._used.get(robot, (b"", 0.0))[0])
            if before is not None and not before.done():
                raise WireError("is being loaded")  # one for each robot at a time
            if sum(not future.done() for future in self._opened.values()) >= MAX_OPENING:
                raise WireError("opens too many other policies now")
            opened = self._opened[digest] = self._executor.submit(self._open, robot, description)
        self._used[robot] = digest, self._clock()
        if not opened.done():
            raise WireError("is being loaded")
        try:
            return opened.result()[0]
        except (UserSysError, HalError):
            raise
        except Exception as error:  # of any kind, such as too little memory: the other policies go on
            raise WireError(f"cannot be loaded: {type(error).__name__}: {error}") from error

    def _open(self, robot: str, encoded: bytes) -> tuple[LivePolicy, ExitStack]:
        description = decode_description(encoded)
        stack = ExitStack()
        policy = stack.enter_context(self._open_policy(description))
        log.info("policy.opened robot=%s model=%s kind=%s", robot, description.spec.model, description.kind)
        return policy, stack

    def expire(self, is_allowed: Callable[[str], bool]) -> None:
        """Closes policies that no allowed robot uses, and those whose receiver has failed."""
        since_s = self._clock() - IDLE_TIMEOUT_S
        self._used = {
            robot: (key, at_s) for robot, (key, at_s) in self._used.items() if at_s >= since_s and is_allowed(robot)
        }
        in_use = {key for key, _ in self._used.values()}
        for key, opened in list(self._opened.items()):
            if opened.done() and (key not in in_use or self._has_failed(opened)):
                del self._opened[key]
                self._executor.submit(_close, opened)

    def _has_failed(self, opened: Future[tuple[LivePolicy, ExitStack]]) -> bool:
        """Whether it could not be opened, or has failed since. The next request then opens it again."""
        try:
            opened.result()[0].raise_failure()
        except Exception as error:  # of any kind: the other policies go on
            log.warning("policy.failed %s: %s", type(error).__name__, error)
            error.__traceback__ = None  # it refers to the policy, which would keep its memory
            return True
        return False

    def swap(self) -> None:
        """Swaps in new weights, also of a policy without requests: a learner may wait for it."""
        for opened in self._opened.values():
            if opened.done() and opened.exception() is None:
                opened.result()[0].swap()

    def close(self) -> None:
        """Closes all policies. Blocks."""
        for opened in self._opened.values():
            self._executor.submit(_close, opened)
        self._executor.shutdown()


def _close(opened: Future[tuple[LivePolicy, ExitStack]]) -> None:
    try:
        opened.result()[1].close()
    except Exception as error:  # of any kind: the other policies go on
        log.warning("policy.close_failed %s: %s", type(error).__name__, error)


class PolicyServer:
    """Serves policies while `run` runs.

    Attributes:
        counters: of answered, late, superseded and refused requests; any thread may read them.
    """

    def __init__(
        self,
        endpoint: str,
        keys: KeyPair,
        ring: Keyring,
        open_policy: OpenPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`endpoint`: ``tcp://ADDRESS:PORT``; port 0 takes a free one."""
        self._endpoint, self._keys, self._ring, self._clock = endpoint, keys, ring, clock
        self.counters: Counter[str] = Counter()
        self._open_policy = open_policy
        self._waiting: dict[str, _Request] = {}  # by robot
        self._times: defaultdict[bytes, BatchTimes] = defaultdict(BatchTimes)  # by the digest of the policy

    def run(self, stop: threading.Event, on_listening: Callable[[str], None] = lambda endpoint: None) -> None:
        """Blocks until `stop` is set.

        Args:
            on_listening: called with the endpoint, with the port that was chosen.

        Raises:
            RunError: the port is in use, or the address is not one of this machine.
        """
        request_short_time_slice()
        with ExitStack() as stack:
            limits = TunnelLimits(max_record_bytes=MAX_MESSAGE_BYTES)
            self._router = GuardedRouter(self._keys, self._ring, limits, self.counters, discard_audit_event)
            stack.callback(self._router.close)
            self._policies = PolicyTable(self._open_policy, self._clock)
            stack.callback(self._policies.close)
            endpoint = self._router.bind(self._endpoint, "the policy server's --listen")
            log.info("policy.listening endpoint=%s public_key=%s", endpoint, self._keys.public)
            on_listening(endpoint)
            self._serve(stop)

    def _serve(self, stop: threading.Event) -> None:
        next_housekeeping_s, read_s = 0.0, self._clock()
        while not stop.is_set():
            came_during_batch = self._router.has_message()
            self._router.wait(0.0 if self._waiting else HOUSEKEEPING_PERIOD_S)
            now_s = self._clock()
            self._receive(0.5 * (read_s + now_s) if came_during_batch else now_s)
            read_s = self._clock()
            self._act(sorted(self._waiting.values(), key=lambda each: each.urgency))
            if self._clock() >= next_housekeeping_s:
                next_housekeeping_s = self._clock() + HOUSEKEEPING_PERIOD_S
                self._ring.refresh()
                names = {entry.name for entry in self._ring.list() if entry.role == "robot"}
                self._policies.expire(names.__contains__)
                self._policies.swap()
                for digest in [each for each in self._times if not self._policies.is_known(each)]:
                    del self._times[digest]

    def _receive(self, arrived_s: float) -> None:
        """Takes the newest request of each robot, which arrived then. Answers messages that are not requests."""
        for _ in range(MAX_REQUESTS_PER_POLL):
            if (received := self._router.receive()) is None:
                break
            try:
                robot, request, observation = self._read(received)
                context = request_context(request, observation)
            except WireError as error:
                self.counters["refused"] += 1
                log.warning("policy.refused key=%s reason=%s", received.public_key, error)
                self._send(received.routing_id, ActionResponse(number=0, unavailable=str(error)))
                continue
            self._router.authorize(received.descriptor, received.routing_id)
            self.counters["superseded"] += robot in self._waiting
            until_s = arrived_s + request.timeout_s
            self._waiting[robot] = _Request(robot, received.routing_id, request, observation, context, until_s)

    def _read(self, received: RoutedMessage) -> tuple[str, ActionRequest, Arrays]:
        """The robot of the peer, and its request. Raises WireError: it is not allowed, or this is not a request."""
        if len(received.frames) != 1 or len(received.frames[0]) > MAX_MESSAGE_BYTES:
            raise WireError(f"takes one frame of {MAX_MESSAGE_BYTES} bytes at most")
        entry = self._ring.find(received.public_key)
        if entry is None or entry.role != "robot":
            raise WireError("refuses this key" if entry is None else f"refuses this robot: its key is a {entry.role}'s")
        return entry.name, *decode_request(received.frames[0])

    def _act(self, requests: Sequence[_Request]) -> None:
        """Answers the most urgent of the requests, which are sorted, and those that act with it as a batch."""
        self._waiting, now_s = {}, self._clock()
        batches: defaultdict[tuple[bytes, bool, str], list[_Request]] = defaultdict(list)
        policies: dict[bytes, LivePolicy] = {}
        for each in requests:
            if each.until_s < now_s:
                self.counters["late"] += 1
                continue
            digest, description = each.request.policy, each.request.description
            if not description and not self._policies.is_known(digest):
                self._refuse(each, unavailable="is being loaded", needs_description=True)
                continue
            try:
                policy = self._policies.get(each.robot, digest, description)
            except (UserSysError, HalError) as error:
                self._refuse(each, unavailable=str(error)[:MAX_REASON_CHARS])
                continue
            if any(IMAGES + camera not in each.observation for camera in policy.cameras):
                names = ", ".join(policy.cameras)
                self._refuse(each, unavailable=f"needs pictures of {names}", cameras=policy.cameras)
                continue
            policies[digest] = policy
            batches[digest, each.request.deterministic, each.request.method].append(each)
        for policy in policies.values():
            policy.swap()
        for (digest, deterministic, _), batch in list(batches.items())[:1]:
            chosen = [batch[index] for index in self._times[digest].choose([each.until_s - now_s for each in batch])]
            self._act_batch(policies[digest], chosen, deterministic)
            acted = {each.robot for each in chosen}
            self._waiting = {each.robot: each for one in batches.values() for each in one if each.robot not in acted}

    def _act_batch(self, policy: LivePolicy, requests: Sequence[_Request], deterministic: bool) -> None:
        batch = []
        for each in requests:
            if reason := policy.hold_reason(explore=each.request.explore and policy.may_explore):
                self._refuse(each, unavailable=reason, awaits_weights=policy.version == NO_VERSION)
            else:
                batch.append(each)
        if not batch:
            return
        started_s = self._clock()
        try:
            with span("act"):
                chunks = policy.act_batch(
                    [each.observation for each in batch],
                    [each.request.instruction for each in batch],
                    deterministic=deterministic,
                    contexts=[each.context for each in batch],
                )
        except Exception as error:  # of any kind: the other policies go on
            is_too_large = len(batch) > 1 and OUT_OF_MEMORY in str(error)
            is_of_gpu = isinstance(error, RuntimeError) and any(word in str(error) for word in GPU_FAILURES)
            if is_of_gpu and not is_too_large:
                raise
            if len(batch) == 1:
                self._on_failed(batch[0], error)
                return
            chunks = []
        if not chunks:  # one robot's observation fails no other robot; the error no longer keeps the batch's memory
            for each in batch:
                self._act_batch(policy, [each], deterministic)
            return
        self._times[batch[0].request.policy].add(len(batch), self._clock() - started_s)
        self.counters["acts"] += len(batch)
        for each, chunk in zip(batch, chunks, strict=True):
            response = ActionResponse(
                number=each.request.number,
                version=policy.version,
                execute=chunk.execute,
                bridged=chunk.bridged,
                swap_delay_s=policy.swap_delay_s,
            )
            arrays = {ACTIONS: chunk.actions, LOG_PROB: chunk.log_prob}
            if chunk.correction is not None:
                arrays |= {CORRECTION + name: array for name, array in chunk.correction.arrays().items()}
            self._send(each.routing_id, response, arrays)

    def _on_failed(self, failed: _Request, error: Exception) -> None:
        if isinstance(error, SpecError):
            self._refuse(failed, invalid=str(error)[:MAX_REASON_CHARS])
            return
        log.warning("policy.act_failed robot=%s: %s: %s", failed.robot, type(error).__name__, error)
        self._refuse(failed, unavailable="failed to select an action; the policy server's log says more")

    def _refuse(self, refused: _Request, **reason: Any) -> None:
        """`reason`: fields of the response."""
        self._send(refused.routing_id, ActionResponse(number=refused.request.number, **reason))

    def _send(self, routing_id: bytes, response: ActionResponse, arrays: Arrays | None = None) -> None:
        """Drops the response if the peer is gone or reads too slowly."""
        if not self._router.send(routing_id, [encode_packet(response, arrays or {})]):
            self.counters["unanswered"] += 1
