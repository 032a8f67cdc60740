"""LeRobot's policies: ACT, Diffusion, SmolVLA, pi0 and pi0.5, from a checkpoint or with new weights.

The policy, its loss, its processors and their statistics are LeRobot's own (`PreTrainedPolicy`,
`PolicyProcessorPipeline`). This module gives them our observations and batches, and saves what LeRobot's tools load. It
works with LeRobot 0.4.4 and 0.6, which is imported when a policy is built.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hal.errors import SpecError
from hal.spec import ACTION, Array, ArraySpec, RobotSpec
from user_sys.errors import ConfigError
from user_sys.policies.lerobot_checkpoint import (
    POSTPROCESSOR_NAME,
    PREPROCESSOR_NAME,
    WEIGHTS_NAME,
    LeRobotSettings,
    PolicyFeatures,
    checkpoint_folder,
    find_checkpoint_file,
    lerobot_version,
    one_line,
    require_known_steps,
    stored_device,
    type_and_chunk_length,
)
from user_sys.policies.networks import Affine
from user_sys.policies.policy import ExecutionMethod
from user_sys.policies.rtc import ChunkPrefix, guided_velocity
from user_sys.policies.torch_policy import PromisedActions, TorchPolicy
from user_sys.policies.trainable import merged_state

WITH_SENTENCE = ("smolvla", "pi0", "pi05")
CALLS_NO_BLOCK = ("diffusion", "smolvla", "pi0", "pi05")  # but the parts of their blocks
WITHOUT_MASK = ("pi0", "pi05")  # their losses count the actions past an episode's end
NEVER_DOWNLOADED: dict[str, Any] = {"load_vlm_weights": False, "pretrained_backbone_weights": None}
"""Fields that load weights of parts from the hub; a checkpoint has them itself."""
WEIGHTS_NOT_LOADED = "Could not load"  # printed by LeRobot's pi0, which then goes on with new weights
_RANGE = ("min", "max", "mean", "std")  # statistics of a feature
STATISTICS_OF = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
"""The statistics by which each of LeRobot's modes scales a feature."""
EVALUATION_SEED = 0  # of the noise of deterministic chunks


class LeRobotProcessors:
    """LeRobot's processors of one policy, which all copies of the policy share.

    Attributes:
        pipelines: before and after the policy, as LeRobot saves them.
    """

    def __init__(self, pipelines: tuple[Any, Any], arrays: Mapping[str, ArraySpec], use_degrees: bool = False) -> None:
        """Args:
        arrays: the vectors that the policy reads, and the action, by LeRobot's name.
        use_degrees: LeRobot's side has degrees where these have rad.
        """
        from lerobot.processor import DeviceProcessorStep

        self.pipelines, self._arrays = pipelines, arrays
        self._scales = {  # to LeRobot's units
            name: torch.tensor(each.degrees_per_unit, dtype=torch.float32)
            for name, each in arrays.items()
            if use_degrees
        }
        # The tensors are on the right device already.
        self._before, self._after = (
            [step for step in each.steps if not isinstance(step, DeviceProcessorStep)] for each in pipelines
        )
        steps = [step for step in (*self._before, *self._after) if hasattr(step, "norm_map")]
        self._scaling = [(step, _scaled_by(step, number)) for number, step in enumerate(steps)]

    def __deepcopy__(self, memo: object) -> LeRobotProcessors:
        return self

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the scaled and tokenized batch that the policy reads, of one in the units of the robot."""
        from lerobot.processor.converters import batch_to_transition, transition_to_batch

        scales = {name: scale.to(batch[name].device) for name, scale in self._scales.items() if name in batch}
        transition = batch_to_transition(batch | {name: batch[name] * scale for name, scale in scales.items()})
        for step in self._before:
            transition = step(transition)
        prepared: dict[str, Any] = transition_to_batch(transition)
        return prepared

    def unscale(self, actions: Tensor) -> Tensor:
        """Returns actions in the units of the robot."""
        from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action

        transition = policy_action_to_transition(actions)
        for step in self._after:
            transition = step(transition)
        unscaled: Tensor = transition_to_policy_action(transition)
        return unscaled / self._scales[ACTION].to(unscaled.device) if self._scales else unscaled

    def require_statistics(self, source: str) -> None:
        """Raises ConfigError if a feature is to be scaled and has no statistics; LeRobot would not scale it."""
        scaled = [(step.state_dict(), *each) for step, names in self._scaling for each in names.values()]
        if missing := [feature for known, feature, name in scaled if f"{feature}.{name}" not in known]:
            raise ConfigError(
                f"{source} has no statistics of {missing[0]}, by which it is scaled; set policy.options.statistics "
                "to the folder of the LeRobot dataset that it was trained on, or to bounds"
            )

    def require_angles(self, source: str) -> None:
        """Raises SpecError if the statistics of an angle are far outside its bounds, as if it were in other units."""
        hint = "if it is in degrees, set policy.options.use_degrees: true"
        hint = "take a checkpoint and statistics of this robot" if self._scales else hint
        for step in (*self._before, *self._after):
            state = step.state_dict() if hasattr(step, "norm_map") else {}
            for name, each in self._arrays.items():
                if (found := _range_of(state, name)) is None or found[0].shape != each.shape:
                    continue
                scale = each.degrees_per_unit if self._scales else 1.0
                if far := each.find_far_angle(found[0] / scale, found[1] / scale):
                    raise SpecError(f"{source}: by the statistics of {name}, {far}; {hint}")

    def statistics(self) -> dict[str, Array]:
        """Returns copies of what scales features, by a name for each: the bits of float32 as int32.

        Published weights may be rounded to bfloat16, and integers are not.
        """
        found: dict[str, Array] = {}
        for step, names in self._scaling:
            known = step.state_dict()
            found |= {key: np.array(known[f"{feature}.{name}"].float()) for key, (feature, name) in names.items()}
        return {key: values.view(np.int32) for key, values in found.items()}

    def use(self, statistics: Mapping[str, Tensor]) -> None:
        """From now on scales by `statistics`, of this policy or another; see `statistics`."""
        for step, names in self._scaling:
            stats: dict[str, dict[str, Tensor]] = {}
            for key, (feature, name) in names.items():
                stats.setdefault(feature, {})[name] = statistics[key].view(torch.float32)
            step.stats = stats
            step.to(next((each.device for each in statistics.values()), None), torch.float32)


def _scaled_by(step: Any, number: int) -> dict[str, tuple[str, str]]:
    """Returns feature and name of the statistics that scale in the step, by a name that a buffer can have."""
    modes = {kind.value: mode.value for kind, mode in step.norm_map.items()}
    used = {feature: STATISTICS_OF.get(modes.get(of.type.value, ""), ()) for feature, of in step.features.items()}
    pairs = [(feature, name) for feature, names in used.items() for name in names]
    return {f"{number}/{feature}/{name}".replace(".", "/"): (feature, name) for feature, name in pairs}


def _range_of(state: Mapping[str, Tensor], name: str) -> tuple[Array, Array] | None:
    """The least and greatest value (n,) in statistics, or one standard deviation about the mean; None without them."""
    values = {kind: state[f"{name}.{kind}"].flatten().double().numpy() for kind in _RANGE if f"{name}.{kind}" in state}
    if {"min", "max"} <= values.keys():
        return values["min"], values["max"]
    if {"mean", "std"} <= values.keys():
        return values["mean"] - values["std"], values["mean"] + values["std"]
    return None


class LeRobotNetwork(nn.Module):
    """A policy of LeRobot as our algorithms train it; a `user_sys.algorithms.algorithm.ImitationPolicy`.

    Attributes:
        network: LeRobot's policy.
        scaling: the statistics that scale observations and actions, part of the weights; see `LeRobotProcessors`.
        features, cameras: names of the vectors and cameras that it reads.
        chunk_length: actions from the present step on of a training sample.
        frozen_from: -1: no encoder of ours is frozen.
        noise_shape: of the noise of one chunk; None for ACT, which draws none.
        execute: actions of a chunk that LeRobot executes before the next one.
        is_pretrained: its first weights are of a checkpoint, so that robots may act with them.
    """

    frozen_from = -1

    def __init__(
        self,
        network: Any,
        processors: LeRobotProcessors,
        found: PolicyFeatures,
        is_pretrained: bool = False,
        device: str | None = None,
    ) -> None:
        """Args:
        network: LeRobot's policy, on the CPU.
        device: for LeRobot's tools, which choose it if it is None.
        """
        super().__init__()
        self.network, self.processors = network.float().train(), processors
        self.scaling = Affine(persistent=True, **processors.statistics())
        self._found, self.is_pretrained, self._device, config = found, is_pretrained, device, network.config
        self.features = tuple(each.name for each in found.vectors)
        self.cameras = tuple(each.name for each in found.cameras)
        deltas: Sequence[int] = config.action_delta_indices
        self._before, self.chunk_length = max(0, -deltas[0]), deltas[-1] + 1
        self._observations = 0 if config.observation_delta_indices is None else len(config.observation_delta_indices)
        self.execute: int = config.n_action_steps
        size: int = config.action_feature.shape[0]
        self.noise_shape: tuple[int, int] | None = (len(deltas), getattr(config, "max_action_dim", size))
        if found.type == "act":
            self.noise_shape = None

    @property
    def draws_between_steps(self) -> bool:
        """A chunk depends on more draws than its noise: a diffusion by DDPM."""
        scheduler = getattr(self.network.config, "noise_scheduler_type", "")
        return bool(scheduler == "DDPM")

    def batch_loss(
        self, observation: Mapping[str, Tensor], sentences: Sequence[str], action: Tensor, mask: Tensor
    ) -> Tensor:
        """See `ImitationPolicy.batch_loss`. LeRobot's policies that give one loss for a batch give it to each sample.

        Raises:
            ConfigError: a sample has no sentence, and the policy reads it.
        """
        inputs = self._inputs(observation, sentences)
        if self._found.type in WITH_SENTENCE and not all(sentences):
            raise ConfigError(
                f"{self._found.type} reads the instruction of an episode, and stored episodes have none; set "
                "options.sentence of the robot's driver, or give the imported dataset a task"
            )
        # LeRobot's samples may begin before the present step, which ours do not: these actions carry no loss.
        first = torch.arange(-self._before, self.chunk_length, device=action.device)
        inputs["action"] = action[:, first.clamp(min=0)]
        inputs["action_is_pad"] = ~mask[:, first.clamp(min=0)] | (first < 0)
        prepared = self.processors.prepare(inputs)
        is_pad = prepared["actions_id_pad"] = prepared["action_is_pad"]  # as SmolVLA of LeRobot 0.4 has it
        if self._found.type not in WITH_SENTENCE:
            loss: Tensor = self.network(prepared)[0]
            return loss.expand(len(action))
        masked = _losses_without(is_pad, self.network.model) if self._found.type in WITHOUT_MASK else _unchanged()
        with masked:
            losses: Tensor = self.network(prepared, reduction="none")[0]
        return losses

    def chunks_from_noise(
        self,
        observation: Mapping[str, Tensor],
        sentences: Sequence[str],
        noise: Tensor | None,
        promised: PromisedActions | None = None,
        guidance_max: float = 0.0,
    ) -> Tensor:
        """Returns chunks (n, H, a) in the robot's units, from `noise` (n, *noise_shape). No gradient.

        With `promised`, RTC guides them to continue the promised actions, with a weight of `guidance_max` at most.
        """
        inputs = self._inputs(observation, sentences)
        if promised is not None and promised.actions.shape[1]:
            inputs["action"] = promised.actions
        prepared = self.processors.prepare(inputs)
        if self._found.type == "act":
            actions = self.network.predict_action_chunk(prepared)
        elif self._found.type == "diffusion":
            pictures = [prepared[name] for name in self.network.config.image_features]
            if pictures:
                prepared["observation.images"] = torch.stack(pictures, dim=-4)
            actions = self.network.diffusion.generate_actions(prepared, noise=noise)
        else:
            scaled = prepared.pop("action", None)
            guided = _unchanged()
            if promised is not None and scaled is not None and self.noise_shape is not None:
                padded = F.pad(scaled, (0, self.noise_shape[1] - scaled.shape[-1]))
                prefix = ChunkPrefix.of(padded, promised.count, promised.delay, self.chunk_length)
                guided = _guided_by(RtcGuidance(prefix, guidance_max), self.network.model)
            with guided:
                actions = self.network.predict_action_chunk(prepared, noise=noise)
        return self.processors.unscale(actions)

    def export(self, folder: Path) -> None:
        """Writes the policy with its processors, as LeRobot's tools load them, into the new folder `folder`."""
        config = self.network.config
        self.processors.use(dict(self.scaling.named_buffers()))
        used, config.device = config.device, self._device
        self.network.save_pretrained(folder)
        config.device = used
        for pipeline in self.processors.pipelines:
            pipeline.save_pretrained(folder)

    def _inputs(self, observation: Mapping[str, Tensor], sentences: Sequence[str]) -> dict[str, Any]:
        """Returns LeRobot's batch: its names, pictures float32 (n, 3, h, w) in [0, 1], past observations.

        The processors, which all copies of the policy share, scale by the statistics of this one from then on.
        """
        self.processors.use(dict(self.scaling.named_buffers()))
        found, inputs = self._found, dict[str, Any]()
        for name in self.features:
            inputs[found.names[name]] = observation[name]
        for camera in found.cameras:
            picture = observation[camera.feature].permute(0, 3, 1, 2).float() / 255
            if (size := found.sizes[camera.name]) != tuple(picture.shape[-2:]):
                picture = F.interpolate(picture, size, mode="bilinear", antialias=True)
            inputs[found.names[camera.feature]] = picture
        if self._observations:
            for name, value in inputs.items():
                inputs[name] = value[:, None].expand(-1, self._observations, *value.shape[1:])
        inputs["task"] = list(sentences)
        return inputs


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    yield


@contextlib.contextmanager
def _losses_without(is_pad: Tensor, model: Any) -> Iterator[None]:
    """Within it, the losses (n, H, a) that `model.forward` returns are 0 where `is_pad` (n, H)."""
    forward: Callable[..., Tensor] = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs).masked_fill(is_pad[..., None], 0.0)
    try:
        yield
    finally:
        del model.forward  # the method of the class again


class RtcGuidance:
    """What LeRobot's models call in place of its `RTCProcessor`, which has one delay for all robots of a batch."""

    def __init__(self, prefix: ChunkPrefix, guidance_max: float) -> None:
        self._prefix, self._guidance_max = prefix, guidance_max

    def is_debug_enabled(self) -> bool:
        return False

    def denoise_step(
        self,
        x_t: Tensor,
        prev_chunk_left_over: object,
        inference_delay: object,
        time: float,
        original_denoise_step_partial: Callable[[Tensor], Tensor],
        execution_horizon: object = None,
    ) -> Tensor:
        """Returns the guided velocity (n, H, a). LeRobot's time runs from 1, noise, to 0, and its velocity too."""
        guided = guided_velocity(
            lambda x: -original_denoise_step_partial(x),
            x_t,
            1 - float(time),
            self._prefix,
            self._guidance_max,
            through_network=False,
        )
        return -guided


@contextlib.contextmanager
def _guided_by(guidance: RtcGuidance, model: Any) -> Iterator[None]:
    """Within it, LeRobot's `model` draws chunks by RTC."""
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    before = model.config.rtc_config, model.rtc_processor
    model.config.rtc_config, model.rtc_processor = RTCConfig(enabled=True), guidance
    try:
        yield
    finally:
        model.config.rtc_config, model.rtc_processor = before


def build_network(spec: RobotSpec, settings: LeRobotSettings, found: PolicyFeatures) -> LeRobotNetwork:
    """Builds LeRobot's policy with its processors, on the CPU.

    Raises:
        ConfigError: LeRobot cannot build or load it.
        SpecError: its angles are in other units than the robot's.
    """
    with _translated(settings, "is it of another version of LeRobot, or is a field of policy.options.config wrong?"):
        config = _configuration(spec, settings, found)
    if config.n_obs_steps > 1 and not settings.repeat_observation:
        raise ConfigError(
            f"{settings.source} reads the last {config.n_obs_steps} observations, and a robot sends the present one; "
            "set policy.options.repeat_observation: true to repeat it, as LeRobot does at an episode's start"
        )
    changed = {name: getattr(config, name) for name in NEVER_DOWNLOADED if settings.path and hasattr(config, name)}
    for name in changed:
        setattr(config, name, NEVER_DOWNLOADED[name])
    with _translated(settings, "are the weights of this configuration, and is what it names on this computer?"):
        network = _network(settings, config)
    for name, value in changed.items():
        setattr(config, name, value)
    pipelines = _pipelines(spec, settings, found, config)
    processors = LeRobotProcessors(pipelines, found.arrays(spec), settings.use_degrees)
    processors.require_statistics(settings.source)
    processors.require_angles(settings.source)
    return LeRobotNetwork(network, processors, found, settings.path is not None, stored_device(settings))


def _configuration(spec: RobotSpec, settings: LeRobotSettings, found: PolicyFeatures) -> Any:
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import make_policy_config

    if settings.path is not None:
        stored = PreTrainedConfig.from_pretrained(settings.path)
        config = replace(stored, device="cpu", **_with_tuples(type(stored), settings.config))
    else:
        features = {
            name: PolicyFeature(type=FeatureType[kind], shape=shape)
            for name, (kind, shape) in found.input_features().items()
        }
        action = {"action": PolicyFeature(type=FeatureType.ACTION, shape=spec.action.shape)}
        chosen = _with_tuples(PreTrainedConfig.get_choice_class(found.type), settings.config)
        options = {"n_obs_steps": 1, "device": "cpu", **chosen}
        config = make_policy_config(found.type, input_features=features, output_features=action, **options)
    if hasattr(config, "do_mask_loss_for_padding"):
        config.do_mask_loss_for_padding = True
    return config


def _with_tuples(kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `options` with tuples in place of YAML's lists where a field of LeRobot's configuration is a tuple."""
    declared = {each.name for each in fields(kind) if "tuple" in str(each.type)}
    return {name: tuple(value) if name in declared and value else value for name, value in options.items()}


def _network(settings: LeRobotSettings, config: Any) -> Any:
    from lerobot.policies.factory import get_policy_class

    printed = io.StringIO()
    kind = get_policy_class(config.type)
    with contextlib.redirect_stdout(printed):
        if settings.path is None:
            return kind(config)
        find_checkpoint_file(settings, WEIGHTS_NAME)
        network = kind.from_pretrained(settings.path, config=config, strict=True)
    if WEIGHTS_NOT_LOADED in printed.getvalue():
        lines = [line for line in printed.getvalue().splitlines() if WEIGHTS_NOT_LOADED in line]
        raise RuntimeError(lines[0])
    return network


def _pipelines(spec: RobotSpec, settings: LeRobotSettings, found: PolicyFeatures, config: Any) -> tuple[Any, Any]:
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.processor import DeviceProcessorStep

    statistics, tensors = found.statistics(spec, settings), None
    if statistics is not None:
        tensors = {name: {key: torch.tensor(value) for key, value in each.items()} for name, each in statistics.items()}
    if settings.path is None:
        options: dict[str, Any] = {"dataset_stats": tensors}
    else:
        _require_processors(settings)
        chosen = {"device_processor": {"device": "cpu"}}  # that of the checkpoint may not exist here
        chosen |= {"tokenizer_processor": {"tokenizer_name": settings.tokenizer}} if settings.tokenizer else {}
        scaling = {} if tensors is None else {"stats": tensors}
        options = {
            "pretrained_path": str(settings.path),
            "preprocessor_overrides": chosen | ({"normalizer_processor": scaling} if scaling else {}),
            "postprocessor_overrides": {"unnormalizer_processor": scaling} if scaling else {},
        }
    with _translated(settings, "is its tokenizer on this computer? policy.options.tokenizer names another"):
        before, after = make_pre_post_processors(config, **options)
    for step in before.steps:
        if isinstance(step, DeviceProcessorStep):
            step.device = stored_device(settings) or step.device  # it is saved, and never called
    return before, after


def _require_processors(settings: LeRobotSettings) -> None:
    try:
        find_checkpoint_file(settings, PREPROCESSOR_NAME)
    except ConfigError:
        raise ConfigError(
            f"{settings.path} has no {PREPROCESSOR_NAME}: a LeRobot before 0.4 saved it; convert it with "
            f"python -m lerobot.processor.migrate_policy_normalization --pretrained-path {settings.path}"
        ) from None
    for name in (PREPROCESSOR_NAME, POSTPROCESSOR_NAME):
        require_known_steps(settings, name)


@contextlib.contextmanager
def _translated(settings: LeRobotSettings, question: str) -> Iterator[None]:
    """Translates errors of LeRobot, which are of many kinds. Raises ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"policy.options: LeRobot {lerobot_version()} cannot make {settings.source} ({one_line(error)}); {question}"
        ) from error


class LeRobotPolicy(TorchPolicy):
    """Acts with LeRobot's policy. A deterministic chunk starts from fixed noise."""

    settings = LeRobotSettings

    @classmethod
    def check_recompute(cls, settings: LeRobotSettings) -> None:
        """See `TrainablePolicy.check_recompute`. Raises ConfigError also if there is no such checkpoint."""
        if (kind := type_and_chunk_length(settings)[0]) in CALLS_NO_BLOCK:
            own = (
                "" if kind == "smolvla" else "set policy.options.config.gradient_checkpointing: true (LeRobot 0.6), or "
            )
            raise ConfigError(
                f"learner.compute.recompute has no effect on most layers of LeRobot's {kind}: {own}raise "
                "learner.compute.parts, or train less (policy.options.train)"
            )

    @classmethod
    def execution_delays(cls, settings: LeRobotSettings) -> dict[ExecutionMethod, int]:
        """See `TrainablePolicy.execution_delays`; flows can do RTC. Raises ConfigError: no such checkpoint."""
        kind, length = type_and_chunk_length(settings)
        methods: tuple[ExecutionMethod, ...] = ("switch", "ensemble", "rtc")
        return dict.fromkeys(methods if kind in WITH_SENTENCE else methods[:2], length // 2)

    @classmethod
    def reads_files(cls, settings: LeRobotSettings) -> bool:
        """See `TrainablePolicy.reads_files`."""
        return True

    def __init__(
        self,
        spec: RobotSpec,
        *,
        settings: LeRobotSettings | None = None,
        features: Sequence[str] = (),
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """See `TrainablePolicy`. Raises ConfigError as `build_network`."""
        options = settings or LeRobotSettings()
        read = [each.name for each in PolicyFeatures.of(spec, options, features).vectors]
        super().__init__(spec, settings=options, features=read, seed=seed, device=device)
        self.options = replace(options, execute=options.execute or self.module.execute)
        self._spec = spec

    @classmethod
    def select_cameras(cls, spec: RobotSpec, settings: LeRobotSettings) -> tuple[str, ...]:
        """See `TrainablePolicy.select_cameras`; those of the checkpoint."""
        return tuple(camera.name for camera in PolicyFeatures.of(spec, settings).cameras)

    @classmethod
    def make_module(
        cls, spec: RobotSpec, *, settings: LeRobotSettings | None = None, features: Sequence[str] = ()
    ) -> nn.Module:
        """See `TrainablePolicy.make_module`. Raises ConfigError as `build_network`."""
        options = settings or LeRobotSettings()
        if options.path is not None:  # from here on the hub cannot give other files than those that are checked
            options = replace(options, path=checkpoint_folder(options))
        return build_network(spec, options, PolicyFeatures.of(spec, options, features))

    def export(self, folder: Path) -> None:
        """See `ExportablePolicy`: what LeRobot's ``save_pretrained`` writes, with the processors; LoRA is merged."""
        plain: Any = self.make_module(self._spec, settings=self.options, features=self.module.features)
        plain.load_state_dict(merged_state(self.module))
        plain.export(folder)

    def draw(
        self, observation: Mapping[str, Tensor], *, deterministic: bool, promised: PromisedActions | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `TorchPolicy.draw`."""
        n = len(self.sentences)
        if deterministic and n > 1 and self.module.draws_between_steps:  # each robot gets the draws that it gets alone
            rows = [{name: value[row : row + 1] for name, value in observation.items()} for row in range(n)]
            actions = torch.cat([self._chunks(each, [s], True) for each, s in zip(rows, self.sentences, strict=True)])
        else:
            guiding = promised if promised is not None and promised.method == "rtc" else None
            actions = self._chunks(observation, self.sentences, deterministic, guiding)
        return actions, torch.full(actions.shape[:2], float("nan"))

    def _chunks(
        self,
        observation: Mapping[str, Tensor],
        sentences: Sequence[str],
        deterministic: bool,
        promised: PromisedActions | None = None,
    ) -> Tensor:
        seed = EVALUATION_SEED if deterministic else int(torch.randint(2**62, (), generator=self._generator))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            shape, n = self.module.noise_shape, len(sentences)
            noise = None if shape is None else torch.randn(1 if deterministic else n, *shape).expand(n, -1, -1)
            noise = None if noise is None else noise.to(self._device)
            chunks: Tensor = self.module.chunks_from_noise(
                observation, sentences, noise, promised, self.options.rtc_guidance_max
            )
            return chunks
