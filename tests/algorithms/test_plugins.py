"""Algorithms and policies by name: an installed package adds one, and what cannot be used is named in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from user_sys.algorithms.algorithm import policy_arrays
from user_sys.compose import PolicyConfig, RobotConfig, make_policy
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError
from user_sys.learner.config import LearnerConfig
from user_sys.learner.trainer import require_trainable
from user_sys.plugins import ALGORITHMS, load_algorithm, load_policy
from user_sys.policies.conformance import example_spec
from user_sys.replay.sampler import SamplerConfig
from user_sys.replay.selectors import StepFilter
from user_sys.rewards.reward import RewardConfig
from user_sys.run.config import RunConfig
from user_sys.run.prepare import check_plugins

MODULE = """
from dataclasses import dataclass
from user_sys.algorithms.rlpd import Rlpd
from user_sys.policies.mlp import MlpPolicy, MlpSettings

@dataclass(frozen=True)
class Settings:
    horizon: int = 3

@dataclass(frozen=True)
class ActingSettings(MlpSettings):
    horizon: int = 3

class Mine(Rlpd):
    settings = Settings

class Acting(MlpPolicy):
    settings = ActingSettings
"""
ENTRY_POINTS = """
[user_sys.algorithms]
mine = my_package:Mine
broken = my_package_that_is_missing:Mine
number = my_package:Settings

[user_sys.policies]
acting = my_package:Acting
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package."""
    folder = tmp_path / "my_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "my_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


POLICIES: dict[str, tuple[str, dict[str, object]]] = {
    "q_chunking": ("flow", {"flow_steps": 1}),
    "dsrl": ("steered", {"base": "flow"}),
    "recap": ("flow", {"conditions": 2, "condition": 1, "guidance": 1.5}),
    "sac_flow": ("gated_flow", {}),
}
"""The policy that an algorithm needs; `mlp` for the others."""


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_each_built_in_algorithm_is_chosen_by_config_alone(algorithm: str) -> None:
    kind, options = POLICIES.get(algorithm, ("mlp", {}))
    config = RunConfig(learner=LearnerConfig(algorithm=algorithm), policy=PolicyConfig(kind=kind, options=options))
    check_plugins(config)
    spec = example_spec()
    policy, policy_settings = load_policy(kind, options)
    found, settings = load_algorithm(algorithm, {})
    made = found(settings, policy.make_module(spec, settings=policy_settings), spec)
    make_policy(config.policy, spec, 0).load(policy_arrays(made.policy))
    assert made.data.batches(1).n_step >= 1


CONDITIONS = {"conditions": 2, "condition": 1}
CLONED = {"flow_steps": 1, "pretrain_updates": 9}


@pytest.mark.parametrize(
    ("algorithm", "kind", "options", "problem"),
    [
        *(
            (algorithm, "steered", {}, "policy.kind is steered, which .* cannot train: set learner.algorithm to dsrl")
            for algorithm in ("bc", "hg_dagger", "ppo", "rlpd", "sac")
        ),
        ("recap", "gated_flow", CONDITIONS, "recap does not train a gated flow: set policy.kind to flow"),
        ("recap", "vla", {"gated": True, **CONDITIONS}, "recap does not train a gated flow"),
        ("q_chunking", "gated_flow", {"flow_steps": 1}, "q_chunking does not train a gated flow"),
        ("ppo", "mlp", {"pretrain_updates": 9}, "policy.options.pretrain_updates is 9, and ppo clones no"),
        ("ppo", "cnn", {"encoder": "frozen", "pretrain_updates": 9}, "leave out pretrain_updates and encoder: frozen"),
        ("q_chunking", "flow", CLONED, "policy.options.pretrain_updates is 9, and q_chunking clones no demonstrations"),
        ("q_chunking", "flow", {"pictures": True, **CLONED}, "pretrain_updates is 9, and q_chunking clones no"),
        ("q_chunking", "vla", CLONED, "pretrain_updates is 9, and q_chunking clones no"),
        ("recap", "flow", {"conditions": 2}, "policy.options.condition is 0, .*: set it to 1"),
        ("recap", "vla", {"conditions": 2, "condition": 2}, "policy.options.condition is 2, .*: set it to 1"),
    ],
)
def test_policy_that_an_algorithm_cannot_train_is_refused_in_one_line(
    algorithm: str, kind: str, options: dict[str, Any], problem: str
) -> None:
    learner, policy = LearnerConfig(algorithm=algorithm), PolicyConfig(kind=kind, options=options)
    robot = RobotConfig(name="fake-0", driver="fake", task="reach", frame_stride=1, options={"cameras": ["front"]})
    with pytest.raises(ConfigError, match=problem) as caught:
        check_plugins(RunConfig(robots=(robot,), learner=learner, policy=policy))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("learner", "problem"),
    [
        (LearnerConfig(algorithm="ppo", min_demonstrations=9), "min_demonstrations has no effect with ppo"),
        (LearnerConfig(sampler=SamplerConfig(only=StepFilter(phases=("policy",)))), r"only.phases is \['policy'\], .*"),
    ],
)
def test_wait_for_demonstrations_that_never_ends_is_refused(learner: LearnerConfig, problem: str) -> None:
    policy = PolicyConfig(options={"pretrain_updates": 9 * (learner.algorithm != "ppo")})
    robot = RobotConfig(name="fake-0", driver="fake", task="reach")
    with pytest.raises(ConfigError, match=problem):
        check_plugins(RunConfig(robots=(robot,), learner=learner, policy=policy))


@pytest.mark.parametrize(
    ("algorithm", "sources", "is_refused"),
    [("ppo", ("online",), True), ("ppo", ("demo",), False), ("sac", ("online",), False)],
)
def test_reward_whose_labels_come_after_the_steps_are_used_is_refused(
    algorithm: str, sources: tuple[str, ...], is_refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "robots.yaml").write_text("robots: [{name: fake-0, driver: fake, task: reach}]")
    rewards = RewardConfig(
        kind="rule", options={"config": str(tmp_path / "robots.yaml")}, sources=tuple(map(EpisodeSource, sources))
    )
    robot = RobotConfig(name="fake-0", driver="fake", task="reach")
    config = RunConfig(robots=(robot,), learner=LearnerConfig(algorithm=algorithm), rewards=rewards)
    if not is_refused:
        check_plugins(config)
        return
    with pytest.raises(ConfigError, match=r"rewards.kind is rule, .* learner.algorithm is ppo") as caught:
        check_plugins(config)
    assert "\n" not in str(caught.value)


TEXT = {"text_encoder": str(Path(__file__).parent)}  # a folder without an encoder
TIMM = {"backbone": "timm", "timm_model": "resnet18", "timm_file": "nothing.safetensors"}


@pytest.mark.parametrize(
    ("algorithm", "kind", "options"),
    [
        ("bc", "vla", TEXT),
        ("sac", "cnn", TIMM),
        ("bc", "flow", TIMM | {"pictures": True}),
        ("dsrl", "steered", TIMM | {"pictures": True}),
        ("dsrl", "steered", {"base": "vla", "base_options": TEXT}),
        ("dsrl", "steered", {"base_options": TIMM | {"pictures": True}}),
    ],
)
def test_policy_that_reads_files_is_built_by_the_learner_only(
    algorithm: str, kind: str, options: dict[str, Any]
) -> None:
    """On torch's meta device what reads pretrained weights fails, and is no reason to refuse a run."""
    found, settings = load_policy(kind, options)
    assert found.reads_files(settings)
    require_trainable(LearnerConfig(algorithm=algorithm), PolicyConfig(kind=kind, options=options), example_spec())


def run(algorithm: str = "rlpd", kind: str = "mlp", **options: object) -> RunConfig:
    learner = LearnerConfig(algorithm=algorithm, options=dict(options))
    return RunConfig(learner=learner, policy=PolicyConfig(kind=kind))


def test_installed_package_adds_an_algorithm_and_a_policy() -> None:
    check_plugins(run("mine", "acting", horizon=5))
    found, settings = load_algorithm("mine", {"horizon": 5})
    assert found.__name__ == "Mine" and settings.horizon == 5
    assert type(make_policy(PolicyConfig(kind="acting"), example_spec(), 0)).__name__ == "Acting"


@pytest.mark.parametrize(
    ("algorithm", "options", "problem"),
    [
        ("rlpdd", {}, "learner.algorithm: no algorithm 'rlpdd'; did you mean 'rlpd'"),
        ("broken", {}, "'broken' .* cannot be imported: ModuleNotFoundError: No module named"),
        ("number", {}, "'number' is not a subclass of user_sys.algorithms.algorithm"),
        ("rlpd", {"critic": 3}, "learner.options: critic: unknown key; did you mean 'critics'"),
        ("rlpd", {"critics": "many"}, "learner.options: critics: "),
        ("rlpd", {"target_critics": 11}, "learner.options: target_critics is 11"),
        ("mine", {"horizont": 3}, "learner.options: horizont: unknown key; did you mean 'horizon'"),
    ],
)
def test_unusable_algorithm_is_refused_in_one_line(algorithm: str, options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        check_plugins(run(algorithm, **options))
    assert "\n" not in str(caught.value)


def test_unusable_policy_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="policy.kind: no policy 'mlpp'; did you mean 'mlp'"):
        check_plugins(run(kind="mlpp"))
    with pytest.raises(ConfigError, match="policy.options: hiden: unknown key; did you mean 'hidden'"):
        make_policy(PolicyConfig(options={"hiden": [3]}), example_spec(), 0)
