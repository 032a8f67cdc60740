"""MCAP recordings, read with the library that viewers use."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from interchange_kit import CAMERA_DELAY_NS, episode_chunks, make_store, read_store, usual_store
from mcap.reader import make_reader
from mcap_protobuf.decoder import DecoderFactory

from hal.spec import ArraySpec, RobotSpec
from user_sys.commands.main import main
from user_sys.commands.options import DRIVEN
from user_sys.episode import Phase
from user_sys.interchange.episodes import ControlledBy
from user_sys.interchange.mcap_export import write_mcap
from user_sys.store.labels import RewardLabel, TrimLabel
from user_sys.store.store import StoreWriter

Message = tuple[int, Any]  # log time, content


def read(path: Path) -> tuple[dict[str, Any], dict[str, list[Message]]]:
    """Schemas and messages by topic; every JSON message is checked against its schema."""
    import jsonschema  # slow to import, and each worker imports each test module

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
            *("action", "action.applied", "step"),
        )
    }
    assert schemas["/panda-0/observation.images.wrist"].name == "foxglove.CompressedImage"
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


def test_mcap_has_only_the_steps_that_a_trim_keeps(tmp_path: Path) -> None:
    store = usual_store(tmp_path / "store")
    with StoreWriter.open(store) as writer:
        writer.append_label(TrimLabel(episode="a", first_step=2, steps=5, labeller="ada", at_unix_ns=1))
        writer.sync()
    file = export(tmp_path) / "panda-0/a.mcap"
    with file.open("rb") as stream:
        assert [each.metadata["episode"] for each in make_reader(stream).iter_metadata()] == ["a-2-7"]
    _, messages = read(file)
    start_ns = 1_700_000_000_000_000_000
    assert [at for at, _ in messages["/panda-0/action"]] == [start_ns + 100_000_000 * n for n in range(2, 7)]
    assert len(messages["/panda-0/observation.images.wrist"]) == 4  # of steps 3, 4 and 6, and what step 2 shows


def test_repeated_export_replaces_files_of_other_steps_or_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks = episode_chunks("a")
    store = make_store(tmp_path / "store", chunks[:1], episode_chunks("b"))
    file = export(tmp_path, "--incomplete") / "panda-0/a.mcap"
    make_store(store, chunks)
    export(tmp_path)
    assert len(read(file)[1]["/panda-0/step"]) == 10
    with StoreWriter.open(store) as writer:
        writer.append_label(RewardLabel(episode="a", first_step=3, rewards=(0.5,), labeller="ada", at_unix_ns=1))
        writer.sync()
    capsys.readouterr()
    export(tmp_path)
    assert "1 recordings written, 1 already existed" in capsys.readouterr().err
    assert read(file)[1]["/panda-0/step"][3][1]["reward"] == 0.5
    file.write_bytes(b"")
    export(tmp_path)
    assert len(read(file)[1]["/panda-0/step"]) == 10


def test_mcap_elements_use_spec_names(tmp_path: Path) -> None:
    def vector(name: str, *labels: str) -> ArraySpec:
        low, high = (-1.0,) * len(labels), (1.0,) * len(labels)
        return ArraySpec(name=name, labels=labels, units=("rad",) * len(labels), low=low, high=high)

    state, action = vector("observation.state", "shoulder", "elbow", "grip"), vector("action", "x", "y")
    spec = RobotSpec(model="arm", rate_hz=10.0, observation=(state,), action=action)
    store = make_store(tmp_path / "store", episode_chunks("a", embodiment=spec.embodiment))
    write_mcap(read_store(store)["a"], 0, spec, tmp_path / "a.mcap")
    schemas, messages = read(tmp_path / "a.mcap")
    assert list(messages["/panda-0/observation.state"][0][1]) == ["shoulder", "elbow", "grip"]
    assert list(json.loads(schemas["/panda-0/action.applied"].data)["properties"]) == ["x", "y"]
    assert msgspec.json.decode(schemas["/panda-0/step"].data)["properties"]["terminated"] == {"type": "boolean"}


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


@pytest.mark.parametrize("damage", ["text", "cut", "offset"])
def test_damaged_recording_is_written_again(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(tmp_path / "store", episode_chunks("a"), episode_chunks("b"))
    path = export(tmp_path) / "panda-0" / "a.mcap"
    good = path.read_bytes()
    footer = len(good) - 8 - 4 - 16  # its two offsets, a CRC and the magic end the file
    path.write_bytes(
        {
            "text": good.replace(b"episode", b"\xff" * 7),
            "cut": good[: len(good) // 2],
            "offset": good[:footer] + b"\xff" * 8 + good[footer + 8 :],
        }[damage]
    )
    capsys.readouterr()
    export(tmp_path)
    assert "1 recordings written, 1 already existed" in capsys.readouterr().err
    assert path.read_bytes() == good


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
