"""MCAP recordings, read with the library that viewers use."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from interchange_kit import CAMERA_DELAY_NS, episode_chunks, make_store, read_store, usual_store
from mcap.reader import make_reader
from mcap_protobuf.decoder import DecoderFactory

from hal.spec import ArraySpec, RobotSpec
from user_sys.commands.main import main
from user_sys.commands.store import DRIVEN
from user_sys.episode import Phase
from user_sys.interchange.episodes import ControlledBy
from user_sys.interchange.frames import decode_frame, decode_image_file
from user_sys.interchange.mcap_export import write_mcap

Message = tuple[int, Any]  # log time, content


def read(path: Path) -> tuple[dict[str, Any], dict[str, list[Message]]]:
    """Schemas and messages by topic; every JSON message is checked against its schema."""
    schemas: dict[str, Any] = {}
    messages: dict[str, list[Message]] = defaultdict(list)
    with path.open("rb") as file:
        reader = make_reader(file, decoder_factories=[DecoderFactory()], validate_crcs=True)
        last = 0
        for schema, channel, message in reader.iter_messages():
            assert schema is not None and message.log_time >= last
            last = message.log_time
            schemas[channel.topic] = schema
            if schema.encoding == "jsonschema":
                described = json.loads(schema.data)
                jsonschema.Draft202012Validator.check_schema(described)
                content = json.loads(message.data)
                jsonschema.validate(content, described)
            else:
                assert schema.encoding == "protobuf" and FileDescriptorSet.FromString(schema.data).file
                content = DecoderFactory().decoder_for("protobuf", schema)(message.data)  # type: ignore[misc]
            messages[channel.topic].append((message.log_time, content))
    return schemas, messages


def export(tmp_path: Path, *options: str) -> Path:
    status = main(
        ["store", "export", str(tmp_path / "store"), "--format", "mcap", "--output", str(tmp_path / "out"), *options]
    )
    assert status == 0
    return tmp_path / "out"


def test_mcap_holds_the_episode(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    schemas, messages = read(export(tmp_path) / "panda-0/a.mcap")
    episode = read_store(store)["a"]
    assert set(schemas) == {
        f"/panda-0/{name}"
        for name in (
            *("observation.images.wrist", "observation.images.front", "observation.state"),
            *("action", "action.applied", "step", "events"),
        )
    }
    assert schemas["/panda-0/observation.images.wrist"].name == "foxglove.CompressedImage"
    assert schemas["/panda-0/events"].name == "foxglove.Log"
    state = np.array([list(content.values()) for _, content in messages["/panda-0/observation.state"]], np.float32)
    np.testing.assert_array_equal(state, episode.columns["observation.state"])
    times = [at for at, _ in messages["/panda-0/step"]]
    assert times == [1_700_000_000_000_000_000 + 100_000_000 * n for n in range(10)]
    steps = [content for _, content in messages["/panda-0/step"]]
    assert [each["step"] for each in steps] == list(range(10))
    assert [each["phase"] for each in steps] == episode.columns["phase"].tolist()
    assert steps[0]["command_delay_ms"] == 3.0
    assert sum("log_prob" not in each for each in steps) == np.isnan(episode.columns["log_prob"]).sum()


def test_mcap_frames_have_capture_times(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    _, messages = read(export(tmp_path) / "panda-0/a.mcap")
    sent = [(n, f) for n, f in enumerate(read_store(store)["a"].frames["observation.images.wrist"]) if f is not None]
    got = messages["/panda-0/observation.images.wrist"]
    assert len(got) == len(sent) == 7
    for (step, frame), (at_ns, message) in zip(sent, got, strict=True):
        assert message.data == frame and message.format == "jpeg" and message.frame_id == "wrist"
        assert at_ns == 1_700_000_000_000_000_000 + 100_000_000 * step
        assert message.timestamp.ToNanoseconds() == at_ns - CAMERA_DELAY_NS["wrist"]


def test_mcap_raw_frames_become_png(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", episode_chunks("a", raw=True))
    _, messages = read(export(tmp_path) / "panda-0/a.mcap")
    first = messages["/panda-0/observation.images.front"][0][1]
    assert first.format == "png"
    sent = read_store(store)["a"].frames["observation.images.front"][0]
    assert sent is not None
    np.testing.assert_array_equal(decode_frame(decode_image_file(first.data)), sent)


def test_mcap_events(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    _, messages = read(export(tmp_path) / "panda-0/b.mcap")
    events = [message.message for _, message in messages["/panda-0/events"]]
    phase = read_store(store)["b"].columns["phase"]
    assert events[0].startswith("episode b started: push the cube (demo, ")
    assert events[-1] == "episode ended after 7 steps: failure (rule)"
    assert len(events) == 2 + np.count_nonzero(np.diff(phase))
    assert all(" to " in each and each.startswith("control: ") for each in events[1:-1])


def test_mcap_elements_use_spec_names(tmp_path: Path) -> None:
    def vector(name: str, *labels: str) -> ArraySpec:
        low, high = (-1.0,) * len(labels), (1.0,) * len(labels)
        return ArraySpec(name=name, labels=labels, units=("rad",) * len(labels), low=low, high=high)

    state, action = vector("observation.state", "shoulder", "elbow", "grip"), vector("action", "x", "y")
    spec = RobotSpec(model="arm", rate_hz=10.0, observation=(state,), action=action)
    store = make_store(tmp_path / "store", episode_chunks("a", embodiment=spec.embodiment))
    write_mcap(read_store(store)["a"], spec, tmp_path / "a.mcap")
    schemas, messages = read(tmp_path / "a.mcap")
    assert list(messages["/panda-0/observation.state"][0][1]) == ["shoulder", "elbow", "grip"]
    assert list(json.loads(schemas["/panda-0/action.applied"].data)["properties"]) == ["x", "y"]
    assert msgspec.json.decode(schemas["/panda-0/step"].data)["properties"]["terminated"] == {"type": "boolean"}


def test_mcap_with_times_before_1970(tmp_path: Path) -> None:
    episode = read_store(usual_store(tmp_path / "store"))["a"]
    early = {**episode.columns, "t_capture_ns": episode.columns["t_capture_ns"] - (1 << 62)}
    write_mcap(replace(episode, columns=early), None, tmp_path / "a.mcap")
    _, messages = read(tmp_path / "a.mcap")
    assert [at for at, _ in messages["/panda-0/step"]] == [0] * episode.steps


def test_mcap_of_several_robots_is_repeatable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(
        tmp_path / "store",
        episode_chunks("a"),
        episode_chunks("u", robot="ur-0", embodiment="e2", size=6, cameras=()),
        episode_chunks("d", robot="ur-0", embodiment="e2", size=6, cameras=(), success=False),
    )
    output = export(tmp_path, "--success", "yes")
    assert {path.relative_to(output).as_posix() for path in output.rglob("*.mcap")} == {
        "panda-0/a.mcap",
        "ur-0/u.mcap",
    }
    (output / "panda-0/a.mcap").unlink()
    capsys.readouterr()
    export(tmp_path)
    assert "2 recordings written, 1 already existed" in capsys.readouterr().err
    assert not list(output.rglob("*unfinished*"))


@pytest.mark.parametrize(
    ("driven", "names"),
    [
        (["policy"], {"alone"}),
        (["person"], {"by-hand"}),
        (["both"], {"helped"}),
        (["policy", "both"], {"alone", "helped"}),
    ],
)
def test_driven_filter(tmp_path: Path, driven: list[str], names: set[str]) -> None:
    assert tuple(ControlledBy) == DRIVEN
    make_store(
        tmp_path / "store",
        episode_chunks("alone", 4, phases=[Phase.POLICY] * 4),
        episode_chunks("by-hand", 4, phases=[Phase.TELEOP] * 4),
        episode_chunks("helped", 4, phases=[Phase.POLICY] * 2 + [Phase.CORRECTION] * 2),
    )
    output = export(tmp_path, *(word for each in driven for word in ("--driven", each)))
    assert {path.stem for path in output.rglob("*.mcap")} == names
