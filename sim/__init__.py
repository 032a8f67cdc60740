"""MuJoCo robots that learn for real.

Importing this package registers its Gymnasium environments; MuJoCo itself is imported when the first one is made.
"""

import gymnasium

for _model, _title in (("panda", "Panda"), ("so101", "SO101"), ("ur5e", "UR5e")):
    for _task in ("lift", "reach"):
        gymnasium.register(
            id=f"user_sim/{_title}{_task.capitalize()}-v0",
            entry_point="sim.environments:ArmEnvironment",
            kwargs={"task": _task, "model": _model},
        )
