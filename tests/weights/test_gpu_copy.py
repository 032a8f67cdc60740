"""Weights brought to the host: equal to the device's, also while it works, and packed as elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from user_sys.codec import BF16, Array
from user_sys.errors import ConfigError
from user_sys.weights.governor import GovernedBudget, GovernorConfig
from user_sys.weights.gpu_copy import (
    DeviceSnapshot,
    HostCopier,
    as_array,
    copy_precision,
    make_host_copier,
    round_to_bf16,
)
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.state import quantize, to_bf16

GPU = pytest.mark.gpu
UNLIMITED = GovernedBudget(GovernorConfig(enabled=False), lambda: 1.0)
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


def fetched(weights: DeviceSnapshot) -> Mapping[str, Array]:
    arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in weights.layout.items()}
    weights.wait()
    weights.fetch(arrays, UNLIMITED)
    return arrays


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ctas", [1, 3, 32])
def test_packing_rounds_as_the_learner_does_with_any_number_of_thread_blocks(device: str, ctas: int) -> None:
    source = values()
    packed = round_to_bf16(source.to(device), ctas).cpu()
    assert np.array_equal(as_array(packed).view(np.uint16), to_bf16(source.numpy()).view(np.uint16))


@pytest.mark.parametrize("device", DEVICES)
def test_snapshot_excludes_later_updates(device: str) -> None:
    weights = {"w": torch.randn(300, 70, device=device), "b": torch.zeros(0, device=device)}
    weights["half"] = weights["w"].to(torch.bfloat16)[:, ::2]
    weights["n"] = torch.tensor(7, device=device)
    expected = {name: tensor.cpu().clone() for name, tensor in weights.items()}
    snapshot = HostCopier(torch.device(device)).snapshot(weights)
    for tensor in weights.values():
        tensor.add_(1)
    found = {name: np.empty(shape, dtype) for name, (dtype, shape) in snapshot.layout.items()}
    snapshot.wait()
    snapshot.fetch(found, UNLIMITED)
    assert found["half"].dtype == BF16
    assert all(torch.equal(torch.from_numpy(found[n].view(np.int16)), expected[n].view(torch.int16)) for n in ["half"])
    assert all(np.array_equal(found[name], expected[name].numpy()) for name in ("w", "b", "n"))


@dataclass
class CountingBudget:
    """A budget of four values a copy at first, and twice as many after each."""

    ctas: int = 2
    chunk_bytes: int = 16
    done: list[int] = field(default_factory=list)

    def yield_cpu(self, done_bytes: int) -> None:
        self.done.append(done_bytes)
        self.chunk_bytes *= 2


@pytest.mark.parametrize("device", DEVICES)
def test_snapshot_is_fetched_in_pieces_of_the_budget(device: str) -> None:
    weights = {"w": torch.arange(10.0, device=device).view(2, 5), "b": torch.ones(20, device=device)}
    snapshot, budget = HostCopier(torch.device(device)).snapshot(weights), CountingBudget()
    arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in snapshot.layout.items()}
    snapshot.wait()
    snapshot.fetch(arrays, budget)
    assert budget.done == [16, 24, 64, 16]
    assert arrays["w"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] and (arrays["b"] == 1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_pieces_begin_where_a_gpu_loads_many_values_at_once(device: str) -> None:
    snapshot = HostCopier(torch.device(device)).snapshot({"w": torch.arange(20_000.0, device=device)})
    arrays, budget = {"w": np.empty(20_000, np.float32)}, CountingBudget(chunk_bytes=20_000)
    snapshot.wait()
    snapshot.fetch(arrays, budget)
    assert [done // 4 for done in budget.done] == [4096, 8192, 7712]
    assert (arrays["w"] == np.arange(20_000.0)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_packed_snapshot_equals_the_published_weights(device: str) -> None:
    weights = {"w": torch.randn(64, 333, device=device), "steps": torch.arange(3, device=device)}
    weights["empty"] = torch.empty(0, 4, device=device)
    exact = {name: tensor.cpu().numpy() for name, tensor in weights.items()}
    found = fetched(HostCopier(torch.device(device), pack="bf16").snapshot(weights))
    expected = quantize(exact, "bf16")
    assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in expected.items()}
    assert found["w"].dtype == BF16 and found["steps"].tolist() == [0, 1, 2], "what is no float32 stays as it is"


def test_weights_are_rounded_on_the_device_where_no_others_are_published() -> None:
    weights = {"w": torch.ones(3)}
    for forms, packed in ((("bf16",), True), (("exact", "bf16"), False), (("exact",), False)):
        copies = HostCopier(torch.device("cpu"), copy_precision(forms))  # type: ignore[arg-type]
        assert (copies.snapshot(weights).layout["w"][0] == BF16) is packed


def test_device_that_cannot_round_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("user_sys.weights.gpu_copy.round_to_bf16", fails)
    with pytest.raises(ConfigError, match="precisions is bf16 alone.*RuntimeError: Failed to find C compiler"):
        HostCopier(torch.device("cpu"), pack="bf16")
    HostCopier(torch.device("cpu"))


def test_learner_on_the_processor_needs_no_copies() -> None:
    assert make_host_copier("cpu", PublishConfig()) is None
