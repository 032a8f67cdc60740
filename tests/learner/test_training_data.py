"""What an algorithm gets to train on, from a store that a simulated arm with two cameras recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hal.spec import STATE, RobotSpec
from user_sys.algorithms.algorithm import Algorithm, TensorBatch, TrainingData
from user_sys.compose import PolicyConfig, RobotConfig, build_robot_setup, robot_spec
from user_sys.edge.demonstrations import DemonstrationConfig
from user_sys.edge.recorder import RecorderConfig
from user_sys.errors import ConfigError
from user_sys.learner.checkpoint import Checkpoint
from user_sys.learner.config import LearnerConfig
from user_sys.learner.trainer import Trainer
from user_sys.plugins import ALGORITHMS
from user_sys.policies.policy import AGE_SUFFIX, SENTENCE
from user_sys.policies.sentences import hash_words
from user_sys.replay.batches import BatchSpec
from user_sys.robot_records import ROBOTS_FOLDER, save_robot_record
from user_sys.run.prepare import record_demonstrations
from user_sys.store.store import StoreReader

CAMERAS = ("front", "wrist")
PICTURES = tuple(f"observation.images.{name}" for name in CAMERAS)
ROBOT = RobotConfig(options={"image_height": 64, "image_width": 64}, frame_stride=1)
CONFIG = LearnerConfig(algorithm="probe", batch_size=64)


@dataclass(frozen=True)
class ProbeSettings:
    cameras: tuple[str, ...] = CAMERAS
    chunk_length: int = 0


class Probe(Algorithm):
    """Keeps its newest batch."""

    settings = ProbeSettings
    batch: TensorBatch

    def __init__(self, settings: ProbeSettings, policy: nn.Module, spec: RobotSpec) -> None:
        super().__init__(settings, policy, spec)
        self._settings = settings

    @property
    def data(self) -> TrainingData:
        length = self._settings.chunk_length
        return TrainingData(
            lambda n_step: BatchSpec(n_step, 0.97, length, within_phase=True), (STATE,), self._settings.cameras,
            {"log_prob": ()},
        )  # fmt: skip

    def update(self, batch: TensorBatch, number: int) -> None:
        self.batch = batch

    def scalars(self) -> dict[str, float]:
        return {}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One demonstration."""
    path = tmp_path_factory.mktemp("recorded") / "store"
    wanted = DemonstrationConfig(episodes=1)
    assert len(list(record_demonstrations(ROBOT, path, wanted, RecorderConfig(), seed=0))) == 1
    return path


@contextmanager
def trainer(
    store: Path,
    config: LearnerConfig,
    monkeypatch: pytest.MonkeyPatch,
    policy: PolicyConfig | None = None,
) -> Iterator[Trainer]:
    monkeypatch.setitem(ALGORITHMS, "probe", f"{__name__}:Probe")
    with StoreReader.open(store) as reader:
        made = Trainer(config, build_robot_setup(ROBOT).robot.spec, reader, policy=policy)
        made.refresh()
        yield made
        made.close()


def batch_of(made: Trainer) -> TensorBatch:
    made.update(0)
    assert isinstance(made.algorithm, Probe)
    return made.algorithm.batch


def test_batch_has_pictures_of_both_ends_of_a_transition(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, sampler=replace(CONFIG.sampler, n_step=3), batch_size=256)
    with trainer(store, config, monkeypatch) as made:
        batch = batch_of(made)
        step = made.batches.replay.index.step_of(made.batches.drawn.row)
        last = int(step.max())
        of_step: dict[int, Any] = {}
        for i, number in enumerate(step.tolist()):
            of_step[number] = i
        assert len(of_step) > 8 and batch.observation[PICTURES[0]].shape == (256, 64, 64, 3)
        for feature in (STATE, *PICTURES):
            for number, i in of_step.items():
                if (later := of_step.get(number + 3)) is not None:
                    assert torch.equal(batch.next_observation[feature][i], batch.observation[feature][later])
            final = batch.next_observation[feature][of_step[last]]
            assert not torch.equal(final, batch.observation[feature][of_step[last]]), "the episode's last picture"
            assert torch.equal(final, batch.next_observation[feature][of_step[last - 1]]), "three steps end there too"
        assert batch.terminated[of_step[last]] and batch.reward[of_step[last]] == 1


def test_batch_has_sentence_version_phase_and_log_prob_of_its_steps(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer(store, replace(CONFIG, options={"chunk_length": 4}), monkeypatch) as made:
        batch = batch_of(made)
        assert batch.sentence is not None and batch.policy_version is not None and batch.mask is not None
        assert {batch.sentences[place] for place in batch.sentence.tolist()} == {"lift the cube"}
        assert batch.action.shape == (64, 4, 4) and batch.policy_version.shape == batch.mask.shape == (64, 4)
        assert (batch.policy_version == -1).all() and batch.extras["log_prob"].isnan().all(), "an expert acted"


def drawn_batches(made: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches that `made` will train on, as they are drawn."""
    drawn, draw = list[Any](), made.batches.next

    def draw_and_keep(number: int) -> Any:
        drawn.append(draw(number))
        return drawn[-1]

    monkeypatch.setattr(made.batches, "next", draw_and_keep)
    return drawn


def test_policy_of_sentences_gets_that_of_each_sample_and_the_ages_of_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robot = replace(ROBOT, task=("lift_red", "lift_blue"))
    assert len(list(record_demonstrations(robot, tmp_path, DemonstrationConfig(2), RecorderConfig(), seed=0))) == 2
    options = {"width": 16, "heads": 2, "prefix_layers": 1, "expert_layers": 1}
    policy = PolicyConfig(kind="vla", options=options, features=(STATE,))
    with StoreReader.open(tmp_path) as reader:
        spec = build_robot_setup(robot).robot.spec
        made = Trainer(LearnerConfig(algorithm="bc", batch_size=32), spec, reader, policy=policy)
        drawn = drawn_batches(made, monkeypatch)
        made.refresh()
        made.update(0)
        made.close()
    (batch,) = drawn
    assert batch.sentence is not None
    said = [batch.sentences[place] for place in batch.sentence.tolist()]
    assert set(said) == {"lift the red cube", "lift the blue cube"}
    for observation in (batch.observation, batch.next_observation):
        assert torch.equal(observation[SENTENCE], hash_words(said))
        assert all(observation[name + AGE_SUFFIX].shape == (32, 1) for name in PICTURES)


@pytest.mark.parametrize("is_earlier_version", [False, True])
def test_steps_under_other_limits_and_steps_of_an_earlier_version_are_drawn(
    is_earlier_version: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robot = RobotConfig(name="arm", driver="fake", task="reach", options={"table": {"force_max": 20}})
    with monkeypatch.context() as earlier:
        if is_earlier_version:  # its embodiment changed with the limits
            earlier.setattr(RobotSpec, "embodiment", RobotSpec.fingerprint)
        assert len(list(record_demonstrations(robot, tmp_path, DemonstrationConfig(1), RecorderConfig(), seed=0))) == 1
    save_robot_record(tmp_path / ROBOTS_FOLDER, "arm", robot_spec(robot))
    gentle = replace(robot, options={"table": {"force_max": 5}})
    save_robot_record(tmp_path / ROBOTS_FOLDER, "arm", robot_spec(gentle))
    config, policy = LearnerConfig(batch_size=8), PolicyConfig(kind="mlp")
    for kind in ("mixed", "uniform"):
        with StoreReader.open(tmp_path) as reader:
            sampler = replace(config.sampler, kind=kind)
            made = Trainer(replace(config, sampler=sampler), robot_spec(gentle), reader, policy=policy)
            made.refresh()
            assert made.can_sample and len(made.batches.demo_online) > 0
            made.close()


@pytest.mark.parametrize("batches_ahead", [0, 2])
def test_pictures_are_encoded_once_from_the_update_that_freezes_the_encoder(
    store: Path, monkeypatch: pytest.MonkeyPatch, batches_ahead: int
) -> None:
    policy = PolicyConfig(kind="cnn", options={"encoder": "frozen", "pretrain_updates": 2, "hidden": [16]})
    options = {"critic_hidden": [16], "critics": 2}
    config = LearnerConfig(options=options, batch_size=16, batches_ahead=batches_ahead)
    with trainer(store, config, monkeypatch, policy) as made:
        drawn = drawn_batches(made, monkeypatch)
        for number in range(2):
            made.update(number)
            assert PICTURES[0] in drawn[-1].observation
        saved = Checkpoint(2, {"position": made.batches.position()}, made.state_dict())
        module: Any = made.policy
        rows, expected = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for number in range(2, 12):
            made.update(number)
            batch = drawn[-1]
            observation = {**batch.observation, **{f"next.{k}": v for k, v in batch.next_observation.items()}}
            assert not any("images" in name for name in observation)
            encoded = batch.observation["observation.encoded.wrist"].clone()
            rows |= zip(made.batches.drawn.row.tolist(), encoded, strict=True)
        straight, cache = made.state_dict(), made.batches.replay.report()
        assert cache.misses < cache.observations / 2, "each picture was encoded once"
        with trainer(store, replace(config, algorithm="probe", options={}), monkeypatch) as plain:
            for _ in range(4):
                pictures = batch_of(plain).observation[PICTURES[1]].clone()
                expected |= zip(plain.batches.drawn.row.tolist(), module.encode_images("wrist", pictures), strict=True)
        assert len(rows.keys() & expected.keys()) > 5
        for row in rows.keys() & expected.keys():
            torch.testing.assert_close(rows[row], expected[row])
    with trainer(store, config, monkeypatch, policy) as resumed:
        resumed.load_checkpoint(saved)
        for number in range(2, 12):
            resumed.update(number)
        for name, value in resumed.state_dict().items():
            np.testing.assert_array_equal(value, straight[name], err_msg=name)


def test_missing_camera_is_named_before_training(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(CONFIG, options={"cameras": ["top"]})
    with pytest.raises(ConfigError, match=r"no camera 'top'; .* has \['front', 'wrist'\]"):
        with trainer(store, wrong, monkeypatch):
            pass
