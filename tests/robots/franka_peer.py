"""A simulated FR3 in a separate process: ``python franka_peer.py HOST``. franky-sim implements libfranka's protocol.

Commands on stdin, one per line: ``set NAME VALUE`` overrides a value of the published state, such as ``set robot_mode
4``, a reflex; ``angles`` prints the joint angles.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from franky_sim import SimulationServer, franka_robot_server
from franky_sim.mujoco_simulator import MujocoSimulator

sent: dict[str, object] = {}
simulated = franka_robot_server.FrankaRobotServer.robot_state.fget
franka_robot_server.FrankaRobotServer.robot_state = property(lambda self: dataclasses.replace(simulated(self), **sent))

with MujocoSimulator(enable_visualization=False) as simulator:
    arm = simulator.add_robot()
    with SimulationServer(simulator, hostname_candidates=[sys.argv[1]]) as server:
        server.run_async()
        print("ready", flush=True)
        for line in sys.stdin:
            if line.strip() == "angles":
                print(json.dumps([round(float(angle), 4) for angle in arm.data.qpos[:7]]), flush=True)
                continue
            _, name, value = line.split(maxsplit=2)
            sent[name] = json.loads(value)
            print("true", flush=True)
