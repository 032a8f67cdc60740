"""GPUs that a process in a slot sees."""

from __future__ import annotations

from hal.ray_cluster import Reservation
from hal.ray_nodes import Bundle
from hal.resource import visible_devices_env


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
