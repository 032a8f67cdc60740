"""Simulated robots in MuJoCo, with tasks that can be learned.

Importing this package registers its Gymnasium environments; the first environment imports MuJoCo.
"""

import gymnasium

_TASKS = (
    *("lift", "reach", "follow", "place", "tidy", "peg", "plug", "cap"),
    *("lift_red", "lift_green", "lift_blue", "lift_yellow"),
)
for _model, _title in (("panda", "Panda"), ("so101", "SO101"), ("ur5e", "UR5e")):
    for _task in _TASKS if _model != "so101" else set(_TASKS) - {"peg", "plug"}:  # `sim.tasks.TableTask.joints_min`
        gymnasium.register(
            id=f"user_sim/{_title}{_task.title().replace('_', '')}-v0",
            entry_point="sim.environments:ArmEnvironment",
            kwargs={"task": _task, "model": _model},
        )
