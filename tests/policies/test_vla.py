"""The policy of pictures and sentences: conformance, that words count, padding, ages, and pretrained encoders."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hal.errors import SpecError
from hal.spec import STATE, Array, ArraySpec, RobotSpec
from user_sys.algorithms.algorithm import ChunkPolicy, SentenceReader, policy_arrays
from user_sys.errors import ConfigError
from user_sys.policies.conformance import PolicyConformance, example_observation, example_spec
from user_sys.policies.policy import AGE_SUFFIX, Policy
from user_sys.policies.sentences import HASHED_WORDS, hash_words
from user_sys.policies.steered import SteeredPolicy, SteeredSettings
from user_sys.policies.vla import VlaPolicy, VlaSettings

torch.set_num_threads(1)
SMALL = VlaSettings(width=16, heads=2, prefix_layers=1, expert_layers=1, chunk_length=4, flow_steps=2)
RED, GREEN = "lift the red cube", "lift the green cube"


def weights_of(spec: RobotSpec, seed: int, settings: VlaSettings = SMALL) -> dict[str, Array]:
    torch.manual_seed(seed)
    module = VlaPolicy.make_module(spec, settings=settings)
    assert isinstance(module, ChunkPolicy) and isinstance(module, SentenceReader)
    return policy_arrays(module)


class TestVlaPolicy(PolicyConformance):
    options = SMALL
    device = "cpu"

    def make(self, spec: RobotSpec) -> Policy:
        return VlaPolicy(spec, settings=self.options, device=self.device)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        return weights_of(spec, seed, self.options)


class TestGatedVlaPolicy(TestVlaPolicy):
    options = replace(SMALL, gated=True, execute=2, cameras=("wrist",))


@pytest.mark.gpu
class TestVlaPolicyOnGpu(TestVlaPolicy):
    device = "cuda"


@pytest.mark.gpu
class TestGatedVlaPolicyOnGpu(TestGatedVlaPolicy):
    device = "cuda"


def acting(settings: VlaSettings = SMALL, spec: RobotSpec | None = None) -> VlaPolicy:
    policy = VlaPolicy(spec or example_spec(), settings=settings)
    policy.load(weights_of(spec or example_spec(), 0, settings))
    return policy


def actions(policy: Policy, observation: dict[str, Array], sentence: str) -> Array:
    return policy.act(observation, sentence, deterministic=True).actions


def test_another_sentence_gives_another_action() -> None:
    policy, observation = acting(), example_observation(np.random.default_rng(0))
    assert not np.array_equal(actions(policy, observation, RED), actions(policy, observation, GREEN))
    np.testing.assert_array_equal(actions(policy, observation, RED), actions(policy, observation, "Lift the RED cube!"))


def test_robots_of_one_batch_have_sentences_of_their_own() -> None:
    policy, observation = acting(), example_observation(np.random.default_rng(0))
    both = policy.act_batch([observation] * 2, [RED, GREEN], deterministic=True)
    for chunk, sentence in zip(both, (RED, GREEN), strict=True):
        np.testing.assert_allclose(chunk.actions, actions(policy, observation, sentence), atol=1e-5)


def test_age_of_a_picture_is_an_input() -> None:
    spec, observation = example_spec(), example_observation(np.random.default_rng(0))
    weights = weights_of(spec, 0)
    weights["encoder.prefix.cameras.front.age.weight"][:] = 1.0
    policy = VlaPolicy(spec, settings=SMALL)
    policy.load(weights)
    late = observation | {spec.cameras[0].feature + AGE_SUFFIX: np.array([0.4], np.float32)}
    assert not np.array_equal(actions(policy, observation, RED), actions(policy, late, RED))


def test_element_that_varies_little_counts_as_much_as_another() -> None:
    torch.manual_seed(0)
    module = VlaPolicy.make_module(example_spec(), settings=SMALL)
    action = torch.randn(64, 4, 2) * torch.tensor([0.8, 0.4])
    exists = torch.ones(64, 4, dtype=torch.bool)
    error = module.weigh_error(0.5 * action, torch.ones(64, 1, 1), action, exists).square().mean((0, 1))
    assert 0.9 < error[1] / error[0] < 1.0


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0])
def test_velocity_is_finite_at_all_times(t: float) -> None:
    torch.manual_seed(0)
    module = VlaPolicy.make_module(example_spec(), settings=SMALL)
    x, context = torch.randn(2, 4, 2), torch.randn(2, module.observation_size + 3 * SMALL.width)
    for times in (torch.full((2,), t), torch.full((2, 4), t)):
        assert module.velocity(x, times, context).abs().max() < 100.0


def test_weights_fit_another_embodiment() -> None:
    spec = example_spec()
    third = ArraySpec(name="action", labels=("a", "b", "c"), units=("m",) * 3, low=(-1.0,) * 3, high=(1.0,) * 3)
    kept = {"observation": spec.observation[:1], "neutral": (0.0,) * 3, "gripper": -1}
    other = msgspec.structs.replace(spec, action=third, **kept)
    policy = VlaPolicy(other, settings=SMALL)
    policy.load(weights_of(spec, 0))
    assert actions(policy, example_observation(np.random.default_rng(0)), RED).shape == (4, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            replace(SMALL, max_state=2),
            "max_state is 2, too little for the state of 3 elements; set it to 3",
        ),
        (
            replace(SMALL, max_action=1),
            "max_action is 1, too little for the action of 2 elements; set it to 2",
        ),
    ],
)
def test_embodiment_beyond_the_padding_is_refused(settings: VlaSettings, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        VlaPolicy(example_spec(), settings=settings)


def test_hashed_words_ignore_case_and_signs_and_end_with_padding() -> None:
    [same, upper, long] = hash_words((RED, "LIFT the, red cube.", "word " * 50))
    assert torch.equal(same, upper) and (same[:4] > 0).all() and (same[4:] == 0).all()
    assert len(long) == HASHED_WORDS and (long > 0).all()


def test_state_is_scaled_by_the_robots_own_bounds() -> None:
    policy, observation = acting(), example_observation(np.random.default_rng(1))
    moved = observation | {STATE: observation[STATE] + np.float32(0.2)}
    assert not np.array_equal(actions(policy, observation, RED), actions(policy, moved, RED))


# Pretrained encoders --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of sentences with random weights."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *RED.split(), "green"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("is_steered", [False, True])
def test_opening_a_policy_reads_its_encoder_of_sentences(monkeypatch: pytest.MonkeyPatch, is_steered: bool) -> None:
    """At the first act a policy server would read it while its other robots wait."""

    class Encoder:
        size, read = 8, False

        def encode(self, sentences: list[str]) -> torch.Tensor:
            Encoder.read = True
            return torch.zeros(len(sentences), 8)

    monkeypatch.setattr("user_sys.policies.vla.load_text_encoder", lambda name: Encoder())
    settings: Any = replace(SMALL, text_encoder="some/name")
    if is_steered:
        settings = SteeredSettings(base="vla", base_options=asdict(settings), hidden=(16,))
    kind: Any = SteeredPolicy if is_steered else VlaPolicy
    kind.make_module(example_spec(), settings=settings)
    assert not Encoder.read, "a learner reads it later"
    kind(example_spec(), settings=settings)
    assert Encoder.read


@pytest.mark.slow  # as transformers takes seconds to import
def test_pretrained_encoder_reads_the_sentence_and_is_no_part_of_the_weights(encoder: Path) -> None:
    settings = replace(SMALL, text_encoder=str(encoder))
    policy, observation = acting(settings), example_observation(np.random.default_rng(0))
    assert not np.array_equal(actions(policy, observation, RED), actions(policy, observation, GREEN))
    weights = weights_of(example_spec(), 0, settings)
    assert {name for name in weights if "words" in name} == {"encoder.prefix.words.weight", "encoder.prefix.words.bias"}
    assert weights["encoder.prefix.words.weight"].shape == (16, 8)


@pytest.mark.slow
def test_folder_without_an_encoder_is_refused_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"policy.options.text_encoder: .*has no encoder of sentences") as caught:
        VlaPolicy(example_spec(), settings=replace(SMALL, text_encoder=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_without_transformers_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"text_encoder needs transformers: .*vla"):
        VlaPolicy(example_spec(), settings=replace(SMALL, text_encoder="some/name"))
