"""A pretrained model of timm reads pictures: it stays as it is, the rest of the policy trains; what does not fit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hal.spec import Array, RobotSpec
from user_sys.algorithms.algorithm import policy_arrays
from user_sys.algorithms.conformance import example_batch
from user_sys.algorithms.sac import Sac, SacSettings
from user_sys.errors import ConfigError
from user_sys.policies.cnn import CnnPolicy, CnnSettings
from user_sys.policies.conformance import PolicyConformance, example_observation, example_spec
from user_sys.policies.policy import Policy
from user_sys.run.prepare import LaunchRequest, load_run

torch.set_num_threads(1)
CONVOLUTIONS, TRANSFORMER = "resnet10t", "vit_tiny_patch16_224"
IS_INSTALLED = importlib.util.find_spec("timm") is not None


def options_of(model: str, file: Path) -> CnnSettings:
    return CnnSettings(
        hidden=(32,), picture_size=8, backbone="timm", pooling="embedding", timm_model=model, timm_file=file
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights of both models, as timm's are published."""
    from safetensors.torch import save_file

    timm = pytest.importorskip("timm", reason="the environments of LeRobot have timm")

    folder = tmp_path_factory.mktemp("timm")
    for name in (CONVOLUTIONS, TRANSFORMER):
        torch.manual_seed(1)
        state = timm.create_model(name).state_dict()
        save_file({key: value.contiguous() for key, value in state.items()}, folder / f"{name}.safetensors")
    return folder


@pytest.mark.lerobot
class TestTimmPolicy(PolicyConformance):
    model = CONVOLUTIONS

    @pytest.fixture(autouse=True)
    def _options(self, files: Path) -> None:
        self.options = options_of(self.model, files / f"{self.model}.safetensors")

    def make(self, spec: RobotSpec) -> Policy:
        return CnnPolicy(spec, settings=self.options)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        torch.manual_seed(seed)
        return policy_arrays(CnnPolicy.make_module(spec, settings=self.options))


@pytest.mark.lerobot
class TestTimmPolicyOfATransformer(TestTimmPolicy):
    model = TRANSFORMER


@pytest.mark.lerobot
def test_pretrained_weights_are_read_and_stay_while_the_rest_trains(files: Path) -> None:
    from safetensors.torch import load_file

    file = files / f"{CONVOLUTIONS}.safetensors"
    module = CnnPolicy.make_module(example_spec(), settings=options_of(CONVOLUTIONS, file))
    learner = Sac(SacSettings(critic_hidden=(16,)), module, example_spec())
    learner.train()
    before = {name: value.clone() for name, value in learner.actor.state_dict().items()}
    for number in range(3):
        learner.update(example_batch(np.random.default_rng(number)), number)
    after = learner.actor.state_dict()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert not any(".backbone." in name for name in moved), "batch norms keep their statistics too"
    assert "encoder.front.project.weight" in moved and "mean.weight" in moved
    published = load_file(file)
    torch.testing.assert_close(after["encoder.front.backbone.model.conv1.0.weight"], published["conv1.0.weight"])


@pytest.mark.lerobot
def test_pictures_are_scaled_as_the_model_was_trained(files: Path) -> None:
    import timm

    file = files / f"{CONVOLUTIONS}.safetensors"
    encoder = CnnPolicy.make_module(example_spec(), settings=options_of(CONVOLUTIONS, file)).encoder["front"]
    picture = example_observation(np.random.default_rng(0))["observation.images.front"]
    model = timm.create_model(CONVOLUTIONS, checkpoint_path=str(file)).eval()
    mean, std = (torch.tensor(model.pretrained_cfg[key]) for key in ("mean", "std"))
    scaled = ((torch.from_numpy(picture) / 255.0 - mean) / std).permute(2, 0, 1)[None]
    x = torch.from_numpy(picture)[None].permute(0, 3, 1, 2) / 127.5 - 1.0
    with torch.no_grad():
        torch.testing.assert_close(encoder.backbone(x), model.forward_features(scaled), atol=1e-4, rtol=1e-4)


@pytest.mark.lerobot
@pytest.mark.parametrize(
    ("model", "file", "message"),
    [
        ("resnet10tt", CONVOLUTIONS, r"timm_model: timm [\d.]+ has no model 'resnet10tt'"),
        ("resnet18", CONVOLUTIONS, "the timm model resnet18 cannot read .*resnet10t.safetensors, or pictures of 32x24"),
    ],
)
def test_weights_that_do_not_fit_are_refused(files: Path, model: str, file: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CnnPolicy.make_module(example_spec(), settings=options_of(model, files / f"{file}.safetensors"))


def test_file_that_is_missing_or_pickled_is_refused(tmp_path: Path) -> None:
    (tmp_path / "resnet18.pth").touch()
    for file in (tmp_path / "resnet18.pth", tmp_path / "resnet18.safetensors"):
        with pytest.raises(ConfigError, match=f"timm_file: {file} is not a .safetensors file"):
            CnnPolicy.make_module(example_spec(), settings=options_of("resnet18", file))


def test_half_of_the_options_is_refused() -> None:
    for options in ({"backbone": "timm"}, {"timm_model": "resnet18", "timm_file": Path("x.safetensors")}):
        with pytest.raises(ConfigError, match="timm_model and timm_file belong to timm, which needs both"):
            CnnSettings(**options)  # type: ignore[arg-type]


def test_file_is_found_when_the_run_goes_on_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resnet18.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    options = {"backbone": "timm", "timm_model": "resnet18", "timm_file": "resnet18.safetensors"}
    (tmp_path / "run.yaml").write_text(json.dumps({"policy": {"kind": "cnn", "options": options}}))
    config, _ = load_run(LaunchRequest("cloud", Path("run.yaml"), None, False, False, None, []))
    assert config.policy.options == {**options, "timm_file": str(tmp_path / "resnet18.safetensors")}


@pytest.mark.skipif(IS_INSTALLED, reason="timm is installed")
def test_missing_timm_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    file = tmp_path / "resnet18.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match=r"backbone is timm, and it is not installed: pip install -e '.\[timm\]'"):
        CnnPolicy.make_module(example_spec(), settings=options_of("resnet18", file))
