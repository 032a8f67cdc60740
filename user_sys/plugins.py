"""Algorithms, policies and rewards by name: built-in ones, and those that installed packages offer by entry points.

An entry point of the group ``user_sys.algorithms`` names a subclass of `user_sys.algorithms.algorithm.Algorithm`; one
of ``user_sys.policies`` names a subclass of `user_sys.policies.policy.TrainablePolicy`; one of ``user_sys.rewards`` a
subclass of `user_sys.rewards.reward.Reward`. Each has settings of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.errors import SpecError
from hal.settings import load_plugin
from user_sys.config import build
from user_sys.errors import ConfigError

if TYPE_CHECKING:
    from user_sys.algorithms.algorithm import Algorithm
    from user_sys.policies.policy import TrainablePolicy
    from user_sys.rewards.reward import Reward, RewardConfig

ALGORITHMS = {
    "bc": "user_sys.algorithms.bc:Bc",
    "dsrl": "user_sys.algorithms.dsrl:Dsrl",
    "hg_dagger": "user_sys.algorithms.hg_dagger:HgDagger",
    "ppo": "user_sys.algorithms.ppo:Ppo",
    "q_chunking": "user_sys.algorithms.q_chunking:QChunking",
    "recap": "user_sys.algorithms.recap:Recap",
    "rlpd": "user_sys.algorithms.rlpd:Rlpd",
    "sac": "user_sys.algorithms.sac:Sac",
    "sac_flow": "user_sys.algorithms.sac_flow:SacFlow",
}
POLICIES = {
    "cnn": "user_sys.policies.cnn:CnnPolicy",
    "flow": "user_sys.policies.flow:FlowPolicy",
    "gated_flow": "user_sys.policies.gated_flow:GatedFlowPolicy",
    "lerobot": "user_sys.policies.lerobot:LeRobotPolicy",
    "mlp": "user_sys.policies.mlp:MlpPolicy",
    "steered": "user_sys.policies.steered:SteeredPolicy",
    "vla": "user_sys.policies.vla:VlaPolicy",
}
REWARDS = {
    "classifier": "user_sys.rewards.classifier:ClassifierReward",
    "progress": "user_sys.rewards.progress:ProgressReward",
    "rule": "user_sys.rewards.rule:RuleReward",
    "vlm": "user_sys.rewards.vlm:VlmReward",
}
TEXT_PATHS = ("statistics", "text_encoder", "tokenizer")  # options of policies: a path or another name
NOT_PATHS = ("", "bounds", "checkpoint")  # values with a meaning of their own for `statistics`


def load_algorithm(name: str, options: Mapping[str, Any]) -> tuple[type[Algorithm], Any]:
    """Returns the algorithm's class and its settings with `options`. Imports torch.

    Raises:
        ConfigError: there is no such algorithm, it cannot be imported, or an option is unknown or invalid.
    """
    from user_sys.algorithms.algorithm import Algorithm

    found = _load("learner.algorithm", "user_sys.algorithms", name, ALGORITHMS, Algorithm)
    return found, build(found.settings, options, "learner.options")


def load_policy(kind: str, options: Mapping[str, Any]) -> tuple[type[TrainablePolicy], Any]:
    """Returns the policy's class and its settings with `options`. Raises as `load_algorithm`."""
    from user_sys.policies.policy import TrainablePolicy

    found = _load("policy.kind", "user_sys.policies", kind, POLICIES, TrainablePolicy)
    return found, build(found.settings, options, "policy.options")


def load_reward(config: RewardConfig) -> Reward:
    """Builds the reward. Raises as `load_algorithm`, and ConfigError if a setting names what cannot be used."""
    kind, settings = _reward(config)
    return kind(settings)


def with_absolute_paths(config: RewardConfig) -> RewardConfig:
    """`config` with the paths in its options made absolute, for processes in other folders. Raises as `load_reward`."""
    _, settings = _reward(config)
    paths = {name: str(value.resolve()) for name, value in vars(settings).items() if isinstance(value, Path)}
    return replace(config, options={**config.options, **paths})


def path_options(settings: Any) -> dict[str, Path]:
    """The options of a policy that are paths, or text that may be one, as given; `settings` are the policy's."""
    given = {name: getattr(settings, name, "") for name in TEXT_PATHS}  # those of a package need not be texts
    texts = {name: Path(text) for name, text in given.items() if isinstance(text, str) and text not in NOT_PATHS}
    return {name: value for name, value in vars(settings).items() if isinstance(value, Path)} | texts


def _reward(config: RewardConfig) -> tuple[type[Reward], Any]:
    from user_sys.rewards.reward import Reward

    found = _load("rewards.kind", "user_sys.rewards", config.kind, REWARDS, Reward)
    return found, build(found.settings, config.options, "rewards.options")


def _load(key: str, group: str, name: str, built_in: Mapping[str, str], base: type[Any]) -> Any:
    try:
        found = load_plugin(group, name, built_in)
    except (SpecError, ImportError) as error:
        raise ConfigError(f"{key}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{key}: {name!r} is not a subclass of {base.__module__}.{base.__name__}")
    return found
