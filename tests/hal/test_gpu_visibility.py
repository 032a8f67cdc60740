"""GPUs that CUDA_VISIBLE_DEVICES shows, and entries that identify no GPU."""

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


def shown(value: str, **more: str) -> list[str]:
    records = drop_hidden_gpus(DESK, {"CUDA_VISIBLE_DEVICES": value, **more})
    assert ARM in records
    return sorted(record.name.removeprefix("desk/gpu-") for record in records if record.kind is Kind.GPU)


def test_environment_hides_gpus_by_uuid() -> None:
    assert drop_hidden_gpus(DESK, {}) == tuple(DESK)
    assert shown("GPU-33f, GPU-aa") == ["10", "3"], "a unique prefix of the UUID suffices"
    assert shown("") == shown("-1") == shown("NoDevFiles") == []
    assert shown("GPU-33f,GPU-nowhere,GPU-44f") == ["3"], "entries after an unknown one are hidden too"


def test_number_identifies_gpu_only_in_bus_order() -> None:
    assert shown("2,10", CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["10", "2"]
    assert shown("2,12", CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["2"]
    assert drop_hidden_gpus([GPUS[5]], {"CUDA_VISIBLE_DEVICES": "0"}) == (GPUS[5],)
    for value in ("0", "GPU-33f,7", "MIG-33f"):
        with pytest.raises(HalError, match=f"the entry '{value.rpartition(',')[2]}', which does not identify one GPU"):
            shown(value)


def test_computer_without_gpus_ignores_the_variable() -> None:
    assert drop_hidden_gpus([ARM], {"CUDA_VISIBLE_DEVICES": "0"}) == (ARM,)


def test_slot_sees_its_own_gpu_first_and_others_of_its_reservation() -> None:
    def gpu_bundle(node: str, uuid: str) -> Bundle:
        return Bundle(node=node, resources={}, is_gpu=True, uuid=uuid)

    share = Bundle(node="rack", resources={"CPU": 2.0})
    reservation = Reservation(
        None, (gpu_bundle("rack", "GPU-a"), gpu_bundle("desk", "GPU-b"), gpu_bundle("rack", "GPU-c"), share)
    )
    assert [slot.gpu_uuids for slot in reservation.slots()] == [("GPU-a", "GPU-c"), ("GPU-b",), ("GPU-c", "GPU-a"), ()]
    assert visible_devices_env(reservation.slots()[2].gpu_uuids) == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}
    assert visible_devices_env(()) == visible_devices_env([""]) == {}, "an unknown UUID hides nothing"
