"""The in-memory index of a store: numpy columns of steps, chunks and episodes, and the links between chunks.

Rows are numbered in storage order and keep their numbers; a deleted or lost row is no longer ``alive``. The steps
of a chunk are adjacent: step row r of chunk row c is step ``chunks.first_step[c] + r - chunks.first_row[c]`` of its
episode. Memory: about 31 bytes per step, 80 per chunk.

An episode of T steps has T + 1 observations: one before each step and the final one. Observations are numbered in
storage order, with a chunk's final observation after those of its steps. So the observation after step r also has a
number, and consecutive numbers were stored together.

The index is built from index blocks alone, so footers and records give the same index. One thread changes it;
other threads may read rows that they have been given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from user_sys.codec import Array
from user_sys.episode import EpisodeSource, Phase
from user_sys.messages import NO_VERSION
from user_sys.store.index_block import CHUNK_COLUMNS, CHUNK_KIND, STEP_DTYPES, EndRecord, EpisodeRecord, IndexBlock
from user_sys.store.labels import (
    REWARD_PREFIX,
    ColumnLabel,
    DeleteLabel,
    Label,
    PhaseLabel,
    RewardLabel,
    SuccessLabel,
    TrimLabel,
    by_precedence,
)
from user_sys.store.record_format import RecordRef

INITIAL_ROWS = 1024
CLOCK_TOLERANCE_NS = 60 * 10**9  # by which a robot's chunks may arrive out of order
NO_ROW = -1  # no row; for `success`: unknown
PERSON = "person"
LABELLED_COLUMNS = ("reward", "terminated", "truncated", "phase")  # step columns that labels can change


class ColumnTable:
    """Growing columns of equal length. Each column is an attribute: a writable view of the current rows.

    Appending is amortised O(1): the arrays behind the views double. An older view keeps its rows, and sees later
    changes of their values until the arrays are next reallocated.
    """

    DTYPES: ClassVar[Mapping[str, str]]

    def __init__(self) -> None:
        self._arrays = {name: np.empty(0, dtype) for name, dtype in self.DTYPES.items()}
        self._rows = 0
        self._bind()

    def __len__(self) -> int:
        return self._rows

    if TYPE_CHECKING:

        def __getattr__(self, column: str) -> Array: ...

    def extend(self, rows: int, columns: Mapping[str, Array | int | bool]) -> range:
        """Appends `rows` rows and returns their numbers; `columns` has a value for every column."""
        new = range(self._rows, self._rows + rows)
        if new.stop > len(next(iter(self._arrays.values()))):
            self._grow(max(INITIAL_ROWS, new.stop, 2 * self._rows))
        for name, array in self._arrays.items():
            array[new.start : new.stop] = columns[name]
        self._rows = new.stop
        self._bind()
        return new

    def _grow(self, capacity: int) -> None:
        for name, array in self._arrays.items():
            grown = np.empty(capacity, array.dtype)
            grown[: self._rows] = array[: self._rows]
            self._arrays[name] = grown

    def _bind(self) -> None:
        for name, array in self._arrays.items():
            setattr(self, name, array[: self._rows])


class StringTable:
    """Strings and their codes 0, 1, 2, ... in order of insertion."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.names)

    def code(self, name: str) -> int:
        """The code of `name`; assigns a new one if needed."""
        code = self._codes.setdefault(name, len(self.names))
        if code == len(self.names):
            self.names.append(name)
        return code

    def find(self, name: str) -> int:
        """The code of `name`, or -1."""
        return self._codes.get(name, -1)


class StepTable(ColumnTable):
    """One row per step, with labels applied.

    Attributes:
        time_unix_ns: of capture, by the edge's clock.
        chunk: row of its chunk.
        alive: neither deleted nor gone.
    """

    DTYPES = {**STEP_DTYPES, "chunk": "int32", "alive": "bool"}


class ChunkTable(ColumnTable):
    """One row per chunk.

    Attributes:
        episode: row of its episode.
        index, first_step, steps: as in its header.
        first_row, first_observation: row of its first step, and number of the observation before that step.
        segment, offset, length, sequence: location of its record when found; see `Index.record_ref`.
        schema: fingerprint of its columns.
        next_chunk: row of the chunk that continues this one; -1 if there is none.
        has_final: it is the last chunk of its episode and has the final observation.
        gone: its record can no longer be read.
        alive: neither deleted nor gone.
    """

    DTYPES = {
        **{name: dtype for name, dtype in CHUNK_COLUMNS.items() if name != "end"},
        "first_row": "int64",
        "first_observation": "int64",
        "next_chunk": "int32",
        "has_final": "bool",
        "gone": "bool",
        "alive": "bool",
    }


class EpisodeTable(ColumnTable):
    """One row per episode. Name columns are codes into `robots`, `embodiments` and so on.

    Attributes:
        steps, chunks, size_bytes: stored so far.
        end_index: index of its last chunk; -1 while unknown.
        complete: its end and all chunks before it are stored.
        success: 1, 0, or -1 if unknown, with labels applied.
        reward_source: code into `reward_sources` of the source of `success`, see `EpisodeSummary`.
        by_policy: in a stored step, as recorded, weights acted. The robot's rest, with which a person's attempt may
            end, is a step in phase POLICY too.
        deleted: by a label.
    """

    DTYPES = {
        **dict.fromkeys(("robot", "embodiment", "task", "sentence", "source", "reward_source"), "int32"),
        **dict.fromkeys(("seed", "started_unix_ns", "steps", "size_bytes"), "int64"),
        **dict.fromkeys(("chunks", "end_index"), "int32"),
        "success": "int8",
        "complete": "bool",
        "by_policy": "bool",
        "deleted": "bool",
    }

    def __init__(self) -> None:
        super().__init__()
        self.ids = StringTable()
        self.robots, self.embodiments, self.tasks = StringTable(), StringTable(), StringTable()
        self.sentences, self.sources, self.reward_sources = StringTable(), StringTable(), StringTable()

    def find(self, episode: str) -> int:
        """The row of `episode`, or -1."""
        return self.ids.find(episode)

    def add(self, records: Sequence[EpisodeRecord]) -> None:
        """Appends new episodes."""
        columns: dict[str, Array | int | bool] = {
            "robot": np.array([self.robots.code(r.robot) for r in records], np.int32),
            "embodiment": np.array([self.embodiments.code(r.embodiment) for r in records], np.int32),
            "task": np.array([self.tasks.code(r.task) for r in records], np.int32),
            "sentence": np.array([self.sentences.code(r.sentence) for r in records], np.int32),
            "source": np.array([self.sources.code(r.source) for r in records], np.int32),
            "reward_source": self.reward_sources.code(""),
            "seed": np.array([r.seed for r in records], np.int64),
            "started_unix_ns": np.array([r.started_unix_ns for r in records], np.int64),
            **dict.fromkeys(("steps", "size_bytes", "chunks", "complete", "by_policy", "deleted"), 0),
            **dict.fromkeys(("end_index", "success"), NO_ROW),
        }
        self.extend(len(records), columns)


class NewestSteps:
    """When the newest living step of each robot was captured, and the versions that acted. Reads each chunk once.

    Attributes:
        time_unix_ns: int64, by the robot's code; 0 if it has no living step. A change replaces the array. An online
            chunk that is more than `CLOCK_TOLERANCE_NS` older sets it back: the robot's clock was. The chunks of the
            first `add_new` do not, because a store may be merged or imported while no run writes it.
    """

    def __init__(self) -> None:
        self._first_live = 0  # the row of the first chunk that may set the time back; 0 before there are chunks
        self.clear()

    def clear(self) -> None:
        """Forgets all chunks: the next `add_new` reads them again."""
        self.time_unix_ns = np.empty(0, np.int64)
        self._chunks = 0
        self._versions: dict[int, list[int]] = {}  # by the embodiment's code, ascending

    def oldest_version(self, embodiments: Iterable[int], age: int) -> int | None:
        """The version `age` places before the newest, of those that acted in these embodiments, or the first of them.

        None: none did. Each learner numbers its own versions, and skips numbers when it resumes.
        """
        newest = {version for code in embodiments for version in self._versions.get(code, [])[-1 - age :]}
        return min(sorted(newest)[-1 - age :], default=None)

    def add_new(self, index: Index) -> None:
        """Adds the chunks that `index` has got since the last call."""
        new, episodes = slice(self._chunks, None), index.episodes
        starts, episode = index.chunks.first_row[new], index.chunks.episode[new]
        missing = np.zeros(len(episodes.robots) - len(self.time_unix_ns), np.int64)
        self.time_unix_ns = np.append(self.time_unix_ns, missing)
        if not len(starts):
            return
        self._first_live = self._first_live or len(index.chunks)
        may_set_back = np.arange(self._chunks, len(index.chunks)) >= self._first_live
        rows, self._chunks = slice(starts[0], None), len(index.chunks)
        times = index.steps.time_unix_ns[rows] * index.steps.alive[rows]
        self._add_times(index, episode, np.maximum.reduceat(times, starts - starts[0]), may_set_back)
        versions = index.steps.policy_version[rows]
        at = np.union1d(starts - starts[0], 1 + np.flatnonzero(versions[1:] != versions[:-1]))
        embodiment = episodes.embodiment[index.episode_of(starts[0] + at)]
        for code in np.unique(embodiment).tolist():
            for version in np.unique(versions[at[embodiment == code]]).tolist():
                self._add_version(code, version)

    def _add_times(self, index: Index, episode: Array, latest_ns: Array, may_set_back: Array) -> None:
        """Adds the newest times of chunks of these episodes, in the order of the store."""
        episodes, newest_ns = index.episodes, self.time_unix_ns.tolist()
        may_set_back &= episodes.source[episode] == episodes.sources.find(EpisodeSource.ONLINE)
        found = (episodes.robot[episode], latest_ns, may_set_back)
        for robot, time_ns, may in zip(*(column.tolist() for column in found), strict=True):
            if time_ns > newest_ns[robot] or (may and 0 < time_ns < newest_ns[robot] - CLOCK_TOLERANCE_NS):
                newest_ns[robot] = time_ns
        self.time_unix_ns = np.array(newest_ns, np.int64)

    def _add_version(self, embodiment: int, version: int) -> None:
        known = self._versions.setdefault(embodiment, [])
        place = bisect_left(known, version)
        if version >= 0 and known[place : place + 1] != [version]:
            known.insert(place, version)


@dataclass(frozen=True)
class IndexChange:
    """Changes of an index between two updates.

    Attributes:
        rows: new steps.
        chunks: new chunks.
        relabelled: int64, older rows of newly labelled episodes; their `LABELLED_COLUMNS` may have changed.
        dropped: int64, older rows that are no longer alive.
        revived: int64, older rows that are alive again.
        ended: int64, older rows of episodes whose end arrived; their `success` may have changed.
    """

    rows: range
    chunks: range
    relabelled: Array
    dropped: Array
    revived: Array
    ended: Array


class Index:
    """Steps, chunks and episodes of a store; `apply` adds blocks in storage order.

    Attributes:
        updates: number of calls of `apply` that have changed an episode.
        ends: of episodes, by their rows, as recorded.
    """

    def __init__(self) -> None:
        self.steps, self.chunks, self.episodes = StepTable(), ChunkTable(), EpisodeTable()
        self._labels: dict[str, list[Label]] = {}
        self.updates = 0
        self._updated = np.empty(0, np.int64)  # the number of the last update of each episode
        self._columns: dict[str, Array] = {}  # labelled columns: float32, NaN without a label, with spare rows
        self._recorded: dict[int, dict[str, Array]] = {}  # recorded step columns of labelled episodes
        self.ends: dict[int, EndRecord] = {}
        self._rows: dict[int, dict[int, int]] = {}  # of incomplete episodes: chunk index -> row
        self._newest = NewestSteps()  # cleared once a step was dropped or revived

    # Queries

    def record_ref(self, chunk: int) -> RecordRef:
        """Location of a chunk row's record, as of when it was found."""
        c = self.chunks
        segment, offset, length = (int(column[chunk]) for column in (c.segment, c.offset, c.length))
        return RecordRef(segment, offset, length, CHUNK_KIND, int(c.sequence[chunk]), int(c.schema[chunk]))

    def successor(self, rows: Array) -> Array:
        """Row of the next step of the same episode, int64; -1 at the episode's end or if it is not stored yet."""
        chunks = self.chunks
        chunk = self.steps.chunk[rows]
        at_end = rows - chunks.first_row[chunk] == chunks.steps[chunk] - 1
        following = chunks.next_chunk[chunk]
        after: Array = np.where(following >= 0, chunks.first_row[following], NO_ROW)
        return np.where(at_end, after, np.asarray(rows, np.int64) + 1)

    def episode_of(self, rows: Array | slice) -> Array:
        """Episode rows of step rows."""
        found: Array = self.chunks.episode[self.steps.chunk[rows]]
        return found

    def step_of(self, rows: Array) -> Array:
        """Number of each step row within its episode."""
        chunk = self.steps.chunk[rows]
        found: Array = rows - self.chunks.first_row[chunk] + self.chunks.first_step[chunk]
        return found

    @property
    def observation_count(self) -> int:
        """Number of stored observations; their numbers are below it."""
        return self.observation_range(len(self.chunks) - 1).stop if len(self.chunks) else 0

    def observation_range(self, chunk: int) -> range:
        """Numbers of a chunk's observations."""
        chunks = self.chunks
        start = int(chunks.first_observation[chunk])
        return range(start, start + int(chunks.steps[chunk]) + int(chunks.has_final[chunk]))

    def observation_before(self, rows: Array) -> Array:
        """Number of the observation before each step, int64."""
        chunk = self.steps.chunk[rows]
        found: Array = self.chunks.first_observation[chunk] + (rows - self.chunks.first_row[chunk])
        return found

    def observation_after(self, rows: Array) -> Array:
        """Number of the observation after each step, int64; -1 if it is not stored (yet)."""
        chunks, chunk = self.chunks, self.steps.chunk[rows]
        step = rows - chunks.first_row[chunk]
        within = (step < chunks.steps[chunk] - 1) | chunks.has_final[chunk]
        continued = chunks.next_chunk[chunk]
        after: Array = np.where(continued >= 0, chunks.first_observation[continued], NO_ROW)
        return np.where(within, chunks.first_observation[chunk] + step + 1, after)

    def failed_by_hand(self, rows: Array | slice) -> Array:
        """Whether steps are in phase TELEOP of a failure in which no policy acted, and so show nothing to do; bool."""
        episode, episodes = self.episode_of(rows), self.episodes
        has_failed = (episodes.success[episode] == 0) & ~episodes.by_policy[episode]
        found: Array = has_failed & (self.steps.phase[rows] == Phase.TELEOP)
        return found

    def locate_observations(self, numbers: Array) -> tuple[Array, Array]:
        """Chunk row of each observation, and the step within it; the number of its steps for the final one."""
        chunk = np.searchsorted(self.chunks.first_observation, numbers, "right") - 1
        return chunk, numbers - self.chunks.first_observation[chunk]

    def newest_steps(self) -> NewestSteps:
        """The newest steps as of the last `apply`. The thread that changes the index calls it."""
        self._newest.add_new(self)
        return self._newest

    def labelled_column(self, name: str, rows: Array) -> Array | None:
        """Labelled values of a column for step rows, float32 like `rows`, NaN without a label; None if it has none."""
        return self._columns[name][rows] if name in self._columns else None

    def recorded_phase(self, episode: int) -> Array | None:
        """The phase of each stored step of an episode's row as recorded, uint8; None if no label has changed steps."""
        columns = self._recorded.get(episode)
        return None if columns is None else columns["phase"]

    def labels(self, episode: str) -> tuple[Label, ...]:
        """Labels of an episode, oldest first."""
        return tuple(self._labels.get(episode, ()))

    def updated_episodes(self, since: int) -> Array:
        """Rows of the episodes that are new, or have got chunks or labels, after the first `since` updates."""
        return np.flatnonzero(self._updated > since)

    # Updates

    def apply(self, blocks: Sequence[IndexBlock], dropped: Sequence[Array] = ()) -> IndexChange:
        """Adds blocks in storage order, and skips chunks that the index already has.

        Args:
            dropped: sequence numbers of records that no longer exist.
        """
        old_rows, old_chunks = len(self.steps), len(self.chunks)
        touched: set[str] = set()
        ended: list[int] = []
        for block in blocks:
            ended += self._add_chunks(block, touched)
            for label in block.labels:
                self._labels.setdefault(label.episode, []).append(label)
                touched.add(label.episode)
        self._count_update(old_chunks, touched)
        lost = self._drop_records(dropped)
        for name, column in self._columns.items():
            if len(column) < len(self.steps):
                grown = np.full(max(INITIAL_ROWS, 2 * len(self.steps)), np.nan, np.float32)
                grown[: len(column)] = column
                self._columns[name] = grown
        relabelled, before, after = self._apply_labels(touched)
        old = np.arange(len(relabelled))[relabelled < old_rows]
        rows, was, now = relabelled[old], before[old], after[old]
        if (was != now).any():
            self._newest.clear()
        return IndexChange(
            range(old_rows, len(self.steps)),
            range(old_chunks, len(self.chunks)),
            rows,
            np.concatenate([lost[lost < old_rows], rows[was & ~now]]),
            rows[~was & now],
            self._steps_of([chunk for chunk in ended if chunk < old_chunks]),
        )

    def _count_update(self, old_chunks: int, labelled: Iterable[str]) -> None:
        """Counts an update of the episodes of the chunks from `old_chunks` on, and of the `labelled` ones."""
        new = np.unique(self.chunks.episode[old_chunks:]).tolist()
        changed = {*new, *map(self.episodes.find, labelled)} - {NO_ROW}
        if changed:
            self.updates += 1
            self._updated = np.append(self._updated, np.zeros(len(self.episodes) - len(self._updated), np.int64))
            self._updated[list(changed)] = self.updates

    def _steps_of(self, chunks: Sequence[int] | Array) -> Array:
        rows = np.asarray(chunks, np.int64)
        return spans(self.chunks.first_row[rows], self.chunks.steps[rows])

    def _add_chunks(self, block: IndexBlock, touched: set[str]) -> list[int]:
        """Returns the chunk rows of episodes whose end is in `block`."""
        if not len(block.chunks["steps"]):
            return []
        touched.update(self._labels.keys() & {record.episode for record in block.episodes})
        existing = np.array([self.episodes.find(record.episode) for record in block.episodes])
        self.episodes.add([record for record, row in zip(block.episodes, existing, strict=True) if row < 0])
        rows = np.array([self.episodes.ids.code(record.episode) for record in block.episodes], np.int32)
        episode = rows[block.chunks["episode"]]
        is_new = self._take_new(episode, block.chunks["index"])
        if not is_new.any():
            return []
        chunks = {name: column[is_new] for name, column in block.chunks.items()} | {"episode": episode[is_new]}
        steps = block.steps
        if not is_new.all():
            of_step = np.repeat(is_new, block.chunks["steps"])
            steps = {name: column[of_step] for name, column in steps.items()}
        return self._append(chunks, steps, block.ends)

    def _append(self, chunks: dict[str, Array], steps: dict[str, Array], ends: Sequence[EndRecord]) -> list[int]:
        end, counts = chunks.pop("end"), chunks["steps"].astype(np.int64)
        observed = counts + (end >= 0)
        chunks |= {
            "first_row": len(self.steps) + np.cumsum(counts) - counts,
            "first_observation": self.observation_count + np.cumsum(observed) - observed,
            "has_final": end >= 0,
        }
        rows = self.chunks.extend(len(end), {**chunks, "next_chunk": NO_ROW, "gone": False, "alive": True})
        of_chunk = np.repeat(np.arange(rows.start, rows.stop, dtype=np.int32), counts)
        self.steps.extend(len(of_chunk), {**steps, "chunk": of_chunk, "alive": True})
        episodes = self.episodes
        np.add.at(episodes.steps, chunks["episode"], counts)
        np.add.at(episodes.chunks, chunks["episode"], 1)
        np.add.at(episodes.size_bytes, chunks["episode"], chunks["length"])
        by_weights = (steps["phase"] == Phase.POLICY) & (steps["policy_version"] != NO_VERSION)
        episodes.by_policy[np.repeat(chunks["episode"], counts)[by_weights]] = True
        for place in np.flatnonzero(end >= 0):
            self._set_end(int(chunks["episode"][place]), int(chunks["index"][place]), ends[int(end[place])])
        self._link(rows, chunks["episode"].tolist(), chunks["index"].tolist())
        seen = np.unique(chunks["episode"])
        complete = seen[episodes.chunks[seen] == episodes.end_index[seen] + 1]
        episodes.complete[complete] = True
        ended = {*chunks["episode"][end >= 0].tolist(), *complete.tolist()}
        found = [chunk for episode in ended for chunk in self._rows[episode].values()]
        for episode in complete.tolist():
            del self._rows[episode]
        return found

    def _set_end(self, episode: int, index: int, end: EndRecord) -> None:
        self.ends[episode] = end
        self.episodes.end_index[episode] = index
        self._set_outcome(episode, end.success, end.reward_source)

    def _set_outcome(self, episode: int, success: bool | None, source: str) -> None:
        self.episodes.success[episode] = NO_ROW if success is None else success
        self.episodes.reward_source[episode] = self.episodes.reward_sources.code(source)

    # Order within episodes

    def _take_new(self, episode: Array, index: Array) -> Array:
        """Which of the chunks are not indexed yet (bool); of equal ones, the first counts."""
        known, taken = self.episodes.complete[episode].tolist(), []
        for is_complete, row, number in zip(known, episode.tolist(), index.tolist(), strict=True):
            rows = {} if is_complete else self._rows.setdefault(row, {})
            taken.append(not is_complete and number not in rows)
            rows.setdefault(number, NO_ROW)
        return np.array(taken, bool)

    def _link(self, rows: range, episodes: Sequence[int], indexes: Sequence[int]) -> None:
        """Links new chunks with stored neighbours whose step numbers are consecutive; chunks arrive in any order."""
        before, after = list[int](), list[int]()
        for row, episode, index in zip(rows, episodes, indexes, strict=True):
            stored = self._rows[episode]
            stored[index] = row
            before += (stored.get(index - 1, NO_ROW), row)
            after += (row, stored.get(index + 1, NO_ROW))
        chunks, first, second = self.chunks, np.array(before), np.array(after)
        fits = chunks.first_step[first] + chunks.steps[first] == chunks.first_step[second]
        fits &= (first >= 0) & (second >= 0)
        chunks.next_chunk[first[fits]] = second[fits]

    # Labels

    def _apply_labels(self, names: set[str]) -> tuple[Array, Array, Array]:
        """Applies the labels of these episodes; returns their step rows and whether each was and is alive."""
        rows = {row: name for name in names if (row := self.episodes.find(name)) >= 0}
        chunks = np.flatnonzero(np.isin(self.chunks.episode, list(rows))) if rows else np.empty(0, np.int64)
        chunks = chunks[np.argsort(self.chunks.episode[chunks], kind="stable")]
        steps = spans(self.chunks.first_row[chunks], self.chunks.steps[chunks])
        before = self.steps.alive[steps].copy()
        for group in np.split(chunks, np.flatnonzero(np.diff(self.chunks.episode[chunks])) + 1):
            if len(group):
                episode = int(self.chunks.episode[group[0]])
                self._apply_episode_labels(episode, group, self._labels[rows[episode]])
        return steps, before, self.steps.alive[steps]

    def _apply_episode_labels(self, episode: int, chunks: Array, labels: Sequence[Label]) -> None:
        """Sets an episode's columns from its records and effective labels; `chunks` are its rows, ascending.

        Each column is assigned once, so concurrent readers never see the recorded value of a labelled step.
        """
        steps = spans(self.chunks.first_row[chunks], self.chunks.steps[chunks])
        valid = by_precedence(labels)
        deleted = next((label.deleted for label in reversed(valid) if isinstance(label, DeleteLabel)), False)
        self.episodes.deleted[episode] = deleted
        self.chunks.alive[chunks] = ~self.chunks.gone[chunks] & (not deleted)
        alive = self.chunks.alive[self.steps.chunk[steps]]
        if (trim := newest_trim(valid)) is not None:
            alive = alive & _is_kept(self.step_of(steps), trim)
        self.steps.alive[steps] = alive
        if any(isinstance(label, SuccessLabel | RewardLabel | PhaseLabel | TrimLabel) for label in labels):
            self._apply_step_labels(episode, steps, valid)
        if any(isinstance(label, ColumnLabel) for label in labels):
            self._apply_column_labels(steps, [label for label in valid if isinstance(label, ColumnLabel)])

    def _apply_column_labels(self, steps: Array, labels: Sequence[ColumnLabel]) -> None:
        number = self.step_of(steps)
        for name in self._columns.keys() | {label.name for label in labels}:
            values = np.full(len(steps), np.nan, np.float32)
            for label in labels:
                if label.name == name:
                    at, given = number - label.first_step, label.array()
                    inside = (at >= 0) & (at < len(given))
                    values[inside] = given[at[inside]]
            if name not in self._columns:
                self._columns[name] = np.full(len(self.steps), np.nan, np.float32)
            self._columns[name][steps] = values

    def _apply_step_labels(self, episode: int, steps: Array, labels: Sequence[Label]) -> None:
        recorded = self._recorded_columns(episode, steps)
        labelled = {name: column.copy() for name, column in recorded.items()}
        number, last = self.step_of(steps), self._is_end(episode, steps)
        end = self.ends.get(episode)
        outcome = (end.success, end.reward_source) if end else (None, "")
        for label in labels:
            match label:
                case SuccessLabel():
                    by_reward = label.labeller.startswith(REWARD_PREFIX)
                    outcome = (label.success, label.labeller if by_reward else PERSON)
                    unknown, success = label.success is None, bool(label.success)
                    labelled["terminated"][last] = recorded["terminated"][last] | success
                    labelled["truncated"][last] = recorded["truncated"][last] & (not success)
                    if not label.keep_reward:
                        labelled["reward"][last] = recorded["reward"][last] if unknown else float(success)
                case RewardLabel():
                    at = number - label.first_step
                    inside = (at >= 0) & (at < len(label.rewards))
                    labelled["reward"][inside] = np.array(label.rewards, np.float32)[at[inside]]
                case PhaseLabel():
                    at = number - label.first_step
                    labelled["phase"][(at >= 0) & (at < label.steps)] = label.phase
        if (trim := newest_trim(labels)) is not None:
            cut = (number == trim.first_step + trim.steps - 1) & ~last
            if outcome[0] and last.any() and cut.any():
                labelled["terminated"][cut] |= labelled["terminated"][last]
                reward = labelled["reward"].copy()
                labelled["reward"][cut], labelled["reward"][last] = reward[last], reward[cut]
            labelled["truncated"][cut] = ~labelled["terminated"][cut]
        self._set_outcome(episode, *outcome)
        for name, column in labelled.items():
            getattr(self.steps, name)[steps] = column

    def _recorded_columns(self, episode: int, steps: Array) -> dict[str, Array]:
        """The `LABELLED_COLUMNS` of an episode's rows `steps` as recorded; new rows follow known ones."""
        existing = self._recorded.get(episode, {name: getattr(self.steps, name)[:0] for name in LABELLED_COLUMNS})
        new = steps[len(existing["reward"]) :]
        recorded = {name: np.concatenate([existing[name], getattr(self.steps, name)[new]]) for name in LABELLED_COLUMNS}
        self._recorded[episode] = recorded
        return recorded

    def _is_end(self, episode: int, steps: Array) -> Array:
        """Which of an episode's rows is its last step (bool); none while its end is not stored."""
        chunks, chunk = self.chunks, self.steps.chunk[steps]
        in_last = chunks.index[chunk] == self.episodes.end_index[episode]
        last: Array = in_last & (steps - chunks.first_row[chunk] == chunks.steps[chunk] - 1)
        return last

    def _drop_records(self, dropped: Sequence[Array]) -> Array:
        sequences = np.concatenate(dropped) if dropped else np.empty(0, np.int64)
        if not len(sequences):
            return sequences
        return self.mark_gone(np.flatnonzero(np.isin(self.chunks.sequence, sequences) & ~self.chunks.gone))

    def mark_gone(self, chunks: Array) -> Array:
        """Marks chunk rows as lost, such as unreadable ones; returns the step rows that are no longer alive."""
        steps = self._steps_of(chunks)
        steps = steps[self.steps.alive[steps]]
        if len(steps):
            self._newest.clear()
        self.chunks.gone[chunks] = True
        self.chunks.alive[chunks] = False
        self.steps.alive[steps] = False
        leading = np.isin(self.chunks.next_chunk, chunks)
        self.chunks.next_chunk[leading] = NO_ROW
        return steps


def newest_trim(labels: Sequence[Label]) -> TrimLabel | None:
    """The trim that applies, of an episode's effective labels; None if it is whole."""
    return next((label for label in reversed(labels) if isinstance(label, TrimLabel)), None)


def _is_kept(number: Array, trim: TrimLabel) -> Array:
    """Which steps, by their number in the episode, a trim keeps (bool)."""
    kept: Array = (number >= trim.first_step) & (number < trim.first_step + trim.steps)
    return kept


def spans(starts: Array, sizes: Array) -> Array:
    """Concatenated ranges ``starts[i] .. starts[i] + sizes[i]``, int64."""
    sizes = np.asarray(sizes, np.int64)
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    spans: Array = np.repeat(np.asarray(starts, np.int64), sizes) + within
    return spans


def rows_of(index: Index, sequence: Array, step: Array) -> Array:
    """Rows of steps by the sequence numbers of their chunks' records and their numbers there; -1 if not stored."""
    chunks = index.chunks
    alive = np.flatnonzero(chunks.alive)
    if not len(alive):
        return np.full(np.shape(sequence), NO_ROW, np.int64)
    alive = alive[np.argsort(chunks.sequence[alive])]
    at = np.minimum(np.searchsorted(chunks.sequence[alive], sequence), len(alive) - 1)
    rows: Array = np.where(chunks.sequence[alive[at]] == sequence, chunks.first_row[alive[at]] + step, NO_ROW)
    return rows


class EpisodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One episode as far as it is stored.

    Attributes:
        success: by the last label, otherwise by the episode's end; None if unknown.
        recorded_success: by the episode's end.
        episode_return: sum of the stored rewards.
        intervention_steps: steps in another phase than POLICY, by the labels.
        recorded_intervention_steps: the same as recorded.
        policy_versions: lowest and highest version that acted; (-1, -1) if no policy did.
        complete: its end and all chunks before it are stored.
        labelled_by: labeller of `success`; empty without a label.
        reward_source: of `success`: ``person`` by a label or as the episode ended, the labeller of a reward, or another
            source that its end names, such as ``rule``; empty while it has neither.
        deleted: a label deletes it; compaction may free its space.
    """

    episode: str
    robot: str
    embodiment: str
    task: str
    source: EpisodeSource
    started_unix_ns: int
    steps: int
    chunks: int
    size_bytes: int
    success: bool | None
    episode_return: float
    intervention_steps: int
    policy_versions: tuple[int, int]
    complete: bool
    labelled_by: str = ""
    reward_source: str = ""
    deleted: bool = False
    recorded_success: bool | None = None
    recorded_intervention_steps: int = 0


def summarise_episodes(index: Index, rows: Array | None = None) -> list[EpisodeSummary]:
    """The episodes in `rows`, ascending, or all; in the order of their first chunks. Visits their steps once."""
    episodes, chunks, steps = index.episodes, index.chunks, index.steps
    rows = np.arange(len(episodes)) if rows is None else rows
    of_chunk: Array | slice = slice(None)
    of_step: Array | slice = slice(None)
    if len(rows) < len(episodes):
        of_chunk = np.flatnonzero(np.isin(chunks.episode, rows))
        of_step = spans(chunks.first_row[of_chunk], chunks.steps[of_chunk])
    owner = np.repeat(np.searchsorted(rows, chunks.episode[of_chunk]), chunks.steps[of_chunk])
    returns = np.bincount(owner, steps.reward[of_step], len(rows))
    by_hand = np.bincount(owner, steps.phase[of_step] != Phase.POLICY, len(rows))
    low, high = _version_range(owner, steps.policy_version[of_step], len(rows))
    return [
        EpisodeSummary(
            episode=(name := episodes.ids.names[row]),
            robot=episodes.robots.names[episodes.robot[row]],
            embodiment=episodes.embodiments.names[episodes.embodiment[row]],
            task=episodes.tasks.names[episodes.task[row]],
            source=EpisodeSource(episodes.sources.names[episodes.source[row]]),
            started_unix_ns=int(episodes.started_unix_ns[row]),
            steps=int(episodes.steps[row]),
            chunks=int(episodes.chunks[row]),
            size_bytes=int(episodes.size_bytes[row]),
            success=None if episodes.success[row] < 0 else bool(episodes.success[row]),
            episode_return=float(returns[place]),
            intervention_steps=int(by_hand[place]),
            policy_versions=(int(low[place]), int(high[place])),
            complete=bool(episodes.complete[row]),
            labelled_by=_labeller(index.labels(name)),
            reward_source=episodes.reward_sources.names[episodes.reward_source[row]],
            deleted=bool(episodes.deleted[row]),
            recorded_success=index.ends[row].success if row in index.ends else None,
            recorded_intervention_steps=int(by_hand[place] if phase is None else np.sum(phase != Phase.POLICY)),
        )
        for place, row in enumerate(rows.tolist())
        for phase in (index.recorded_phase(row),)
    ]


def is_intervention(phase: Array) -> Array:
    """Whether a person showed what to do, as a bool array like `phase`; a rewind shows nothing."""
    shown: Array = np.isin(phase, (Phase.TELEOP, Phase.CORRECTION))
    return shown


def _version_range(owner: Array, versions: Array, episodes: int) -> tuple[Array, Array]:
    acted = versions >= 0
    low, high = np.full(episodes, np.iinfo(np.int64).max), np.full(episodes, -1)
    np.minimum.at(low, owner[acted], versions[acted])
    np.maximum.at(high, owner[acted], versions[acted])
    return np.minimum(low, high), high


def _labeller(labels: Sequence[Label]) -> str:
    return next((label.labeller for label in reversed(by_precedence(labels)) if isinstance(label, SuccessLabel)), "")
