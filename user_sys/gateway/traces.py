"""OpenTelemetry traces: one for each episode, from the camera to the weights that were trained with it.

| span | from | to |
|---|---|---|
| `episode` | first capture | the end of its last span |
| `act` | first capture of a chunk | last command of the chunk |
| `deliver` | last command of a chunk | its durable write |
| `train` | durable write of the last chunk | offer of the next version of the weights to the robot |
| `apply` | offer | use by the robot |

Captures and commands have the time of the robot's computer, all others that of the gateway's computer. Their difference
is not corrected, so the lengths of `episode` and `deliver` are as exact as the two clocks agree.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, set_span_in_context

from user_sys.episode import ChunkHeader

MAX_EPISODES = 256  # unfinished; the oldest one then ends without the spans that it lacks
EXPORT_TIMEOUT_S = 2.0


@dataclass
class _Episode:
    span: Span
    context: Context
    robot: str
    last_ns: int
    complete_ns: int = 0  # Unix time of the last chunk's durable write; 0 before


class EpisodeTraces:
    """Sends a trace for each episode to an OTLP collector. Any thread may call it; nothing blocks but `close`."""

    def __init__(self, endpoint: str, run: str) -> None:
        """Args:
        endpoint: of traces over HTTP, such as ``http://127.0.0.1:4318/v1/traces``.
        """
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._provider = TracerProvider(resource=Resource({SERVICE_NAME: "user-sys", "user_sys.run": run}))
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("user_sys.gateway")
        self._lock = threading.Lock()
        self._episodes: dict[str, _Episode] = {}  # by identifier, the oldest first

    def add_chunk(
        self,
        header: ChunkHeader,
        captured_ns: npt.NDArray[np.int64],
        inferred_ns: npt.NDArray[np.int64],
        commanded_ns: npt.NDArray[np.int64],
        durable_unix_ns: int,
    ) -> None:
        """Adds the spans of a stored chunk. The arrays have one time a step, by the robot's clock."""
        first_ns, last_ns = int(captured_ns[0]) + header.unix_offset_ns, int(commanded_ns[-1]) + header.unix_offset_ns
        with self._lock:
            episode = self._episodes.get(header.episode)
            if episode is None:
                about = {"robot": header.robot, "episode": header.episode, "task": header.task}
                span = self._tracer.start_span("episode", Context(), attributes=about, start_time=first_ns)
                episode = _Episode(span, set_span_in_context(span, Context()), header.robot, last_ns)
                self._episodes[header.episode] = episode
            delays = {
                "steps": header.steps,
                "capture_to_inference_s": float((inferred_ns - captured_ns).mean() / 1e9),
                "inference_to_command_s": float((commanded_ns - inferred_ns).mean() / 1e9),
            }
            self._add(episode, "act", first_ns, last_ns, delays)
            self._add(episode, "deliver", last_ns, durable_unix_ns, {"chunk": header.index})
            if header.end is not None:
                episode.complete_ns = durable_unix_ns
            while len(self._episodes) > MAX_EPISODES:
                self._end(next(iter(self._episodes)))

    def on_applied(self, robot: str, version: int, seconds: float) -> None:
        """Ends the traces of the robot's episodes that were durable when this version was offered, `seconds` ago."""
        now_ns = time.time_ns()
        offered_ns = now_ns - int(seconds * 1e9)
        with self._lock:
            for name, episode in list(self._episodes.items()):
                if episode.robot == robot and 0 < episode.complete_ns <= offered_ns:
                    self._add(episode, "train", episode.complete_ns, offered_ns, {"version": version})
                    self._add(episode, "apply", offered_ns, now_ns, {"version": version})
                    self._end(name)

    def close(self) -> None:
        """Ends all traces and sends them. Blocks for at most `EXPORT_TIMEOUT_S` if the collector is away."""
        with self._lock:
            for name in list(self._episodes):
                self._end(name)
        self._provider.force_flush(int(EXPORT_TIMEOUT_S * 1000))
        self._provider.shutdown()

    def _add(self, episode: _Episode, name: str, start_ns: int, end_ns: int, about: dict[str, int | float]) -> None:
        span = self._tracer.start_span(name, episode.context, attributes=about, start_time=start_ns)
        span.end(max(start_ns, end_ns))
        episode.last_ns = max(episode.last_ns, end_ns)

    def _end(self, name: str) -> None:
        episode = self._episodes.pop(name)
        episode.span.end(episode.last_ns)
