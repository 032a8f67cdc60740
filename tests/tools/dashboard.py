"""Makes the Grafana dashboard of a run, docker/monitoring/dashboard.json; `--check` fails if the file differs."""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

FILE = Path(__file__).parents[2] / "docker" / "monitoring" / "dashboard.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
RATE = "[1m]"
SAFETY = "user_sys_robot_safety_interventions_total"
BY_TASK = 'user_sys_task_success_ratio or user_sys_success_ratio{window="50"}'
VALUES = '{name=~"q|target|value|entropy|temperature|advantage"}'
WIDTH, HEIGHT = 8, 7


def quantile(name: str) -> str:
    return f"histogram_quantile(0.99, sum by (robot, le) (rate(user_sys_{name}_seconds_bucket{RATE})))"


STATS = (  # title, query, unit
    ("Faults", "sum(user_sys_fault) or vector(0)", "none"),
    ("Robots connected", "sum(user_sys_robot_connected)", "none"),
    ("Success, newest 50", 'user_sys_success_ratio{window="50"}', "percentunit"),
    ("Episodes", "user_sys_episodes_total", "none"),
)
CURVES = (  # title, queries with legends, unit
    ("Success", [("user_sys_success_ratio", "newest {{window}}")], "percentunit"),
    ("Success by task", [(BY_TASK, "{{task}}")], "percentunit"),
    ("Steps a second", [(f"rate(user_sys_steps_total{RATE})", "steps")], "none"),
    ("Updates a second", [(f"rate(user_sys_updates_total{RATE})", "updates")], "none"),
    ("Interventions a minute", [(f"60 * rate(user_sys_interventions_total{RATE})", "episodes with help")], "none"),
    ("Control rate", [("user_sys_robot_control_hertz", "{{robot}}")], "hertz"),
    ("Capture to action, p99", [(quantile("capture_to_inference"), "{{robot}}")], "s"),
    ("Action to command, p99", [(quantile("inference_to_command"), "{{robot}}")], "s"),
    ("Recorded to durable, p99", [(quantile("recorded_to_durable"), "{{robot}}")], "s"),
    ("Weights offered to applied, p99", [(quantile("offered_to_applied"), "{{robot}}")], "s"),
    ("Staleness", [("user_sys_staleness_versions", "versions")], "none"),
    ("Safety interventions a second", [(f"rate({SAFETY}{RATE})", "{{robot}} {{reason}}")], "none"),
    ("Chunks in outboxes", [("user_sys_robot_outbox_chunks", "{{robot}}")], "none"),
    ("Gateway's queue", [("user_sys_gateway_queue_bytes", "{{node}}")], "bytes"),
    ("Learner idle", [(f"rate(user_sys_learner_waited_seconds_total{RATE})", "{{node}}")], "percentunit"),
    ("Losses", [("user_sys_learner_loss", "{{node}} {{name}}")], "none"),
    ("Q, entropy, temperature", [(f"user_sys_learner_value{VALUES}", "{{node}} {{name}}")], "none"),
    ("Updates for each step", [("user_sys_learner_updates_per_step", "{{node}}")], "none"),
    ("Store", [("user_sys_store_bytes", "{{node}}")], "bytes"),
    ("Memory", [("user_sys_process_resident_bytes", "{{process}}")], "bytes"),
    ("Open files", [("user_sys_process_open_files", "{{process}}")], "none"),
    ("Restarts in 5 minutes", [("increase(user_sys_process_restarts_total[5m])", "{{process}}")], "none"),
)  # fmt: skip


def make() -> str:
    board = (
        dashboard.Dashboard("USER").uid("user-sys").tags(["user-sys", "robots"]).refresh("5s").time("now-30m", "now")
    )
    board = board.with_variable(dashboard.DatasourceVariable("source").label("source").type("prometheus"))
    for title, query, unit in STATS:
        panel = stat.Panel().title(title).unit(unit).datasource(SOURCE).height(4).span(6)
        board = board.with_panel(panel.with_target(prometheus.Dataquery().expr(query)))
    for title, queries, unit in CURVES:
        curve = timeseries.Panel().title(title).unit(unit).datasource(SOURCE).height(HEIGHT).span(WIDTH)
        for query, legend in queries:
            curve = curve.with_target(prometheus.Dataquery().expr(query).legend_format(legend))
        board = board.with_panel(curve)
    return JSONEncoder(sort_keys=True, indent=1).encode(board.build()) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if FILE.read_text() == make() else f"{FILE} is old: run tests/tools/dashboard.py")
    FILE.write_text(make())
