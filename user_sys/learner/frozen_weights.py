"""The frozen weights of a policy on disk: one file next to the checkpoints, which name it by its digest.

A file is ``frozen-<digest>.safetensors``. The digest is the BLAKE3 of names, dtypes, shapes and bytes, so equal weights
are stored once, and a file that was damaged or exchanged is refused. It is written tensor by tensor, under a temporary
name, synced and renamed: after a crash it is complete or absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from hal.durable import make_folder_durably, sync_folder
from user_sys.errors import RunError
from user_sys.trace import span

FROZEN_KEY = "frozen"  # scalar of a checkpoint: the digest
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int64: "I64",
}


def frozen_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the digest of the tensors, in hexadecimal; empty if there are none. Takes about 1 s for 2 GB."""
    if not tensors:
        return ""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update(_header(tensors))
    for content in _contents(tensors):
        hasher.update(content)
    return hasher.hexdigest()


def frozen_path(folder: Path, digest: str) -> Path:
    """Returns the file of the weights with this digest next to the checkpoints of `folder`."""
    return folder / f"frozen-{digest[:32]}.safetensors"


def save_frozen(folder: Path, tensors: Mapping[str, Tensor], digest: str) -> None:
    """Writes the tensors durably, unless the file is there. Blocks for the disk.

    Raises:
        RunError: the file cannot be written.
    """
    path = frozen_path(folder, digest)
    if not tensors or path.exists():
        return
    partial = path.with_suffix(".tmp")
    try:
        make_folder_durably(folder)
        with span("write frozen weights"), open(partial, "wb") as stream:
            header = _header(tensors)
            stream.write(len(header).to_bytes(8, "little") + header)
            for content in _contents(tensors):
                stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(path)
        sync_folder(folder)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"the frozen weights cannot be written to {path}: {error.strerror or error}") from error


@torch.no_grad()
def restore_frozen(folder: Path, tensors: Mapping[str, Tensor], digest: str) -> None:
    """Makes `tensors` those with `digest`, which a checkpoint names: as they are, or from the file in `folder`.

    Raises:
        RunError: the file is missing or damaged, or is of another policy.
    """
    if frozen_digest(tensors) == digest:
        return
    path = frozen_path(folder, digest)
    where = f"the checkpoints of {folder} need the frozen weights {path.name}"
    if not digest or not path.exists():
        detail = "is missing: restore it" if digest else "were saved without any: resume with the same policy.options"
        raise RunError(f"{where}, which {detail}")
    loaded = load_frozen(path)
    if {name: (t.dtype, t.shape) for name, t in loaded.items()} != {n: (t.dtype, t.shape) for n, t in tensors.items()}:
        raise RunError(f"{where}, which do not fit this policy: resume with the same policy.kind and policy.options")
    for name, tensor in tensors.items():
        tensor.copy_(loaded[name])
    if frozen_digest(tensors) != digest:
        raise RunError(f"{where}, which is damaged: its digest differs; restore a copy of it")


def load_frozen(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file; they are read when they are used. Raises RunError if it is no such file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise RunError(f"the frozen weights {path} cannot be read: {error}; restore a copy of them") from None


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns the header of a safetensors file, padded to 8 bytes."""
    entries, start = {}, 0
    for name in sorted(tensors):
        tensor, end = tensors[name], start + tensors[name].nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    return encoded + b" " * (-len(encoded) % 8)


def _contents(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous().view(-1)
        yield flat.view(torch.uint8).numpy().data
