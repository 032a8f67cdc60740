"""The policy of pictures: conformance, its encoders, and what random shift and a frozen encoder do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hal.errors import SpecError
from hal.spec import IMAGES, Array, RobotSpec
from user_sys.algorithms.algorithm import GaussianPolicy, TensorBatch, imitation_loss, policy_arrays
from user_sys.algorithms.conformance import example_batch
from user_sys.errors import ConfigError
from user_sys.policies.cnn import CnnPolicy, CnnSettings
from user_sys.policies.conformance import PolicyConformance, example_observation, example_spec
from user_sys.policies.networks import GaussianNetwork, random_shift
from user_sys.policies.policy import Policy
from user_sys.policies.scaling import encoded_feature

torch.set_num_threads(1)
SMALL = CnnSettings(hidden=(32,), picture_size=8, shift=2)


def module_of(settings: CnnSettings = SMALL, seed: int = 0) -> GaussianNetwork:
    torch.manual_seed(seed)
    module = CnnPolicy.make_module(example_spec(), settings=settings)
    assert isinstance(module, GaussianNetwork)
    return module


class TestCnnPolicy(PolicyConformance):
    options = SMALL
    device = "cpu"

    def make(self, spec: RobotSpec) -> Policy:
        return CnnPolicy(spec, settings=self.options, device=self.device)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        torch.manual_seed(seed)
        return policy_arrays(CnnPolicy.make_module(spec, settings=self.options))


class TestResNetOfOneCamera(TestCnnPolicy):
    options = replace(SMALL, cameras=("wrist",), backbone="resnet10", pooling="embedding")


@pytest.mark.gpu
class TestCnnPolicyOnGpu(TestCnnPolicy):
    device = "cuda"


def test_module_acts_as_the_policy() -> None:
    module, spec = module_of(), example_spec()
    assert isinstance(module, GaussianPolicy) and module.cameras == ("front", "wrist")
    policy = CnnPolicy(spec, settings=SMALL)
    policy.load(policy_arrays(module))
    observation = example_observation(np.random.default_rng(0))
    with torch.no_grad():
        x = module.eval().encode({name: torch.from_numpy(value)[None] for name, value in observation.items()})
        expected = torch.tanh(module(x)[0])
    found = torch.from_numpy(policy.act(observation, "", deterministic=True).actions)
    torch.testing.assert_close(module.scale_action(found), expected, atol=1e-5, rtol=0)


def test_acting_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    CnnPolicy(example_spec(), settings=SMALL)
    assert torch.get_num_threads() == 1


def test_pictures_shift_in_training_only_and_edges_repeat() -> None:
    module, batch = module_of(), example_batch(np.random.default_rng(0), 8)
    first, second = (module.encode(batch.observation) for _ in range(2))
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(*(module.encode(batch.observation) for _ in range(2)))
    picture = torch.arange(25, dtype=torch.uint8).view(1, 5, 5, 1).expand(200, 5, 5, 3)
    moved = random_shift(picture, 1)
    centre = {int(each) for each in moved[:, 2, 2, 0]}
    assert centre == {6, 7, 8, 11, 12, 13, 16, 17, 18} and moved.shape == picture.shape
    right = moved[moved[:, 2, 2, 0] == 13][0, :, :, 0]  # moved by one column: the last one repeats
    assert torch.equal(right[:, 4], right[:, 3]) and torch.equal(right[:, :4], picture[0, :, 1:, 0])


def test_encoded_pictures_replace_pictures() -> None:
    module, batch = (
        module_of(replace(SMALL, encoder="frozen", pretrain_updates=3)),
        example_batch(np.random.default_rng(0)),
    )
    assert module.frozen_from == 3
    pictures = batch.observation
    encoded = {encoded_feature(c): module.encode_images(c, pictures[IMAGES + c]) for c in module.cameras}
    assert all(each.shape == (32, 8) for each in encoded.values())
    vectors = {name: pictures[name] for name in module.features}
    torch.testing.assert_close(module.encode(vectors | encoded), module.eval().encode(pictures))


def test_imitation_reaches_the_encoder_and_learns_a_place_in_the_picture() -> None:
    """A bright spot in the picture says where to move; the vectors say nothing."""
    torch.manual_seed(0)
    module = CnnPolicy.make_module(example_spec(), settings=replace(SMALL, cameras=("front",), shift=0))
    assert isinstance(module, GaussianNetwork)
    optimizer, rng = torch.optim.Adam(module.parameters(), lr=3e-3), np.random.default_rng(0)
    losses = []
    for number in range(150):
        loss = imitation_loss(module, spots(rng)).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        batch = spots(rng)
        if 0 < number < 140:
            continue
        with torch.no_grad():
            mean, log_std = module(module.encode(batch.observation))
        losses.append(float((torch.tanh(mean) - module.scale_action(batch.action)).square().mean()))
    assert losses[0] > 0.2 and np.mean(losses[-10:]) < 0.02
    assert log_std.mean() < -1.0, "the deviation follows the error"


def spots(rng: np.random.Generator, n: int = 32) -> TensorBatch:
    """Pictures with a bright spot; its row and column are the action."""
    batch = example_batch(rng, n)
    picture = np.zeros((n, 24, 32, 3), np.uint8)
    rows, columns = rng.integers(2, 22, n), rng.integers(2, 30, n)
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            picture[np.arange(n), rows + dy, columns + dx] = 255
    scaled = np.stack([rows / 12.0 - 1.0, columns / 16.0 - 1.0], -1)
    action = scaled * np.array([0.05, 0.04]) + np.array([0.0, 0.04])
    batch.observation[IMAGES + "front"] = torch.from_numpy(picture)
    return replace(batch, action=torch.from_numpy(action.astype(np.float32)))


def test_unusable_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="encoder is frozen, .*: set pretrain_updates above 0, or leave out encoder"):
        CnnSettings(encoder="frozen")
    with pytest.raises(SpecError, match="no camera 'frnt'"):
        CnnPolicy(example_spec(), settings=CnnSettings(cameras=("frnt",)))
    blind = RobotSpec(model="blind", rate_hz=10.0, observation=example_spec().observation, action=example_spec().action)
    with pytest.raises(SpecError, match="the policy reads pictures, and blind has no camera"):
        CnnPolicy(blind)


def test_softmax_over_a_single_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="pooling is softmax, .* pictures of 32x24 give one: set embedding"):
        module_of(replace(SMALL, backbone="resnet10", cameras=("front",)))
