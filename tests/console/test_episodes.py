"""The console's episodes: list, pictures, traces, labels, export, and hostile requests."""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from console_kit import STEPS, SimulatedRun, episode_chunk, write_episode

from hal.errors import install_hint
from hal.state_database import AuditLog, read_audit_log
from user_sys.console import server as console_server
from user_sys.console.access import MAX_BODY_BYTES
from user_sys.console.episodes import EpisodeLibrary, EpisodeQuery
from user_sys.console.server import ConsoleServer
from user_sys.console.videos import EpisodeVideos
from user_sys.console.videos import main as write_video
from user_sys.episode import Chunk, Phase
from user_sys.errors import DataSetError, StoreError
from user_sys.store.labels import RETENTION_LABELLER, DeleteLabel, RewardLabel, SuccessLabel, queued_files
from user_sys.store.maintenance import Retention, add_labels, compact_store
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.video import VideoReader

VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""uPlot 1.6.32 (MIT), with the SHA-256 of its files in the npm package."""


@dataclass
class Site:
    """A signed-in browser without a page."""

    browser: httpx.Client
    run: Path
    origin: str

    def get(self, path: str, **query: Any) -> Any:
        return self.browser.get(path, params=query)

    def post(self, path: str, **content: Any) -> Any:
        return self.browser.post(path, json={"person": "ana", **content}, headers={"origin": self.origin})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    simulated, log = SimulatedRun(), AuditLog(tmp_path / "audit")
    server = ConsoleServer(simulated.hub, audit=log.write, store=tmp_path / "store")
    address = server.start()
    origin = address.partition("/?")[0]
    with httpx.Client(base_url=origin, trust_env=False, timeout=60) as browser:
        browser.get(address)
        yield Site(browser, tmp_path, origin)
    server.stop()
    log.close()


def test_video_has_a_frame_for_each_step_and_the_cache_is_bounded(site: Site) -> None:
    store, folder = site.run / "store", site.run / "videos"
    write_episode(store, "panda-0-1")
    played = site.get("/api/episodes/panda-0-1/video")
    assert played.headers["content-type"] == "video/mp4" and played.content[4:8] == b"ftyp"
    (file,) = folder.iterdir()
    frames = list(VideoReader(file).read(0.0, STEPS, 10.0))
    assert frames[0].shape == (48, 128, 3)
    assert abs(float(frames[5][:, :60].mean()) - 80) < 4, "front repeats the picture of step 4"
    assert abs(float(frames[5][:20, 68:84].mean()) - 150) < 4, "wrist"
    file.write_bytes(played.content[:8])  # it is not encoded again
    part = site.browser.get("/api/episodes/panda-0-1/video", headers={"range": "bytes=4-7"})
    assert (part.status_code, part.headers["content-range"]) == (206, "bytes 4-7/8")
    write_episode(store, "panda-0-2")
    newer = EpisodeVideos(store, folder, max_bytes=file.stat().st_size).file("panda-0-2", 10.0)
    assert list(folder.iterdir()) == [newer]
    assert site.get("/api/episodes/panda-0-3/video").status_code == 400


def test_encoder_ends_with_a_killed_console(tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "videos"
    write_episode(store, "panda-0-1")
    folder.mkdir()
    # The encoder waits until somebody reads its output.
    os.mkfifo(folder / f"{hashlib.blake2b(b'panda-0-1', digest_size=16).hexdigest()}.part")
    encode = "import pathlib, sys; from user_sys.console.videos import EpisodeVideos as Videos"
    encode += "; Videos(*map(pathlib.Path, sys.argv[1:])).file('panda-0-1', 10.0)"
    console = subprocess.Popen([sys.executable, "-c", encode, str(store), str(folder)])
    children = Path(f"/proc/{console.pid}/task/{console.pid}/children")
    try:
        end_s = time.monotonic() + 60
        while not children.read_text().strip() and time.monotonic() < end_s:
            time.sleep(0.01)
        encoder = os.pidfd_open(int(children.read_text()))
    finally:
        console.kill()
        console.wait(60)
    assert select.select([encoder], [], [], 60)[0], "the encoder goes on"
    os.close(encoder)


def test_video_without_the_encoders_package_names_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.delitem(sys.modules, "user_sys.video", raising=False)
    assert write_video(["store", "panda-0-1", "10", "video.mp4"]) == 2
    assert install_hint("interchange") in capsys.readouterr().err


def test_fourth_request_for_a_video_is_refused_at_once(tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "videos"
    write_episode(store, "panda-0-1")
    folder.mkdir()
    part = folder / f"{hashlib.blake2b(b'panda-0-1', digest_size=16).hexdigest()}.part"
    os.mkfifo(part)  # the encoder waits until the test reads its output
    videos, refused = EpisodeVideos(store, folder), queue.Queue[str]()

    def play() -> None:
        try:
            videos.file("panda-0-1", 10.0)
        except StoreError as error:
            refused.put(str(error))

    threads = [threading.Thread(target=play) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert refused.get(timeout=20) == "other videos are being encoded; try again"
        encoded = folder / f"{hashlib.blake2b(b'panda-0-2', digest_size=16).hexdigest()}.mp4"
        encoded.write_bytes(b"an encoded video needs no place")
        assert videos.file("panda-0-2", 10.0) == encoded
    finally:
        part.open("rb").close()
        for thread in threads:
            thread.join(60)


def store_queued_labels(store: Path, stop: threading.Event) -> None:
    """Does what a gateway does with queued labels."""
    while not stop.wait(0.05):
        if queued_files(store):
            add_labels(store, ())


@pytest.fixture
def gateway(site: Site) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=store_queued_labels, args=(site.run / "store", stop))
    thread.start()
    yield
    stop.set()
    thread.join()


def test_episodes_are_listed_newest_first_and_filtered(site: Site) -> None:
    assert site.get("/api/episodes").json()["episodes"] == [], "a run without a store yet"
    write_episode(site.run / "store", "a", success=True)
    write_episode(site.run / "store", "b", success=False, task="reach")
    found = site.get("/api/episodes").json()
    assert [each["episode"] for each in found["episodes"]] == ["b", "a"]
    assert (found["matching"], found["robots"], found["tasks"]) == (2, ["panda-0"], ["lift", "reach"])
    now_ms = time.time_ns() // 10**6
    for query, expected in (
        ({"success": "yes"}, ["a"]),
        ({"task": "reach"}, ["b"]),
        ({"phase": "policy"}, []),
        ({"phase": "person", "robot": "panda-0", "version": "7"}, ["b", "a"]),
        ({"version": "8"}, []),
        ({"from_unix_ms": now_ms - 60_000, "until_unix_ms": now_ms + 60_000}, ["b", "a"]),
        ({"from_unix_ms": now_ms + 60_000}, []),
        ({"until_unix_ms": now_ms - 60_000}, []),
    ):
        assert [each["episode"] for each in site.get("/api/episodes", **query).json()["episodes"]] == expected, query


def test_detail_has_capture_steps_phases_and_traces(site: Site) -> None:
    write_episode(site.run / "store", "a")
    detail = site.get("/api/episodes/a").json()
    front, wrist = detail["cameras"]
    assert front["captured_step"][:4] == [0, 0, 2, 2], "every other picture is missing"
    assert wrist["captured_step"] == list(range(STEPS))
    assert detail["phases"] == ["policy"] * 6 + ["correction"] * 6
    assert [trace["title"] for trace in detail["traces"]] == ["reward", "action 0", "action 1", "action 2"]
    picture = site.get("/api/episodes/a/pictures/observation.images.wrist/3")
    assert picture.headers["content-type"] == "image/jpeg" and picture.content.startswith(b"\xff\xd8")


@pytest.mark.usefixtures("gateway")
def test_label_is_stored_shown_and_audited(site: Site) -> None:
    write_episode(site.run / "store", "a", success=True)
    assert site.get("/api/episodes/a").json()["traces"][0]["curves"]["reward"][-1] == 1
    assert site.post("/api/episodes/a/label", success="no", note="it slipped").json() == {"stored": True}
    detail = site.get("/api/episodes/a").json()
    assert detail["summary"]["success"] is False and detail["labels"] == ["ana: failed (it slipped)"]
    assert detail["traces"][0]["curves"]["reward"][-1] == 0
    assert site.post("/api/episodes/a/label", deleted=True).json() == {"stored": True}
    assert site.get("/api/episodes/a").json()["summary"]["deleted"]
    assert site.post("/api/episodes/a/label", deleted=False).json() == {"stored": True}
    orders = [each for each in read_audit_log(site.run / "audit") if each.event == "order"]
    assert [(each.person, each.order) for each in orders][0] == ("ana", "label a: success no, note it slipped")


@pytest.mark.usefixtures("gateway")
def test_episode_is_marked_trimmed_and_restored_by_undo(site: Site) -> None:
    write_episode(site.run / "store", "a", success=True)

    def label(**given: Any) -> dict[str, Any]:
        assert site.post("/api/episodes/a/label", **given).json() == {"stored": True}
        found: dict[str, Any] = site.get("/api/episodes/a").json()
        return found

    def sampled() -> list[int]:
        with StoreReader.open(site.run / "store") as store:
            store.refresh()
            assert store.index.steps.truncated.any() == (store.index.steps.alive.sum() < STEPS)
            return np.flatnonzero(store.index.steps.alive).tolist()

    assert set(label(demonstration=True)["phases"]) == {"teleop"}
    assert label(keep_from=2, keep_to=8)["kept"] == [2, 8] and sampled() == [*range(2, 9)]
    assert label(keep_from=1, keep_to=5)["labels"][0] == "ana: trimmed to steps 1 to 5" and sampled() == [*range(1, 6)]
    assert label(undo=True)["kept"] == [2, 8] and sampled() == [*range(2, 9)]
    label(undo=True)
    assert label(undo=True)["phases"] == ["policy"] * 6 + ["correction"] * 6 and sampled() == [*range(STEPS)]
    assert "no label to undo" in site.post("/api/episodes/a/label", undo=True).text
    assert "cannot be kept" in site.post("/api/episodes/a/label", keep_from=3, keep_to=99).text
    orders = [each.order for each in read_audit_log(site.run / "audit") if each.event == "order"]
    assert orders[:2] == ["label a: demonstration True", "label a: keep_from 2, keep_to 8"]


def test_second_end_of_a_trim_keeps_the_first_which_waits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.console.episodes.STORE_TIMEOUT_S", 0.0)  # no gateway stores the labels
    write_episode(site.run / "store", "a")
    for given, first, last in (
        ({"keep_from": 3}, 3, "the end"),
        ({"keep_to": 8}, 3, 8),
        ({"keep_from": 10}, 10, 10),
        ({"keep_to": 4}, 4, 4),
        ({"undo": True}, 10, 10),
        ({"keep_to": 11}, 10, 11),
    ):
        assert site.post("/api/episodes/a/label", **given).json() == {"stored": False}
        newest = site.get("/api/episodes/a").json()["labels"][0]
        assert newest == f"ana: trimmed to steps {first} to {last} (waits for the gateway)"
    add_labels(site.run / "store", [])
    assert site.get("/api/episodes/a").json()["kept"] == [10, 11]


def test_labels_up_to_the_end_cover_steps_that_arrive_later(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.console.episodes.STORE_TIMEOUT_S", 0.0)  # no gateway stores the labels
    store, whole = site.run / "store", episode_chunk("a")
    assert whole.header.end is not None
    end, replace = msgspec.structs.replace(whole.header.end, steps=2 * STEPS), msgspec.structs.replace
    with StoreWriter.open(store) as writer:
        writer.append(Chunk(replace(whole.header, end=None), whole.columns, {}).encode())
    site.post("/api/episodes/a/label", demonstration=True)
    site.post("/api/episodes/a/label", keep_from=5)
    add_labels(store, [])
    detail = site.get("/api/episodes/a").json()
    assert detail["kept"] == [5, None] and set(detail["phases"]) == {"teleop"} and len(detail["phases"]) == STEPS
    assert detail["labels"] == ["ana: trimmed to steps 5 to the end", "ana: teleop in steps 0 to the end"]
    with StoreWriter.open(store) as writer:
        writer.append(Chunk(replace(whole.header, index=1, first_step=STEPS, end=end), whole.columns, {}).encode())
    with StoreReader.open(store) as reader:
        reader.refresh()
        steps = reader.index.steps
        assert np.flatnonzero(steps.alive).tolist() == [*range(5, 2 * STEPS)]
        assert (steps.phase == Phase.TELEOP).all() and not steps.truncated.any()
        assert np.flatnonzero(steps.reward).tolist() == [STEPS - 1, 2 * STEPS - 1], "as recorded"
    assert "cannot be kept" in site.post("/api/episodes/a/label", keep_from=2 * STEPS).text


def test_undo_reverts_the_newest_label_of_a_person_even_one_that_waits(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("user_sys.console.episodes.STORE_TIMEOUT_S", 0.0)  # no gateway stores the labels
    store = site.run / "store"
    write_episode(store, "a")
    add_labels(store, [SuccessLabel(episode="a", labeller="bob", at_unix_ns=1, success=False)])
    for given in ({"deleted": True}, {"undo": True}):
        assert site.post("/api/episodes/a/label", **given).json() == {"stored": False}
        waits = ["ana: deleted (waits for the gateway)"] if "deleted" in given else []
        assert site.get("/api/episodes/a").json()["labels"] == [*waits, "bob: failed"]
    add_labels(store, [DeleteLabel(episode="a", labeller=RETENTION_LABELLER, at_unix_ns=2)])
    assert site.get("/api/episodes/a").json()["labels"] == ["retention: deleted", "bob: failed"]
    site.post("/api/episodes/a/label", undo=True)
    assert "no label to undo" in site.post("/api/episodes/a/label", undo=True).text
    add_labels(store, [])
    assert site.get("/api/episodes/a").json()["labels"] == ["retention: deleted"]


def test_undo_reverts_a_persons_label_before_that_of_a_reward_which_came_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("user_sys.console.episodes.STORE_TIMEOUT_S", 0.0)  # no gateway stores the labels
    store = site.run / "store"
    write_episode(store, "a", success=True)
    add_labels(store, [SuccessLabel(episode="a", labeller="bob", at_unix_ns=1, success=False)])
    add_labels(store, [RewardLabel(episode="a", labeller="reward:vlm", at_unix_ns=2, first_step=0, rewards=(0.5,))])
    for left in (["reward:vlm: rewards of steps 0 to 0"], []):
        site.post("/api/episodes/a/label", undo=True)
        add_labels(store, [])
        found = site.get("/api/episodes/a").json()
        assert (found["labels"], found["summary"]["success"]) == (left, True)


def test_export_writes_into_the_run(site: Site) -> None:
    write_episode(site.run / "store", "a")
    folder = Path(site.post("/api/episodes/a/export", format="mcap").json()["folder"])
    assert folder.parent == site.run / "exports" and list(folder.rglob("*.mcap"))


@pytest.mark.parametrize(
    "path",
    [
        "/api/episodes/none",
        "/api/episodes/a/pictures/observation.images.front/1",
        "/api/episodes/a/pictures/no-camera/0",
        "/api/episodes/a/pictures/observation.images.front/-1",
        "/api/episodes?success=maybe",
        "/api/episodes?limit=1",
    ],
)
def test_wrong_request_gets_one_line(site: Site, path: str) -> None:
    write_episode(site.run / "store", "a")
    answer = site.browser.get(path)
    assert answer.status_code == 400 and answer.text.count("\n") == 1


def test_label_that_cannot_be_written_says_why(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    write_episode(site.run / "store", "a")

    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("user_sys.store.labels.replace_durably", full)
    answer = site.post("/api/episodes/a/label", success="yes")
    assert answer.status_code == 400 and "No space left on device" in answer.text


@pytest.mark.parametrize("episode", ["..%2F..%2Fetc", "none"])
def test_unknown_episode_is_neither_labelled_nor_exported(site: Site, episode: str) -> None:
    write_episode(site.run / "store", "a")
    for act, content in (("label", {"success": "yes"}), ("export", {"format": "mcap"})):
        assert site.post(f"/api/episodes/{episode}/{act}", **content).status_code in (400, 404)
    assert not queued_files(site.run / "store") and not (site.run / "exports").exists()


def test_episode_without_its_first_chunk_is_refused_in_one_line(site: Site) -> None:
    chunk = episode_chunk("a")
    header = msgspec.structs.replace(chunk.header, index=1, first_step=STEPS, end=None)
    with StoreWriter.open(site.run / "store") as writer:
        writer.append(Chunk(header, chunk.columns, {}).encode())
    answer = site.get("/api/episodes/a")
    assert answer.status_code == 400 and answer.text.startswith("episode a: its first chunk is not stored")


def test_compacted_episode_leaves_the_list_of_an_open_library(site: Site) -> None:
    store = site.run / "store"
    write_episode(store, "a")
    write_episode(store, "b")
    library = EpisodeLibrary(store)
    assert library.list(EpisodeQuery()).matching == 2
    add_labels(store, [DeleteLabel(episode="b", labeller="bob", at_unix_ns=1)])
    compact_store(store, Retention())
    assert [each.episode for each in library.list(EpisodeQuery()).episodes] == ["a"]
    with pytest.raises(DataSetError, match="episode b: its first chunk is not stored"):
        library.detail("b")


def test_detail_of_an_episode_without_rewards_and_phases_has_its_other_curves(site: Site) -> None:
    chunk = episode_chunk("a")
    columns = {name: column for name, column in chunk.columns.items() if name not in ("reward", "phase")}
    with StoreWriter.open(site.run / "store") as writer:
        writer.append(Chunk(chunk.header, columns, {}).encode())
    detail = site.get("/api/episodes/a").json()
    assert detail["phases"] == ["policy"] * STEPS
    assert [trace["title"] for trace in detail["traces"]] == ["action 0", "action 1", "action 2"]


def test_killed_export_is_refused_with_its_exit_status(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    write_episode(site.run / "store", "a")
    killed = subprocess.CompletedProcess((), -9, "", "")
    monkeypatch.setattr("user_sys.console.episodes.subprocess.run", lambda *args, **options: killed)
    answer = site.post("/api/episodes/a/export", format="mcap")
    assert answer.status_code == 400 and "exit status -9" in answer.text


def test_order_from_elsewhere_or_malformed_is_refused(site: Site) -> None:
    write_episode(site.run / "store", "a")
    body = {"person": "ana", "success": "no"}
    path = "/api/episodes/a/label"
    assert site.browser.post(path, json=body).status_code == 403, "a page always names its origin"
    assert site.browser.post(path, json=body, headers={"origin": "http://evil.example"}).status_code == 403
    with httpx.Client(base_url=site.origin, trust_env=False) as stranger:
        assert stranger.post(path, json=body, headers={"origin": site.origin}).status_code == 401
    assert site.browser.post("/episodes", headers={"origin": site.origin}).status_code == 405
    too_long = "x" * (MAX_BODY_BYTES + 1)
    assert site.browser.post(path, content=too_long, headers={"origin": site.origin}).status_code == 413
    names = [{"person": each, "success": "no"} for each in ("<b>", "ana\n")]
    for content in ({}, {"success": "maybe"}, *names, {"unknown": 1}):
        assert site.post(path, **content).status_code == 400, content
    assert not queued_files(site.run / "store")


def test_vendored_files_are_unchanged() -> None:
    folder = Path(console_server.__file__).parent / "static/vendor"
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()} == VENDORED
