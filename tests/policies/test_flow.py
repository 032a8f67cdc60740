"""The policy of flow-matching chunks: conformance, that it learns two ways to act, and guidance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hal.spec import Array, RobotSpec
from user_sys.algorithms.algorithm import ChunkPolicy, policy_arrays
from user_sys.errors import ConfigError, RunError
from user_sys.policies.conformance import PolicyConformance, example_observation, example_spec
from user_sys.policies.flow import FlowNetwork, FlowPolicy, FlowSettings
from user_sys.policies.policy import Policy
from user_sys.policies.torch_policy import acting_stream, warm_up_gpu

torch.set_num_threads(1)
SMALL = FlowSettings(hidden=(64, 64), chunk_length=4, picture_size=8)


def module_of(settings: FlowSettings = SMALL) -> FlowNetwork:
    torch.manual_seed(0)
    module = FlowPolicy.make_module(example_spec(), settings=settings)
    assert isinstance(module, FlowNetwork) and isinstance(module, ChunkPolicy)
    return module


class TestFlowPolicy(PolicyConformance):
    options = SMALL
    device = "cpu"

    def make(self, spec: RobotSpec) -> Policy:
        return FlowPolicy(spec, settings=self.options, device=self.device)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        torch.manual_seed(seed)
        return policy_arrays(FlowPolicy.make_module(spec, settings=self.options))


class TestFlowPolicyOfPictures(TestFlowPolicy):
    options = replace(SMALL, pictures=True, execute=2, conditions=2, condition=1, guidance=1.5)


class TestFlowPolicyForDelays(TestFlowPolicy):
    options = replace(SMALL, prefix_max=2, correction_hidden=(8,))


@pytest.mark.gpu
class TestFlowPolicyOfPicturesOnGpu(TestFlowPolicyOfPictures):
    device = "cuda"


@pytest.mark.gpu
class TestFlowPolicyForDelaysOnGpu(TestFlowPolicyForDelays):
    device = "cuda"


@pytest.mark.gpu
def test_acting_on_a_gpu_does_not_wait_for_an_upload_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, streams = FlowPolicy(example_spec(), settings=SMALL, device="cuda"), list[torch.cuda.Stream]()
    policy.load(policy_arrays(module_of()))
    velocity = FlowNetwork.velocity_given
    monkeypatch.setattr(
        FlowNetwork,
        "velocity_given",
        lambda self, x: (streams.append(torch.cuda.current_stream()), velocity(self, x))[1],
    )
    policy.act(example_observation(np.random.default_rng(0)), "", deterministic=True)
    assert streams == [acting_stream("cuda")] and torch.cuda.current_stream() == torch.cuda.default_stream()


def test_gpu_that_cannot_be_used_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions.")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("user_sys.policies.torch_policy.acting_stream", fails)
    with pytest.raises(RunError, match=r"the GPU cannot be used: CUDA error: out of memory; end what uses it.*$"):
        warm_up_gpu()


@pytest.mark.gpu
def test_acting_on_a_gpu_goes_before_other_work() -> None:
    assert warm_up_gpu() and acting_stream("cuda").priority < torch.cuda.current_stream().priority


def train(module: FlowNetwork, draw: object, updates: int = 300) -> None:
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    for _ in range(updates):
        chunk, condition = draw()  # type: ignore[operator]  # a function
        loss = module.imitation_loss(torch.zeros(len(chunk), module.observation_size), chunk, condition=condition)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()


def sampled(module: FlowNetwork, condition: int, guidance: float = 1.0, n: int = 256) -> Tensor:
    with torch.no_grad():
        tokens = torch.full((n,), condition) if condition else None
        context, noise = torch.zeros(n, module.observation_size), torch.randn(n, module.chunk_length, 2)
        return module.sample(context, noise, condition=tokens, guidance=guidance)


def test_flow_learns_both_ways_around_and_not_their_mean() -> None:
    module = module_of()

    def draw() -> tuple[Tensor, None]:
        side = torch.randint(0, 2, (128, 1, 1)) * 2.0 - 1.0
        return (0.7 * side).expand(128, 4, 2).clone(), None

    train(module, draw)
    chunk = sampled(module, 0)
    assert ((chunk.abs() - 0.7).abs() < 0.2).float().mean() > 0.9
    assert 0.25 < (chunk[:, 0, 0] > 0).float().mean() < 0.75
    assert (chunk[:, 0] - chunk[:, 3]).abs().median() < 0.15, "a chunk keeps to one side"


def test_condition_selects_and_guidance_sharpens() -> None:
    module = module_of(replace(SMALL, conditions=1))

    def draw() -> tuple[Tensor, Tensor]:
        conditioned = torch.randint(0, 2, (128,))
        centre = torch.where(conditioned == 1, 0.3, -0.3)[:, None, None]
        return (centre + 0.2 * torch.randn(128, 4, 2)).clamp(-1, 1), conditioned

    train(module, draw)
    free, conditioned, guided = sampled(module, 0), sampled(module, 1), sampled(module, 1, guidance=2.0)
    assert free.mean() < -0.15 < 0.15 < conditioned.mean() < guided.mean() - 0.1


def test_policy_trained_without_conditions_acts_alike_under_all_of_them() -> None:
    module = module_of(replace(SMALL, conditions=2))
    train(module, lambda: (0.3 + 0.2 * torch.randn(128, 4, 2), None), updates=20)
    found = []
    for condition in (0, 1):
        torch.manual_seed(0)  # of the noise
        found.append(sampled(module, condition))
    torch.testing.assert_close(*found)


def test_steps_after_the_end_of_an_episode_do_not_train() -> None:
    module, chunk, mask = module_of(), torch.zeros(64, 4, 2), torch.ones(64, 4, dtype=torch.bool)
    torch.nn.init.zeros_(module.layers[-1].weight)  # so that the velocity does not depend on the chunk
    mask[:, 2:], chunk[:, 2:] = False, 100.0
    context = torch.zeros(64, module.observation_size)
    assert module.imitation_loss(context, chunk, mask).mean().item() == pytest.approx(1.0, abs=0.3), (
        "the noise's variance"
    )
    assert module.imitation_loss(context, chunk).mean() > 1000


def test_policy_executes_the_first_actions_of_its_chunk() -> None:
    spec, observation = example_spec(), example_observation(np.random.default_rng(0))
    chunks = []
    for execute in (0, 3):
        policy = FlowPolicy(spec, settings=replace(SMALL, execute=execute))
        policy.load(policy_arrays(module_of()))
        chunks.append(policy.act(observation, "", deterministic=True))
    assert chunks[0].actions.shape == (4, 2) and np.array_equal(chunks[0].actions, chunks[1].actions)
    assert [chunk.execute for chunk in chunks] == [0, 3], "the others are promised"


def test_unusable_settings_are_refused() -> None:
    for wrong, problem in (
        ({"execute": 9}, "execute is 9; a chunk has only 8 actions"),
        ({"condition": 1}, "condition is 1; set it to at most conditions=0"),
        ({"hidden": ()}, "hidden is"),
    ):
        with pytest.raises(ConfigError, match=problem):
            FlowSettings(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_training_episodes_explore_by_one_offset_for_each_chunk() -> None:
    spec, observation = example_spec(), example_observation(np.random.default_rng(0))
    span = np.subtract(spec.action.high, spec.action.low) / 2

    def chunks(*, deterministic: bool, **options: float) -> Array:
        policy = FlowPolicy(spec, settings=replace(SMALL, **options))  # type: ignore[arg-type]  # floats
        policy.load(policy_arrays(module_of()))
        return np.stack([policy.act(observation, "", deterministic=deterministic).actions for _ in range(40)])

    likely = chunks(deterministic=True, noise_scale=0.0, exploration=0.05)
    np.testing.assert_array_equal(likely, chunks(deterministic=True))
    np.testing.assert_allclose(likely, chunks(deterministic=False, noise_scale=0.0), rtol=1e-5)
    offsets = (chunks(deterministic=False, noise_scale=0.0, exploration=0.05) - likely) / span
    np.testing.assert_allclose(offsets, offsets[:, :1].repeat(SMALL.chunk_length, 1), atol=1e-4)
    assert offsets[:, 0].std(0) == pytest.approx(0.05, rel=0.4)
    assert chunks(deterministic=False, noise_scale=0.3).std(0).mean() < 0.5 * chunks(deterministic=False).std(0).mean()
