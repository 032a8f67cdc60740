"""MuJoCo robots that learn for real.

Importing this package registers its Gymnasium environments; MuJoCo itself is imported when the first one is made.
"""

import gymnasium

for _task in ("lift", "reach"):
    gymnasium.register(
        id=f"user_sim/Panda{_task.capitalize()}-v0",
        entry_point="sim.environments:PandaEnvironment",
        kwargs={"task": _task},
    )
