"""The episodes of a run's store, for the console: list, pictures, traces, labels and export.

`EpisodeLibrary` reads the store in the threads of FastAPI's pool, so that it delays no WebSocket. It never writes the
store: labels are queued for the gateway, and exports run in a process of their own.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse

from hal.decode_errors import DECODE_ERRORS
from hal.spec import ACTION, RobotSpec
from hal.state_database import AuditEntry, AuditSink
from user_sys.console.videos import EpisodeVideos
from user_sys.episode import APPLIED_ACTION, Phase
from user_sys.errors import StoreError, UserSysError, WireError
from user_sys.interchange.episodes import EpisodeReader, StoredEpisode, element_labels, load_robot_specs
from user_sys.interchange.frames import encode_jpeg
from user_sys.store.index import EpisodeSummary, newest_trim
from user_sys.store.labels import (
    ALL_STEPS,
    DeleteLabel,
    Label,
    NoteLabel,
    PhaseLabel,
    SuccessLabel,
    TrimLabel,
    UndoLabel,
    by_precedence,
    describe_label,
    label_to_undo,
    queue_labels,
    queued_labels,
    wait_until_stored,
)
from user_sys.store.record_format import segment_numbers
from user_sys.store.store import StoreReader

MAX_LISTED = 200
CACHED_EPISODES = 4
USUAL_RATE_HZ = 10.0  # of a robot without a spec
STORE_TIMEOUT_S = 10.0  # a gateway polls every few seconds
EXPORT_TIMEOUT_S = 600.0
SUCCESS: dict[str, bool | None] = {"yes": True, "no": False, "unknown": None}
Note = Annotated[str, msgspec.Meta(max_length=500)]
Step = Annotated[int, msgspec.Meta(ge=0)]


class EpisodeQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which episodes to list; an empty text and 0 do not restrict. Those that began in [from, until)."""

    robot: str = ""
    task: str = ""
    source: str = ""
    success: Literal["", "yes", "no", "unknown"] = ""
    phase: Literal["", "policy", "person"] = ""
    version: str = ""
    from_unix_ms: int = 0
    until_unix_ms: int = 0


class EpisodeList(msgspec.Struct, frozen=True):
    """The newest matching episodes, at most `MAX_LISTED`, newest first; and what there is to choose from."""

    episodes: list[EpisodeSummary]
    matching: int
    robots: list[str]
    tasks: list[str]
    sources: list[str]


class CameraFrames(msgspec.Struct, frozen=True):
    """Of each step: the step at which its newest picture was captured; -1 before the first."""

    name: str
    captured_step: list[int]


class Trace(msgspec.Struct, frozen=True):
    """Values of each step, by the name of a curve; NaN is null."""

    title: str
    curves: dict[str, list[float | None]]


class EpisodeDetail(msgspec.Struct, frozen=True):
    """One episode. `phases`: of each step. `kept`: first and last step of its trim; the last is None if the end is
    kept. `labels`: as text, the one that applies last first. Those that wait for the gateway are among them, and have
    no other effect yet.

    `rate_hz`: steps per second, also of its video.
    """

    summary: EpisodeSummary
    rate_hz: float
    sentence: str
    cameras: list[CameraFrames]
    phases: list[str]
    kept: tuple[int, int | None]
    traces: list[Trace]
    labels: list[str]


class LabelRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person's label. Absent fields stay as they are.

    Attributes:
        demonstration: all steps count as a person's, from which algorithms take demonstrations.
        keep_from, keep_to: first and last of the steps that are kept; the others are not sampled. If one is absent,
            that of the newest trim stays, or moves to the one that is given. Without a last one all later steps are
            kept, also those that are not stored yet.
        undo: reverts the newest label instead, see `label_to_undo`.
    """

    person: Annotated[str, msgspec.Meta(pattern=r"^[\w .@-]{1,40}\Z")]
    success: Literal["yes", "no", "unknown"] | None = None
    deleted: bool | None = None
    demonstration: bool = False
    keep_from: Step | None = None
    keep_to: Step | None = None
    undo: bool = False
    note: Note = ""


class ExportRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exports one episode into the run's folder ``exports``."""

    person: Annotated[str, msgspec.Meta(pattern=r"^[\w .@-]{1,40}\Z")]
    format: Literal["lerobot", "mcap"]


class EpisodeLibrary:
    """The episodes of the store at `path`. Any thread may call it; each call blocks for its own work."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock, self._exporting = threading.Lock(), threading.Lock()
        self._store: StoreReader | None = None
        self._cache: OrderedDict[tuple[str, int], StoredEpisode] = OrderedDict()  # by episode and number of labels
        self._videos = EpisodeVideos(path, path.with_name("videos"))

    def list(self, query: EpisodeQuery) -> EpisodeList:
        """The matching episodes of which a chunk is stored. Raises StoreError."""
        with self._lock:
            episodes: list[EpisodeSummary] = []
            if (store := self._refreshed()) is not None:
                stored = np.unique(store.index.chunks.episode[~store.index.chunks.gone]).tolist()
                found = store.episodes()
                episodes = [found[row] for row in stored]
        chosen = [each for each in reversed(episodes) if _matches(each, query)]
        return EpisodeList(
            episodes=chosen[:MAX_LISTED],
            matching=len(chosen),
            robots=sorted({each.robot for each in episodes}),
            tasks=sorted({each.task for each in episodes}),
            sources=sorted({str(each.source) for each in episodes}),
        )

    def detail(self, episode: str) -> EpisodeDetail:
        """Raises StoreError, DataSetError: there is no such episode, or it cannot be read."""
        queued = queued_labels(self._path, episode)
        with self._lock:
            store, summary, spec = self._described(episode)
            applied = store.index.labels(episode)
            waiting = [label for label in queued if label not in applied]
            valid = by_precedence([*applied, *waiting])
            texts = [_label_text(label) + (" (waits for the gateway)" if label in waiting else "") for label in valid]
            labels = dict.fromkeys(reversed(texts))  # a crash repeats one
            trim = newest_trim(by_precedence(applied))
            stored = self._read(store, episode)
        names = element_labels(spec)
        phases = stored.columns.get("phase", np.full(stored.steps, Phase.POLICY))
        return EpisodeDetail(
            summary=summary,
            rate_hz=USUAL_RATE_HZ if spec is None else spec.rate_hz,
            sentence=stored.header.sentence or summary.task,
            cameras=[CameraFrames(name, _captured_steps(stored, name)) for name in sorted(stored.frames)],
            phases=[Phase(int(phase)).name.lower() for phase in phases],
            kept=_kept(trim),
            traces=_traces(stored, list(names.get(ACTION, ()))),
            labels=list(labels),
        )

    def picture(self, episode: str, camera: str, step: int) -> bytes:
        """The JPEG file that was captured at `step`. Raises StoreError: there is none."""
        with self._lock:
            frames = self._read(self._require(episode), episode).frames.get(camera, [])
        frame = frames[step] if 0 <= step < len(frames) else None
        if frame is None:
            raise StoreError(f"{episode} has no picture of {camera[:80]!r} at step {step}")
        return frame if isinstance(frame, bytes) else encode_jpeg(frame)

    def video(self, episode: str) -> Path:
        """The MP4 file of a complete episode, see `EpisodeVideos.file`. Raises StoreError: there is none."""
        with self._lock:
            _, summary, spec = self._described(episode)
        if not summary.complete:
            raise StoreError(f"{episode} is not complete; its pictures are shown one by one")
        return self._videos.file(episode, USUAL_RATE_HZ if spec is None else spec.rate_hz)

    def label(self, episode: str, request: LabelRequest) -> bool:
        """Queues labels for the process that writes the store. Returns whether it stored them within a few seconds.

        Raises:
            StoreError: there is no such episode, or the request has no label.
        """
        queued = queued_labels(self._path, episode)
        with self._lock:
            store = self._require(episode)
            steps = int(store.index.episodes.steps[store.index.episodes.find(episode)])
            known = [*store.index.labels(episode), *queued]
        common: dict[str, Any] = {"episode": episode, "labeller": request.person, "at_unix_ns": time.time_ns()}
        common["note"] = request.note
        labels: list[Label] = []
        if request.success is not None:
            labels.append(SuccessLabel(success=SUCCESS[request.success], **common))
        if request.deleted is not None:
            labels.append(DeleteLabel(deleted=request.deleted, **common))
        if request.demonstration:
            labels.append(PhaseLabel(first_step=0, steps=ALL_STEPS, phase=Phase.TELEOP, **common))
        if (request.keep_from, request.keep_to) != (None, None):
            first, last = _requested_steps(request, *_kept(newest_trim(by_precedence(known))))
            if not first <= (first if last is None else last) < steps:
                end = "the end" if last is None else last
                raise StoreError(f"steps {first} to {end} cannot be kept: {episode} has steps 0 to {steps - 1}")
            kept = ALL_STEPS if last is None else last - first + 1
            labels.append(TrimLabel(first_step=first, steps=kept, **common))
        if request.undo:
            labels = [UndoLabel(undone_at_unix_ns=label_to_undo(known, episode).at_unix_ns, **common)]
        if not labels and not request.note:
            raise StoreError("the label is empty: give success, deleted, demonstration, a kept step, undo or a note")
        return wait_until_stored(queue_labels(self._path, labels or [NoteLabel(**common)]), STORE_TIMEOUT_S)

    def export(self, episode: str, form: Literal["lerobot", "mcap"]) -> Path:
        """Exports the episode with `user-sys store export` and returns the folder.

        Raises:
            StoreError: there is no such episode, another export runs, or it failed; the message has the reason.
        """
        with self._lock:
            self._require(episode)
        if not self._exporting.acquire(blocking=False):
            raise StoreError("another export runs; try again when it has ended")
        try:
            return self._export(episode, form)
        finally:
            self._exporting.release()

    def _export(self, episode: str, form: Literal["lerobot", "mcap"]) -> Path:
        folder = self._path.parent / "exports" / f"{episode}-{form}-{time.time_ns()}"
        options = ["--format", form, "--episode", episode, "--incomplete", "--output", str(folder)]
        command = [sys.executable, "-m", "user_sys.commands.main", "store", "export", str(self._path), *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise StoreError(f"the export took over {EXPORT_TIMEOUT_S:.0f} s; use `user-sys store export`") from None
        if done.returncode:
            reason = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
            raise StoreError(f"{episode} cannot be exported: {reason.splitlines()[-1]}")
        return folder

    # The lock is held from here on.

    def _refreshed(self) -> StoreReader | None:
        """The store with its newest records; None while there is none."""
        if self._store is None:
            if not segment_numbers(self._path):
                return None
            self._store = StoreReader.open(self._path)
        self._store.refresh()
        return self._store

    def _require(self, episode: str) -> StoreReader:
        store = self._refreshed()
        if store is None or store.index.episodes.find(episode) < 0:
            raise StoreError(f"the store has no episode {episode[:80]!r}")
        return store

    def _described(self, episode: str) -> tuple[StoreReader, EpisodeSummary, RobotSpec | None]:
        store = self._require(episode)
        summary = store.episodes()[store.index.episodes.find(episode)]
        return store, summary, load_robot_specs(self._path).get(summary.embodiment)

    def _read(self, store: StoreReader, episode: str) -> StoredEpisode:
        """Only complete episodes are cached: others grow."""
        key = episode, len(store.index.labels(episode))
        if (found := self._cache.get(key)) is None:
            found = EpisodeReader(store).read(episode)
            if found.header.end is not None:
                self._cache[key] = found
            while len(self._cache) > CACHED_EPISODES:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return found


def _kept(trim: TrimLabel | None) -> tuple[int, int | None]:
    """See `EpisodeDetail.kept`."""
    if trim is None:
        return 0, None
    return trim.first_step, None if trim.steps == ALL_STEPS else trim.first_step + trim.steps - 1


def _requested_steps(request: LabelRequest, first: int, last: int | None) -> tuple[int, int | None]:
    """First and last step that are kept after the request, of the present ones."""
    if request.keep_from is not None:
        first, last = request.keep_from, None if last is None else max(request.keep_from, last)
    if request.keep_to is not None:
        first, last = first if request.keep_from is not None else min(first, request.keep_to), request.keep_to
    return first, last


def _label_text(label: Label) -> str:
    """E.g. ``ana: succeeded (the cube slipped)``."""
    return f"{label.labeller}: {describe_label(label)}" + (f" ({label.note})" if label.note else "")


def _matches(episode: EpisodeSummary, query: EpisodeQuery) -> bool:
    low, high = episode.policy_versions
    return (
        query.robot in ("", episode.robot)
        and query.task in ("", episode.task)
        and query.source in ("", episode.source)
        and (not query.success or episode.success is SUCCESS[query.success])
        and (not query.phase or bool(episode.intervention_steps) is (query.phase == "person"))
        and (not query.version or (query.version.isdecimal() and low <= int(query.version) <= high))
        and query.from_unix_ms * 10**6 <= episode.started_unix_ns
        and (not query.until_unix_ms or episode.started_unix_ns < query.until_unix_ms * 10**6)
    )


def _captured_steps(stored: StoredEpisode, camera: str) -> list[int]:
    has_frame = np.array([frame is not None for frame in stored.frames[camera]], bool)
    newest: list[int] = np.maximum.accumulate(np.where(has_frame, np.arange(len(has_frame)), -1)).tolist()
    return newest


def _traces(stored: StoredEpisode, labels: list[str]) -> list[Trace]:
    columns = stored.columns
    traces = [Trace("reward", {"reward": _values(columns["reward"])})] if "reward" in columns else []
    for n in range(columns[ACTION].shape[1] if ACTION in columns else 0):
        curves = {"requested": _values(columns[ACTION][:, n])}
        if APPLIED_ACTION in columns:
            curves["applied"] = _values(columns[APPLIED_ACTION][:, n])
        traces.append(Trace(labels[n] if n < len(labels) else f"action {n}", curves))
    return traces


def _values(column: Any) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in column]


def episode_routes(library: EpisodeLibrary, audit: AuditSink) -> APIRouter:
    """The routes under ``/api/episodes``. An error is a text in one line with status 400."""
    router = APIRouter(prefix="/api/episodes")

    @router.get("")
    def listed(request: Request) -> Response:
        return _answer(lambda: library.list(_converted(dict(request.query_params), EpisodeQuery)))

    @router.get("/{episode}")
    def detail(episode: str) -> Response:
        return _answer(lambda: library.detail(episode))

    @router.get("/{episode}/pictures/{camera}/{step}")
    def picture(episode: str, camera: str, step: int) -> Response:
        try:
            return Response(library.picture(episode, camera, step), media_type="image/jpeg")
        except UserSysError as error:
            return _refusal(error)

    @router.get("/{episode}/video")
    def video(episode: str) -> Response:
        try:
            return FileResponse(library.video(episode), media_type="video/mp4")
        except UserSysError as error:
            return _refusal(error)

    @router.post("/{episode}/label")
    async def label(episode: str, request: Request) -> Response:
        return await _order(request, LabelRequest, lambda asked: {"stored": library.label(episode, asked)}, episode)

    @router.post("/{episode}/export")
    async def export(episode: str, request: Request) -> Response:
        return await _order(
            request, ExportRequest, lambda asked: {"folder": str(library.export(episode, asked.format))}, episode
        )

    async def _order(
        request: Request, kind: type[Any], act: Callable[[Any], dict[str, object]], episode: str
    ) -> Response:
        """Runs a person's order in a thread and audits it there: an order takes effect also if the page has gone."""
        address = request.client.host if request.client else ""

        def perform(asked: Any) -> dict[str, object]:
            result = act(asked)
            fields = {name: value for name, value in msgspec.structs.asdict(asked).items() if name != "person"}
            unset = {each.name: each.default for each in msgspec.structs.fields(asked)}
            given = ", ".join(f"{name} {value}" for name, value in fields.items() if value != unset[name])
            order = f"{kind.__name__.removesuffix('Request').lower()} {episode}: {given}"
            audit(AuditEntry(event="order", person=asked.person, address=address, order=order, outcome="done"))
            return result

        try:
            asked = _decoded(await request.body(), kind)
            if name := request.scope["sign_in"].name:
                asked = msgspec.structs.replace(asked, person=name)
            result = await run_in_threadpool(perform, asked)
        except UserSysError as error:
            return _refusal(error)
        except OSError as error:
            return _refusal(StoreError(f"the order cannot be written: {error}"))
        return Response(msgspec.json.encode(result), media_type="application/json")

    return router


def _answer(make: Callable[[], msgspec.Struct]) -> Response:
    try:
        return Response(msgspec.json.encode(make()), media_type="application/json")
    except UserSysError as error:
        return _refusal(error)


def _refusal(error: UserSysError) -> Response:
    return Response(f"{error}\n", status_code=400, media_type="text/plain; charset=utf-8")


def _converted(values: dict[str, str], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(values, kind, strict=False)  # numbers are texts
    except DECODE_ERRORS as error:
        raise WireError(str(error)) from None


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except DECODE_ERRORS as error:
        raise WireError(str(error)) from None
