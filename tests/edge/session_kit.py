"""A run folder with its gateway, driver, session and policy server, which a test starts and kills."""

from __future__ import annotations

import contextlib
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edge_kit import END_S, NodeProcess, node

from user_sys.compose import RobotConfig
from user_sys.edge.outbox import Outbox
from user_sys.episode import Chunk, decode_chunk
from user_sys.messages import PROTOCOL_VERSION, Hello
from user_sys.robot_records import LEARNER
from user_sys.run.config import RunConfig, create_run_folder
from user_sys.run.prepare import free_endpoint, prepare_run_folder
from user_sys.run.topology import ProcessSlot, policy_process
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import GATEWAY_NAME, load_keypair, load_public_key

ROBOT = RobotConfig(name="fake-0", driver="fake")


class FollowedLog:
    """Every chunk in a log, as often as it is there. Each is read once."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path, self._stack = path, stack
        self._reader: LogReader | None = None
        self._found: list[Chunk] = []

    def chunks(self) -> list[Chunk]:
        if self._reader is None:
            if not any(self._path.glob("*.seg")):
                return []
            self._reader = self._stack.enter_context(LogReader.open(self._path))
        refs = self._reader.records()
        self._found += [decode_chunk(bytes(self._reader.read(ref))) for ref in refs if ref.kind == CHUNK_KIND]
        return self._found


class Site:
    """A run folder, and the processes that a test starts and kills in it."""

    def __init__(self, folder: Path, stack: ExitStack, **settings: Any) -> None:
        self._stack = stack
        config = RunConfig(**{"robots": (ROBOT,), "runs": folder, **settings})
        self.folder, self.card = create_run_folder(config, "run", free_endpoint("tcp://127.0.0.1:0"))
        prepare_run_folder(config, self.folder, self.card)
        self.state = self.folder.edge(ROBOT.name)
        self._logs = 0
        self.config, self._store = config, FollowedLog(self.folder.store, stack)
        self._recorded: set[tuple[str, int]] = set()

    def start(self, *argv: object) -> NodeProcess:
        self._logs += 1
        log = self.folder.path / "logs" / f"{self._logs}-{argv[0]}.log"
        return self._stack.enter_context(node(argv, log))

    def gateway(self) -> NodeProcess:
        return self.start("user_sys.gateway", "--run", self.folder.path)

    def driver(self) -> NodeProcess:
        return self.start("user_sys.edge.driver_server", self.state / "robot.yaml", self.state)

    def session(self) -> NodeProcess:
        return self.start("user_sys.edge.session", self.state / "session.yaml")

    def policy(self) -> NodeProcess:
        return self.start(*policy_process(self.folder, self.config, ProcessSlot(), "desk", self.card.endpoint).argv[2:])

    def client(self, name: str) -> TunnelClient:
        hello = Hello(protocol=PROTOCOL_VERSION, role="learner" if name == LEARNER else "console", name=name)
        keys = load_keypair(self.folder.keys / f"{name}.key")
        gateway_key = load_public_key(self.folder.keys / f"{GATEWAY_NAME}.pub")
        client = self._stack.enter_context(TunnelClient(self.card.endpoint, keys, gateway_key, hello))
        client.wait_open(END_S)
        return client

    def chunks(self) -> list[Chunk]:
        """Every chunk in the store, as often as it is there."""
        return self._store.chunks()

    def recorded(self) -> set[tuple[str, int]]:
        """Every chunk that was seen in the outbox or in the store."""
        self._recorded |= {key(decode_chunk(packet)) for packet in self.waiting()}
        self._recorded |= set(self.stored())
        return set(self._recorded)

    def waiting(self) -> list[bytes]:
        """The chunks in the outbox. They may be acknowledged and deleted meanwhile."""
        found = []
        for file in sorted((self.state / "outbox").glob("*.chunk")):
            with contextlib.suppress(FileNotFoundError):
                found.append(file.read_bytes())
        return found

    def stored(self) -> Counter[tuple[str, int]]:
        return Counter(key(chunk) for chunk in self.chunks())

    def unsent(self) -> int:
        with Outbox.open(self.state / "outbox") as outbox:
            return len(outbox)


def key(chunk: Chunk) -> tuple[str, int]:
    return chunk.header.episode, chunk.header.index
