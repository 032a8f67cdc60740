"""A process of a learner: ``python -m user_sys.run.learner_process RUN NAME ENDPOINT``.

The environment has what torchrun sets: ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``;
without them the learner is one process. Each process reads the run's store. That of rank 0 owns the publisher process,
which connects to the gateway.

All processes end if one of them ends; their supervisors start them again, and they resume from the checkpoint.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hal.errors import HalError
from hal.signals import stop_on_signals
from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import NETWORK, POLICY
from user_sys.algorithms.distributed import TrainingGroup, training_group
from user_sys.codec import Array
from user_sys.errors import ConfigError, LinkDown, RunError, UserSysError, WireError
from user_sys.learner.checkpoint import exclusive_writer, load_latest_checkpoint, scan_checkpoints
from user_sys.learner.config import CPU, require_gpu, training_device, training_stream
from user_sys.learner.frozen_weights import FROZEN_KEY, frozen_path, load_frozen
from user_sys.learner.learner import Learner
from user_sys.learner.publisher_client import PublisherClient
from user_sys.learner.publisher_protocol import PublisherSettings
from user_sys.learner.trainer import Trainer, memory_errors
from user_sys.logs import configure_logging
from user_sys.messages import PROTOCOL_VERSION, Hello
from user_sys.robot_records import (
    EXIT_ORPHANED,
    LEARNER,
    assign_learners,
    learner_folder,
    learner_from_embodiment,
    read_robot_records,
)
from user_sys.run.config import RunConfig, RunFolder, open_run_folder
from user_sys.run.metrics import MetricsWriter
from user_sys.store.store import StoreReader
from user_sys.tunnel.keys import GATEWAY_NAME, load_public_key
from user_sys.weights.signing import run_id_of

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 60.0
ROBOT_POLL_S = 0.5  # while the run has no robot for its first learner
DELIVERY_TIMEOUT_S, DELIVERY_POLL_S = 10.0, 0.1  # of the last version, beside what its size takes
DELIVERED_BYTES_PER_S = 2e6  # the least rate: a slow link


@dataclass(frozen=True)
class RankEnvironment:
    """The place of this process among those that train together, as torchrun describes it.

    Attributes:
        local_rank: index of its GPU among the visible ones.
        host, port: where rank 0 listens.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    host: str = ""
    port: int = 0

    @classmethod
    def read(cls, env: Mapping[str, str]) -> RankEnvironment:
        """Reads the environment variables. Raises RunError if they do not fit each other."""
        try:
            rank, local_rank, world, port = (
                int(env.get(name, default))
                for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 0))
            )
        except ValueError as error:
            raise RunError(f"RANK, LOCAL_RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}") from None
        host = env.get("MASTER_ADDR", "")
        if not 0 <= rank < world or (world > 1 and not (host and port)):
            raise RunError(f"RANK {rank} of WORLD_SIZE {world} with MASTER_ADDR {host!r} and MASTER_PORT {port}")
        return cls(rank, world, local_rank, host, port)


def main(argv: list[str]) -> int:
    """Trains until a limit is reached or the run is stopped. Returns 0 then, and `EXIT_ORPHANED` if another rank ended.

    `argv`: the run's folder; the name of the learner (`user_sys.robot_records`); and the gateway's endpoint.
    """
    configure_logging()
    path, name, endpoint = argv
    try:
        return _run(Path(path), name, endpoint, RankEnvironment.read(os.environ))
    except LinkDown as error:
        log.warning("learner.orphaned %s", error)
        return EXIT_ORPHANED
    except (UserSysError, HalError, OSError) as error:
        log.error("learner.failed %s: %s", type(error).__name__, error)
        return 2


def _run(path: Path, name: str, endpoint: str, place: RankEnvironment) -> int:
    folder, config, _ = open_run_folder(path)
    torch.set_num_threads(config.learner.threads)
    torch.set_flush_denormal(True)  # arithmetic on denormal weights is ten times slower
    stop, stop_now = threading.Event(), threading.Event()
    stop_on_signals(stop, stop_now)
    if (spec := wait_for_spec(folder.robots, name, stop)) is None:
        return 0
    checkpoints = learner_folder(folder.checkpoints, name)
    is_first = place.rank == 0
    with exclusive_writer(checkpoints, stop) if is_first else nullcontext(True) as may_train:
        if may_train:
            settings = _publisher_settings(folder, config, name, endpoint, spec, checkpoints) if is_first else None
            train(folder, config, spec, name, settings, place, (stop, stop_now))
    return 0


def _publisher_settings(
    folder: RunFolder, config: RunConfig, name: str, endpoint: str, spec: RobotSpec, checkpoints: Path
) -> PublisherSettings:
    return PublisherSettings(
        endpoint=endpoint,
        tunnel_key=str(folder.keys / f"{name}.key"),
        gateway_key=load_public_key(folder.keys / f"{GATEWAY_NAME}.pub"),
        hello=Hello(protocol=PROTOCOL_VERSION, role="learner", name=name, spec=spec),
        signing_folder=str(folder.keys),
        publish=config.learner.publish,
        run=run_id_of(checkpoints),
        waits_for_robots=config.learner.staleness is not None,
    )


def train(
    folder: RunFolder,
    config: RunConfig,
    spec: RobotSpec,
    name: str,
    settings: PublisherSettings | None,
    place: RankEnvironment,
    stops: tuple[threading.Event, threading.Event],
) -> None:
    """Trains in this process until the learner is done, and waits until the gateway has its last version.

    Args:
        settings: of the publisher; None in other processes than that of rank 0.
        stops: the first ends the training after its current work, the second without any further wait.
    """
    stop, stop_now = stops
    checkpoints = learner_folder(folder.checkpoints, name)
    with memory_errors(), ExitStack() as stack:
        reader = stack.enter_context(StoreReader.open(folder.store, wait_s=STORE_TIMEOUT_S))
        group, device = stack.enter_context(_group(config, place))
        metrics = publisher = None
        if settings is not None:
            metrics = stack.enter_context(MetricsWriter(folder.path, settings.hello.name))
            publisher = stack.enter_context(PublisherClient(settings, lambda reason: _on_run_stopped(reason, stop)))

        def report(updates: int, scalars: dict[str, float]) -> None:
            if metrics is not None and publisher is not None:
                metrics.write(updates, scalars)
                publisher.report(updates, scalars)

        make = partial(
            Trainer, spec=spec, reader=reader, policy=config.policy, seed=config.seed, device=device, group=group
        )
        trainer = make_trainer(config, name, spec, checkpoints, make)
        if trainer.batches.replay.features.cameras and not config.recorder.cameras:
            raise ConfigError(f"recorder.cameras is false, and {config.learner.algorithm} needs pictures: remove it")
        if trainer.batches.once is not None:  # of a robot that the launcher could not build
            config.rewards.require_replay(config.learner.algorithm)
        learner = Learner(config.learner, trainer, publisher=publisher, report=report, checkpoint_dir=checkpoints)
        learner.run(stop, stop_now)
        size_bytes = 0 if publisher is None else publisher.size_bytes
        deadline_s = time.monotonic() + DELIVERY_TIMEOUT_S + size_bytes / DELIVERED_BYTES_PER_S
        # The others are still there if rank 0 has to start again. Each call has a deadline of its own.
        while not group.all_true(publisher is None or _is_delivery_over(publisher, deadline_s, stop_now)):
            pass


def make_trainer(
    config: RunConfig, name: str, spec: RobotSpec, checkpoints: Path, make: Callable[..., Trainer]
) -> Trainer:
    """Returns what `make` makes of the learner's settings and of `initial_state`.

    If the other run had no robot of this embodiment, and its policy does not fit, the learner starts untrained.

    Raises:
        RunError: as `initial_state`.
        WireError: the policy does not fit.
    """
    is_other, initial = initial_state(config, name, spec.embodiment, checkpoints)
    try:
        return make(config.learner, initial_state=initial)
    except WireError as error:
        if not is_other:
            raise
        log.warning("learner.starts_untrained name=%s: %s", name, error)
    return make(replace(config.learner, initial_policy=""))  # so that robots do not act with the initial weights


def initial_state(
    config: RunConfig, name: str, embodiment: str, checkpoints: Path
) -> tuple[bool, Mapping[str, Array | torch.Tensor] | None]:
    """Whether the run of `learner.initial_policy` had no robot of this embodiment, and the state to start from.

    The state is then that of its first learner. It is None without this setting, and for a learner that has trained.
    Raises RunError if there is none.
    """
    if not config.learner.initial_policy or scan_checkpoints(checkpoints).has_updates:
        return False, None
    other = RunFolder(Path(config.learner.initial_policy))
    first = other.checkpoints
    namesake = learner_from_embodiment(read_robot_records(other.robots)).get(embodiment, name)
    others = learner_folder(first, namesake)
    if is_other := (found := load_latest_checkpoint(others)) is None and others != first:
        log.warning("learner.initial_policy %s has no checkpoint: %s starts from %s", others, name, first)
        others, found = first, load_latest_checkpoint(first)
    if found is None:
        raise RunError(f"learner.initial_policy: {others} has no checkpoint; give the folder of a run that has trained")
    if not (digest := str(found.scalars.get(FROZEN_KEY, ""))):
        return is_other, found.arrays
    frozen = load_frozen(frozen_path(others, digest))
    return is_other, {**found.arrays, **{NETWORK + POLICY + name: tensor for name, tensor in frozen.items()}}


def _on_run_stopped(reason: str, stop: threading.Event) -> None:
    log.info("run.stopped %s", reason)
    stop.set()


@contextmanager
def _group(config: RunConfig, place: RankEnvironment) -> Iterator[tuple[TrainingGroup, str]]:
    """The processes that train together, and the torch device of this one."""
    is_gpu_reserved = any(request.is_learner_gpu for request in config.resources)
    device = training_device(config.learner.device, is_gpu_reserved, place.local_rank)
    if device != CPU and place.world > 1:
        require_gpu(torch.cuda.device_count(), place.local_rank)
        torch.cuda.set_device(place.local_rank)
        device = f"{device}:{place.local_rank}"
    with training_group(place.rank, place.world, place.host, place.port, device) as group, training_stream(device):
        yield group, device


def _is_delivery_over(publisher: PublisherClient, deadline_s: float, stop_now: threading.Event) -> bool:
    """Waits for a moment. Returns whether the gateway has the last version, or is no longer waited for."""
    if publisher.wait_until_stored(DELIVERY_POLL_S):
        return True
    is_over = stop_now.is_set() or time.monotonic() > deadline_s
    if is_over:
        log.warning("weights.not_delivered version=%d", publisher.version)
    return is_over


def wait_for_spec(robots: Path, name: str, stop: threading.Event) -> RobotSpec | None:
    """Returns the spec of a robot that the learner trains for. The run's first learner waits for one.

    Returns:
        None if `stop` was set before.

    Raises:
        RunError: the run has no robot for this learner.
    """
    is_logged = False
    while (spec := assign_learners(read_robot_records(robots)).get(name)) is None:
        if name != LEARNER:
            raise RunError(f"the run has no robot for {name}; resume it with a robot of that embodiment")
        if not is_logged:
            log.info("learner.waiting_for_robot folder=%s", robots)
            is_logged = True
        if stop.wait(ROBOT_POLL_S):
            return None
    return spec


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    os._exit(status)  # everything is saved; Python's clean-up of torch takes seconds, too long for Ctrl-C
