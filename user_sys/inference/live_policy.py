"""A policy whose weights arrive while it acts: in a robot's session, and in a policy server for several robots."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hal.context import StartedAtEntry
from hal.spec import Array
from user_sys.errors import PolicyUnavailable, SessionRefused
from user_sys.messages import FOREIGN_RUN, NO_VERSION, WeightsApplied
from user_sys.policies.policy import ActionChunk, ChunkContext, PolicyQuery
from user_sys.tunnel.client import REFUSED_PAUSE_S, TunnelClient
from user_sys.tunnel.protocol import TunnelState
from user_sys.weights.governor import Governor
from user_sys.weights.receiver import DoubleBufferedPolicy, ReceiverConfig, WeightsReceiver

WAITING_FOR_WEIGHTS = "waiting for weights: holds until the first version; take over to demonstrate the task"
TOO_STALE = "holds: its weights are older than weights.max_staleness_versions allows; waiting for newer ones"


class LivePolicy(StartedAtEntry):
    """Two copies of a policy, of which one acts, and the thread that receives weights. A context manager.

    One thread calls it, except `scalars` and `raise_failure`.
    """

    def __init__(
        self,
        policies: DoubleBufferedPolicy,
        client: TunnelClient,
        name: str,
        config: ReceiverConfig,
        keys: Path,
        folder: Path | None,
        *,
        explore: bool = False,
    ) -> None:
        """Args:
        policies: the two copies.
        client: the tunnel through which weights arrive and reports about them leave.
        name: the robot or policy server, as in its reports.
        keys, folder: as for `WeightsReceiver`.
        explore: `act` acts at random once the gateway has said that there is no version, until it offers one.
        """
        self._policies, self._client, self._name, self._config, self._explore = policies, client, name, config, explore
        self._governor = Governor(config.governor)
        self._refused_s = math.inf  # since when the gateway refuses it
        self._is_paused = False
        self._report_lock = threading.Lock()  # the last report must name the version that acts
        report = partial(LivePolicy._report_version, weakref.proxy(self))  # no cycle, which would keep a GPU's memory
        self._receiver = WeightsReceiver(client, policies, config, keys, folder, self._governor, report)

    def start(self) -> None:
        self._receiver.start()

    def close(self) -> None:
        self._receiver.close()

    @property
    def version(self) -> int:
        """The version of the acting weights; -1 before the first."""
        return self._policies.version

    @property
    def cameras(self) -> tuple[str, ...]:
        """As `Policy.cameras`."""
        return self._policies.policy.cameras

    @property
    def swap_delay_s(self) -> float:
        """Seconds from the announcement of the acting version to its swap."""
        return self._policies.swap_delay_s

    @property
    def awaits_weights(self) -> bool:
        """No weights have arrived, and the policy may not explore."""
        return self.version == NO_VERSION and not self._explores

    @property
    def may_explore(self) -> bool:
        """See `WeightsReceiver.is_without_version`; otherwise a policy server may have lost its weights."""
        return self._receiver.is_without_version()

    @property
    def _explores(self) -> bool:
        """Whether `act` acts at random without weights. The session goes on while the gateway is away."""
        return self._explore and self._receiver.was_without_version()

    def hold_reason(self, *, explore: bool) -> str:
        """Why a robot must hold, for its operators; empty if the policy may act."""
        if self._client.state is TunnelState.REFUSED:
            return f"holds: {self._client.reason}"
        if self.version in (NO_VERSION, FOREIGN_RUN) and (why := self._receiver.planner.rejection):
            return f"holds: this run's weights are refused: {why}"
        if self.version == NO_VERSION and not explore:
            return WAITING_FOR_WEIGHTS
        return TOO_STALE if self._receiver.is_too_stale() else ""

    def swap(self) -> None:
        """Swaps in new weights if some are ready. Call it between chunks, or between episodes."""
        if self._policies.swap_if_ready() is not None:
            self._report_version()

    # agents.UpdatingPolicy

    def begin_episode(self) -> None:
        self.swap()

    def pause(self) -> None:
        """If weights are swapped between chunks, a newer version is in use at once; otherwise none is until `act`."""
        if self._config.swap_at == "chunk":
            self.swap()
        else:
            self._set_paused(True)

    def act(self, query: PolicyQuery) -> ActionChunk:
        """As `Policy.act`. Raises PolicyUnavailable: no weights, or too old ones."""
        if self._config.swap_at == "chunk" or self.hold_reason(explore=self._explores):
            self.swap()
        if reason := self.hold_reason(explore=self._explores):
            raise PolicyUnavailable(reason)
        self._set_paused(False)
        started_s = time.perf_counter()
        chunk = self._policies.policy.act(
            query.observation, query.sentence, deterministic=query.deterministic, context=query.context
        )
        self._governor.observe(time.perf_counter() - started_s)
        return chunk

    def act_batch(
        self,
        observations: Sequence[Mapping[str, Array]],
        instructions: Sequence[str],
        *,
        deterministic: bool,
        contexts: Sequence[ChunkContext | None] = (),
    ) -> list[ActionChunk]:
        """As `Policy.act_batch`, whether or not the robots must hold."""
        started_s = time.perf_counter()
        chunks = self._policies.policy.act_batch(
            observations, instructions, deterministic=deterministic, contexts=contexts
        )
        self._governor.observe(time.perf_counter() - started_s)
        return chunks

    def scalars(self) -> dict[str, float]:
        """Metrics of the weights. Any thread may call it."""
        return self._receiver.scalars()

    def raise_failure(self) -> None:
        """Raises what ended the receiver's thread. Any thread may call it.

        Also raises SessionRefused once the gateway has refused it for `REFUSED_PAUSE_S`: it gets no weights any more.
        """
        self._receiver.raise_failure()
        if self._client.state is TunnelState.REFUSED:
            self._refused_s = min(self._refused_s, time.monotonic())
            if time.monotonic() >= self._refused_s + REFUSED_PAUSE_S:
                raise SessionRefused(self._client.reason)

    def _report_version(self) -> None:
        """Reports the acting version to the gateway: at a swap, and at the start of a tunnel session."""
        with self._report_lock:
            if self.version != NO_VERSION and not self._is_paused:
                self._client.send(self._receiver.applied_report(self._name))

    def _set_paused(self, is_paused: bool) -> None:
        """Reports that no version is in use, or that one is again."""
        if is_paused is self._is_paused:
            return
        with self._report_lock:
            self._is_paused = is_paused
            if is_paused:
                self._client.send(WeightsApplied(robot=self._name, version=NO_VERSION, seconds=0.0))
        self._report_version()
