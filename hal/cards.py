"""Which GPU is meant: each by its UUID, since CUDA counts a computer's GPUs in another order than their driver does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hal.errors import HalError
from hal.resource import Kind, ResourceRecord

VISIBLE = "CUDA_VISIBLE_DEVICES"
UUID = "uuid"
"""The label of a GPU's record that has its UUID."""
_BY_BUS = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # with this CUDA counts as the driver does


def sight(uuids: Iterable[str]) -> dict[str, str]:
    """The variables of a process that is to see these GPUs only, in this order; none where no UUID is known."""
    known = [uuid for uuid in uuids if uuid]
    return {VISIBLE: ",".join(known)} if known else {}


def visible(records: Sequence[ResourceRecord], environment: Mapping[str, str]) -> tuple[ResourceRecord, ...]:
    """`records` without the GPUs that `environment` hides from CUDA.

    Raises:
        HalError: it shows some of several by number, or a slice of one: which GPUs these are cannot be told.
    """
    said = environment.get(VISIBLE)
    gpus = sorted((r for r in records if r.kind is Kind.GPU), key=lambda gpu: (len(gpu.name), gpu.name))
    if said is None or not gpus:
        return tuple(records)
    shown: list[ResourceRecord] = []
    for word in (each.strip() for each in said.split(",")):
        found = _meant(word, gpus, counted=len(gpus) == 1 or environment.get(_BY_BUS[0]) == _BY_BUS[1])
        if found is None:  # as CUDA has it: what follows one that is not there is hidden
            break
        shown.append(found)
    return tuple(record for record in records if record.kind is not Kind.GPU or record in shown)


def _meant(word: str, gpus: Sequence[ResourceRecord], counted: bool) -> ResourceRecord | None:
    if word.startswith("MIG-") or (word.isdecimal() and not counted):
        raise HalError(
            f"{VISIBLE} shows {word}, which does not say which GPU that is; write UUIDs there, as nvidia-smi -L tells "
            f"them, or count as it does with {'='.join(_BY_BUS)}"
        )
    if word.isdecimal():
        return gpus[int(word)] if int(word) < len(gpus) else None
    alike = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.labels.get(UUID, "").startswith(word)]
    return alike[0] if len(alike) == 1 else None
