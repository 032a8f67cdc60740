"""A real Prometheus scrapes a run with faults: ``python tests/observe.py``; about three minutes.

Every query of the dashboard returns data. The alerts on a killed gateway, a killed driver and a hung session fire and
clear, and that on the end of the run fires; their times are shorter here. promtool tests all alerts
(tests/run/test_exporter.py). It needs Debian's package prometheus.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from run_kit import user_sys
from wait_kit import until

from user_sys.run.prepare import free_port
from user_sys.run.status import read_status

MONITORING = Path(__file__).parents[1] / "docker" / "monitoring"
CONFIG = """
robots:
  - {name: left, driver: fake, task: reach, real_time: true, options: {rate_hz: 40, cameras: [front]}}
demonstrations: {episodes: 2}
learner: {max_training_s: 100000, batch_size: 32, warmup_updates: 20}
logging: {wandb: {mode: disabled}}
console: {port: 0}
"""
QUIET = ("user_sys_robot_safety",)  # a well-behaved robot has no such samples
START_S, DATA_S, ALERT_S = 300.0, 120.0, 60.0
SHORTER = {"[5m]": "[20s]", "for: 30s": "for: 3s"}
FAULTS = (  # alert, its labels, the process, the signal that causes it, the signal that ends it
    ("ProcessRestarted", {"process": "gateway"}, "user_sys.gateway", signal.SIGKILL, 0),
    ("ProcessRestarted", {"process": "left-driver"}, "user_sys.edge.driver_server", signal.SIGKILL, 0),
    ("RobotLost", {"robot": "left"}, "user_sys.edge.session", signal.SIGSTOP, signal.SIGCONT),
)


def ask(address: str, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{address}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.load(answer)["data"]


def observe(folder: Path) -> list[str]:
    served, port = free_port("127.0.0.1"), free_port("127.0.0.1")
    address = f"http://127.0.0.1:{port}"
    alerts = (MONITORING / "alerts.yml").read_text()
    for long, short in SHORTER.items():
        assert long in alerts
        alerts = alerts.replace(long, short)
    (folder / "alerts.yml").write_text(alerts)
    config = (MONITORING / "prometheus.yml").read_text().replace("127.0.0.1:9464", f"127.0.0.1:{served}")
    (folder / "prometheus.yml").write_text(config.replace("5s", "1s"))
    (folder / "run.yaml").write_text(CONFIG)
    board = json.loads((MONITORING / "dashboard.json").read_text())
    queries = {target["expr"] for panel in board["panels"] for target in panel.get("targets", ())}
    run = folder / "runs" / "observed"
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=error"]
    prometheus = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], cwd=folder)
    try:
        with user_sys(
            folder, "train", "run.yaml", "--name", "observed", f"--logging.prometheus_port={served}"
        ) as launch:
            until(lambda: (run / "status.json").exists() and read_status(run).run.updates > 20, "it trains", START_S)

            def silent() -> list[str]:
                return [q for q in sorted(queries) if not q.removeprefix("rate(").startswith(QUIET) and not has_data(q)]

            def has_data(query: str) -> bool:
                return bool(ask(address, "/api/v1/query", query=query)["result"])

            try:
                until(lambda: not silent(), "each query returns data", DATA_S)
            except AssertionError:
                return [f"no data: {query}" for query in silent()]
            print(f"observe: {len(queries)} queries return data", flush=True)

            def fires(name: str, labels: dict[str, str]) -> bool:
                found = ask(address, "/api/v1/alerts")["alerts"]
                wanted = {"alertname": name, **labels}.items()
                return any(each["state"] == "firing" and wanted <= each["labels"].items() for each in found)

            for name, labels, module, begin, end in FAULTS:
                what = f"{name} {labels}"
                until(lambda: not fires(name, labels), f"{what} does not fire before its cause", ALERT_S)  # noqa: B023
                pid = launch.pid_of(module)
                assert pid is not None, module
                os.kill(pid, begin)
                until(lambda: fires(name, labels), f"{what} fires", ALERT_S)  # noqa: B023
                if end:
                    os.kill(pid, end)
                until(lambda: not fires(name, labels), f"{what} clears", ALERT_S)  # noqa: B023
                print(f"observe: {what} fires and clears", flush=True)
            launch.interrupt()
            launch.wait()
            until(lambda: fires("LauncherDown", {}), "LauncherDown fires", ALERT_S)
            print("observe: LauncherDown fires", flush=True)
            return []
    finally:
        prometheus.terminate()
        prometheus.wait(30)


def main() -> int:
    if shutil.which("prometheus") is None:
        print("prometheus is missing: apt-get install prometheus")
        return 2
    with tempfile.TemporaryDirectory(prefix="us-observe-") as folder:
        problems = observe(Path(folder))
    print("\n".join(problems) or "observe: passed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
