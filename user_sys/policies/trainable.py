"""Which parameters of a policy train: all of them, those of some modules, or low-rank adapters next to frozen ones.

A parameter is frozen if its `requires_grad` is False when the policy's module has been built. It never changes in a
run. So its memory is shared by all copies of the policy, and it is published and saved once.

LoRA is that of Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022 (arXiv 2106.09685), by the
library peft: a linear layer W x becomes W x + (alpha / rank) B A x with frozen W; B starts at zero.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hal.errors import install_hint
from hal.settings import Count, suggest
from user_sys.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

ModuleT = TypeVar("ModuleT", bound="nn.Module")
MAX_NAMES_CHARS = 300  # of the known names in an error


@dataclass(frozen=True)
class TrainSettings:
    """Which parameters of the policy train; the others are frozen.

    A name is that of a module of the policy, or the end of one: ``expert`` is also ``model.expert``.

    Attributes:
        mode: full, lora (adapters of `targets`, and `modules`), or modules (`modules` alone, such as an action expert).
        modules: modules of which all parameters train.
        targets: linear layers that get adapters, or modules that hold them.
        rank: of the adapters.
        alpha: the adapters' output is scaled by alpha / rank.
    """

    mode: Literal["full", "lora", "modules"] = "full"
    modules: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    rank: Count = 16
    alpha: Count = 16

    def __post_init__(self) -> None:
        needed = {"lora": "targets", "modules": "modules"}.get(self.mode)
        if needed and not getattr(self, needed):
            raise ConfigError(f"train.mode is {self.mode}: name the {needed} in train.{needed}")
        unused = [name for name in ("modules", "targets") if getattr(self, name) and self.mode == "full"]
        unused += ["targets"] if self.targets and self.mode == "modules" else []
        if unused:
            raise ConfigError(f"train.{unused[0]} has no effect with train.mode {self.mode}: remove it, or set a mode")


def apply_train_settings(module: ModuleT, settings: Any) -> ModuleT:
    """Freezes what does not train, and adds adapters, by the field ``train`` of a policy's `settings`, if it has one.

    torch's default generator initialises the adapters.

    Raises:
        ConfigError: a name matches no module, or nothing that can train; or peft is not installed.
    """
    train = getattr(settings, "train", TrainSettings())
    if train.mode == "full":
        return module
    trained = [parameter for each in _find(module, train.modules, "modules") for parameter in each.parameters()]
    if train.modules and not trained:
        raise ConfigError(f"policy.options.train.modules: {', '.join(train.modules)} have no parameters")
    module.requires_grad_(False)
    if train.mode == "lora":
        _add_adapters(module, train)
    for parameter in trained:
        parameter.requires_grad_(parameter.is_floating_point())
    return module


def _find(module: nn.Module, wanted: Sequence[str], key: str) -> list[nn.Module]:
    """Returns the modules that are named. Raises ConfigError if a name matches none."""
    named = {name: each for name, each in module.named_modules() if name}
    found = []
    for name in wanted:
        matches = [each for path, each in named.items() if path == name or path.endswith(f".{name}")]
        if not matches:
            known = {*named, *(path.rpartition(".")[2] for path in named if not path.rpartition(".")[2].isdigit())}
            raise ConfigError(f"policy.options.train.{key}: the policy has no module {name!r}; {_nearest(name, known)}")
        found += matches
    return found


def _nearest(name: str, known: Iterable[str]) -> str:
    text = suggest(name, known)
    return text if len(text) <= MAX_NAMES_CHARS else f"{text[:MAX_NAMES_CHARS].rpartition(',')[0]}, ..."


def _add_adapters(module: nn.Module, train: TrainSettings) -> None:
    from torch import nn

    chosen = {id(each) for found in _find(module, train.targets, "targets") for each in found.modules()}
    layers = [name for name, each in module.named_modules() if id(each) in chosen and isinstance(each, nn.Linear)]
    if not layers:
        raise ConfigError(f"policy.options.train.targets: {', '.join(train.targets)} hold no linear layer for adapters")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError(
            f"policy.options.train.mode is lora, which needs peft, and it is not installed: {install_hint('lora')}"
        ) from None
    config = LoraConfig(r=train.rank, lora_alpha=train.alpha, target_modules=layers)
    inject_adapter_in_model(config, module)  # only the adapters require gradients then


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """Returns the `state_dict` of the module without adapters that computes the same."""
    state = dict(module.state_dict())
    for name, each in module.named_modules():
        if (delta := getattr(each, "get_delta_weight", None)) is not None:
            weight = f"{name}.base_layer.weight"
            state[weight] = state[weight] + sum(delta(adapter) for adapter in each.lora_A)
    plain = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
    return {name.replace(".base_layer.", "."): tensor for name, tensor in plain.items()}


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that never change, by their names in `state_dict`."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


def shared_copy(module: ModuleT) -> ModuleT:
    """Returns a copy that shares with `module` the parameters that require no gradient.

    Raises ConfigError: the processes of the learner have divided `module`.
    """
    if any(hasattr(each, "full_tensor") for each in module.parameters()):
        raise ConfigError(
            "learner.compute.divide: this algorithm keeps a second copy of the policy, which cannot be divided; use bc "
            "or hg_dagger with learner.options.acting_rate: 1"
        )
    return copy.deepcopy(module, {id(parameter): parameter for parameter in frozen_parameters(module).values()})
