"""The commands of ``user-sys store``: inspect, verify, repair, label, compact, merge."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from store_kit import chunk, segment_path

from user_sys.commands.main import main
from user_sys.episode import EpisodeSource, Phase
from user_sys.errors import WireError
from user_sys.gateway.config import GatewayConfig
from user_sys.gateway.ingest import ChunkIngester
from user_sys.interchange.episodes import EpisodeReader
from user_sys.store.labels import Label, RewardLabel, SuccessLabel, column_labels, queue_labels, queued_files
from user_sys.store.maintenance import add_labels
from user_sys.store.store import StoreReader, StoreWriter

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "160")

    def order(*argv: str | Path) -> tuple[int, str]:
        status = main(["store", *map(str, argv)])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return order


def fill(path: Path, episodes: int = 4, *, chunks: int = 3, sealed: bool = False, width: int = 64) -> Path:
    with StoreWriter.open(path, segment_bytes=1 << 14 if sealed else 1 << 26) as writer:
        for number in range(episodes):
            source = EpisodeSource.DEMO if number == 0 else EpisodeSource.ONLINE
            for index in range(chunks):
                end = index == chunks - 1
                made = chunk(f"e{number}", index, end=end, success=number % 2 == 0, source=source, width=width)
                header = msgspec.structs.replace(made.header, started_unix_ns=number + 1)
                writer.append(type(made)(header, made.columns, made.final).encode())
    return path


def spoil(path: Path, episode: str, index: int) -> None:
    """Flips a byte in the middle of a chunk's payload."""
    with StoreReader.open(path) as reader:
        reader.refresh()
        chunks = reader.index.chunks
        (row,) = np.flatnonzero((chunks.episode == reader.index.episodes.find(episode)) & (chunks.index == index))
        segment, offset = int(chunks.segment[row]), int(chunks.offset[row])
        at = offset + 32 + int(chunks.length[row]) - 100
    with segment_path(path, segment).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0xFF]))


def index_of(path: Path) -> StoreReader:
    reader = StoreReader.open(path)
    reader.refresh()
    reader.close()
    return reader


def test_inspect_filters_episodes_and_shows_one_in_detail(run: Run, tmp_path: Path) -> None:
    path = fill(tmp_path / "store")
    status, text = run("inspect", path, "--success", "no", "--last", "1")
    assert status == 0 and "e3  " in text and "\n e1" not in text
    assert json.loads(run("inspect", path, "--source", "demo", "--json")[1])["episodes"] == 1
    run("label", path, "e1", "--note", "the cube slipped", "--by", "ada")
    status, text = run("inspect", path, "--episode", "e1")
    assert status == 0 and "failed" in text and "by ada" in text and "the cube slipped" in text
    assert "teleop 0 to 0, correction 1 to 1, recovery 2 to 2, policy 3 to 3" in text
    shown = json.loads(run("inspect", path, "--episode", "e1", "--json")[1])
    assert shown["phases"][:2] == [["teleop", 0, 0], ["correction", 1, 1]]
    assert run("inspect", path, "--episode", "zz") == (
        2,
        f"user-sys: error: {path} has no episode 'zz'; `user-sys store inspect {path}` lists them\n",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_files_that_root_writes_belong_to_the_owner_of_the_store(run: Run, tmp_path: Path) -> None:
    """The command may run with sudo, and the run's gateway as another user."""
    path = fill(tmp_path / "store", sealed=True)
    for file in (tmp_path, path, *path.iterdir()):
        os.chown(file, 1000, 1001)
    before = {*path.iterdir()}
    assert run("label", path, "e1", "--delete")[0] == run("compact", path)[0] == 0
    assert run("backup", path, tmp_path / "backup")[0] == 0
    assert run("restore", tmp_path / "backup", tmp_path / "restored")[0] == 0
    written = [file for folder in (path, tmp_path / "restored") for file in folder.rglob("*")]
    assert {*path.iterdir()} - before
    assert {(file.stat().st_uid, file.stat().st_gid) for file in written} == {(1000, 1001)}


@pytest.mark.parametrize("sealed", [False, True], ids=["tail", "sealed"])
def test_verify_lists_losses_and_repair_quarantines_them_once(run: Run, tmp_path: Path, sealed: bool) -> None:
    path = fill(tmp_path / "store", 8, sealed=sealed)
    assert run("verify", path)[0] == 0
    spoil(path, "e2", 1)
    before = {file: file.read_bytes() for file in path.glob("*.seg")}
    status, text = run("verify", path)
    assert status == 1 and "e2, chunk 1, steps 4 to 7" in text and "repair" in text
    (finding,) = json.loads(run("verify", path, "--json")[1])["findings"]
    assert finding["chunks"] == [{"episode": "e2", "index": 1, "first_step": 4, "steps": 4}]
    status, text = run("repair", path)
    assert status == 0 and "e2, chunk 1, steps 4 to 7" in text and "quarantined: 1 ranges, 1 copies" in text
    assert len(list((path / "quarantine").iterdir())) == 1
    assert {file: file.read_bytes() for file in path.glob("*.seg")} == before
    status, text = run("verify", path)
    assert status == 0 and "no damage found" in text
    assert run("repair", path)[0] == 0 and len(list((path / "quarantine").iterdir())) == 1
    assert run("inspect", path)[0] == 0
    with StoreWriter.open(path) as writer:
        assert writer.append(chunk("e2", 1, width=64).encode()) and not writer.append(chunk("e2", 2).encode())
    known = {each.episode: each for each in index_of(path).episodes()}
    assert len(known) == 8 and known["e2"].steps == 12 and known["e2"].complete
    assert run("compact", path)[0] == 0 and "lacks" not in run("verify", path)[1]


def test_verify_identifies_damaged_record_without_index(run: Run, tmp_path: Path) -> None:
    path = fill(tmp_path / "store", 2)
    spoil(path, "e1", 0)
    status, text = run("verify", path)
    assert status == 1 and "by its header" in text and "e1 lacks steps 0 to 3" in text


def cut_off(path: Path, kept: int) -> Path:
    """Truncates a sealed segment of 60 chunks, six per episode, in the chunk after `kept`."""
    with StoreWriter.open(path) as writer:
        for number in range(10):
            for index in range(6):
                writer.append(chunk(f"e{number}", index, end=index == 5).encode())
        writer.rotate()
        writer.append(chunk("later", end=True).encode())
    with StoreReader.open(path) as reader:
        reader.refresh()
        offsets = reader.index.chunks.offset.tolist()
        length = int(reader.index.chunks.length[kept])
    with segment_path(path, 0).open("r+b") as stream:
        stream.truncate(offsets[kept] + length // 2)
    return path


def test_verify_names_the_lost_records_of_a_truncated_segment(run: Run, tmp_path: Path) -> None:
    path = cut_off(tmp_path / "store", 44)
    status, text = run("verify", path)
    assert status == 1 and "44 to 59" in text
    assert run("repair", path)[0] == 0 and run("verify", path)[0] == 0
    assert len(index_of(path).index.chunks) == 45


def test_verify_names_a_missing_segment_and_its_records(run: Run, tmp_path: Path) -> None:
    path = cut_off(tmp_path / "store", 59)
    segment_path(path, 0).unlink()
    (finding,) = json.loads(run("verify", path, "--json")[1])["findings"]
    assert (finding["segment"], finding["sequence"], finding["last_sequence"]) == (0, 0, 59)


def test_verify_without_store_is_an_error(run: Run, tmp_path: Path) -> None:
    status, text = run("verify", tmp_path)
    assert status == 2 and "is not a store" in text and text.count("\n") == 1


def test_labels_change_index_columns(run: Run, tmp_path: Path) -> None:
    path = fill(tmp_path / "store")
    assert run("label", path, "e0", "e2", "--success", "no", "--note", "dropped it", "--by", "ada")[0] == 0
    assert run("label", path, "e1", "--reward", "2.5", "--phase", "recovery", "--steps", "4-6")[0] == 0
    assert run("label", path, "e3", "--delete")[0] == 0
    reader = index_of(path)
    known = {each.episode: each for each in reader.episodes()}
    assert known["e0"].success is False and known["e2"].labelled_by == "ada" and known["e3"].deleted
    rows = np.flatnonzero(reader.index.steps.reward == 2.5)
    assert reader.index.step_of(rows).tolist() == [4, 5, 6]
    assert (reader.index.steps.phase[rows] == Phase.RECOVERY).all()
    assert run("label", path, "e3", "--restore")[0] == 0
    assert not index_of(path).index.episodes.deleted.any()


def test_phase_of_a_whole_episode_covers_steps_that_arrive_later(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with StoreWriter.open(path) as writer:
        writer.append(chunk("e0", 0).encode())
    assert run("label", path, "e0", "--phase", "recovery")[0] == 0
    with StoreWriter.open(path) as writer:
        writer.append(chunk("e0", 1, end=True).encode())
    assert (index_of(path).index.steps.phase == Phase.RECOVERY).all()


def test_undone_success_label_survives_compaction_merge_and_export(run: Run, tmp_path: Path) -> None:
    path = fill(tmp_path / "store", 4, sealed=True)
    recorded = last_rewards(path)
    assert run("label", path, "e2", "--success", "no")[0] == 0
    assert run("label", path, "e1", "--success", "yes", "--keep-reward")[0] == 0
    corrected = recorded | {"e2": 0.0}
    assert last_rewards(path) == corrected
    assert run("label", path, "e3", "--delete")[0] == run("compact", path)[0] == 0
    assert run("merge", path, "--into", tmp_path / "all")[0] == 0
    remaining = {name: reward for name, reward in corrected.items() if name != "e3"}
    assert last_rewards(path) == last_rewards(tmp_path / "all") == remaining
    assert float(EpisodeReader(index_of(tmp_path / "all")).read("e2").columns["reward"][-1]) == 0.0
    assert "(undone)" not in run("inspect", path, "--episode", "e2")[1]
    assert run("label", path, "e2", "--undo")[0] == 0
    assert last_rewards(path)["e2"] == recorded["e2"] and index_of(path).episodes()[2].success is True
    assert "(undone)" in run("inspect", path, "--episode", "e2")[1]
    status, text = run("label", path, "e2", "--undo")
    assert status == 2 and "no label to undo" in text
    queue_labels(path, [SuccessLabel(episode="e2", labeller="ana", at_unix_ns=1, success=False)])
    assert run("label", path, "e2", "--undo")[0] == 0, "a label that waits is the newest"
    assert index_of(path).episodes()[2].success is True


def test_undo_command_reverts_a_persons_label_before_that_of_a_reward(run: Run, tmp_path: Path) -> None:
    path = fill(tmp_path / "store")
    assert run("label", path, "e2", "--success", "no")[0] == 0
    add_labels(path, [SuccessLabel(episode="e2", labeller="reward:vlm", at_unix_ns=time.time_ns(), success=True)])
    assert index_of(path).episodes()[2].success is False
    assert run("label", path, "e2", "--undo")[0] == 0
    assert index_of(path).episodes()[2].success is True and index_of(path).episodes()[2].labelled_by == "reward:vlm"
    assert run("label", path, "e2", "--undo")[0] == 0 and index_of(path).episodes()[2].labelled_by == ""


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("column_first", [False, True])
def test_undo_skips_columns_of_programs(run: Run, tmp_path: Path, sealed: bool, column_first: bool) -> None:
    path = fill(tmp_path / "store")
    columns: list[Label] = [*column_labels("e2", {"advantage": np.arange(12.0)}, "recap")]
    wrong: list[Label] = [SuccessLabel(episode="e2", labeller="ada", at_unix_ns=time.time_ns(), success=False)]
    with StoreWriter.open(path) as writer:
        for label in columns + wrong if column_first else wrong + columns:
            writer.append_label(label)
        writer.sync()
        if sealed:
            writer.rotate()
    assert index_of(path).episodes()[2].success is False
    assert run("label", path, "e2", "--undo")[0] == 0
    reader = index_of(path)
    advantages = reader.index.labelled_column("advantage", np.arange(24, 36))
    assert reader.episodes()[2].success is True and advantages is not None
    assert advantages.tolist() == list(range(12)), "the program's label stays"
    status, text = run("label", path, "e2", "--undo")
    assert status == 2 and "no label to undo" in text


def last_rewards(path: Path) -> dict[str, float]:
    """Reward of the last step of each complete stored episode, as read by a learner."""
    index = index_of(path).index
    rows = np.flatnonzero((index.successor(np.arange(len(index.steps))) < 0) & index.steps.alive)
    names = [index.episodes.ids.names[row] for row in index.episode_of(rows)]
    return dict(zip(names, index.steps.reward[rows].tolist(), strict=True))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("e0", "--undo", "--success", "no"), "use two commands"),
        (("e0", "--keep-reward", "--reward", "1"), "--keep-reward requires --success"),
        (("zz", "--delete"), "no episode 'zz'"),
        (("e0",), "no label given"),
        (("e0", "--reward", "1", "--steps", "10-90"), "e0 has steps 0 to 11"),
        (("e0", "--delete", "--steps", "1-2"), "--steps requires"),
    ],
)
def test_invalid_label_options_are_an_error(run: Run, tmp_path: Path, argv: tuple[str, ...], message: str) -> None:
    status, text = run("label", fill(tmp_path / "store"), *argv)
    assert status == 2 and message in text and text.count("\n") == 1


@pytest.mark.parametrize("reward", ["nan", "inf", "1e39", "much"])
def test_non_finite_reward_is_refused(run: Run, tmp_path: Path, reward: str) -> None:
    path = fill(tmp_path / "store")
    status, text = run("label", path, "e0", "--reward", reward)
    assert status == 2 and "'--reward'" in text
    assert not index_of(path).index.labels("e0")


def test_undecodable_label_is_never_stored(tmp_path: Path) -> None:
    path = fill(tmp_path / "store")
    spoilt = RewardLabel(episode="e0", labeller="ada", at_unix_ns=1, first_step=0, rewards=(1.0, float("nan")))
    with pytest.raises(WireError, match="not a label"):
        add_labels(path, [spoilt])
    with pytest.raises(WireError, match="not a label"):
        queue_labels(path, [spoilt])
    reader = index_of(path)
    assert not reader.damaged and not reader.index.labels("e0") and not queued_files(path)


def test_gateway_stores_queued_labels(run: Run, tmp_path: Path) -> None:
    path = fill(tmp_path / "store")
    stop = threading.Event()

    def serve() -> None:
        with StoreWriter.open(path) as writer:
            committer = ChunkIngester(
                writer, lambda peer, answer: None, lambda peer, sequence, size: None, GatewayConfig()
            )
            committer.start()
            locked.set()
            assert stop.wait(120)
            committer.close()

    locked = threading.Event()
    gateway = threading.Thread(target=serve)
    gateway.start()
    try:
        assert locked.wait(120)
        (path / "inbox").mkdir()
        (path / "inbox/00-nonsense.labels").write_bytes(b"\xc1")
        status, text = run("label", path, "e1", "--success", "yes", "--by", "ada")
        assert status == 0 and "by the process that writes the store" in text
        assert [file.name for file in queued_files(path)] == ["00-nonsense.labels"]
        status, text = run("repair", path)
        assert status == 0 and "no damage found" in text
        status, text = run("compact", path)
        assert status == 2 and "is being written by process" in text
        assert "frees only segments of 64 MiB of which deleted episodes take 25%" in text
        status, text = run("compact", path, "--max-bytes", "10kB", "--keep", "demo", "--dry-run")
        assert status == 0 and "failed" in text
    finally:
        stop.set()
        gateway.join(120)
    labels = index_of(path).index.labels("e1")
    assert len(labels) == 1 and isinstance(labels[0], SuccessLabel) and labels[0].success


def test_compact_dry_run_lists_what_compact_frees(run: Run, tmp_path: Path) -> None:
    path = fill(tmp_path / "store", 12, sealed=True)
    run("label", path, "e5", "--delete")
    before = sum(file.stat().st_size for file in path.glob("*.seg"))
    status, text = run("compact", path, "--max-bytes", f"{before // 2}", "--keep", "demo", "--dry-run")
    assert status == 0 and "  e1: online, 12 steps" in text and "failed" in text and "  e0:" not in text
    assert sum(file.stat().st_size for file in path.glob("*.seg")) == before
    report = json.loads(run("compact", path, "--max-bytes", f"{before // 2}", "--keep", "demo", "--json")[1])
    assert report["freed_bytes"] > before / 2 and "e1" in report["dropped"] and "e0" not in report["dropped"]
    status, text = run("compact", path, "--max-bytes", "1kB", "--keep", "demo")
    assert status == 0 and "above the limit remain" in text
    assert run("compact", path, "--keep", "demo")[0] == 2


def test_merge_refuses_different_episodes_with_one_id(run: Run, tmp_path: Path) -> None:
    a, b, into = fill(tmp_path / "a", 3), tmp_path / "b", tmp_path / "into"
    with StoreWriter.open(b) as writer:
        made = chunk("e1", end=True)
        header = msgspec.structs.replace(made.header, robot="panda-1", seed=99)
        writer.append(type(made)(header, made.columns, made.final).encode())
    status, text = run("merge", a, b, "--into", into)
    assert status == 2 and f"{b}: its episode e1 is not the one that the target has" in text
    status, text = run("merge", a, "--into", into)
    assert status == 0 and "0 chunks and 0 labels added, 9 already existed" in text
    assert run("merge", a, "--into", a)[0] == 2
    assert run("merge", tmp_path / "none", "--into", tmp_path / "new")[0] == 2 and not (tmp_path / "new").exists()
