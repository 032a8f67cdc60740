"""The learner process: ``python -m user_sys.learner RUN``. It reads the run's store; its envoy speaks
through the tunnel."""

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
    """Trains until the learner's time is up or the run is stopped; the exit status is then 0.

    `argv`: the run's folder; the name of the learner (`user_sys.robot_records`); where it reaches the gateway; its
    address, where the learner's other processes find it; and which of the GPUs that it sees is its own.
    """
    configure_logging()
    path, name, endpoint, address, card = argv
    try:
        return _run(Path(path), name, endpoint, RankAddress(address, int(card)))
    except (UserSysError, HalError, OSError) as error:
        log.error("learner.failed %s: %s", type(error).__name__, error)
        return 2


def _run(path: Path, name: str, endpoint: str, place: RankAddress) -> int:
    folder, config, _ = open_run_folder(path)
    torch.set_num_threads(config.learner.threads)
    torch.set_flush_denormal(True)  # denormal weights cost ten times as much
    stop, hurried = threading.Event(), threading.Event()
    stop_on_signals(stop, hurried)
    if (spec := _spec(folder.robots, name, stop)) is None:
        return 0
    checkpoints = learner_folder(folder.checkpoints, name)
    with exclusive_writer(checkpoints, stop) as alone:
        if alone:
            setup = replace(_publisher_settings(folder, config, name, endpoint, spec), run=run_id_of(checkpoints))
            _train(folder, config, setup, checkpoints, place, stop, hurried)
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


def _train(
    folder: RunFolder,
    config: RunConfig,
    setup: PublisherSettings,
    checkpoints: Path,
    place: RankAddress,
    stop: threading.Event,
    hurried: threading.Event,
) -> None:
    name, spec = setup.hello.name, setup.hello.spec
    assert spec is not None  # `_publisher_settings` gave it
    reserved = any(need.is_learner_gpu for need in config.resources)
    device = training_device(config.learner.device, reserved, place.gpu)

    def stopped(reason: str) -> None:
        log.info("run.stopped %s", reason)
        stop.set()

    with (
        StoreReader.open(folder.store, wait_s=STORE_TIMEOUT_S) as reader,
        MetricsWriter(folder.path, name) as metrics,
        PublisherClient(setup, stopped) as envoy,
        _process_group(_training_spec(folder, config, spec, checkpoints, device), place, stop) as ranks,
        training_stream(device if ranks is None else CPU),  # FSDP2 has streams of its own
    ):
        if ranks is None and config.learner.processes > 1:
            return  # told to stop before all had come

        def report(updates: int, scalars: dict[str, float]) -> None:
            metrics.write(updates, scalars)
            envoy.report(updates, scalars)

        learner = Learner(
            config.learner,
            spec,
            reader,
            publisher=envoy,
            report=report,
            checkpoint_dir=checkpoints,
            features=config.policy.features,
            seed=config.seed,
            device=device if ranks is None else str(ranks.device),
            group=ranks,
        )
        learner.run(stop, hurried)
        deadline = time.monotonic() + DELIVERY_TIMEOUT_S
        while not envoy.wait_until_stored(DELIVERY_POLL_S):
            if hurried.is_set() or time.monotonic() > deadline:
                log.warning("weights.not_delivered version=%d", envoy.version)
                break


def _process_group(
    assignment: TrainingSpec, place: RankAddress, stop: threading.Event
) -> AbstractContextManager[TrainingGroup | None]:
    """This process among those that train together; None where it trains alone, or `stop` was set before all came."""
    return nullcontext() if assignment.config.processes == 1 else WorkerGroup(assignment, place, stop)


def _training_spec(
    folder: RunFolder, config: RunConfig, spec: RobotSpec, checkpoints: Path, device: str
) -> TrainingSpec:
    return TrainingSpec(
        config=config.learner,
        spec=spec,
        store=str(folder.store),
        checkpoints=str(checkpoints),
        features=config.policy.features,
        seed=config.seed,
        device=device,
    )


def _spec(robots: Path, name: str, stop: threading.Event) -> RobotSpec | None:
    """What the learner learns for: the first learner waits for the run's first robot, the others have theirs.

    Returns:
        None where `stop` was set first.

    Raises:
        RunError: no robot is known that the learner is for.
    """
    first = wait_for_robot_record(robots, stop)
    if first is None or name == LEARNER:
        return None if first is None else first.spec
    for plan in assign_learners(read_robot_records(robots)):
        if plan.name == name:
            return plan.spec
    raise RunError(f"no robot is known that {name} learns for")


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    logging.shutdown()
    os._exit(ended)  # all is saved and closed; Python's own clean-up takes torch seconds, which Ctrl-C does not have
