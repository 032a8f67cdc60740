"""Simulated robots in MuJoCo, with tasks that can be learned.

Importing this package registers its Gymnasium environments; the first environment imports MuJoCo.
"""

import gymnasium

for _model, _title in (("panda", "Panda"), ("so101", "SO101"), ("ur5e", "UR5e")):
    for _task in ("lift", "reach"):
        gymnasium.register(
            id=f"user_sim/{_title}{_task.capitalize()}-v0",
            entry_point="sim.environments:ArmEnvironment",
            kwargs={"task": _task, "model": _model},
        )
