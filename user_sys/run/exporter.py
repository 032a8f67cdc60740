"""Prometheus metrics of a run, served by its launcher on loopback: robots, learners, gateway and processes.

Robots' and learners' metrics arrive through the gateway; the launcher serves them also while the gateway is down.
docs/operations.md lists the names, which are stable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hal.process_supervisor import ProcessState
from user_sys.errors import RunError
from user_sys.messages import LATENCY_BOUNDS_S, MetricsReport
from user_sys.robot_records import is_learner_name
from user_sys.run.status import RunStatus, find_faults, silent_s
from user_sys.tunnel.keys import GATEWAY_NAME

LOOPBACK = "127.0.0.1"
PREFIX = "user_sys_"
SAFETY_PREFIX = "safety_"
_BOUNDS = (*map(str, LATENCY_BOUNDS_S), "+Inf")
_LATENCY_HELP = {
    "capture_to_inference": "from the capture of an observation to its action",
    "inference_to_command": "from an action to its command to the robot",
    "recorded_to_durable": "from a step's command to its durable write in the store",
    "offered_to_applied": "from the offer of weights to their use by the robot",
}
_NODE_GAUGES = {  # of any process: scalar, name of the metric, help
    "queued_bytes": ("gateway_queue_bytes", "chunks that wait for the disk"),
    "store_bytes": ("store_bytes", "size of the store on disk"),
    "outbox_bytes": ("robot_outbox_bytes", "recorded steps that the gateway has not acknowledged"),
    "disk_needed_bytes": ("disk_needed_bytes", "bytes that wait for disk space; 0 while there is some"),
    "step_ms": ("learner_step_milliseconds", "time of one update"),
    "publish_ms": ("learner_publish_milliseconds", "time to publish the newest version"),
    "updates_per_step": ("learner_updates_per_step", "updates for each online step"),
    "cold_share": ("learner_cold_ratio", "share of samples that were read from disk"),
    "policy_version": ("policy_version", "newest version of the weights"),
}
_NODE_COUNTERS = {
    "training_s": ("learner_training_seconds", "time in which the learner trained"),
    "waited_s": ("learner_waited_seconds", "time in which the learner waited for robots"),
    "peers_refused": ("gateway_refused_peers", "connections refused by key, version or format"),
    "chunks_refused": ("gateway_refused_chunks", "chunks that the gateway refused"),
    "duplicates": ("gateway_duplicate_chunks", "chunks that arrived again"),
    "outbox_dropped_episodes": ("robot_dropped_episodes", "episodes that a full outbox deleted"),
    "chunk_stalls": ("robot_chunk_stalls", "control periods without a planned action"),
}
log = logging.getLogger(__name__)


class RunExporter(Collector):
    """Serves ``http://127.0.0.1:<port>/metrics`` in threads."""

    def __init__(self, port: int, folder: Path, status: Callable[[], RunStatus | None], *, is_local: bool) -> None:
        """Args:
            port: to listen on; 0 switches it off.
            status: the newest status of the run in `folder`. The server's thread calls it.
            is_local: all processes run on this computer, so that their memory can be read.

        Raises:
            RunError: the port is in use.
        """
        self._folder, self._status, self._is_local = folder, status, is_local
        self._latencies: MetricsReport | None = None
        self._server: Any = None
        if port:
            registry = CollectorRegistry()
            registry.register(self)
            try:
                self._server, _ = start_http_server(port, LOOPBACK, registry)
            except OSError as error:
                raise RunError(
                    f"logging.prometheus_port: {LOOPBACK}:{port}: {error.strerror}; choose another"
                ) from None
            log.info("exporter.started address=http://%s:%d/metrics", LOOPBACK, port)

    def close(self) -> None:
        """Closes the port. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def add_report(self, report: MetricsReport) -> None:
        """Takes over the distributions in a report of the gateway. Any thread may call it."""
        if report.node == GATEWAY_NAME and report.histograms:
            self._latencies = report

    def collect(self) -> Iterator[Metric]:
        """All metrics at this moment; the server's threads call it."""
        yield from self._latency_metrics()
        status = self._status()
        if status is None:
            return
        yield from _run_metrics(status)
        yield from _robot_metrics(status)
        yield from _node_metrics(status)
        yield from self._process_metrics(status)
        faults = _gauge("fault", "1 for each subject with a fault; `user-sys status` has the sentence", "subject")
        for subject in sorted({fault.subject for fault in find_faults(status, self._folder)}):
            faults.add_metric([subject], 1)
        yield faults

    def _latency_metrics(self) -> Iterator[Metric]:
        families = {
            name: HistogramMetricFamily(f"{PREFIX}{name}_seconds", text, labels=["robot"])
            for name, text in _LATENCY_HELP.items()
        }
        for key, found in (self._latencies.histograms if self._latencies else {}).items():
            name, _, robot = key.partition("/")
            if name in families and len(found.counts) == len(_BOUNDS):
                totals = [sum(found.counts[: n + 1]) for n in range(len(_BOUNDS))]
                families[name].add_metric([robot], list(zip(_BOUNDS, totals, strict=True)), found.sum_s)
        yield from families.values()

    def _process_metrics(self, status: RunStatus) -> Iterator[Metric]:
        up = _gauge("process_up", "1 while the process runs; none once it is done", "process")
        restarts = _counter("process_restarts", "restarts of the process in this launch", "process")
        memory = _gauge("process_resident_bytes", "memory of the process", "process")
        files = _gauge("process_open_files", "open files of the process", "process")
        threads = _gauge("process_threads", "threads of the process", "process")
        silent = _gauge("process_silent_seconds", "how long a running gateway or learner has not reported", "process")
        for process in status.processes:
            silent.add_metric([process.name], silent_s(process, status))
            if process.state is not ProcessState.STOPPED or process.last_exit != 0:  # else it is done
                up.add_metric([process.name], float(process.state is ProcessState.RUNNING))
            restarts.add_metric([process.name], process.restarts)
        usage = process_usage(status) if self._is_local else {}
        for name, (resident_bytes, open_files, thread_count) in usage.items():
            memory.add_metric([name], resident_bytes)
            files.add_metric([name], open_files)
            threads.add_metric([name], thread_count)
        yield from (up, restarts, silent, memory, files, threads)


def process_usage(status: RunStatus) -> dict[str, tuple[int, int, int]]:
    """Resident bytes, open files and threads of the launcher and of each process that runs on this computer."""
    pids = {"launcher": status.pid, **{each.name: each.pid for each in status.processes if each.pid is not None}}
    found = {}
    for name, pid in pids.items():
        folder = Path(f"/proc/{pid}")
        try:
            lines = (folder / "status").read_text().splitlines()
            values = dict(line.split(":", 1) for line in lines if ":" in line)
            resident = int(values.get("VmRSS", "0 kB").split()[0]) * 1024
            found[name] = (resident, len(list((folder / "fd").iterdir())), int(values["Threads"]))
        except (OSError, KeyError, ValueError):
            continue  # it has ended
    return found


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def _run_metrics(status: RunStatus) -> Iterator[Metric]:
    run = status.run
    about = _gauge("run_info", "the run, its stage and the program's version", "run", "stage", "version")
    about.add_metric([run.run, status.stage, version("user-sys")], 1)
    yield about
    for name, text, count in (
        ("episodes", "online episodes", run.episodes),
        ("steps", "online steps", run.env_steps),
        ("interventions", "online episodes with steps of a person", run.interventions),
        ("updates", "updates of all learners", run.updates),
    ):
        counter = _counter(name, text)
        counter.add_metric([], count)
        yield counter
    staleness = _gauge("staleness_versions", "versions by which the slowest robot is behind its learner")
    staleness.add_metric([], run.staleness)
    yield staleness
    success = _gauge("success_ratio", "successes of the newest autonomous episodes", "window")
    for window, share in (("20", run.success_20), ("50", run.success_50)):
        if share is not None:
            success.add_metric([window], share)
    yield success
    tasks = _gauge("task_success_ratio", "of runs with several tasks: of the newest autonomous episodes", "task")
    for task, share in run.tasks.items():
        tasks.add_metric([task], share)
    yield tasks


def _robot_metrics(status: RunStatus) -> Iterator[Metric]:
    connected = _gauge("robot_connected", "1 while the robot reports", "robot")
    control = _gauge("robot_control", "1 for who controls the robot: policy, human, hold, stopped", "robot", "control")
    rate = _gauge("robot_control_hertz", "control periods a second", "robot")
    acting = _gauge("robot_policy_version", "version of the weights that the robot acts with", "robot")
    waiting = _gauge("robot_outbox_chunks", "chunks that the gateway has not acknowledged", "robot")
    limited = _counter(
        "robot_safety_interventions", "control periods that the safety kernel changed", "robot", "reason"
    )
    for robot in status.run.robots:
        report = robot.status
        is_connected = report is not None and not robot.lost
        connected.add_metric([robot.name], float(is_connected))
        for name, value in status.run.metrics.get(robot.name, {}).items():
            if name.startswith(SAFETY_PREFIX):
                limited.add_metric([robot.name, name.removeprefix(SAFETY_PREFIX)], value)
        if report is not None and is_connected:
            control.add_metric([robot.name, report.authority], 1)
            rate.add_metric([robot.name], report.control_hz)
            acting.add_metric([robot.name], report.policy_version)
            waiting.add_metric([robot.name], report.outbox_chunks)
    yield from (connected, control, rate, acting, waiting, limited)


def _node_metrics(status: RunStatus) -> Iterator[Metric]:
    for make, known in ((_gauge, _NODE_GAUGES), (_counter, _NODE_COUNTERS)):
        for scalar, (name, text) in known.items():
            family: Any = make(name, text, "node")
            for node, scalars in status.run.metrics.items():
                if scalar in scalars:
                    family.add_metric([node], scalars[scalar])
            yield family
    losses = _gauge("learner_loss", "losses by name", "node", "name")
    others = _gauge("learner_value", "other scalars of a learner by name, such as q and entropy", "node", "name")
    for node, scalars in status.run.metrics.items():
        for scalar, value in scalars.items():
            if is_learner_name(node) and scalar not in _NODE_GAUGES and scalar not in _NODE_COUNTERS:
                (losses if "loss" in scalar else others).add_metric([node, scalar], value)
    yield from (losses, others)
