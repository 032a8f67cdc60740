"""LeRobot's policies with LeRobot itself, in its environments: ``make test-lerobot``."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from lerobot_policies_kit import edit_config, make_checkpoint, make_pi, small_settings
from run_kit import user_sys
from safetensors.torch import load_file
from torch import Tensor

from hal.errors import SpecError
from hal.spec import ACTION, STATE, Array, ArraySpec, RobotSpec
from robots.fake import FakeRobotConfig, fake_spec
from user_sys.algorithms.algorithm import (
    Algorithm,
    TensorBatch,
    fits_policy,
    load_generators,
    load_policy_state,
    load_state,
    policy_arrays,
    save_state,
)
from user_sys.algorithms.conformance import AlgorithmConformance, example_batch_for
from user_sys.algorithms.dsrl import Dsrl, DsrlSettings
from user_sys.algorithms.hg_dagger import HgDagger, HgDaggerSettings
from user_sys.compose import PolicyConfig
from user_sys.errors import ConfigError, WireError
from user_sys.learner.config import ComputeConfig, LearnerConfig
from user_sys.learner.trainer import blocks_of, require_trainable
from user_sys.plugins import load_policy
from user_sys.policies.conformance import PolicyConformance, example_observation, example_spec
from user_sys.policies.lerobot import LeRobotNetwork, LeRobotPolicy, lerobot_version
from user_sys.policies.lerobot_checkpoint import LeRobotSettings
from user_sys.policies.policy import ChunkContext, Policy
from user_sys.policies.torch_policy import PromisedActions
from user_sys.policies.trainable import TrainSettings, apply_train_settings
from user_sys.store.store import StoreReader
from user_sys.weights.state import dequantize, quantize

pytest.importorskip("lerobot")  # only its environments have it
pytestmark = [pytest.mark.lerobot, pytest.mark.filterwarnings("ignore")]
torch.set_num_threads(1)
SPEC, SENTENCE = example_spec(), "lift the cube"
HAS_PI0 = not lerobot_version().startswith("0.4")
PI = ("pi0", "pi05")
FROM_0_5 = pytest.mark.skipif(not HAS_PI0, reason="0.5 on")
KINDS = ["act", "diffusion", "smolvla", *(pytest.param(kind, marks=FROM_0_5) for kind in PI)]
FRONT = {"cameras": ("front",)}
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lerobot")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> Iterator[dict[str, LeRobotSettings]]:
    """A checkpoint of each kind, from LeRobot's own `save_pretrained`."""
    with pytest.MonkeyPatch.context() as patch:
        made = {kind: make_checkpoint(kind, SPEC, folder, **FRONT) for kind in ("act", "diffusion", "smolvla")}
        if HAS_PI0:
            made |= {kind: make_pi(kind, SPEC, folder, patch) for kind in PI}
        yield made


def module_of(settings: LeRobotSettings, seed: int = 0) -> LeRobotNetwork:
    torch.manual_seed(seed)
    module = LeRobotPolicy.make_module(SPEC, settings=settings)
    assert isinstance(module, LeRobotNetwork)
    return module


def trainer_of(settings: LeRobotSettings, seed: int = 0) -> HgDagger:
    return HgDagger(HgDaggerSettings(acting_rate=1.0), module_of(settings, seed), SPEC)


def batch_of(algorithm: Algorithm, seed: int = 0, n: int = 8) -> TensorBatch:
    return example_batch_for(algorithm.data, np.random.default_rng(seed), n)


def on_gpu(value: Any) -> Any:
    """A batch, or a part of one."""
    if isinstance(value, Tensor):
        return value.to("cuda")
    if isinstance(value, dict):
        return {name: on_gpu(each) for name, each in value.items()}
    if isinstance(value, TensorBatch):
        return replace(value, **{each.name: on_gpu(getattr(value, each.name)) for each in fields(value)})
    return value


def loss_of(module: LeRobotNetwork, batch: TensorBatch) -> Tensor:
    assert batch.mask is not None
    return module.batch_loss(batch.observation, batch.instructions(), batch.action, batch.mask).detach()


class TestAct(PolicyConformance):
    kind, device = "act", "cpu"
    folder: ClassVar[Path]

    @pytest.fixture(autouse=True)
    def _folder(self, folder: Path) -> None:
        type(self).folder = folder

    def settings(self) -> LeRobotSettings:
        return small_settings(self.kind, self.folder, **FRONT)

    def make(self, spec: RobotSpec) -> Policy:
        return LeRobotPolicy(spec, settings=self.settings(), device=self.device)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        return policy_arrays(module_of(self.settings(), seed))


class TestDiffusion(TestAct):
    kind = "diffusion"


class TestSmolVla(TestAct):
    kind = "smolvla"


@ON_GPU
class TestActOnGpu(TestAct):
    device = "cuda"


@ON_GPU
class TestDiffusionOnGpu(TestDiffusion):
    device = "cuda"


@ON_GPU
class TestSmolVlaOnGpu(TestSmolVla):
    device = "cuda"


@pytest.mark.parametrize("kind", [pytest.param("smolvla"), *(pytest.param(each, marks=FROM_0_5) for each in PI)])
def test_rtc_continues_the_promised_actions(kind: str, checkpoints: dict[str, LeRobotSettings]) -> None:
    settings = checkpoints[kind]
    assert LeRobotPolicy.execution_delays(settings) == {"switch": 2, "ensemble": 2, "rtc": 2}
    assert "rtc" not in LeRobotPolicy.execution_delays(checkpoints["act"])
    policy, observation = LeRobotPolicy(SPEC, settings=settings), example_observation(np.random.default_rng(0))
    policy.load(policy_arrays(module_of(settings)))

    def chunks(*contexts: ChunkContext | None) -> list[Array]:
        many = [observation] * len(contexts), [SENTENCE] * len(contexts)
        return [each.actions for each in policy.act_batch(*many, deterministic=True, contexts=contexts)]

    (free,) = chunks(None)
    centre = (np.array(SPEC.action.low) + SPEC.action.high) / 2
    promise = np.repeat(((free[:1] + centre) / 2).astype(np.float32), 3, 0)
    promised = ChunkContext(promise, delay=2, method="rtc")
    guided, unbound = chunks(promised, ChunkContext(promise[:0], delay=0, method="rtc"))
    off, before = (np.abs(each[:3] - promise).max(1) for each in (guided, free))
    assert (off[:2] < 0.5 * before[:2]).all(), "the executed actions are kept"
    np.testing.assert_allclose(chunks(promised)[0], guided, atol=1e-4, err_msg="each robot has its own delay")
    np.testing.assert_allclose(unbound, free, atol=1e-4)
    np.testing.assert_allclose(chunks(None)[0], free, atol=1e-6, err_msg="RTC leaves nothing behind")
    theirs = chunk_by_lerobots_rtc(module_of(settings), observation, promise, delay=2)
    np.testing.assert_allclose(guided, np.clip(theirs, SPEC.action.low, SPEC.action.high), atol=1e-3)


def chunk_by_lerobots_rtc(
    module: LeRobotNetwork, observation: Mapping[str, Array], promise: Array, delay: int
) -> Array:
    from lerobot.configs.types import RTCAttentionSchedule
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    inputs: dict[str, Any] = {name: torch.from_numpy(observation[name])[None] for name in module.features}
    picture = torch.from_numpy(observation["observation.images.front"])[None].permute(0, 3, 1, 2) / 255
    inputs |= {"observation.images.front": picture, "task": [SENTENCE], "action": torch.from_numpy(promise)[None]}
    prepared = module.processors.prepare(inputs)
    network, scaled = module.network.eval(), prepared.pop("action")
    network.config.rtc_config = RTCConfig(enabled=True, prefix_attention_schedule=RTCAttentionSchedule.EXP)
    network.init_rtc_processor()
    torch.manual_seed(0)  # as of a deterministic chunk
    assert module.noise_shape is not None
    noise = torch.randn(1, *module.noise_shape)
    chunk = network.predict_action_chunk(prepared, noise=noise, inference_delay=delay, prev_chunk_left_over=scaled)
    return module.processors.unscale(chunk)[0].numpy()


class TestHgDaggerOnAct(AlgorithmConformance):
    def settings(self) -> LeRobotSettings:
        return small_settings("act", Path(), **FRONT)

    def make(self, spec: RobotSpec) -> Algorithm:
        return HgDagger(HgDaggerSettings(), LeRobotPolicy.make_module(spec, settings=self.settings()), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return LeRobotPolicy(spec, settings=self.settings())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_trains_and_resumes_bit_identically(kind: str, checkpoints: dict[str, LeRobotSettings]) -> None:
    straight, resumed = trainer_of(checkpoints[kind]), trainer_of(checkpoints[kind])
    losses = []
    for number in range(6):
        straight.update(batch_of(straight, number % 2), number)
        losses.append(straight.scalars()["imitation_loss"])
        if number == 2:
            saved = save_state(straight)
    end = save_state(straight)
    load_state(resumed, saved)
    load_generators(saved)
    for number in range(3, 6):
        resumed.update(batch_of(resumed, number % 2), number)
    for name, value in save_state(resumed).items():
        np.testing.assert_array_equal(value, end[name], err_msg=name)
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_policy_starts_a_later_run(kind: str, checkpoints: dict[str, LeRobotSettings]) -> None:
    trained = module_of(checkpoints[kind])
    state = save_state(HgDagger(HgDaggerSettings(acting_rate=1.0), trained.requires_grad_(True), SPEC))
    later = module_of(checkpoints[kind])
    for parameter in later.parameters():
        parameter.data.zero_()
    load_policy_state(later, state)
    for name, value in policy_arrays(trained).items():
        np.testing.assert_array_equal(policy_arrays(later)[name], value, err_msg=name)


@pytest.fixture
def recorded(tmp_path: Path) -> LeRobotSettings:
    """A new ACT with the statistics of a dataset."""
    write_statistics(tmp_path, 10.0)
    return replace(small_settings("act", tmp_path, **FRONT), statistics=str(tmp_path))


def write_statistics(folder: Path, mean: float) -> None:
    """As after ``lerobot-record``, of vectors around `mean`."""
    sizes = {each.name: each.shape[0] for each in (*SPEC.observation, SPEC.action)}
    stats = {name: {"mean": [mean] * size, "std": [mean / 3] * size} for name, size in sizes.items()}
    (folder / "meta").mkdir(exist_ok=True)
    (folder / "meta" / "stats.json").write_text(json.dumps(stats))


def chunk_of(module: LeRobotNetwork) -> Array:
    observation = example_observation(np.random.default_rng(0))
    tensors = {name: torch.from_numpy(value)[None] for name, value in observation.items()}
    with torch.no_grad():
        return module.eval().chunks_from_noise(tensors, [SENTENCE], None)[0].numpy()


def test_weights_keep_their_statistics_after_more_was_recorded(recorded: LeRobotSettings, tmp_path: Path) -> None:
    algorithm, acting = trainer_of(recorded), LeRobotPolicy(SPEC, settings=recorded)
    algorithm.update(batch_of(algorithm), 0)
    acting.load(policy_arrays(algorithm.policy))
    before, saved = chunk_of(acting.module), save_state(algorithm)
    write_statistics(tmp_path, 12.0)
    resumed, server = trainer_of(recorded), LeRobotPolicy(SPEC, settings=recorded)
    load_state(resumed, saved)
    server.load(policy_arrays(resumed.policy))
    for module in (resumed.policy, server.module, server.copy().module):  # the server has its copy of the dataset
        np.testing.assert_array_equal(chunk_of(module), before)
    server.load(dequantize(quantize(policy_arrays(resumed.policy), "bf16"), "bf16"))
    for name, value in acting.module.scaling.state_dict().items():
        assert torch.equal(server.module.scaling.state_dict()[name], value)
    server.load(policy_arrays(resumed.policy))
    server.export(tmp_path / "saved")
    observation = example_observation(np.random.default_rng(0))
    np.testing.assert_allclose(lerobot_actions(tmp_path / "saved", observation, None), before[:2], atol=1e-5)


def test_initial_policy_of_other_statistics_is_refused(recorded: LeRobotSettings, tmp_path: Path) -> None:
    state = save_state(trainer_of(recorded))
    write_statistics(tmp_path, 12.0)
    assert not fits_policy(module_of(recorded), state)
    with pytest.raises(WireError, match="scaling"):
        load_policy_state(module_of(recorded), state)
    write_statistics(tmp_path, 10.0)
    load_policy_state(module_of(recorded), state)


@ON_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_trains_and_acts_on_a_gpu(kind: str, checkpoints: dict[str, LeRobotSettings]) -> None:
    algorithm = trainer_of(checkpoints[kind]).to("cuda")
    for number in range(3):
        algorithm.update(on_gpu(batch_of(algorithm, number)), number)
    assert np.isfinite(algorithm.scalars()["imitation_loss"])
    assert {each.device.type for each in algorithm.policy.state_dict().values()} == {"cuda"}
    policy = LeRobotPolicy(SPEC, settings=checkpoints[kind], device="cuda")
    policy.load(policy_arrays(algorithm.policy))
    promise = ChunkContext(np.zeros((2, *SPEC.action.shape), np.float32), delay=1, method="rtc")
    observation = example_observation(np.random.default_rng(0))
    for context in (None, promise) if kind not in ("act", "diffusion") else (None,):
        chunk = policy.act(observation, SENTENCE, deterministic=True, context=context)
        assert np.isfinite(chunk.actions).all()


@pytest.mark.parametrize("kind", KINDS)
def test_actions_past_the_end_carry_no_loss(kind: str, checkpoints: dict[str, LeRobotSettings]) -> None:
    module = module_of(checkpoints[kind]).eval() if kind != "act" else module_of(checkpoints[kind])
    batch, losses = batch_of(trainer_of(checkpoints[kind])), []
    batch.mask[:, 1:] = False  # type: ignore[index]  # a batch of chunks
    for value in (0.0, 1e-3):
        torch.manual_seed(0)
        action = batch.action.clone()
        action[:, 1:] += value
        torch.manual_seed(0)
        losses.append(loss_of(module, replace(batch, action=action)))
    if kind == "act":
        assert (losses[0] - losses[1]).abs().max() < 1e-3
        return
    mask = torch.zeros_like(batch.mask)  # the other networks see the noisy chunk, padding included
    torch.manual_seed(0)
    assert loss_of(module, replace(batch, mask=mask)).abs().max() == 0
    if kind != "diffusion":  # whose convolutions carry noise of the padding to the valid actions
        assert (losses[0] - losses[1]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_lerobot_loads_the_result_and_acts_alike(
    kind: str, checkpoints: dict[str, LeRobotSettings], tmp_path: Path
) -> None:
    algorithm = trainer_of(checkpoints[kind])
    for number in range(3):
        algorithm.update(batch_of(algorithm), number)
    policy = LeRobotPolicy(SPEC, settings=checkpoints[kind])
    policy.load(policy_arrays(algorithm.policy))
    policy.export(tmp_path / "saved")
    for device in ("cuda", None):
        edit_config(checkpoints[kind], device=device)
        policy.export(tmp_path / str(device))
        assert json.loads((tmp_path / str(device) / "config.json").read_text())["device"] == device
    observation = example_observation(np.random.default_rng(3))
    noise = None if policy.module.noise_shape is None else torch.randn(1, *policy.module.noise_shape)
    expected = lerobot_actions(tmp_path / "saved", observation, noise)
    tensors = {name: torch.from_numpy(value)[None] for name, value in observation.items()}
    torch.manual_seed(5)
    found = policy.module.chunks_from_noise(tensors, [SENTENCE], noise)[0]
    np.testing.assert_allclose(found[: len(expected)].numpy(), expected, atol=1e-5)
    assert not np.allclose(lerobot_actions(checkpoints[kind].path, observation, noise), expected, atol=1e-4)  # type: ignore[arg-type]  # it has one


def test_adapters_are_merged_for_lerobot(checkpoints: dict[str, LeRobotSettings], tmp_path: Path) -> None:
    settings = replace(checkpoints["smolvla"], train=TrainSettings("lora", targets=("lm_expert",), rank=2))
    module = apply_train_settings(module_of(settings), settings)
    algorithm = HgDagger(HgDaggerSettings(acting_rate=1.0, learning_rate=0.05), module, SPEC)
    assert sum(each.numel() for each in module.parameters() if each.requires_grad) < 5000
    for number in range(3):
        algorithm.update(batch_of(algorithm), number)
    policy = LeRobotPolicy(SPEC, settings=settings)
    policy.load(policy_arrays(algorithm.policy))
    policy.export(tmp_path / "saved")
    observation = example_observation(np.random.default_rng(3))
    noise = torch.randn(1, *policy.module.noise_shape)
    tensors = {name: torch.from_numpy(value)[None] for name, value in observation.items()}
    found = policy.module.chunks_from_noise(tensors, [SENTENCE], noise)[0].numpy()
    np.testing.assert_allclose(found, lerobot_actions(tmp_path / "saved", observation, noise), atol=1e-5)
    before = lerobot_actions(checkpoints["smolvla"].path, observation, noise)  # type: ignore[arg-type]  # it has one
    assert not np.allclose(found, before, atol=1e-4)


def lerobot_actions(path: Path, observation: dict[str, Array], noise: Tensor | None) -> Array:
    """The first actions by LeRobot's own loading and `select_action`, as its robots call them."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(path)
    policy = get_policy_class(config.type).from_pretrained(path, config=config)
    before, after = make_pre_post_processors(config, pretrained_path=str(path))
    frame: dict[str, Any] = {"task": SENTENCE}
    for name in config.input_features:
        value = torch.from_numpy(observation[name])
        frame[name] = value.permute(2, 0, 1) / 255 if value.ndim == 3 else value
    policy.reset()
    torch.manual_seed(5)
    options = {} if noise is None else {"noise": noise}
    if config.type in ("smolvla", *PI):
        return after(policy.predict_action_chunk(before(frame), **options))[0].numpy()
    return np.stack([after(policy.select_action(before(frame), **options))[0].numpy() for _ in range(2)])


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_as_fast_as_a_bare_loop(kind: str, checkpoints: dict[str, LeRobotSettings]) -> None:
    """The adapter, its batches and HG-DAgger beside LeRobot's policy, its processors and the same optimizer."""
    algorithm = HgDagger(HgDaggerSettings(), module_of(checkpoints[kind]), SPEC)
    batch, bare = batch_of(algorithm, n=32), module_of(checkpoints[kind])
    inputs = {"observation.state": batch.observation["observation.state"], "action": batch.action}
    for name in bare.network.config.input_features:
        value = batch.observation[name]
        value = value.permute(0, 3, 1, 2) / 255 if value.ndim == 4 else value
        inputs[name] = value[:, None] if kind == "diffusion" else value
    tasks = batch.instructions()
    trained = [each for each in bare.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trained, 1e-3, fused=True)
    mean = [torch.empty_like(each).copy_(each.detach()) for each in bare.parameters()]

    def plain() -> None:
        prepared = bare.processors.prepare({**inputs, "task": tasks, "action_is_pad": ~batch.mask})  # type: ignore[operator]  # bool
        loss = bare.network(prepared)[0]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 10.0)
        optimizer.step()
        torch._foreach_lerp_(mean, [each.detach() for each in bare.parameters()], 0.01)

    spent: dict[str, list[float]] = {"ours": [], "plain": []}
    for number in range(12):
        for name, call in (("plain", plain), ("ours", lambda: algorithm.update(batch, number))):  # noqa: B023  # called at once
            started = time.perf_counter()
            call()
            spent[name].append(time.perf_counter() - started)
    ours, bare_s = (float(np.median(spent[name][2:])) for name in ("ours", "plain"))
    print(f"{kind}: {32 / ours:.0f} samples/s, a bare loop {32 / bare_s:.0f}: {bare_s / ours:.2f}")
    assert bare_s / ours > 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_without_effect_is_refused(kind: str, checkpoints: dict[str, LeRobotSettings]) -> None:
    config = LearnerConfig(algorithm="hg_dagger", compute=ComputeConfig(recompute=True))
    policy = PolicyConfig(kind="lerobot", options={"path": str(checkpoints[kind].path)})
    with nullcontext() if kind == "act" else pytest.raises(ConfigError, match="recompute has no effect") as refused:
        require_trainable(config, policy, SPEC)
    called, module = list[str](), module_of(checkpoints[kind]).train()
    for name, part in module.named_modules():
        part.register_forward_hook(lambda part, *_, name=name: called.append(name))
    loss_of(module, batch_of(trainer_of(checkpoints[kind]), n=2))
    trained = {id(each) for each in blocks_of(module) if any(weight.requires_grad for weight in each.parameters())}
    names = {name for name, part in module.named_modules() if id(part) in trained}
    assert (names <= {*called}) == (kind == "act")
    if refused is not None:
        assert ("gradient_checkpointing" in str(refused.value)) == (kind != "smolvla")


def test_dsrl_steers_a_checkpoint(checkpoints: dict[str, LeRobotSettings]) -> None:
    """Its noise is trained, and its weights stay."""
    for kind in ("diffusion", "smolvla"):
        pictures: dict[str, Any] = {"pictures": True, "picture_size": 8, "cameras": ["front"]}
        base: dict[str, Any] = {"path": str(checkpoints[kind].path)}
        options = {"base": "lerobot", "base_options": base, **pictures}
        if kind == "diffusion":
            found, settings = load_policy("steered", options)
            with pytest.raises(ConfigError, match=r"base_options.config: \{noise_scheduler_type: DDIM\}"):
                found.make_module(SPEC, settings=settings)
            base["config"] = {"noise_scheduler_type": "DDIM"}
        require_trainable(LearnerConfig(algorithm="dsrl"), PolicyConfig(kind="steered", options=options), SPEC)
        found, settings = load_policy("steered", options)
        chosen = DsrlSettings(critic_hidden=(32,), critics=2, critics_first=0)
        algorithm = Dsrl(chosen, found.make_module(SPEC, settings=settings), SPEC)
        before, batch = policy_arrays(algorithm.policy), batch_of(algorithm)
        noise = torch.zeros(len(batch.weight), algorithm.actor.action_size)
        given = batch.observation, batch.instructions(), noise, algorithm.actor.encode(batch.observation)
        torch.testing.assert_close(algorithm.actor.chunks(*given), algorithm.actor.chunks(*given))
        for number in range(3):
            algorithm.update(batch_of(algorithm), number)
        after = policy_arrays(algorithm.policy)
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert changed and not any(name.startswith("base.") for name in changed)
        policy = found(SPEC, settings=settings)
        policy.load(after)
        assert len(policy.act(example_observation(np.random.default_rng(0)), SENTENCE, deterministic=True).actions) == 4


# Degrees -------------------------------------------------------------------------------------------------------------

TO_DEGREES = torch.tensor([180 / math.pi, 1.0])
FRONT_PICTURE = {SPEC.cameras[0].feature: torch.randint(0, 256, (4, *SPEC.cameras[0].shape), dtype=torch.uint8)}


def arm_in(unit: str) -> RobotSpec:
    """A joint of half a turn either way, in rad or in LeRobot's degrees, and a gripper."""
    labels, half = ("pan.pos", "gripper.pos"), math.pi if unit == "rad" else 180.0
    state, action = (
        ArraySpec(name=name, labels=labels, units=(unit, "%"), low=(-half, 0.0), high=(half, 100.0))
        for name in (STATE, ACTION)
    )
    return msgspec.structs.replace(SPEC, observation=(state,), action=action, neutral=(0.0, 100.0))


def arm_module(unit: str, settings: LeRobotSettings) -> LeRobotNetwork:
    module = LeRobotPolicy.make_module(arm_in(unit), settings=settings)
    assert isinstance(module, LeRobotNetwork)
    return module


def arm_results(module: LeRobotNetwork, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and chunks (n, H, 2) divided by `scale`, of one batch whose vectors are multiplied by `scale`."""
    draws = torch.Generator().manual_seed(3)
    state, actions = (torch.rand(4, *size, 2, generator=draws) * scale for size in ((), (module.chunk_length,)))
    observation, sentences = {STATE: state, **FRONT_PICTURE}, [SENTENCE] * 4
    torch.manual_seed(1)
    loss = module.batch_loss(observation, sentences, actions, torch.ones(actions.shape[:2], dtype=torch.bool))
    noise = None if module.noise_shape is None else torch.randn(4, *module.noise_shape)
    promised = PromisedActions(actions[:, :3], torch.full((4,), 3), torch.full((4,), 2), "rtc")
    with torch.no_grad():
        chunks = module.eval().chunks_from_noise(observation, sentences, noise, promised, 5.0)
    return loss.detach(), chunks / scale


@pytest.mark.parametrize("kind", ["act", "diffusion", "smolvla"])
def test_checkpoint_in_degrees_trains_and_drives_an_arm_in_rad_as_one_in_degrees(kind: str, tmp_path: Path) -> None:
    stored = make_checkpoint(kind, arm_in("lerobot_deg"), tmp_path, **FRONT)
    expected = arm_results(arm_module("lerobot_deg", stored), TO_DEGREES)
    module = arm_module("rad", replace(stored, use_degrees=True))
    new = make_checkpoint(kind, arm_in("rad"), tmp_path / "new", use_degrees=True, **FRONT)
    module.export(tmp_path / "saved")
    saved = arm_module("lerobot_deg", LeRobotSettings(path=tmp_path / "saved"))
    for each, scale in ((module, torch.ones(2)), (saved, TO_DEGREES), (arm_module("lerobot_deg", new), TO_DEGREES)):
        for found, wanted in zip(arm_results(each, scale), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_dsrl_steers_a_checkpoint_in_degrees(tmp_path: Path) -> None:
    path = str(make_checkpoint("smolvla", arm_in("lerobot_deg"), tmp_path, **FRONT).path)
    draws = torch.Generator().manual_seed(3)
    state, chunks = torch.rand(4, 2, generator=draws), list[Any]()
    for unit, scale in (("lerobot_deg", TO_DEGREES), ("rad", torch.ones(2))):
        base = {"path": path, "use_degrees": unit == "rad"}
        found, settings = load_policy("steered", {"base": "lerobot", "base_options": base})
        module: Any = found.make_module(arm_in(unit), settings=settings)
        observation = {STATE: state * scale, **FRONT_PICTURE}
        noise = torch.full((4, module.mean.out_features), 0.3)
        chunks.append(module.chunks(observation, [SENTENCE] * 4, noise, module.encode(observation)) / scale)
    np.testing.assert_allclose(chunks[1], chunks[0], rtol=1e-3, atol=1e-4)


def test_statistics_far_outside_the_bounds_of_an_angle_are_refused(tmp_path: Path) -> None:
    stored = make_checkpoint("act", arm_in("lerobot_deg"), tmp_path, **FRONT)
    text = message(SpecError, stored, arm_in("rad"))
    assert "observation.state, pan.pos is -180, and its bound -3.14159 rad; if it is in degrees, set " in text
    (tmp_path / "meta").mkdir()
    for spread, refused in ((60.0, True), (2.0, False)):
        each = {"mean": [-10.0 if refused else 0.5, 50.0], "std": [spread, 20.0]}
        (tmp_path / "meta/stats.json").write_text(json.dumps({STATE: each, ACTION: each}))
        settings = replace(stored, statistics=str(tmp_path))
        if refused:
            assert "pan.pos is -70" in message(SpecError, settings, arm_in("rad"))
        else:
            LeRobotPolicy(arm_in("rad"), settings=settings)
    assert "no angle in rad" in message(ConfigError, replace(stored, use_degrees=True), arm_in("lerobot_deg"))


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def act(checkpoints: dict[str, LeRobotSettings], tmp_path: Path) -> LeRobotSettings:
    """A copy of the checkpoint of ACT, to be spoiled."""
    assert checkpoints["act"].path is not None
    shutil.copytree(checkpoints["act"].path, tmp_path / "copy")
    return LeRobotSettings(path=tmp_path / "copy")


def message(kind: type[Exception], settings: LeRobotSettings, spec: RobotSpec = SPEC) -> str:
    with pytest.raises(kind) as raised:
        LeRobotPolicy(spec, settings=settings)
    text = str(raised.value)
    assert "\n" not in text
    return text


def larger_camera() -> RobotSpec:
    front, wrist = SPEC.cameras
    return msgspec.structs.replace(SPEC, cameras=(msgspec.structs.replace(front, height=48), wrist))


def test_a_checkpoint_of_another_robot_is_refused(act: LeRobotSettings) -> None:
    without = msgspec.structs.replace(SPEC, cameras=SPEC.cameras[1:])
    assert "reads observation.images.front" in message(SpecError, act, without)
    text = message(SpecError, act, larger_camera())
    assert "32x24" in text and "32x48" in text and "resize" in text
    action = msgspec.structs.replace(SPEC.action, labels=("a",), units=("m",), low=(0.0,), high=(1.0,))
    text = message(SpecError, act, msgspec.structs.replace(SPEC, action=action, neutral=(0.0,), gripper=None))
    assert "actions of 2 elements" in text and "takes 1" in text


def test_another_size_of_pictures_can_be_scaled(act: LeRobotSettings) -> None:
    spec = larger_camera()
    policy = LeRobotPolicy(spec, settings=replace(act, resize=True))
    policy.load(policy_arrays(LeRobotPolicy.make_module(spec, settings=replace(act, resize=True))))
    front = spec.cameras[0]
    observation = example_observation(np.random.default_rng(0)) | {front.feature: np.zeros(front.shape, np.uint8)}
    assert len(policy.act(observation, SENTENCE, deterministic=True).actions) == 4


def test_cameras_of_a_new_policy_in_another_order_than_the_robots_are_refused() -> None:
    listed = LeRobotSettings(type="act", cameras=("wrist", "front"))
    assert r"give the robot's order, [front, wrist]" in message(SpecError, listed)


def test_a_camera_can_have_another_name_in_the_checkpoint(act: LeRobotSettings) -> None:
    assert act.path is not None
    for path in (*act.path.glob("*.json"),):
        path.write_text(path.read_text().replace("observation.images.front", "observation.images.top"))
    assert "rename_map" in message(SpecError, act)
    renamed = replace(act, rename_map={"observation.images.front": "observation.images.top"}, statistics="bounds")
    assert LeRobotPolicy(SPEC, settings=renamed).cameras == ("front",)


def test_a_checkpoint_of_another_version_is_refused(act: LeRobotSettings) -> None:
    assert act.path is not None
    edit_config(act, field_of_tomorrow=1)
    assert "another version of LeRobot" in message(ConfigError, act)
    edit_config(act, type="tdmpc")
    assert "'tdmpc'" in message(ConfigError, act)
    (act.path / "config.json").unlink()
    assert "no config.json" in message(ConfigError, act)


def test_a_checkpoint_of_a_gpu_needs_none(act: LeRobotSettings, tmp_path: Path) -> None:
    assert act.path is not None
    edit_config(act, device="cuda")
    steps = act.path / "policy_preprocessor.json"
    steps.write_text(steps.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    module_of(act).export(tmp_path / "saved")
    for name in ("config.json", "policy_preprocessor.json"):
        assert '"device": "cuda"' in (tmp_path / "saved" / name).read_text()


def test_missing_parts_are_named(act: LeRobotSettings) -> None:
    assert act.path is not None
    for states in act.path.glob("policy_preprocessor_*.safetensors"):
        states.unlink()
    assert "LeRobot" in message(ConfigError, act)
    (act.path / "policy_preprocessor.json").unlink()
    assert "migrate_policy_normalization" in message(ConfigError, act)
    (act.path / "model.safetensors").unlink()
    assert "no model.safetensors" in message(ConfigError, act)
    assert "hub gives no config.json" in message(ConfigError, LeRobotSettings(path=Path("nobody/nothing")))


@pytest.mark.parametrize("name", ["policy_preprocessor.json", "policy_postprocessor.json"])
def test_code_that_a_checkpoint_names_is_not_run(act: LeRobotSettings, tmp_path: Path, name: str) -> None:
    assert act.path is not None
    stored = json.loads((act.path / name).read_text())
    stored["steps"].append({"class": "subprocess.Popen", "config": {"args": ["mkdir", str(tmp_path / "owned")]}})
    (act.path / name).write_text(json.dumps(stored))
    assert f"{name} has the step 'subprocess.Popen'" in message(ConfigError, act)
    assert not (tmp_path / "owned").exists()


def test_all_files_of_a_checkpoint_on_the_hub_are_of_one_download(
    act: LeRobotSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(act.path))
    module = LeRobotPolicy.make_module(SPEC, settings=LeRobotSettings(path=Path("nobody/nothing")))
    assert isinstance(module, LeRobotNetwork) and module.cameras == ("front",)


def test_a_checkpoint_in_the_home_folder_is_loaded(act: LeRobotSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert act.path is not None
    monkeypatch.setenv("HOME", str(act.path.parent))
    assert LeRobotPolicy(SPEC, settings=LeRobotSettings(path=Path("~/copy"))).cameras == ("front",)


def test_missing_statistics_are_named(act: LeRobotSettings) -> None:
    from lerobot.policies.factory import make_pre_post_processors

    module = module_of(act)
    for pipeline in make_pre_post_processors(module.network.config, dataset_stats=None):
        pipeline.save_pretrained(act.path)
    assert "no statistics of observation" in message(ConfigError, act)
    assert LeRobotPolicy(SPEC, settings=replace(act, statistics="bounds")).cameras == ("front",)
    assert "stats.json" in message(ConfigError, replace(act, statistics="/nowhere"))


def test_a_missing_tokenizer_or_sentence_is_named(checkpoints: dict[str, LeRobotSettings], tmp_path: Path) -> None:
    text = message(ConfigError, replace(checkpoints["smolvla"], tokenizer=str(tmp_path / "none")))
    assert "policy.options.tokenizer" in text
    algorithm = trainer_of(checkpoints["smolvla"])
    with pytest.raises(ConfigError, match="instruction"):
        algorithm.update(replace(batch_of(algorithm), sentences=("", "")), 0)


def test_a_history_is_repeated_on_request_only(folder: Path) -> None:
    settings = small_settings("diffusion", folder, **FRONT)
    settings = replace(settings, config=settings.config | {"n_obs_steps": 2})
    assert "repeat_observation" in message(ConfigError, settings)
    repeated = replace(settings, repeat_observation=True)
    algorithm = HgDagger(HgDaggerSettings(), module_of(repeated), SPEC)
    algorithm.update(batch_of(algorithm), 0)
    assert algorithm.actor.chunk_length == 7  # LeRobot's eight begin with the action before the present one


# A whole run ---------------------------------------------------------------------------------------------------------

RUN = """
robots:
  - {name: left, driver: fake, task: reach, frame_stride: 1, options: {cameras: [front], image_size: 32}}
policy: {kind: lerobot, device: cpu, options: {path: CHECKPOINT}}
demonstrations: {episodes: 2}
learner: {algorithm: hg_dagger, max_updates: 30, batch_size: 8, warmup_updates: 5}
evaluation: {episodes: 1, video_episodes: 0}
console: {port: 0}
logging: {wandb: {mode: disabled}}
"""


def test_a_run_trains_swaps_resumes_and_is_exported(tmp_path: Path) -> None:
    spec = fake_spec(FakeRobotConfig(cameras=("front",), image_size=32))
    make_checkpoint("smolvla", spec, tmp_path)
    (tmp_path / "run.yaml").write_text(RUN.replace("CHECKPOINT", "smolvla"))  # beside the run; it gets absolute
    run, saved = tmp_path / "runs" / "tuned", tmp_path / "saved"
    with user_sys(tmp_path, "train", "run.yaml", "--name", "tuned") as launch:
        assert launch.wait() == 0, launch.err
    with user_sys(tmp_path, "train", "--resume", run, "--learner.max_updates=60") as launch:
        assert launch.wait() == 0, launch.err
    with StoreReader.open(run / "store") as reader:
        reader.refresh()
        assert max(episode.policy_versions[1] for episode in reader.episodes()) > 1, "it acts with what was learned"
    log = (run / "logs" / "learner.log").read_text()
    assert "learner.resumed updates=30" in log and "updates=60" in log
    with user_sys(tmp_path, "policy", "export", run, saved) as launch:
        assert launch.wait() == 0, launch.err
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "smolvla", saved))
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert any("lm_expert" in name for name in changed) and not any("vision_model" in name for name in changed)
    with user_sys(tmp_path, "policy", "export", run, saved) as launch:
        assert launch.wait() == 2 and "exists; give a new folder" in launch.err
