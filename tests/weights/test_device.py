"""Weights brought to the host: equal to what the device holds, whatever it does meanwhile, and packed as elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from user_sys.algorithms.conformance import brought
from user_sys.codec import Array
from user_sys.errors import ConfigError
from user_sys.weights.forms import convert, narrow
from user_sys.weights.gpu.device import DeviceCopy, HostCopies, as_array, host_copies, packing
from user_sys.weights.gpu.packing import narrow_in_torch, narrow_tensor
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.snapshot import Unbounded
from user_sys.weights.state import BF16

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
CORNERS = np.array(
    [
        0x0,
        0x80000000,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7F7F7FFF,
        0x7F7F8000,
        0x00008000,
        0x00018000,
        1,
    ],
    np.uint32,
).view(np.float32)


def values(count: int = 10_000) -> torch.Tensor:
    random = np.random.default_rng(0).integers(0, 1 << 32, count, np.uint64).astype(np.uint32).view(np.float32)
    return torch.from_numpy(np.concatenate((CORNERS, random[np.isfinite(random)])))


def fetched(weights: DeviceCopy) -> tuple[Mapping[str, Array], tuple[float, float, float]]:
    arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in weights.layout.items()}
    weights.wait()
    return arrays, weights.fetch(arrays, Unbounded())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ctas", [1, 3, 32])
def test_packing_rounds_as_the_learner_does_with_any_number_of_thread_blocks(device: str, ctas: int) -> None:
    source = values()
    packed = narrow_tensor(source.to(device), ctas)[0].cpu()
    assert np.array_equal(as_array(packed).view(np.uint16), narrow(source.numpy()).view(np.uint16))
    assert torch.equal(narrow_in_torch(source).view(torch.int16), packed.view(torch.int16))


@pytest.mark.parametrize(
    ("device", "green_sms"), [("cpu", 0), pytest.param("cuda", 0, marks=GPU), pytest.param("cuda", 8, marks=GPU)]
)
def test_a_snapshot_is_of_the_moment_at_which_it_was_taken(device: str, green_sms: int) -> None:
    weights = {"w": torch.randn(300, 70, device=device), "b": torch.zeros(0, device=device)}
    weights["half"] = weights["w"].to(torch.bfloat16)[:, ::2]
    weights["n"] = torch.tensor(7, device=device)
    expected = {name: tensor.cpu().clone() for name, tensor in weights.items()}
    snapshot = HostCopies(torch.device(device), green_sms=green_sms).snapshot(weights)
    for tensor in weights.values():
        tensor.add_(1)
    found = brought(snapshot)
    assert found["half"].dtype == BF16
    assert all(torch.equal(torch.from_numpy(found[n].view(np.int16)), expected[n].view(torch.int16)) for n in ["half"])
    assert all(np.array_equal(found[name], expected[name].numpy()) for name in ("w", "b", "n"))


@dataclass
class Counted:
    """A budget of four values a copy at first, and twice as many after each."""

    ctas: int = 2
    chunk_bytes: int = 16
    done: list[int] = field(default_factory=list)

    def breathe(self, done_bytes: int) -> None:
        self.done.append(done_bytes)
        self.chunk_bytes *= 2


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_fetched_in_pieces_of_what_the_budget_allows_at_the_time(device: str) -> None:
    weights = {"w": torch.arange(10.0, device=device).view(2, 5), "b": torch.ones(20, device=device)}
    snapshot, budget = HostCopies(torch.device(device)).snapshot(weights), Counted()
    arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in snapshot.layout.items()}
    snapshot.wait()
    snapshot.fetch(arrays, budget)
    assert budget.done == [16, 24, 64, 16]
    assert arrays["w"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] and (arrays["b"] == 1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_pieces_begin_where_a_gpu_loads_many_values_at_once(device: str) -> None:
    snapshot = HostCopies(torch.device(device)).snapshot({"w": torch.arange(20_000.0, device=device)})
    arrays, budget = {"w": np.empty(20_000, np.float32)}, Counted(chunk_bytes=20_000)
    snapshot.wait()
    snapshot.fetch(arrays, budget)
    assert [done // 4 for done in budget.done] == [4096, 8192, 7712]
    assert (arrays["w"] == np.arange(20_000.0)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_packed_on_the_device_is_what_the_learner_would_have_published(device: str) -> None:
    weights = {"w": torch.randn(64, 333, device=device), "steps": torch.arange(3, device=device)}
    weights["empty"] = torch.empty(0, 4, device=device)
    exact = {name: tensor.cpu().numpy() for name, tensor in weights.items()}
    found, rounding = fetched(HostCopies(torch.device(device), pack="bf16").snapshot(weights))
    expected, errors = convert(exact, "bf16")
    assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in expected.items()}
    assert found["w"].dtype == BF16 and found["steps"].tolist() == [0, 1, 2], "what is no float32 stays as it is"
    assert convert(found, "bf16", before=rounding)[1] == pytest.approx(errors, rel=1e-5)


def test_weights_are_rounded_on_the_device_where_no_others_are_published() -> None:
    weights = {"w": torch.ones(3)}
    for forms, packed in ((("bf16",), True), (("exact", "bf16"), False), (("exact",), False), (("int8",), False)):
        copies = HostCopies(torch.device("cpu"), packing(forms))  # type: ignore[arg-type]
        assert (copies.snapshot(weights).layout["w"][0] == BF16) is packed


class Kept:
    """Notes in `gone` when it goes."""

    def __init__(self, name: str, gone: list[str]) -> None:
        weakref.finalize(self, gone.append, name)


def test_page_locked_memory_goes_before_the_green_context_whose_stream_filled_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch marks on that stream that the memory is free again; on one that is no more it ends the process."""
    gone: list[str] = []
    monkeypatch.setattr("user_sys.weights.gpu.device.green_stream", lambda *_: (Kept("context", gone), None))
    copies = HostCopies(torch.device("cpu"), green_sms=8)
    copies._staging = Kept("memory", gone)  # type: ignore[assignment]
    del copies
    assert gone == ["memory", "context"]


def test_a_device_that_cannot_round_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("user_sys.weights.gpu.device.narrow_tensor", fails)
    with pytest.raises(ConfigError, match="forms is bf16 alone.*RuntimeError: Failed to find C compiler"):
        HostCopies(torch.device("cpu"), pack="bf16")
    HostCopies(torch.device("cpu"))


def test_a_learner_on_the_processor_needs_no_copies_and_has_no_multiprocessors_to_set_aside() -> None:
    assert host_copies("cpu", PublishConfig()) is None
    with pytest.raises(ConfigError, match="green_sms is 8, and the learner trains on the processor"):
        host_copies("cpu", PublishConfig(green_sms=8))
    with pytest.raises(ConfigError, match="green_sms"):
        PublishConfig(green_sms=-1)


@GPU
def test_more_multiprocessors_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match="green_sms is 100000, and torch"):
        host_copies("cuda", PublishConfig(green_sms=100_000))
