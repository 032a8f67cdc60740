"""Policies of flows under a delay: RTC, training-time RTC, VLASH and A2C2, from training to acting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hal.errors import SpecError
from hal.spec import ACTION, STATE, Array, ArraySpec, RobotSpec, SafetyLimits
from user_sys.algorithms.algorithm import Algorithm, TensorBatch, policy_arrays
from user_sys.algorithms.bc import Bc, BcSettings
from user_sys.algorithms.q_chunking import QChunking
from user_sys.compose import PolicyConfig, RobotConfig, check_execution, robot_spec
from user_sys.edge.agents import LoadedPolicy
from user_sys.edge.chunk_executor import ChunkExecutor
from user_sys.errors import ConfigError, PolicyUnavailable, WireError
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.correction import ChunkCorrection
from user_sys.policies.flow import FlowNetwork, FlowPolicy, FlowSettings
from user_sys.policies.policy import SENTENCE, ChunkContext, ExecutionConfig, ExecutionMethod
from user_sys.policies.trainable import TrainSettings, apply_train_settings
from user_sys.policies.vla import VlaPolicy, VlaSettings
from user_sys.policies.vlash import StateForecast
from user_sys.run.config import EvaluationConfig
from user_sys.run.evaluate import evaluate

torch.set_num_threads(1)
H = 8
SMALL = FlowSettings(hidden=(32,), chunk_length=H, execute=2)
SPEC = RobotSpec(
    model="slider",
    rate_hz=10.0,
    observation=(
        ArraySpec(name=STATE, labels=("x", "y"), units=("m", "m"), low=(-1.0, -1.0), high=(1.0, 1.0)),
        ArraySpec(name="observation.goal", labels=("goal",), units=("m",), low=(-1.0,), high=(1.0,)),
    ),
    action=ArraySpec(name=ACTION, labels=("dx",), units=("m",), low=(-0.1,), high=(0.1,)),
    limits=SafetyLimits(joint_position=(0,)),
    joint_delta=(0,),
    neutral=(0.0,),
)
SEEN = {STATE: np.array([0.3, 0.5], np.float32), "observation.goal": np.array([0.1], np.float32)}
PREFIX = np.array([[0.05], [0.06], [0.07], [0.08], [0.09], [0.1]], np.float32)


def acting(**changes: object) -> FlowPolicy:
    settings = replace(SMALL, **changes)  # type: ignore[arg-type]  # a setting
    policy = FlowPolicy(SPEC, settings=settings)
    torch.manual_seed(0)
    policy.load(policy_arrays(FlowPolicy.make_module(SPEC, settings=settings)))
    return policy


def chunk(policy: FlowPolicy, method: ExecutionMethod, delay: int = 3, seen: dict[str, Array] = SEEN) -> Array:
    context = ChunkContext(PREFIX, delay, method)
    return policy.act(seen, "", deterministic=True, context=context).actions


@pytest.mark.parametrize("through_network", [True, False])
def test_rtc_keeps_the_actions_of_the_delay(through_network: bool) -> None:
    policy = acting(rtc_through_network=through_network)
    free, guided = chunk(policy, "switch"), chunk(policy, "rtc")
    off, before = (np.abs(each[:6] - PREFIX).ravel() for each in (guided, free))
    assert off[:3].max() < 0.02 < before[:3].min() and off[3] < before[3]
    context = ChunkContext(PREFIX[:0], 3, "rtc")
    first = policy.act(SEEN, "", deterministic=True, context=context).actions
    np.testing.assert_allclose(first, free, atol=1e-6, err_msg="nothing is promised at the start")


@pytest.mark.parametrize("method", ["rtc", "training_rtc"])
def test_exploration_begins_where_the_promised_actions_end(method: ExecutionMethod) -> None:
    context = ChunkContext(PREFIX / 2, 2, method)

    def chunks(exploration: float) -> Array:
        policy = acting(noise_scale=0.0, prefix_max=4, exploration=exploration)
        return np.stack([policy.act(SEEN, "", deterministic=False, context=context).actions for _ in range(40)])[..., 0]

    added = (chunks(0.05) - chunks(0.0)) / SPEC.action.high[0]
    np.testing.assert_allclose(added[:, :2], 0.0, atol=1e-6, err_msg="these the robot executes whatever is drawn")
    assert added[:, 6].std() == pytest.approx(0.05, rel=0.4)
    np.testing.assert_allclose(added[:, 7], added[:, 6], atol=1e-5)
    assert (np.diff(np.abs(added[:, 1:7])) > 0).all(), "it fades in"


def test_vla_continues_promised_actions_by_the_same_functions() -> None:
    settings = VlaSettings(width=16, heads=2, prefix_layers=1, expert_layers=1, flow_steps=10, prefix_max=4)
    spec, observation = example_spec(), example_observation(np.random.default_rng(0))
    policy = VlaPolicy(spec, settings=settings)
    policy.load(policy_arrays(policy.module))
    prefix = np.tile(np.array([[0.02, 0.05]], np.float32), (6, 1))
    methods: tuple[ExecutionMethod, ...] = ("switch", "rtc", "training_rtc")
    free, guided, given = (
        policy.act(observation, "lift", deterministic=True, context=ChunkContext(prefix, 3, method)).actions
        for method in methods
    )
    off, before = (np.abs(each[:3] - prefix[:3]).mean() for each in (guided, free))
    assert off < 0.3 * before and {*methods} <= {*VlaPolicy.execution_delays(settings)}
    np.testing.assert_allclose(given[:3], prefix[:3], atol=1e-6)
    module = policy.module.requires_grad_(True)
    observed = {name: torch.from_numpy(each)[None] for name, each in observation.items()}
    observed[SENTENCE] = module.encode_sentences(["lift"])
    loss = module.imitation_loss(module.encode(observed), torch.zeros(1, H, 2), torch.ones(1, H, dtype=torch.bool))
    assert loss.shape == (1,) and loss.isfinite().all()
    assert "rtc" not in VlaPolicy.execution_delays(replace(settings, gated=True))


def test_training_rtc_continues_the_given_actions() -> None:
    policy = acting(prefix_max=4)
    given, free = chunk(policy, "training_rtc"), chunk(policy, "switch")
    np.testing.assert_allclose(given[:3], PREFIX[:3], atol=1e-6)
    assert not np.allclose(given[3:], free[3:], atol=1e-4), "the others depend on them"
    np.testing.assert_allclose(chunk(policy, "training_rtc", 6)[:4], PREFIX[:4], atol=1e-6)


def test_vlash_acts_from_the_state_at_the_end_of_the_promise() -> None:
    policy = acting(offset_max=4)
    moved = {**SEEN, STATE: SEEN[STATE] + np.array([0.05 + 0.06 + 0.07, 0.0], np.float32)}
    other = {**SEEN, STATE: SEEN[STATE] + np.array([-0.3, 0.0], np.float32)}
    assert not np.allclose(chunk(policy, "vlash"), chunk(policy, "switch", seen=moved), atol=1e-4), "the offset is read"
    policy.module.layers[0].weight.data[:, -1] = 0.0
    np.testing.assert_allclose(chunk(policy, "vlash"), chunk(policy, "switch", seen=moved), atol=1e-6)
    assert not np.allclose(chunk(policy, "vlash"), chunk(policy, "switch", seen=other), atol=1e-4)


@pytest.mark.parametrize(
    ("method", "trained"), [("vlash", {"offset_max": 4}), ("training_rtc", {"prefix_max": 4}), ("rtc", {})]
)
def test_chunk_for_a_longer_delay_is_that_of_the_longest_trained_one(
    method: ExecutionMethod, trained: dict[str, int]
) -> None:
    policy, longest = acting(**trained), 4 if trained else 0
    for delay in (3, 6):
        contexts = [ChunkContext(PREFIX, delay, method), ChunkContext(PREFIX[:0], delay, method), None]
        drawn = policy.act_batch([SEEN] * 3, [""] * 3, deterministic=True, contexts=contexts)
        assert [each.bridged for each in drawn] == [min(delay, longest), 0, 0]
    if method == "vlash":
        np.testing.assert_array_equal(chunk(policy, method, 6), chunk(policy, method, 4))


def test_state_follows_targets_and_steps_of_the_tool() -> None:
    observed = {STATE: torch.tensor([[0.0, 0.0], [1.0, 1.0]])}
    actions, count = torch.tensor([[[0.1], [0.2]], [[0.3], [0.4]]]), torch.tensor([2, 0])
    tool = replace_spec(joint_delta=(), tool_delta=(0,), limits=SafetyLimits(tool_position=(1,)))
    torch.testing.assert_close(
        StateForecast(tool).roll(observed, actions, count)[STATE], torch.tensor([[0.0, 0.3], [1.0, 1.0]])
    )
    joints = replace_spec(joint_delta=(), joint_target=(0,))
    torch.testing.assert_close(
        StateForecast(joints).roll(observed, actions, count)[STATE], torch.tensor([[0.2, 0.0], [1.0, 1.0]])
    )
    assert observed[STATE][0, 0] == 0, "the observation stays"


def replace_spec(**changes: object) -> RobotSpec:
    from msgspec.structs import replace as with_changes

    return with_changes(SPEC, **changes)


def test_offsets_move_state_and_chunk_together() -> None:
    forecast, n = StateForecast(SPEC), 64
    action = torch.arange(H + 4).float().expand(n, -1)[..., None] + 1
    mask = torch.ones(n, H + 4, dtype=torch.bool)
    mask[:, 3:] = torch.arange(n)[:, None] % 2 == 0  # episodes that end after three steps
    observation, moved, exists = forecast.offset({STATE: torch.zeros(n, 2)}, action, mask, H)
    offset = moved[:, 0, 0] - 1
    torch.testing.assert_close(observation[STATE][:, 0], offset * (offset + 1) / 2)
    assert offset.min() == 0 and offset.max() == 4 and (offset[1::2] <= 2).all()
    assert exists[:, 0].all() and (exists[1::2].sum(1) == 3 - offset[1::2]).all()


def exploring(**settings: Any) -> ChunkExecutor:
    policy = LoadedPolicy(FlowPolicy(SPEC, settings=replace(SMALL, offset_max=4)), version=-1)
    executor = ChunkExecutor(policy, SPEC.action, ExecutionConfig(**settings), deterministic=False)
    executor.begin_episode()
    return executor


def explored(executor: ChunkExecutor) -> Array:
    """Random actions; checks that they go on as one walk, over the whole range, and that chunks agree."""
    actions, disagreement = [], 0.0
    for _ in range(400):
        actions.append(executor.next_action(lambda: SEEN, 0, "").action)
        disagreement = max(disagreement, executor.counters.disagreement)
    walk = np.array(actions)[:, 0] / SPEC.action.high[0]
    assert np.corrcoef(walk[1:], walk[:-1])[0, 1] > 0.6, "it keeps its direction for a while"
    assert walk.std() == pytest.approx(3**-0.5, rel=0.15) and disagreement == 0.0
    return walk


@pytest.mark.parametrize("method", ["switch", "ensemble", "vlash"])
@pytest.mark.parametrize("delay_periods", [3, 4])
def test_robot_without_weights_does_not_stop_under_a_delay_that_its_chunks_bridge(
    delay_periods: int, method: str
) -> None:
    executor = exploring(mode="async", delay_periods=delay_periods, method=method)
    for _ in range(delay_periods):
        with pytest.raises(PolicyUnavailable, match="has not arrived"):
            executor.next_action(lambda: SEEN, 0, "")
    explored(executor)
    assert executor.counters.stalls == 0


def test_waiting_robot_without_weights_asks_for_each_action() -> None:
    executor = exploring()
    explored(executor)
    assert executor.counters.chunks == 400, "so that it uses weights as soon as they arrive"


@pytest.mark.parametrize("method", ["switch", "vlash"])
def test_random_chunk_goes_on_from_the_promised_actions_of_its_own_robot(method: ExecutionMethod) -> None:
    policy, robots = FlowPolicy(SPEC, settings=replace(SMALL, offset_max=4)), range(2)
    promised, pairs = [np.zeros((0, 1), np.float32) for _ in robots], list[tuple[float, float]]()
    for robot in [*robots] * 200:
        before, context = promised[robot], ChunkContext(promised[robot], 2, method)
        actions = policy.act(SEEN, "", deterministic=False, context=context).actions
        new = actions[len(before) - (policy.bridged(context) if method == "vlash" else 0) :]
        if len(before):
            pairs.append((before[-1, 0], new[0, 0]))
        promised[robot] = new[:4]
    assert np.corrcoef(np.array(pairs).T)[0, 1] > 0.6


# A2C2


def following(n: int, seed: int) -> TensorBatch:
    """Windows of a robot that goes to a goal which moves at random, so that only the newest observation tells where."""
    torch.manual_seed(seed)
    x, goal = torch.rand(n, 1) - 0.5, torch.rand(n, 1) - 0.5
    states, goals, actions = [], [], []
    for _ in range(H):
        step = (goal - x).clamp(-0.1, 0.1)
        states.append(torch.cat([x, 0 * x], -1))
        goals.append(goal)
        actions.append(step)
        x, goal = x + step, (goal + 0.1 * torch.randn(n, 1)).clamp(-1, 1)
    steps = {STATE: torch.stack(states, 1), "observation.goal": torch.stack(goals, 1)}
    first = {name: each[:, 0].clone() for name, each in steps.items()}
    nothing = torch.zeros(n)
    mask = torch.ones(n, H, dtype=torch.bool)
    return TensorBatch(
        first, first, torch.stack(actions, 1), nothing, nothing, nothing.bool(), nothing + 1, mask, steps=steps
    )


def test_a2c2_learns_to_correct_and_travels_with_the_chunk() -> None:
    settings = replace(SMALL, correction_hidden=(32, 32), flow_steps=2)
    torch.manual_seed(0)
    module = FlowPolicy.make_module(SPEC, settings=settings)
    algorithm = Bc(BcSettings(learning_rate=3e-3, acting_rate=0.05), module, SPEC)
    assert algorithm.data.batches(1).step_vectors
    for number in range(400):
        algorithm.update(following(64, number), number)
    policy = FlowPolicy(SPEC, settings=settings)
    policy.load(policy_arrays(algorithm.policy))
    errors: dict[str, list[float]] = {"chunk": [], "corrected": []}
    batch = following(50, 1000)
    for row in range(50):
        seen = {name: each[row].numpy() for name, each in batch.observation.items()}
        context = ChunkContext(np.zeros((0, 1), np.float32), 2, "a2c2")
        drawn = policy.act(seen, "", deterministic=True, context=context)
        sent = drawn.correction
        assert sent is not None
        received = ChunkCorrection.from_arrays({STATE: 2, "observation.goal": 1}, 1, H, sent.arrays())
        for place in range(2, H):
            newest = {name: each[row, place].numpy() for name, each in batch.steps.items()}
            corrected = received.correct(drawn.actions[place], place, newest)
            np.testing.assert_array_equal(corrected, sent.correct(drawn.actions[place], place, newest))
            wanted = batch.action[row, place].numpy()
            errors["chunk"].append(abs(float((drawn.actions[place] - wanted)[0])))
            errors["corrected"].append(abs(float((corrected - wanted)[0])))
    assert np.mean(errors["corrected"]) < 0.6 * np.mean(errors["chunk"])
    assert policy.act(SEEN, "", deterministic=True).correction is None, "only on request"


def test_a2c2_corrects_with_the_adapters_that_it_trains() -> None:
    train = TrainSettings(mode="lora", targets=("layers",), rank=2)  # also a name of the correction's
    settings = replace(SMALL, correction_hidden=(8,), flow_steps=2, train=train)
    torch.manual_seed(0)
    module = apply_train_settings(FlowPolicy.make_module(SPEC, settings=settings), settings)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    policy = FlowPolicy(SPEC, settings=settings)
    policy.load(policy_arrays(module))
    drawn = policy.act(SEEN, "", deterministic=True, context=ChunkContext(np.zeros((0, 1), np.float32), 2, "a2c2"))
    assert drawn.correction is not None and isinstance(module, FlowNetwork) and module.correction is not None
    newest = {name: each + np.float32(0.2) for name, each in SEEN.items()}
    scaled = module.scale_action(torch.from_numpy(drawn.actions[:1].copy()))
    vectors = [torch.from_numpy(each)[None] for each in (drawn.correction.scaled(newest), drawn.correction.observed)]
    with torch.no_grad():
        wanted = module.unscale_action(scaled + module.correction(*vectors, scaled, torch.zeros(1))).numpy()
    assert np.abs(wanted - drawn.actions[:1]).max() > 1e-4
    np.testing.assert_allclose(drawn.correction.correct(drawn.actions[0], 0, newest), wanted[0], atol=1e-5)


def test_a2c2_trains_on_all_parts_of_a_batch() -> None:
    """A batch begins with demonstrations, and ends with interventions."""
    batch, trained = following(256, 0), list[torch.Tensor]()
    for changed in (256, 128):  # from this sample on the actions are others
        torch.manual_seed(0)
        module = FlowPolicy.make_module(SPEC, settings=replace(SMALL, correction_hidden=(8,), flow_steps=2))
        algorithm = Bc(BcSettings(acting_rate=1.0, gradient_norm_max=1e9), module, SPEC)
        batch.action[changed:] *= -1
        algorithm.update(batch, 0)
        assert isinstance(module, FlowNetwork) and module.correction is not None
        trained.append(torch.cat([each.detach().flatten() for each in module.correction.parameters()]))
    assert not torch.equal(*trained)


def test_correction_that_does_not_fit_is_refused() -> None:
    one = np.ones(1, np.float32)
    fits = ChunkCorrection(("x",), one, one, one, one, one, H, ((np.ones((1, 4), np.float32), one),)).arrays()
    number, two = np.ones((), np.float32), np.ones(2, np.float32)
    for wrong in (
        {"0.weight": np.ones((1, 5), np.float32)},
        {"offset": two},
        {"centre": number},
        {"half": number},
        {"0.bias": number},
        {"0.weight": np.ones((2, 5), np.float32), "0.bias": two, "centre": two, "half": two},  # of another robot
    ):
        with pytest.raises(WireError, match="a correction of a chunk"):
            ChunkCorrection.from_arrays({"x": 1}, 1, H, {**fits, **wrong})
    with pytest.raises(WireError, match="lacks the array 'scale'"):
        ChunkCorrection.from_arrays({"x": 1}, 1, H, {name: each for name, each in fits.items() if name != "scale"})


# Bad input


@pytest.mark.parametrize(
    ("kind", "options", "execution", "problem"),
    [
        ("mlp", {}, {"method": "rtc"}, "method is rtc, which the policy mlp cannot do with its present policy.options"),
        ("flow", {}, {"method": "vlash"}, "use one of switch, ensemble, rtc"),
        ("gated_flow", {"chunk_length": 8}, {"method": "rtc"}, "gated_flow cannot do"),
        ("mlp", {}, {"delay_periods": "measured"}, "measured, which is 1 at least, and the policy mlp bridges at most"),
        ("gated_flow", {}, {"delay_periods": "measured"}, "policy gated_flow bridges at most 0 with the method switch"),
        (
            "flow",
            {"chunk_length": 8},
            {"delay_periods": 5},
            "delay_periods is 5, and the policy flow bridges at most 4",
        ),
        (
            "flow",
            {"prefix_max": 2},
            {"delay_periods": 3, "method": "training_rtc"},
            "at most 2 with the method training",
        ),
    ],
)
def test_execution_that_a_policy_cannot_do_is_refused(
    kind: str, options: dict[str, int], execution: dict[str, object], problem: str
) -> None:
    config = ExecutionConfig(mode="async", **execution)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=problem):
        check_execution(PolicyConfig(kind=kind, options=options, execution=config))


def test_settings_that_cannot_be_trained_are_refused() -> None:
    for wrong, problem in (
        ({"prefix_max": H}, "prefix_max is 8; set it below chunk_length=8"),
        ({"offset_max": 2, "correction_hidden": (8,)}, "set one of them only"),
    ):
        with pytest.raises(ConfigError, match=problem):
            replace(SMALL, **wrong)  # type: ignore[arg-type]
    kind: type[Algorithm] = QChunking
    module = FlowPolicy.make_module(SPEC, settings=replace(SMALL, offset_max=2, flow_steps=1))
    with pytest.raises(ConfigError, match="q_chunking does not train offset_max"):
        kind(kind.settings(), module, SPEC)
    module = FlowPolicy.make_module(SPEC, settings=replace(SMALL, prefix_max=2, flow_steps=1))
    with pytest.raises(ConfigError, match="q_chunking does not train prefix_max"):
        kind(kind.settings(), module, SPEC)


def test_vlash_without_a_state_that_the_actions_move_is_refused() -> None:
    settings = replace(SMALL, offset_max=2)
    with pytest.raises(SpecError, match=f"add {STATE} to policy.features"):
        FlowPolicy.make_module(SPEC, settings=settings, features=("observation.goal",))
    speeds = msgspec.structs.replace(SPEC, joint_delta=())
    with pytest.raises(SpecError, match="no action of slider sets or steps a joint or the tool"):
        FlowPolicy.check_robot(speeds, settings)
    FlowPolicy.check_robot(speeds, SMALL, ("observation.goal",))


@pytest.mark.parametrize("method", ["switch", "ensemble", "rtc", "training_rtc", "vlash", "a2c2"])
def test_evaluation_under_a_delay_repeats(method: ExecutionMethod) -> None:
    trained = {"training_rtc": {"prefix_max": 4}, "vlash": {"offset_max": 4}, "a2c2": {"correction_hidden": [8]}}
    options = {"chunk_length": H, "hidden": [16], "flow_steps": 2, **trained.get(method, {})}
    execution = ExecutionConfig(mode="async", method=method, delay_periods=2)
    policy = PolicyConfig(kind="flow", options=options, execution=execution)
    check_execution(policy)
    robot = RobotConfig(name="fake-0", driver="fake", task="reach")
    kind = FlowPolicy(robot_spec(robot), settings=FlowSettings(**{**options, "hidden": (16,)}))  # type: ignore[arg-type]
    weights = policy_arrays(kind.module)
    runs = [
        list(
            evaluate(robot, policy, dict(weights), EvaluationConfig(episodes=2, video_episodes=0), lambda picture: None)
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and all(result.steps > 0 for result in runs[0])
