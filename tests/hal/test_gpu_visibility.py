"""Which GPUs a computer shows, as CUDA takes it, and what cannot be told."""

from __future__ import annotations

import pytest

from hal.errors import HalError
from hal.ray_cluster import Reservation
from hal.ray_nodes import Bundle
from hal.resource import Kind, ResourceRecord, drop_hidden_gpus, visible_devices_env


def gpu(number: int) -> ResourceRecord:
    return ResourceRecord(
        kind=Kind.GPU, name=f"desk/gpu-{number}", model="L4", node="desk", labels={"uuid": f"GPU-{number:x}{number:x}f"}
    )


ARM = ResourceRecord(kind=Kind.ROBOT, name="arm", model="panda", node="desk")
GPUS = [gpu(number) for number in range(12)]
DESK = [ARM, *sorted(GPUS, key=lambda record: record.name)]


def shown(said: str, **more: str) -> list[str]:
    records = drop_hidden_gpus(DESK, {"CUDA_VISIBLE_DEVICES": said, **more})
    assert ARM in records
    return sorted(record.name.removeprefix("desk/gpu-") for record in records if record.kind is Kind.GPU)


def test_all_are_shown_unless_the_environment_hides_some() -> None:
    assert drop_hidden_gpus(DESK, {}) == tuple(DESK)
    assert shown("GPU-33f, GPU-aa") == ["10", "3"], "by the UUID, or as much of it as tells"
    assert shown("") == shown("-1") == shown("NoDevFiles") == []
    assert shown("GPU-33f,GPU-nowhere,GPU-44f") == ["3"], "what follows one that is not there is hidden too"


def test_numbers_say_which_only_where_cuda_counts_as_the_driver_does() -> None:
    assert shown("2,10", CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["10", "2"]
    assert shown("2,12", CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["2"]
    assert drop_hidden_gpus([GPUS[5]], {"CUDA_VISIBLE_DEVICES": "0"}) == (GPUS[5],)
    for said in ("0", "GPU-33f,7", "MIG-33f"):
        with pytest.raises(HalError, match=f"shows {said.rpartition(',')[2]}, which does not say which GPU that is"):
            shown(said)


def test_a_computer_without_gpus_hides_none() -> None:
    assert drop_hidden_gpus([ARM], {"CUDA_VISIBLE_DEVICES": "0"}) == (ARM,)


def test_a_process_sees_the_gpus_of_its_seats_reservation_on_its_computer_its_own_first() -> None:
    def card(node: str, uuid: str) -> Bundle:
        return Bundle(node=node, resources={}, is_gpu=True, uuid=uuid)

    share = Bundle(node="rack", resources={"CPU": 2.0})
    held = Reservation(None, (card("rack", "GPU-a"), card("desk", "GPU-b"), card("rack", "GPU-c"), share))
    assert [seat.gpu_uuids for seat in held.slots()] == [("GPU-a", "GPU-c"), ("GPU-b",), ("GPU-c", "GPU-a"), ()]
    assert visible_devices_env(held.slots()[2].gpu_uuids) == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}
    assert visible_devices_env(()) == visible_devices_env([""]) == {}, "who knows no UUID hides nothing"
