"""The learner process: ``python -m user_sys.run.learner_process RUN NAME ENDPOINT ADDRESS GPU``.

It reads the run's store; its publisher process owns the connection to the gateway.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from msgspec.structs import replace

from hal.errors import HalError
from hal.signals import stop_on_signals
from hal.spec import RobotSpec
from user_sys.algorithms.distributed import TrainingGroup
from user_sys.errors import RunError, UserSysError
from user_sys.learner.checkpoint import exclusive_writer
from user_sys.learner.config import CPU, training_device, training_stream
from user_sys.learner.learner import Learner
from user_sys.learner.publisher_client import PublisherClient
from user_sys.learner.publisher_protocol import PublisherSettings
from user_sys.learner.trainer import RankTrainer
from user_sys.learner.workers import RankAddress, TrainingSpec, WorkerGroup
from user_sys.logs import configure_logging
from user_sys.messages import PROTOCOL_VERSION, Hello
from user_sys.robot_records import LEARNER, assign_learners, learner_folder, read_robot_records, wait_for_robot_record
from user_sys.run.config import RunConfig, RunFolder, open_run_folder
from user_sys.run.metrics import MetricsWriter
from user_sys.store.store import StoreReader
from user_sys.tunnel.keys import GATEWAY_NAME, load_public_key
from user_sys.weights.signing import run_id_of

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 60.0
DELIVERY_TIMEOUT_S, DELIVERY_POLL_S = 10.0, 0.1


def main(argv: list[str]) -> int:
    """Trains until a limit is reached or the run is stopped. Returns 0 then.

    `argv`: the run's folder; the name of the learner (`user_sys.robot_records`); the gateway's endpoint; the address at
    which the learner's other processes reach this one; and the index of its GPU among the visible ones.
    """
    configure_logging()
    path, name, endpoint, address, gpu = argv
    try:
        return _run(Path(path), name, endpoint, RankAddress(address, int(gpu)))
    except (UserSysError, HalError, OSError) as error:
        log.error("learner.failed %s: %s", type(error).__name__, error)
        return 2


def _run(path: Path, name: str, endpoint: str, address: RankAddress) -> int:
    folder, config, _ = open_run_folder(path)
    torch.set_num_threads(config.learner.threads)
    torch.set_flush_denormal(True)  # arithmetic on denormal weights is ten times slower
    stop, stop_now = threading.Event(), threading.Event()
    stop_on_signals(stop, stop_now)
    if (spec := _wait_for_spec(folder.robots, name, stop)) is None:
        return 0
    checkpoints = learner_folder(folder.checkpoints, name)
    with exclusive_writer(checkpoints, stop) as is_locked:
        if is_locked:
            settings = replace(_publisher_settings(folder, config, name, endpoint, spec), run=run_id_of(checkpoints))
            training = _training_spec(folder, config, spec, checkpoints, address)
            _train(folder, training, settings, address, (stop, stop_now))
    return 0


def _publisher_settings(
    folder: RunFolder, config: RunConfig, name: str, endpoint: str, spec: RobotSpec
) -> PublisherSettings:
    return PublisherSettings(
        endpoint=endpoint,
        tunnel_key=str(folder.keys / f"{name}.key"),
        gateway_key=load_public_key(folder.keys / f"{GATEWAY_NAME}.pub"),
        hello=Hello(protocol=PROTOCOL_VERSION, role="learner", name=name, spec=spec),
        signing_folder=str(folder.keys),
        publish=config.learner.publish,
    )


def _training_spec(
    folder: RunFolder, config: RunConfig, spec: RobotSpec, checkpoints: Path, address: RankAddress
) -> TrainingSpec:
    is_gpu_reserved = any(request.is_learner_gpu for request in config.resources)
    return TrainingSpec(
        config=config.learner,
        spec=spec,
        store=str(folder.store),
        checkpoints=str(checkpoints),
        features=config.policy.features,
        seed=config.seed,
        device=training_device(config.learner.device, is_gpu_reserved, address.gpu),
    )


def _train(
    folder: RunFolder,
    training: TrainingSpec,
    settings: PublisherSettings,
    address: RankAddress,
    stops: tuple[threading.Event, threading.Event],
) -> None:
    config, (stop, stop_now) = training.config, stops

    def on_run_stopped(reason: str) -> None:
        log.info("run.stopped %s", reason)
        stop.set()

    with (
        StoreReader.open(folder.store, wait_s=STORE_TIMEOUT_S) as reader,
        MetricsWriter(folder.path, settings.hello.name) as metrics,
        PublisherClient(settings, on_run_stopped) as publisher,
        _training_group(training, address, stop) as group,
        training_stream(training.device if group is None else CPU),  # FSDP2 has streams of its own
    ):
        if group is None and config.processes > 1:
            return  # stopped before all processes had joined

        def report(updates: int, scalars: dict[str, float]) -> None:
            metrics.write(updates, scalars)
            publisher.report(updates, scalars)

        trainer = RankTrainer(
            config,
            training.spec,
            reader,
            features=training.features,
            seed=training.seed,
            device=training.device if group is None else str(group.device),
            group=group,
        )
        checkpoints = Path(training.checkpoints)
        learner = Learner(config, trainer, publisher=publisher, report=report, checkpoint_dir=checkpoints)
        learner.run(stop, stop_now)
        _wait_for_delivery(publisher, stop_now)


def _wait_for_delivery(publisher: PublisherClient, stop_now: threading.Event) -> None:
    deadline_s = time.monotonic() + DELIVERY_TIMEOUT_S
    while not publisher.wait_until_stored(DELIVERY_POLL_S):
        if stop_now.is_set() or time.monotonic() > deadline_s:
            log.warning("weights.not_delivered version=%d", publisher.version)
            break


def _training_group(
    training: TrainingSpec, address: RankAddress, stop: threading.Event
) -> AbstractContextManager[TrainingGroup | None]:
    """Joins the processes that train together. Gives None for a single process, or if `stop` was set before."""
    return nullcontext() if training.config.processes == 1 else WorkerGroup(training, address, stop)


def _wait_for_spec(robots: Path, name: str, stop: threading.Event) -> RobotSpec | None:
    """Returns the spec that the learner trains for: that of the run's first robot, or of its own embodiment.

    Returns:
        None if `stop` was set before the first robot.

    Raises:
        RunError: the run has no robot for this learner.
    """
    first = wait_for_robot_record(robots, stop)
    if first is None or name == LEARNER:
        return None if first is None else first.spec
    for assignment in assign_learners(read_robot_records(robots)):
        if assignment.name == name:
            return assignment.spec
    raise RunError(f"the run has no robot for {name}; resume it with a robot of that embodiment")


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    os._exit(status)  # everything is saved; Python's clean-up of torch takes seconds, too long for Ctrl-C
