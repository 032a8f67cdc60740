"""The append-only log under the experience store and under the edge's outbox.

A log is a folder of segments. One process writes it, any number read it, in other processes too.

What survives: a record is *acknowledged* once the `LogWriter.sync` after its `append` has returned. An acknowledged
record survives ``kill -9`` and a power cut. A record that was appended and not synced may survive or be absent, but is
never seen in part. A damaged record is reported and skipped; its neighbours stay readable.

Why each sync is where it is:

- a commit's fdatasync: the record's bytes and the file's length, before it is acknowledged;
- at a segment's creation, the file before it gets its name (a segment is never without its header), and the folder
  before the first record goes in (a commit syncs the file, not its name);
- a footer's fdatasync, before the manifest lists the segment as sealed, or before a rewritten one gets its name;
- the manifest before it gets its name; the folder before anything that the old manifest lists is deleted;
- when a log is created, the folder above it, and nothing further up: what is made there is its maker's;
- when a log is opened, the folder and the last segment: a killed writer may have renamed and written without having
  synced, readers have seen it, and what is appended now relies on it.

Deletions are not synced: what comes back after a power cut is recognised by its generation, or by the manifest's first
number, and deleted again.
"""

from __future__ import annotations

from user_sys.store.log_reader import LogReader, RecordBatch
from user_sys.store.log_writer import SEGMENT_BYTES, LogWriter
from user_sys.store.record_format import Damage, RecordRef, RecordTable, segment_numbers, segment_path
from user_sys.store.segment_writer import Summarise, SyncPoint

__all__ = [
    "SEGMENT_BYTES",
    "RecordBatch",
    "Damage",
    "LogReader",
    "LogWriter",
    "RecordRef",
    "RecordTable",
    "Summarise",
    "SyncPoint",
    "segment_numbers",
    "segment_path",
]
