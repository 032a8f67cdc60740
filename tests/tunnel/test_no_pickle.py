"""An audit hook checks that a working gateway and robot never unpickle or execute received bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

AUDITED = """
import sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tunnel_kit import chunk, prepare, serving, stored, until
from user_sys.edge.outbox import Outbox

armed, found = [], []
FORBIDDEN = ("pickle.find_class", "marshal.loads", "exec", "compile")
sys.addaudithook(lambda event, args: found.append((event, str(args)[:200])) if armed and event in FORBIDDEN else None)

def work(first):
    with serving(run) as site, Outbox.open(run / "outbox") as outbox:
        robot, console = site.client("panda-0", outbox), site.client("console-0")
        learner = site.client("learner")
        for index in range(first, first + 20):
            outbox.append(chunk(index))
        assert robot.drain(120) == 0
        robot.close()

with tempfile.TemporaryDirectory() as folder:
    run = Path(folder)
    prepare(run)
    for first in (0, 20):  # lazy imports execute code
        work(first)
        stored(run)
    armed.append(True)
    work(40)
    stored(run)
    armed.clear()
print(found)
sys.exit(bool(found))
"""


def test_gateway_and_peers_never_unpickle_or_execute() -> None:
    argv = [sys.executable, "-c", AUDITED, str(Path(__file__).parent)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
