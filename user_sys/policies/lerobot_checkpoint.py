"""What a policy of LeRobot reads, by its settings or its ``config.json``: settings, features, statistics.

It imports neither torch nor LeRobot: the pictures that a run needs are checked before anything starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from hal.errors import SpecError, install_hint
from hal.settings import Limit, Positive, suggest
from hal.spec import ACTION, ENVIRONMENT_STATE, IMAGES, STATE, ArraySpec, CameraSpec, RobotSpec
from user_sys.errors import ConfigError, DataSetError
from user_sys.policies.policy import require_order
from user_sys.policies.scaling import feature_specs, require_vectors
from user_sys.policies.trainable import TrainSettings

TYPES = ("act", "diffusion", "pi0", "pi05", "smolvla")
CHUNK_LENGTHS = {"act": 100, "diffusion": 8, "pi0": 50, "pi05": 50, "smolvla": 50}  # LeRobot's defaults
CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
PREPROCESSOR_NAME, POSTPROCESSOR_NAME = "policy_preprocessor.json", "policy_postprocessor.json"
KNOWN_STEPS = frozenset(
    ("rename_observations_processor", "to_batch_processor", "device_processor", "tokenizer_processor")
    + ("normalizer_processor", "unnormalizer_processor", "relative_actions_processor", "absolute_actions_processor")
    + ("smolvla_new_line_processor", "pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step")
)
"""The steps of LeRobot's processors of `TYPES`. Others may run code of the checkpoint: LeRobot imports and calls any
``class`` that a step names, and its ``action_tokenizer_processor`` runs Python files of a tokenizer."""
TYPE_OF_VECTOR = {STATE: "STATE", ENVIRONMENT_STATE: "ENV"}
EMPTY_CAMERA = IMAGES + "empty_camera_"  # LeRobot fills such a camera by itself
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""Statistics of pictures scaled to [0, 1], by colour: LeRobot's default (torchvision's pretrained encoders)."""

Statistics = dict[str, dict[str, list[Any]]]


@dataclass(frozen=True)
class LeRobotSettings:
    """The settings of the policy `lerobot`.

    Attributes:
        path: a checkpoint: a folder, or a name on the Hugging Face hub. Without it, training starts from new weights.
        type: act, diffusion, smolvla, pi0 or pi05; needed without `path`.
        config: fields of LeRobot's configuration of that type, such as ``chunk_size``; others keep their values.
        cameras: that a new policy reads; empty for all of the robot.
        rename_map: feature of the robot to the name that the checkpoint has for it, such as
            ``{observation.images.front: observation.images.camera1}``; LeRobot's option of that name.
        statistics: that scale observations and actions. checkpoint: those of `path`. bounds: those of the robot's spec,
            and the default without `path`. Otherwise the folder of a LeRobot dataset. The weights of a run keep those
            with which its training started.
        tokenizer: folder or hub name of another tokenizer than the one that the checkpoint names.
        use_degrees: LeRobot's side has degrees where the robot's spec has rad, as by LeRobot's setting of that name of
            its arms. Observations and actions are converted, and a saved policy stays in degrees.
        resize: scales pictures to the size that the checkpoint has for them. Otherwise another size is an error.
        repeat_observation: a checkpoint that reads past observations gets the present one in their place.
        execute: actions of a chunk that the robot executes before the next one; 0 for LeRobot's ``n_action_steps``.
        rtc_guidance_max: greatest weight of RTC's guidance (smolvla, pi0, pi05); LeRobot's ``max_guidance_weight``.
        train: which parameters train, such as adapters (LoRA); full: those that LeRobot's configuration trains.
    """

    path: Path | None = None
    type: Literal["", "act", "diffusion", "smolvla", "pi0", "pi05"] = ""
    config: dict[str, Any] = field(default_factory=dict)
    cameras: tuple[str, ...] = ()
    rename_map: dict[str, str] = field(default_factory=dict)
    statistics: str = ""
    tokenizer: str = ""
    use_degrees: bool = False
    resize: bool = False
    repeat_observation: bool = False
    execute: Limit = 0
    rtc_guidance_max: Positive = 10.0
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        """Expands ``~`` in paths, which LeRobot does not."""
        if self.path is not None:
            object.__setattr__(self, "path", Path(os.path.expanduser(self.path)))
        for name in ("statistics", "tokenizer"):
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        if self.path is None and self.statistics == "checkpoint":
            raise ConfigError("statistics is checkpoint, and path names none; set it to bounds or a dataset's folder")
        if self.path is None and self.tokenizer:
            raise ConfigError(
                "tokenizer is for a checkpoint, and path names none; for smolvla set config.vlm_model_name"
            )
        if self.path is not None and self.cameras:
            raise ConfigError("cameras are those of the checkpoint in path; map their names with rename_map")

    @property
    def source(self) -> str:
        """The checkpoint or, without one, the type, for error messages."""
        return f"lerobot {self.type}" if self.path is None else str(self.path)


def lerobot_version() -> str:
    """The version of the installed LeRobot. Raises ConfigError if it is not installed."""
    try:
        return version("lerobot")
    except PackageNotFoundError:
        raise ConfigError(
            f"policy.kind lerobot needs LeRobot (0.4.4; for pi0 and pi05 0.6 on Python 3.12): {install_hint('lerobot')}"
        ) from None


@dataclass(frozen=True)
class PolicyFeatures:
    """What a policy of LeRobot reads of a robot.

    Attributes:
        type: of the policy, such as ``act``.
        vectors, cameras: what it reads.
        names: feature of the robot to its name in the checkpoint.
        sizes: camera to the (height, width) that the checkpoint has for it.
    """

    type: str
    vectors: tuple[ArraySpec, ...]
    cameras: tuple[CameraSpec, ...]
    names: Mapping[str, str]
    sizes: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, spec: RobotSpec, settings: LeRobotSettings, features: Sequence[str] = ()) -> PolicyFeatures:
        """Reads ``config.json`` of the checkpoint, or takes the robot's features for a new policy.

        Args:
            features: vectors that a new policy reads; empty for those of the robot that LeRobot has a type for. A
                checkpoint has its own.

        Raises:
            ConfigError: LeRobot is not installed, the checkpoint cannot be read, or `execute` is longer than a chunk.
            SpecError: the robot lacks what the policy reads, or its actions have another size.
        """
        lerobot_version()
        found = (cls._new if settings.path is None else cls._stored)(spec, settings, features)
        if settings.execute > (length := type_and_chunk_length(settings)[1]):
            raise ConfigError(
                f"policy.options.execute is {settings.execute}, and a chunk of {settings.source} has only {length} "
                "actions: give at most that many, or 0"
            )
        if settings.use_degrees and not found.has_rad(spec):
            raise ConfigError(f"policy.options.use_degrees: {spec.model} has no angle in rad; remove the setting")
        return found

    @classmethod
    def _new(cls, spec: RobotSpec, settings: LeRobotSettings, features: Sequence[str]) -> PolicyFeatures:
        if not settings.type:
            raise ConfigError(
                f"policy.options: give path, a LeRobot checkpoint, or type, one of {', '.join(sorted(TYPES))}"
            )
        by_name = {camera.name: camera for camera in spec.cameras}
        if unknown := [name for name in settings.cameras if name not in by_name]:
            raise SpecError(
                f"policy.options.cameras: {spec.model} has no camera {unknown[0]!r}; {suggest(unknown[0], by_name)}"
            )
        require_vectors(spec, features, "a new policy of LeRobot", "choose another policy.kind")
        named = feature_specs(spec, features)
        vectors = tuple(each for each in named if each.name in TYPE_OF_VECTOR)
        if not vectors or (features and vectors != named):
            raise SpecError(
                f"policy.features: LeRobot's policies read {' and '.join(TYPE_OF_VECTOR)}, and not "
                f"{', '.join(each.name for each in named if each not in vectors)}"
            )
        require_order("policy.options.cameras", settings.cameras, [*by_name])
        cameras = tuple(by_name[name] for name in settings.cameras or by_name)
        names = {name: name for name in (*(each.name for each in vectors), *(each.feature for each in cameras))}
        return cls(settings.type, vectors, cameras, names, {each.name: each.shape[:2] for each in cameras})

    @classmethod
    def _stored(cls, spec: RobotSpec, settings: LeRobotSettings, features: Sequence[str]) -> PolicyFeatures:
        stored = _read_config(settings)
        kind, inputs = stored.get("type", ""), stored.get("input_features") or {}
        if kind not in TYPES:
            raise ConfigError(f"{settings.path} holds a policy of type {kind!r}; supported are {', '.join(TYPES)}")
        if settings.type not in ("", kind):
            raise ConfigError(f"policy.options.type is {settings.type}, and {settings.path} holds a policy of {kind}")
        own_name = {theirs: ours for ours, theirs in settings.rename_map.items()}
        wanted = {
            own_name.get(name, name): (name, tuple(each["shape"]))
            for name, each in inputs.items()
            if not name.startswith(EMPTY_CAMERA)
        }
        known: dict[str, tuple[int, ...]] = {each.name: each.shape for each in spec.observation}
        known |= {each.feature: () for each in spec.cameras}
        for ours, (theirs, shape) in wanted.items():
            if ours not in known:
                raise SpecError(
                    f"{settings.path} reads {theirs}, and {spec.model} has {', '.join(known)}; name the one to read in "
                    f"policy.options.rename_map, such as {{{_similar(theirs, known)}: {theirs}}}"
                )
            if known[ours] and known[ours] != shape:
                raise SpecError(
                    f"{settings.path} reads {theirs} with {shape[0]} elements; that of {spec.model} has "
                    f"{known[ours][0]}: take a checkpoint that was trained on this robot"
                )
        action = (stored.get("output_features") or {}).get("action", {}).get("shape")
        if action is None or tuple(action) != spec.action.shape:
            raise SpecError(
                f"{settings.path} gives actions of {action[0] if action else 0} elements, and {spec.model} takes "
                f"{spec.action.shape[0]}: take a checkpoint that was trained on this robot"
            )
        vectors = tuple(each for each in spec.observation if each.name in wanted)
        if features and (*features,) != tuple(each.name for each in vectors):
            read = ", ".join(each.name for each in vectors)
            raise SpecError(f"policy.features: {settings.path} reads {read}; remove the setting")
        cameras = tuple(each for each in spec.cameras if each.feature in wanted)
        sizes = {each.name: _height_width(wanted[each.feature][1]) for each in cameras}
        for camera in cameras:
            if sizes[camera.name] != camera.shape[:2] and not settings.resize:
                height, width = sizes[camera.name]
                raise SpecError(
                    f"{settings.path} reads pictures of {width}x{height} pixels of {camera.name}, and that of "
                    f"{spec.model} gives {camera.width}x{camera.height}; set policy.options.resize: true, or the "
                    "camera to that size"
                )
        return cls(kind, vectors, cameras, {ours: theirs for ours, (theirs, _) in wanted.items()}, sizes)

    def arrays(self, spec: RobotSpec) -> dict[str, ArraySpec]:
        """The vectors that the policy reads, and the action, by the checkpoint's name."""
        return {**{self.names[each.name]: each for each in self.vectors}, ACTION: spec.action}

    def has_rad(self, spec: RobotSpec) -> bool:
        """Whether one of `arrays` has an angle in rad."""
        return any((each.degrees_per_unit != 1.0).any() for each in self.arrays(spec).values())

    def input_features(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """By the checkpoint's name: LeRobot's feature type and shape; pictures are (3, height, width)."""
        vectors = {self.names[each.name]: (TYPE_OF_VECTOR[each.name], each.shape) for each in self.vectors}
        pictures = {self.names[each.feature]: ("VISUAL", (3, *self.sizes[each.name])) for each in self.cameras}
        return {**vectors, **pictures}

    def statistics(self, spec: RobotSpec, settings: LeRobotSettings) -> Statistics | None:
        """Returns LeRobot's dataset statistics by feature, or None for those of the checkpoint.

        Raises:
            ConfigError: the folder in `settings.statistics` is no LeRobot dataset, or an export of ours in other units.
        """
        wanted = settings.statistics or ("bounds" if settings.path is None else "checkpoint")
        if wanted == "checkpoint":
            return None
        if wanted == "bounds":
            bounds = {
                name: _statistics_of_bounds(each, settings.use_degrees) for name, each in self.arrays(spec).items()
            }
            return bounds | {self.names[each.feature]: _picture_statistics() for each in self.cameras}
        path = Path(wanted) / "meta" / "stats.json"
        try:
            found: Statistics = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"policy.options.statistics: {path} cannot be read ({error}); give checkpoint, bounds, or the folder "
                "of a LeRobot dataset v3"
            ) from None
        if self.has_rad(spec):
            _require_unit(Path(wanted), settings.use_degrees)
        renamed = {self.names.get(name, name): each for name, each in found.items()}
        return renamed | {self.names[each.feature]: _picture_statistics() for each in self.cameras}


def type_and_chunk_length(settings: LeRobotSettings) -> tuple[str, int]:
    """Returns a policy's type, and the actions of its chunks: of a diffusion those that LeRobot keeps.

    Raises ConfigError: the checkpoint cannot be read.
    """
    config = settings.config if settings.path is None else _read_config(settings) | settings.config
    kind = settings.type or str(config.get("type", ""))
    name = "n_action_steps" if kind == "diffusion" else "chunk_size"
    return kind, int(config.get(name) or CHUNK_LENGTHS.get(kind, 1))


def executed_actions(settings: LeRobotSettings) -> int:
    """Returns how many actions of a chunk the robot executes. Raises ConfigError: the checkpoint cannot be read."""
    config = settings.config if settings.path is None else _read_config(settings) | settings.config
    kind, length = type_and_chunk_length(settings)
    usual = min(length, CHUNK_LENGTHS.get(kind, length))
    return settings.execute or int(config.get("n_action_steps") or usual)


def stored_device(settings: LeRobotSettings) -> str | None:
    """Returns the device on which LeRobot's tools use the checkpoint; None if they choose it, as of a new policy.

    Raises ConfigError: the checkpoint cannot be read.
    """
    device = None if settings.path is None else _read_config(settings).get("device")
    return None if device is None else str(device)


def find_checkpoint_file(settings: LeRobotSettings, name: str) -> Path:
    """Returns the path of a file of the checkpoint, from the hub if need be.

    Raises:
        ConfigError: there is no such file.
    """
    folder = Path(str(settings.path))
    if folder.is_dir():
        if (folder / name).is_file():
            return folder / name
        inner = folder / "pretrained_model"
        hint = f"give {inner}" if (inner / name).is_file() else "give the folder that save_pretrained wrote"
        raise ConfigError(f"policy.options.path: {folder} has no {name}; {hint}")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo_id=str(settings.path), filename=name))
    except Exception as error:  # the hub fails in many ways, also by its own checks of the name
        raise ConfigError(
            f"policy.options.path: {settings.path} is no folder, and the Hugging Face hub gives no {name} of that name "
            f"({one_line(error)})"
        ) from None


def checkpoint_folder(settings: LeRobotSettings) -> Path:
    """Returns the folder of the checkpoint. One on the hub is downloaded, all its files of one commit.

    Raises ConfigError: LeRobot is not installed, or the hub has no such checkpoint.
    """
    lerobot_version()
    folder = Path(str(settings.path))
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(folder), allow_patterns=[CONFIG_NAME, WEIGHTS_NAME, "policy_*"]))
    except Exception as error:  # as in `find_checkpoint_file`
        raise ConfigError(f"policy.options.path: {folder} cannot be downloaded ({one_line(error)})") from None


def require_known_steps(settings: LeRobotSettings, name: str) -> None:
    """Raises ConfigError: the checkpoint has no such file of processors, or it names a step beyond `KNOWN_STEPS`."""
    path = find_checkpoint_file(settings, name)
    try:
        steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
        unknown = [step for step in steps if step.get("registry_name") not in KNOWN_STEPS]
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(f"policy.options.path: {path} has no processors of LeRobot ({one_line(error)})") from None
    if unknown:
        step = str(unknown[0].get("registry_name") or unknown[0].get("class"))[:80]
        raise ConfigError(
            f"policy.options.path: {path} has the step {step!r}, which is none of LeRobot's {', '.join(TYPES)} and may "
            "run any code; take a checkpoint without it"
        )


def one_line(error: Exception) -> str:
    """Returns the first line of a foreign error, at most 200 characters, with its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _read_config(settings: LeRobotSettings) -> dict[str, Any]:
    path = find_checkpoint_file(settings, CONFIG_NAME)
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = [each["shape"] for each in (stored.get("input_features") or {}).values()]
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(f"policy.options.path: {path} is no configuration of LeRobot ({one_line(error)})") from None
    return stored


def _height_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """LeRobot's shape of a picture is (3, height, width)."""
    return shape[1], shape[2]


def _similar(theirs: str, known: Mapping[str, object]) -> str:
    """A feature of the robot of the same kind as `theirs`, for an example."""
    return next((name for name in known if name.startswith(IMAGES) == theirs.startswith(IMAGES)), theirs)


def _statistics_of_bounds(spec: ArraySpec, in_degrees: bool) -> dict[str, list[Any]]:
    """Statistics by which both of LeRobot's scalings map the bounds to [-1, 1]; elements without bounds stay."""
    low, high = list(spec.low), list(spec.high)
    for index, (lower, upper) in enumerate(zip(spec.low, spec.high, strict=True)):
        if not (-float("inf") < lower < upper < float("inf")):
            low[index], high[index] = -1.0, 1.0
    if in_degrees:
        low, high = ((spec.degrees_per_unit * bounds).tolist() for bounds in (low, high))
    mean = [(lower + upper) / 2 for lower, upper in zip(low, high, strict=True)]
    half = [(upper - lower) / 2 for lower, upper in zip(low, high, strict=True)]
    return {"min": low, "max": high, "mean": mean, "std": half, **dict.fromkeys(("q01", "q10"), low)} | dict.fromkeys(
        ("q90", "q99"), high
    )


def _require_unit(folder: Path, use_degrees: bool) -> None:
    """Raises ConfigError: the dataset is an export of ours with angles in the other unit, or that cannot be read."""
    if not (folder / "meta/episodes").is_dir():
        return
    try:
        from user_sys.interchange.lerobot_import import recorded_units

        found = recorded_units(folder)
    except ImportError:
        hint = install_hint("interchange")
        raise ConfigError(f"policy.options.statistics: the unit of angles in {folder} is not read: {hint}") from None
    except DataSetError as error:
        raise ConfigError(f"policy.options.statistics: {error}") from None
    if (not use_degrees) in found:
        unit, option = ("rad", "with") if use_degrees else ("degrees", "without")
        raise ConfigError(
            f"policy.options.use_degrees is {str(use_degrees).lower()}, and the angles of {folder} are exported in "
            f"{unit}: for policy.options.statistics, export it {option} user-sys store export --use-degrees"
        )


def _picture_statistics() -> dict[str, list[Any]]:
    """Of shape (3, 1, 1), for pictures scaled to [0, 1]."""
    values = {**IMAGENET, "min": (0.0,) * 3, "max": (1.0,) * 3}
    return {name: [[[value]] for value in colours] for name, colours in values.items()}
