"""Rewards: the image classifier, its audit, and labels for the episodes of a store."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from episode_kit import chunk_header
from msgspec.structs import replace as replace_fields
from wait_kit import until

from user_sys.codec import Array
from user_sys.commands import reward as reward_commands
from user_sys.commands import store_label
from user_sys.commands.main import main
from user_sys.compose import RobotConfig, robot_spec
from user_sys.config import load
from user_sys.episode import IMAGE_PREFIX, Chunk, EpisodeEnd, EpisodeSource, frame_columns
from user_sys.errors import ConfigError, LinkDown
from user_sys.interchange.episodes import EpisodeFilter, EpisodeReader, StoredEpisode
from user_sys.interchange.frames import decode_frame
from user_sys.plugins import load_reward
from user_sys.rewards.audit import AuditedEpisode, audit, rank_correlation
from user_sys.rewards.conformance import TASK, RewardConformance, example_episode
from user_sys.rewards.labelling import EpisodeLabeller
from user_sys.rewards.networks import labelled_episodes
from user_sys.rewards.reward import EpisodeReward, Reward, RewardConfig, clip_pictures, final_pictures
from user_sys.run.config import RunConfig, create_run_folder
from user_sys.run.reward_process import label_new
from user_sys.store.index import EpisodeSummary
from user_sys.store.labels import SuccessLabel, TrimLabel, UndoLabel, queued_files
from user_sys.store.maintenance import add_labels
from user_sys.store.store import StoreReader, StoreWriter

STEPS, SIDE = 3, 64
FRONT = IMAGE_PREFIX + "front"


def picture(rng: np.random.Generator, success: bool) -> Array:
    image = rng.integers(0, 90, (SIDE, SIDE, 3)).astype(np.uint8)
    if success:
        image[20:44, 20:44] = 230
    return image


def episode(
    name: str,
    label: bool | None,
    *,
    looks: bool | None = None,
    task: str = "lift",
    index: int = 0,
    source: EpisodeSource = EpisodeSource.ONLINE,
    judged_by: str = "rule",
) -> bytes:
    """A complete episode. `label`: its recorded success; `looks`: how its last picture looks (default: as labelled)."""
    rng = np.random.default_rng(list(name.encode()))
    shown = [picture(rng, False) for _ in range(STEPS)]
    files = [bytes(simplejpeg.encode_jpeg(image, quality=90, colorspace="RGB")) for image in shown]
    last = simplejpeg.encode_jpeg(picture(rng, bool(label) if looks is None else looks), quality=90, colorspace="RGB")
    header = chunk_header(
        name,
        STEPS,
        index=index,
        robot="arm",
        embodiment="e",
        task=task,
        source=source,
        started_unix_ns=1_700_000_000_000_000_000,
        end=EpisodeEnd(steps=STEPS, success=label, reward_source=judged_by),
    )
    columns = {
        "observation.state": rng.standard_normal((STEPS, 2)).astype(np.float32),
        "action": np.zeros((STEPS, 2), np.float32),
        "reward": np.array([0, 0, label or False], np.float32),
        "terminated": np.array([False, False, label or False]),
        "truncated": np.array([False, False, not label]),
        "phase": np.zeros(STEPS, np.uint8),
        "policy_version": np.zeros(STEPS, np.int64),
    } | frame_columns(FRONT, files, [1] * STEPS)
    return Chunk(header, columns, {FRONT: np.frombuffer(last, np.uint8)}).encode()


def make_store(path: Path, episodes: Sequence[bytes]) -> Path:
    with StoreWriter.open(path) as writer:
        for chunk in episodes:
            writer.append(chunk)
        writer.sync()
    return path


def labelled_store(path: Path, count: int = 60) -> Path:
    """Every second of `count` episodes succeeded."""
    return make_store(path, [episode(f"e{number:03d}", number % 2 == 0) for number in range(count)])


def rising(name: str, task: str, success: bool = True, steps: int = 8) -> bytes:
    """An episode of the task ``red`` or ``green`` in which the bar of this colour grows, to the top in a success."""
    rng = np.random.default_rng(list(name.encode()))
    channels = {"red": 0, "green": 1}
    other = int(rng.integers(0, SIDE))

    def bars(share: float) -> bytes:
        image = rng.integers(0, 60, (SIDE, SIDE, 3)).astype(np.uint8)
        for colour, channel in channels.items():
            height = round(SIDE * share) if colour == task else other
            columns = slice(channel * SIDE // 2, (channel + 1) * SIDE // 2)
            image[SIDE - height :, columns, channel] = 240
        return bytes(simplejpeg.encode_jpeg(image, quality=90, colorspace="RGB"))

    top = 1.0 if success else 0.5
    shown = [bars(top * step / steps) for step in range(steps)]
    header = chunk_header(
        name,
        steps,
        robot="arm",
        embodiment="e",
        task=task,
        sentence=f"raise the {task} bar",
        end=EpisodeEnd(steps=steps, success=success),
    )
    last = np.arange(steps) == steps - 1
    columns = {
        "observation.state": np.zeros((steps, 2), np.float32),
        "action": np.zeros((steps, 2), np.float32),
        "reward": np.zeros(steps, np.float32),
        "terminated": last & success,
        "truncated": last & (not success),
        "phase": np.zeros(steps, np.uint8),
        "policy_version": np.zeros(steps, np.int64),
    } | frame_columns(FRONT, shown, [1] * steps)
    return Chunk(header, columns, {FRONT: np.frombuffer(bars(top), np.uint8)}).encode()


def rising_store(path: Path, count: int = 60) -> Path:
    """Episodes of both tasks; every fourth one failed."""
    return make_store(path, [rising(f"r{n:03d}", "red" if n % 2 else "green", success=n % 4 < 3) for n in range(count)])


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*argv: object) -> tuple[int, str]:
        status = main([str(each) for each in argv])
        out = capsys.readouterr()
        return status, out.out + out.err

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier that was trained on a store of 60 episodes, next to it."""
    folder = tmp_path_factory.mktemp("classifier")
    labelled_store(folder / "store")
    path = folder / "reward.safetensors"
    assert main(["reward", "train", str(folder / "store"), "--output", str(path), "--updates", "30"]) == 0
    return path


def episodes(store: Path) -> dict[str, EpisodeSummary]:
    with StoreReader.open(store) as reader:
        reader.refresh()
        return {each.episode: each for each in reader.episodes()}


class GivenReward(Reward):
    """Finds what a function of the episode gives."""

    settings = object

    def __init__(self, settings: Callable[[StoredEpisode], EpisodeReward]) -> None:
        self._find = settings

    def evaluate(self, episode: StoredEpisode) -> EpisodeReward:
        return self._find(episode)


def label_by(store: Path, find: Callable[[StoredEpisode], EpisodeReward], passes: int = 1) -> None:
    """Labels the episodes of `store`, as the reward process does after its start."""
    with StoreReader.open(store) as reader:
        labeller = EpisodeLabeller(reader, GivenReward(find), "given")
        for _ in range(passes):
            label_new(labeller, store, [])
    add_labels(store, [])


class TestClassifierConformance(RewardConformance):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        from user_sys.rewards.classifier import SuccessNet
        from user_sys.rewards.networks import save_network
        from user_sys.rewards.reward import FORMAT, RewardMetadata

        self.path = tmp_path / "model.safetensors"
        metadata = RewardMetadata(
            format=FORMAT, cameras=("front", "wrist"), tasks=(TASK,), temperature=2.0, successes=9, failures=9
        )
        save_network(self.path, SuccessNet(2), metadata)

    def make(self) -> Reward:
        return load_reward(RewardConfig(kind="classifier", options={"model": str(self.path)}))


class TestProgressConformance(RewardConformance):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        from user_sys.rewards.networks import save_network
        from user_sys.rewards.progress import ProgressNet
        from user_sys.rewards.reward import FORMAT, RewardMetadata

        self.path = tmp_path / "model.safetensors"
        metadata = RewardMetadata(
            format=FORMAT, cameras=("front", "wrist"), tasks=(TASK,), temperature=2.0, successes=9, failures=0
        )
        save_network(self.path, ProgressNet(2), metadata)

    def make(self) -> Reward:
        return load_reward(RewardConfig(kind="progress", options={"model": str(self.path)}))


class TestRuleConformance(RewardConformance):
    @pytest.fixture(autouse=True)
    def _config(self, tmp_path: Path) -> None:
        self.path = tmp_path / "fake.yaml"
        self.path.write_text("robots: [{name: example, driver: fake, task: reach}]")

    def make(self) -> Reward:
        return load_reward(RewardConfig(kind="rule", options={"config": str(self.path)}))

    def episode(self, rng: np.random.Generator, steps: int = 12) -> StoredEpisode:
        plain, final = example_episode(rng, steps, task="reach"), dict[str, Array]()
        columns = {name: column for name, column in plain.columns.items() if not name.startswith("observation")}
        for each in robot_spec(RobotConfig(name="example", driver="fake", task="reach")).observation:
            columns[each.name] = rng.uniform(-0.2, 0.2, (steps, *each.shape)).astype(np.float32)
            final[each.name] = rng.uniform(-0.2, 0.2, each.shape).astype(np.float32)
        return replace(plain, columns=columns, final=final)


def still_episode(robot: RobotConfig, steps: int) -> StoredEpisode:
    """Of the robot's first task, with observations of zeros."""
    final = {each.name: np.zeros(each.shape, np.float32) for each in robot_spec(robot).observation}
    plain = example_episode(np.random.default_rng(0), steps, task=robot.tasks[0].name)
    others = {name: column for name, column in plain.columns.items() if not name.startswith("observation")}
    columns = {name: np.zeros((steps, *value.shape), np.float32) for name, value in final.items()}
    return replace(plain, columns={**others, **columns}, final=final)


def test_rule_that_counts_control_periods_starts_anew_in_each_episode(tmp_path: Path) -> None:
    (tmp_path / "sim.yaml").write_text("robots: [{name: example, driver: sim, task: follow}]")
    reward = load_reward(RewardConfig(kind="rule", options={"config": str(tmp_path / "sim.yaml")}))
    robot = RobotConfig(name="example", driver="sim", task="follow")
    for steps, success in ((20, False), (20, False), (30, True)):  # the tool is at its target
        assert reward.evaluate(still_episode(robot, steps)).success is success


def test_classifier_labels_what_it_sees(run: Run, model: Path, tmp_path: Path) -> None:
    """Also against the task's own rule; a person's label stays."""
    store = make_store(
        tmp_path / "store",
        [
            episode("good", False, looks=True),
            episode("bad", True, looks=False),
            episode("unknown", None, looks=True),
            episode("judged", True, looks=False),
            episode("other", True, looks=False, task="push"),
        ],
    )
    add_labels(store, [SuccessLabel(episode="judged", labeller="ann", at_unix_ns=1, success=True)])
    argv = ("store", "relabel", store, "--reward", "classifier", f"--options.model={model}")
    status, text = run(*argv, "--dry-run")
    assert status == 0 and "good: failure becomes success" in text and "3 episodes would be labelled" in text
    assert episodes(store)["good"].success is False
    assert run(*argv)[0] == 0
    found = episodes(store)
    assert {name: each.success for name, each in found.items()} == {
        "good": True, "bad": False, "unknown": True, "judged": True, "other": True,
    }  # fmt: skip
    assert found["good"].episode_return == 1.0 and found["bad"].episode_return == 0.0
    assert found["good"].labelled_by == "reward:classifier" and found["judged"].labelled_by == "ann"
    assert "0 episodes labelled" in run(*argv)[1], "once"
    assert run(*argv, "--again", "--options.unsure=0.9")[0] == 0
    assert episodes(store)["bad"].success is True, "as recorded, for a person"


def test_rule_is_evaluated_again_on_what_was_recorded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "fake.yaml").write_text("robots: [{name: arm, driver: fake, task: reach}]")
    store = tmp_path / "store"
    assert run("record", "fake.yaml", "--output", store, "--episodes", "3")[0] == 0
    before = episodes(store)
    name = next(iter(before))
    wrong = SuccessLabel(episode=name, labeller="reward:broken", at_unix_ns=1, success=False)
    add_labels(store, [wrong])
    argv = ("store", "relabel", store, "--reward", "rule")
    (tmp_path / "other.yaml").write_text("robots: [{name: other, driver: fake, task: reach}]")
    assert "0 episodes labelled" in run(*argv, "--options.config=other.yaml")[1], "of other robots"
    status, text = run(*argv, "--options.config=fake.yaml")
    assert status == 0 and f"{name}: failure becomes success" in text and "1 with another success" in text
    after = episodes(store)
    assert [each.success for each in after.values()] == [True] * 3
    assert [each.episode_return for each in after.values()] == [each.episode_return for each in before.values()]
    assert run(*argv, "--options.config=none.yaml")[0] == 2


TASKS_MODULE = """
from dataclasses import dataclass
from hal.task import TaskOutcome
from robots.fake import FakeTask

@dataclass(frozen=True)
class Settings:
    radius_m: float = 0.05
    fails: bool = False

class Near(FakeTask):
    name, settings = "near", Settings

    @classmethod
    def for_robot(cls, robot, settings):
        made = cls(settings.radius_m)
        made.fails = settings.fails
        return made

    def evaluate(self, observation):
        outcome = super().evaluate(observation)
        return TaskOutcome(0.0, True, False) if self.fails and not outcome.terminated else outcome

class Judged(FakeTask):
    name, is_judged = "judged", True

    def evaluate(self, observation):
        return TaskOutcome(0.0, False)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with the tasks ``near`` and ``judged``."""
    installed = tmp_path / "tasks_of_rewards-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: tasks-of-rewards\nVersion: 1.0\n")
    names = "near = tasks_of_rewards:Near\njudged = tasks_of_rewards:Judged\n"
    (installed / "entry_points.txt").write_text(f"[user_sys.tasks]\n{names}")
    (tmp_path / "tasks_of_rewards.py").write_text(TASKS_MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("options", "success"), [("radius_m: 0.15", True), ("fails: true", False)])
def test_episode_ends_for_the_rule_at_the_first_step_that_terminates(
    options: str, success: bool, run: Run, tmp_path: Path
) -> None:
    """With a wider tolerance several steps are near the goal, and the recorded one succeeded after a failure."""
    for file, own in (("recorded.yaml", "{}"), ("changed.yaml", f"{{{options}}}")):
        Path(file).write_text(f"robots: [{{name: arm, driver: fake, task: [{{name: near, options: {own}}}]}}]")
    store = tmp_path / "store"
    assert run("record", "recorded.yaml", "--output", store, "--episodes", "3")[0] == 0
    assert run("store", "relabel", store, "--reward", "rule", "--options.config=changed.yaml")[0] == 0
    found = episodes(store).values()
    assert [each.success for each in found] == [success] * 3
    assert [each.episode_return for each in found] == [float(success)] * 3
    assert all(each.steps > 2 for each in found), "so that several steps could be rewarded"


def test_rule_evaluates_each_of_the_tasks_that_a_scripted_operator_corrects(tmp_path: Path) -> None:
    tasks, config = ("lift_red", "lift_green", "lift_blue", "lift_yellow"), tmp_path / "robots.yaml"
    robot = {"name": "example", "driver": "sim", "task": tasks, "teleoperators": [{"kind": "scripted"}]}
    config.write_text(json.dumps({"robots": [robot]}))
    reward = load_reward(RewardConfig(kind="rule", options={"config": str(config)}))
    for task in tasks:
        found = reward.evaluate(still_episode(RobotConfig(name="example", driver="sim", task=task), 5))
        assert found.success is False, "nothing is lifted"


@pytest.mark.usefixtures("package")
def test_rule_leaves_out_the_task_of_a_package_that_a_person_judges(tmp_path: Path) -> None:
    (tmp_path / "fake.yaml").write_text("robots: [{name: example, driver: fake, task: [near, judged]}]")
    reward = load_reward(RewardConfig(kind="rule", options={"config": str(tmp_path / "fake.yaml")}))
    for task, success in (("near", True), ("judged", None)):
        found = reward.evaluate(still_episode(RobotConfig(name="example", driver="fake", task=task), 5))
        assert found.success is success


def test_audit_shows_calibration_and_false_positives(run: Run, model: Path, tmp_path: Path) -> None:
    status, text = run("reward", "audit", model.parent / "store", f"--options.model={model}", "--json")
    found = json.loads(text)
    assert status == 0 and found["false_positives"] == [] and found["sheet"] is None
    assert 5 < found["episodes"] < 40, "only those that are kept for it"
    assert sum(each["episodes"] for each in found["bins"]) == found["episodes"] and found["calibration_error"] < 0.4
    wrong = make_store(tmp_path / "wrong", [episode(f"w{n}", False, looks=True) for n in range(3)])
    status, text = run(
        "reward", "audit", wrong, f"--options.model={model}", "--all", "--output", tmp_path / "sheet.png"
    )
    assert status == 0 and "false positives 3 of 3 failures" in text and "reliability" in text
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


def test_episode_without_pictures_is_left_out_and_counted(
    run: Run, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    header = chunk_header("blind", 2, task="lift", end=EpisodeEnd(steps=2, success=True))
    blind = Chunk(header, {"reward": np.array([0, 1], np.float32)}, {}).encode()
    alone = make_store(tmp_path / "alone", [blind])
    mixed = make_store(tmp_path / "mixed", [blind, *(episode(f"e{n:03d}", n % 2 == 0) for n in range(30))])
    trained = ("reward", "train", "--output", tmp_path / "new.safetensors", "--updates", "1")
    audited = ("reward", "audit", "--all", f"--options.model={model}")
    for argv in (trained, audited):
        status, text = run(*argv, mixed)
        assert status == 0 and "1 could not be evaluated" in text
        assert "reward.unusable episode blind has no picture" in caplog.text
        caplog.clear()
        status, text = run(*argv, alone)
        assert status == 2 and "episode blind has no picture" in text
    assert json.loads(run(*audited, mixed, "--json")[1])["unusable"] == 1


def test_audit_replaces_no_file_but_a_picture(run: Run, model: Path, tmp_path: Path) -> None:
    (kept := tmp_path / "model.safetensors").write_bytes(content := model.read_bytes())
    audited = ("reward", "audit", model.parent / "store", f"--options.model={kept}", "--output")
    status, text = run(*audited, kept)
    assert status == 2 and f"{kept} exists and is not a PNG" in text and kept.read_bytes() == content
    assert run(*audited, tmp_path)[0] == 2
    (old := tmp_path / "old.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert run(*audited, old)[0] == 0


def test_progress_model_rewards_each_step_that_brings_the_goal_nearer(run: Run, tmp_path: Path) -> None:
    store, model = rising_store(tmp_path / "store"), tmp_path / "progress.safetensors"
    status, text = run("reward", "train", store, "--kind", "progress", "--output", model, "--updates", "30")
    assert status == 0 and "reward audit" in text and "--reward progress" in text
    audited = ("reward", "audit", store, "--reward", "progress", f"--options.model={model}")
    status, text = run(*audited, "--json")
    found = json.loads(text)["progress"]
    assert status == 0 and found["recorded"]["rank_correlation"] > 0.9 > -0.9 > found["reversed"]["rank_correlation"]
    assert found["wrong sentence"]["at_end"] < 0.5 * found["recorded"]["at_end"]
    assert "wrong sentence" in run(*audited)[1]
    with StoreWriter.open(store) as writer:
        writer.append(rising("new", "red"))
    options = (f"--options.model={model}", "--options.threshold=0.2")
    status, _ = run("store", "relabel", store, "--reward", "progress", *options, "--episode", "new")
    assert status == 0
    with StoreReader.open(store) as reader:
        rewards = EpisodeReader(reader).read("new").columns["reward"]
    assert (rewards[:-1] > -0.1).all() and rewards[:-1].sum() > 0.4, "each step adds progress"
    assert rewards[-1] > 0.8, "the goal is reached"
    require_watched(model, store)


def require_watched(model: Path, store: Path) -> None:
    """The progress of an episode as a robot watches it: some, none, and that of an unknown task."""
    from user_sys.rewards.progress import ProgressWatch

    with StoreReader.open(store) as reader:
        episode = EpisodeReader(reader).read("new")
    first, *_, last = [decode_frame(frame) for frame in episode.frames["observation.images.front"] if frame is not None]
    watch = ProgressWatch(model, steps=8)

    def gain(image: Array) -> float:
        watch.begin_episode("red", episode.header.sentence)
        assert watch.gain(0, {"front": first}) is None
        gains = iter(lambda: watch.gain(8, {"front": image}), "never")
        return float(until(lambda: [each for each in [next(gains)] if each is not None], "both are evaluated")[0])

    assert gain(last) > 0.3 and gain(first) < 0.05
    watch.begin_episode("other", "")
    assert watch.gain(0, {"front": first}) is None and watch.gain(8, {"front": last}) is None


class AnsweringModel(BaseHTTPRequestHandler):
    """A vision-language model's server that finds progress where the last picture is brighter than the first."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, *images = body["messages"][0]["content"]
        files = [base64.b64decode(each["image_url"]["url"].partition(",")[2]) for each in images]
        bright = [float(simplejpeg.decode_jpeg(file).mean()) for file in files]
        judged = {"progress": [(each - bright[0]) / 30 for each in bright], "success": bright[-1] > bright[0] + 10}
        answer = {"choices": [{"message": {"content": f"Here you are:\n```json\n{json.dumps(judged)}\n```"}}]}
        is_known = self.headers["Authorization"] == "Bearer 1234" and "lift the cube" in text["text"]
        self.send_response(302 if self.path == "/moved" else 200 if is_known else 401)
        if self.path == "/moved":
            self.send_header("Location", "/v2/chat/completions")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_GET(self) -> None:
        raise AssertionError("urllib follows a redirect with GET")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_vision_language_model_judges_over_http(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = labelled_store(tmp_path / "store", 4)
    with HTTPServer(("127.0.0.1", 0), AnsweringModel) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
        options = (f"--options.url={url}", "--options.key_variable=VLM_KEY")
        assert "the environment has no VLM_KEY" in run("reward", "audit", store, "--reward", "vlm", *options)[1]
        monkeypatch.setenv("VLM_KEY", "1234")
        status, text = run("reward", "audit", store, "--reward", "vlm", "--all", "--json", *options)
        elsewhere = f"--options.url=http://127.0.0.1:{server.server_port}/moved"
        moved = run("reward", "audit", store, "--reward", "vlm", "--all", *options, elsewhere)
        monkeypatch.setenv("VLM_KEY", "4321")
        refused = run("reward", "audit", store, "--reward", "vlm", "--all", *options)
        server.shutdown()
        thread.join()
    found = json.loads(text)
    assert status == 0 and (found["episodes"], found["false_positives"]) == (4, [])
    recorded = found["progress"]["recorded"]
    assert (recorded["clips"], recorded["success"]) == (2, 1.0) and recorded["rank_correlation"] > 0.8
    assert refused[0] == 2 and "HTTP Error 401" in refused[1]
    assert moved[0] == 2 and "redirects to" in moved[1] and "/v2/chat" in moved[1], "the key stays with its server"
    monkeypatch.setenv("VLM_KEY", "1234")
    reward = load_reward(RewardConfig(kind="vlm", options={"url": url, "key_variable": "VLM_KEY"}))
    with StoreReader.open(store) as reader:
        labeller = EpisodeLabeller(reader, reward, "vlm")
        for _ in range(2):
            label_new(labeller, store, [])
    assert caplog.text.count("reward.waiting") == 2, "it tries again while the server is down"
    assert not queued_files(store)


def test_only_episodes_that_are_new_or_relabelled_are_examined_again(tmp_path: Path) -> None:
    examined = list[str]()

    class Examining(EpisodeFilter, frozen=True, kw_only=True):
        def matches(self, episode: EpisodeSummary) -> bool:
            examined.append(episode.episode)
            return EpisodeFilter.matches(self, episode)

    store = labelled_store(tmp_path / "store", 4)
    with StoreReader.open(store) as reader:
        labeller = EpisodeLabeller(reader, GivenReward(lambda _: EpisodeReward(None)), "given", Examining())
        for expected in (["e000", "e001", "e002", "e003"], [], ["e002", "new"]):
            assert list(labeller.new_labels()) == [] and examined == expected
            examined.clear()
            if not expected:
                make_store(store, [episode("new", True)])
                add_labels(store, [SuccessLabel(episode="e002", labeller="ann", at_unix_ns=1, success=True)])


def test_verdict_of_an_operator_stays_as_it_is(tmp_path: Path) -> None:
    judged = [episode("operator", True, judged_by="person"), episode("rule", True)]
    store = make_store(tmp_path / "store", judged)
    label_by(store, lambda _: EpisodeReward(False))
    found = episodes(store)
    assert (found["operator"].success, found["operator"].labelled_by, found["operator"].episode_return) == (True, "", 1)
    assert (found["rule"].success, found["rule"].labelled_by) == (False, "reward:given")
    with StoreReader.open(store) as reader:
        assert [each.episode for each in labelled_episodes(EpisodeReader(reader))] == ["operator"]


def test_dense_reward_values_the_steps_of_an_operators_episode_and_keeps_the_verdict(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [episode("operator", True, judged_by="person")])

    class Dense(Reward):
        is_dense = True

        def __init__(self, settings: object = None) -> None:
            pass

        def evaluate(self, episode: StoredEpisode) -> EpisodeReward:
            return EpisodeReward(False, np.array([0.25, 0.5, 0.125], np.float32))

    with StoreReader.open(store) as reader:
        labels = [label for *_, new in EpisodeLabeller(reader, Dense(), "dense").new_labels() for label in new]
    add_labels(store, labels)
    found = episodes(store)["operator"]
    assert (found.success, found.reward_source) == (True, "person")
    assert found.episode_return == 0.25 + 0.5 + 1.0, "the last reward is the verdict's"


def trimmed_store(path: Path, success: bool, steps: int = 8) -> Path:
    """One episode, of which a person keeps the steps 2 to 5."""
    store = make_store(path, [rising("e", "red", success, steps)])
    add_labels(store, [TrimLabel(episode="e", labeller="ann", at_unix_ns=1, first_step=2, steps=4)])
    return store


@pytest.mark.parametrize("success", [True, False])
def test_reward_labels_the_steps_that_a_trim_keeps(success: bool, tmp_path: Path) -> None:
    store = trimmed_store(tmp_path / "store", not success)
    given = np.array([0.25, 0.5, 0.125, 1.5], np.float32)
    seen = list[int]()

    def find(asked: StoredEpisode) -> EpisodeReward:
        seen.append(asked.steps)
        return EpisodeReward(success, given)

    label_by(store, find)
    with StoreReader.open(store) as reader:
        reader.refresh()
        steps = reader.index.steps
        assert seen == [4] and reader.episodes()[0].success is success
        assert steps.reward[steps.alive].tolist() == given.tolist()
        assert steps.terminated[steps.alive].tolist() == [False, False, False, success]


@pytest.mark.parametrize("restarts", [True, False])
def test_steps_that_a_new_trim_brings_back_are_rewarded(restarts: bool, tmp_path: Path) -> None:
    """Also those that the undo of a trim brings back; each trim is evaluated once."""
    store, evaluated = trimmed_store(tmp_path / "store", True), list[int]()

    def find(asked: StoredEpisode) -> EpisodeReward:
        evaluated.append(asked.steps)
        return EpisodeReward(True, np.array([0.125] * (asked.steps - 1) + [1.125], np.float32))

    with StoreReader.open(store) as reader:
        labeller = EpisodeLabeller(reader, GivenReward(find), "given")
        for changes, kept in (
            ([], 4),
            ([TrimLabel(episode="e", labeller="ann", at_unix_ns=2, first_step=0, steps=6)], 6),
            ([UndoLabel(episode="e", labeller="ann", at_unix_ns=9, undone_at_unix_ns=n) for n in (1, 2)], 8),
        ):
            add_labels(store, changes)
            for _ in range(2):
                again = EpisodeLabeller(reader, GivenReward(find), "given") if restarts else labeller
                add_labels(store, [label for *_, new in again.new_labels() for label in new])
            reader.refresh()
            steps = reader.index.steps
            assert steps.reward[steps.alive].tolist() == [0.125] * (kept - 1) + [1.125]
    assert evaluated == [4, 6, 8]


@pytest.mark.parametrize("restarts", [True, False])
def test_label_that_an_unsure_evaluation_took_back_returns_with_the_steps(restarts: bool, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [rising("e", "red", False, 8)])
    trim = TrimLabel(episode="e", labeller="ann", at_unix_ns=2, first_step=0, steps=6)
    found = list[bool | None]()
    with StoreReader.open(store) as reader:
        reward = GivenReward(lambda asked: EpisodeReward(True if asked.steps == 8 else None))
        labeller = EpisodeLabeller(reader, reward, "given")
        for changes in ([], [trim], [UndoLabel(episode="e", labeller="ann", at_unix_ns=9, undone_at_unix_ns=2)]):
            add_labels(store, changes)
            again = EpisodeLabeller(reader, reward, "given") if restarts else labeller
            add_labels(store, [label for *_, new in again.new_labels() for label in new])
            reader.refresh()
            found.append(reader.episodes()[0].success)
    assert found == [True, False, True]


def test_message_about_a_trimmed_episode_has_its_stored_id_and_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def find(asked: StoredEpisode) -> EpisodeReward:
        return EpisodeReward(bool(list(clip_pictures(asked, ["wrist"], [0]))))

    label_by(trimmed_store(tmp_path / "store", True), find)
    assert "reward.unusable episode e has no picture of the camera 'wrist' at step 2" in caplog.text


def test_rewards_train_on_the_steps_that_a_trim_keeps(tmp_path: Path) -> None:
    from user_sys.rewards.networks import read_labelled_clips

    def clip(store: Path) -> Array:
        with StoreReader.open(store) as reader:
            return read_labelled_clips(reader, 99).pictures[0]

    whole = clip(make_store(tmp_path / "whole", [rising("e", "red")]))
    np.testing.assert_array_equal(clip(trimmed_store(tmp_path / "store", True)), whole[2:7])


def test_audit_evaluates_the_steps_that_a_trim_keeps(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()

    def find(asked: StoredEpisode) -> EpisodeReward:
        seen.append(asked.steps)
        return EpisodeReward(True)

    monkeypatch.setattr(reward_commands, "load_reward", lambda config: GivenReward(find))
    assert run("reward", "audit", trimmed_store(tmp_path / "store", True), "--all")[0] == 0
    assert seen == [4]


def test_label_that_a_person_undid_is_not_made_again(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [episode("e", None)])
    label_by(store, lambda _: EpisodeReward(True))
    with StoreReader.open(store) as reader:
        reader.refresh()
        (made,) = reader.index.labels("e")
    add_labels(store, [UndoLabel(episode="e", labeller="ann", at_unix_ns=1, undone_at_unix_ns=made.at_unix_ns)])
    trim = TrimLabel(episode="e", labeller="ann", at_unix_ns=2, first_step=0, steps=2)
    for changes in ([], [trim]):
        add_labels(store, changes)
        label_by(store, lambda _: EpisodeReward(True))
        assert episodes(store)["e"].success is None


def test_episode_at_which_the_server_fails_does_not_delay_others(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [episode(name, None) for name in ("bad", "e1", "e2")])

    def find(asked: StoredEpisode) -> EpisodeReward:
        if asked.header.episode == "bad":
            raise LinkDown("HTTP Error 500")
        return EpisodeReward(True)

    label_by(store, find, passes=2)
    assert {name: each.success for name, each in episodes(store).items()} == {"bad": None, "e1": True, "e2": True}


@pytest.mark.parametrize("status", [400, 413, 422])
def test_request_that_the_server_refuses_is_not_sent_again(
    status: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(AnsweringModel):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(status)

    store = make_store(tmp_path / "store", [episode("e", None)])
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        reward = load_reward(RewardConfig(kind="vlm", options={"url": f"http://127.0.0.1:{server.server_port}/"}))
        label_by(store, reward.evaluate, passes=2)
        server.shutdown()
        thread.join()
    assert caplog.text.count(f"HTTP Error {status}") == 1 and "reward.unusable e:" in caplog.text


def test_relabel_stores_what_it_found_before_the_server_failed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"e{number}" for number in range(5)]
    store, evaluated = make_store(tmp_path / "store", [episode(name, None) for name in names]), list[int]()

    def find(asked: StoredEpisode) -> EpisodeReward:
        evaluated.append(sum(each.success is True for each in episodes(store).values()))
        if asked.header.episode == "e4":
            raise LinkDown("no answer")
        return EpisodeReward(True)

    monkeypatch.setattr(store_label, "load_reward", lambda config: GivenReward(find))
    monkeypatch.setattr(store_label, "LABELS_AT_ONCE", 3)
    status, text = run("store", "relabel", store, "--reward", "vlm")
    assert status == 2 and "no answer" in text
    assert evaluated == [0, 0, 0, 3, 3], "stored while it evaluates"
    assert [each.success for each in episodes(store).values()] == [True] * 4 + [None]


def test_relabel_leaves_out_an_episode_with_an_invalid_reward(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", [episode(name, None) for name in ("a", "b", "c")])

    def find(asked: StoredEpisode) -> EpisodeReward:
        value = np.nan if asked.header.episode == "b" else 0.5
        return EpisodeReward(True, np.full(asked.steps, value, np.float32))

    monkeypatch.setattr(store_label, "load_reward", lambda config: GivenReward(find))
    status, text = run("store", "relabel", store, "--reward", "vlm")
    assert status == 0 and "2 episodes labelled" in text and "1 could not be evaluated" in text
    assert {name: each.success for name, each in episodes(store).items()} == {"a": True, "b": None, "c": True}


def malformed(name: str, **final: Array) -> list[bytes]:
    """An episode that a store takes: its second chunk has a wider state, or it ends with this final observation."""
    header = chunk_header(name, 2, end=EpisodeEnd(steps=2, success=None))
    frames = frame_columns(FRONT, [np.zeros((4, 6, 3), np.uint8)] * 2, [1, 2])
    if final:
        return [Chunk(header, frames, {FRONT: final["picture"]}).encode()]
    first = Chunk(replace_fields(header, end=None), {"observation.state": np.zeros((2, 3), np.float32)}, {})
    second = replace_fields(header, index=1, first_step=2, end=EpisodeEnd(steps=4, success=None))
    return [first.encode(), Chunk(second, {"observation.state": np.zeros((2, 4), np.float32)}, {}).encode()]


def test_malformed_episode_is_logged_and_others_are_labelled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    several = malformed("several", picture=np.zeros((2, 4, 6, 3), np.uint8))
    store = make_store(tmp_path / "store", [*malformed("widths"), *several, episode("e", None)])
    label_by(store, lambda _: EpisodeReward(True))
    assert {name: each.success for name, each in episodes(store).items()} == {
        "widths": None,
        "several": None,
        "e": True,
    }
    assert "reward.unusable episode widths: its chunks have different columns" in caplog.text
    assert "reward.unusable episode several: its final" in caplog.text


def test_final_picture_with_a_leading_axis_is_a_picture(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", malformed("e", picture=np.full((1, 4, 6, 3), 9, np.uint8)))
    shown = list[Array]()

    def find(asked: StoredEpisode) -> EpisodeReward:
        shown.extend(final_pictures(asked, ["front"]).values())
        return EpisodeReward(True)

    label_by(store, find)
    assert [each.shape for each in shown] == [(4, 6, 3)]


@pytest.mark.parametrize(("driver", "options"), [("ur", {"host": "127.0.0.1"}), ("gym", {"id": "Pendulum-v1"})])
def test_task_without_a_rule_on_observations_is_refused(driver: str, options: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "robots.yaml"
    config.write_text(json.dumps({"robots": [{"name": "arm", "driver": driver, "task": "lift", "options": options}]}))
    with pytest.raises(ConfigError, match="names no task that observations decide"):
        load_reward(RewardConfig(kind="rule", options={"config": str(config)}))


def test_file_names_only_the_tasks_that_it_was_trained_on() -> None:
    from user_sys.rewards.classifier import SuccessNet
    from user_sys.rewards.networks import AUDIT_PARTS, TEMPERATURE_PART, LabelledClips, part_of, train_network
    from user_sys.rewards.progress import ProgressNet

    kept = [name for name in map(str, range(999)) if part_of(name) in AUDIT_PARTS]
    trained = [name for name in map(str, range(999)) if part_of(name) not in (*AUDIT_PARTS, TEMPERATURE_PART)]
    names = [*trained[:20], trained[20], kept[0]]
    tasks, success = ["lift"] * 20 + ["pour", "push"], np.array([n % 2 == 0 for n in range(20)] + [False, True])
    pictures = [np.zeros((2, 1, 64, 64, 3), np.uint8)] * len(names)
    clips = LabelledClips(names, tasks, tasks, pictures, success, ("front",))
    assert train_network(SuccessNet, clips, 0)[1].tasks == ("lift", "pour")
    assert train_network(ProgressNet, clips, 0)[1].tasks == ("lift",), "progress is learned from successes"


def test_tasks_that_share_a_sentence_are_no_wrong_sentences_of_each_other() -> None:
    import torch

    from user_sys.rewards.networks import LabelledClips
    from user_sys.rewards.progress import ProgressNet

    torch.manual_seed(0)
    net, pictures = ProgressNet(1).eval(), [np.zeros((3, 1, 64, 64, 3), np.uint8)] * 2

    def loss(tasks: list[str], sentences: list[str]) -> float:
        clips = LabelledClips(["a", "b"], tasks, sentences, pictures, np.ones(2, bool), ("front",))
        return float(net.loss(clips, (0, 1), np.random.default_rng(0)).detach())

    same = loss(["lift", "lift"], ["lift it", "lift it"])
    assert loss(["lift", "lift-2"], ["lift it", "lift it"]) == same != loss(["lift", "pour"], ["lift it", "pour it"])


def test_rank_correlation_shares_the_ranks_of_equal_values() -> None:
    time = np.arange(4)
    assert rank_correlation(np.array([0.1, 0.2, 0.9, 1.0]), time) == pytest.approx(1.0)
    assert rank_correlation(np.array([1.0, 0.0, 0.0, -1.0]), time) == pytest.approx(-(0.9**0.5))
    assert rank_correlation(np.zeros(4), time) == 0.0


def test_calibration_error_is_the_mean_distance_of_the_bins() -> None:
    found = audit(
        [AuditedEpisode("a", True, True, 0.92), AuditedEpisode("b", False, True, 0.98)]
        + [AuditedEpisode(f"c{n}", False, False, 0.1) for n in range(2)]
        + [AuditedEpisode("d", True, None, None)]
    )
    assert found.calibration_error == pytest.approx((2 * 0.45 + 2 * 0.1) / 4)
    assert [each.episode for each in found.false_positives] == ["b"] and found.unsure == 1
    assert [(each.low, each.episodes, each.success) for each in found.bins] == [(0.1, 2, 0.0), (0.9, 2, 0.5)]
    assert audit([]).calibration_error is None


def test_episodes_are_labelled_as_they_end(model: Path, tmp_path: Path) -> None:
    """While the gateway writes the store; it takes the queued labels."""
    reward = load_reward(RewardConfig(kind="classifier", options={"model": str(model)}))
    store = tmp_path / "store"
    with StoreWriter.open(store) as writer:
        writer.append(episode("first", False, looks=True))
        writer.sync()
        with StoreReader.open(store) as reader:
            labeller = EpisodeLabeller(reader, reward, "classifier")
            label_new(labeller, store, [])
            assert len(queued_files(store)) == 1
            writer.append(episode("second", True, looks=True))
            writer.sync()
            for _ in range(2):
                label_new(labeller, store, [])
    assert len(queued_files(store)) == 2
    add_labels(store, [])
    assert {name: each.labelled_by for name, each in episodes(store).items()} == dict.fromkeys(
        ("first", "second"), "reward:classifier"
    )


@pytest.mark.slow
@pytest.mark.parametrize("sources", [(EpisodeSource.ONLINE,), (EpisodeSource.DEMO, EpisodeSource.ONLINE)])
def test_reward_process_of_a_run_labels_until_it_is_stopped(
    model: Path, tmp_path: Path, sources: tuple[EpisodeSource, ...]
) -> None:
    rewards = RewardConfig(kind="classifier", options={"model": str(model)}, sources=sources)
    folder, _ = create_run_folder(RunConfig(runs=tmp_path, rewards=rewards), "run", "tcp://127.0.0.1:5000")
    with StoreWriter.open(folder.store) as writer:
        writer.append(episode("shown", False, looks=True, source=EpisodeSource.DEMO))
        writer.append(episode("first", False, looks=True))
        writer.sync()
        command = [sys.executable, "-m", "user_sys.run.reward_process", str(folder.path)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        assert any("reward.labelled episode=first" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert len(queued_files(folder.store)) == len(sources)


def test_training_needs_both_kinds_and_pictures(run: Run, tmp_path: Path) -> None:
    one_kind = make_store(tmp_path / "one", [episode(f"e{n}", True) for n in range(20)])
    status, text = run("reward", "train", one_kind)
    assert status == 2 and "0 failures to train on" in text
    status, text = run("reward", "train", one_kind, "--camera", "wrist")
    assert status == 2 and "no picture of the camera 'wrist'" in text


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("{kind: clasifier}", "did you mean 'classifier'?"),
        ("{kind: classifier, options: {modle: x}}", "did you mean 'model'?"),
        ("{kind: classifier, options: {model: none.safetensors}}", "no such file; train a classifier"),
        ("{kind: progress, options: {model: none.safetensors}}", "no such file; train a progress"),
        ("{kind: classifier, options: {model: broken.safetensors}}", "holds no classifier"),
    ],
)
def test_wrong_reward_is_named(rewards: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.safetensors").write_bytes(np.zeros(100, np.uint8).tobytes())
    Path("run.yaml").write_text(f"rewards: {rewards}")
    config = load(RunConfig, Path("run.yaml"))
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load_reward(config.rewards)
