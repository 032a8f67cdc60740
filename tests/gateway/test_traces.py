"""Traces of episodes, as a collector gets them over OTLP."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from run_kit import until, user_sys

from user_sys.config import build
from user_sys.episode import ChunkHeader, EpisodeEnd, EpisodeSource
from user_sys.errors import ConfigError
from user_sys.gateway.config import GatewayConfig
from user_sys.gateway.ingest import LatencyHistograms
from user_sys.gateway.traces import EpisodeTraces

ROBOT = "arm"
STAGES = {"episode", "act", "deliver", "train", "apply"}
CONFIG = """
robots: [{name: arm, driver: fake, task: reach, real_time: true, options: {rate_hz: 20}}]
demonstrations: {episodes: 2}
learner: {max_training_s: 100000, batch_size: 32, warmup_updates: 20}
logging: {wandb: {mode: disabled}}
console: {enabled: false}
"""


class Collector:
    """An OTLP collector over HTTP on loopback."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                spans.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def traces(self) -> list[dict[str, list[Any]]]:
        """Of each trace, its spans by their names."""
        found: dict[bytes, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for span in list(self.spans):
            found[span.trace_id][span.name].append(span)
        return list(found.values())


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def add(traces: EpisodeTraces, episode: str, index: int, end: bool, durable_s: float) -> None:
    """Two steps: captured at 1.0 and 1.1 s, commanded 20 ms later."""
    header = ChunkHeader(
        episode=episode, index=index, first_step=2 * index, steps=2, robot=ROBOT, embodiment="x", task="t", sentence="",
        source=EpisodeSource.ONLINE, seed=0, started_unix_ns=1, unix_offset_ns=0,
        end=EpisodeEnd(steps=2 * index + 2, success=True) if end else None,
    )  # fmt: skip
    captured = np.array([1_000_000_000, 1_100_000_000], np.int64)
    traces.add_chunk(header, captured, captured + 10**7, captured + 2 * 10**7, int(durable_s * 1e9))


def test_trace_has_each_stage_of_an_episode(collector: Collector) -> None:
    traces = EpisodeTraces(collector.url, "run")
    add(traces, "e0", 0, False, 1.5)
    add(traces, "unfinished", 0, False, 1.5)
    traces.on_applied(ROBOT, 6, 0.01)
    add(traces, "e0", 1, True, 2.0)
    traces.on_applied("another", 7, 0.01)
    traces.on_applied(ROBOT, 7, 0.01)
    traces.close()
    whole, unfinished = sorted(collector.traces(), key=lambda trace: len(trace["act"]), reverse=True)
    assert set(whole) == STAGES and set(unfinished) == {"episode", "act", "deliver"}
    (root,) = whole["episode"]
    assert all(span.parent_span_id == root.span_id for name in STAGES - {"episode"} for span in whole[name])
    assert root.start_time_unix_nano == 10**9 and root.end_time_unix_nano == whole["apply"][0].end_time_unix_nano
    assert [span.end_time_unix_nano for span in whole["deliver"]] == [1_500_000_000, 2_000_000_000]
    assert whole["train"][0].start_time_unix_nano == 2_000_000_000
    attributes = {each.key: each.value for each in whole["act"][0].attributes}
    assert attributes["capture_to_inference_s"].double_value == pytest.approx(0.01)
    assert {each.key: each.value.int_value for each in whole["apply"][0].attributes} == {"version": 7}


def test_trace_goes_on_after_a_repeated_report_of_an_older_version(collector: Collector) -> None:
    latencies, traces = LatencyHistograms(), EpisodeTraces(collector.url, "run")
    latencies.traces = traces
    latencies.on_applied(ROBOT, 7, 0.01)
    add(traces, "e0", 0, True, 2.0)
    latencies.on_applied(ROBOT, 7, 0.01)  # a policy at a server repeats it each second
    latencies.on_applied(ROBOT, 8, 0.01)
    traces.close()
    (whole,) = collector.traces()
    assert {each.key: each.value.int_value for each in whole["apply"][0].attributes} == {"version": 8}


def test_collector_that_is_away_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.gateway.traces.EXPORT_TIMEOUT_S", 0.1)
    traces = EpisodeTraces("http://127.0.0.1:9/v1/traces", "run")
    for number in range(300):
        add(traces, f"e{number}", 0, False, 1.5)
    traces.close()


def test_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="write http://HOST:PORT/v1/traces"):
        build(GatewayConfig, {"traces": "localhost:4318"}, "run.yaml")


@pytest.mark.slow
def test_run_sends_all_stages_in_one_trace(collector: Collector, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    with user_sys(tmp_path, "train", "run.yaml", f"--gateway.traces={collector.url}") as launch:

        def is_whole() -> bool:
            assert launch.process.poll() is None, launch.err
            return any(set(trace) == STAGES for trace in collector.traces())

        until(is_whole, "a trace has all stages")
        launch.interrupt()
        assert launch.wait() == 130, launch.err
