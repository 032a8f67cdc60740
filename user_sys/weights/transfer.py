"""Weights as bytes: a manifest that says what they are, and a payload of safetensors that a digest protects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from user_sys.codec import Array
from user_sys.errors import UserSysError, WireError
from user_sys.messages import WeightsManifest

MAX_PAYLOAD_BYTES = 1 << 30
DIGEST_BYTES = 32


class NotFinite(UserSysError):
    """Weights hold NaN or infinity; they are kept at the source. The message names the arrays."""


def encode_full(weights: Mapping[str, Array], version: int, updates: int) -> tuple[WeightsManifest, bytes]:
    """All of `weights` as (manifest, payload).

    Args:
        weights: name to array of any dtype that safetensors knows.
        version: grows by each publication.
        updates: how many updates the learner had made.

    Raises:
        NotFinite: an array of floats holds NaN or infinity.
    """
    spoiled = [name for name, value in weights.items() if not np.isfinite(value).all()]
    if spoiled:
        raise NotFinite(f"weights of version {version} are not finite in {spoiled[:4]}: they are not published")
    payload = save({name: np.asarray(value, order="C") for name, value in weights.items()})
    return WeightsManifest(
        version=version, codec="full", digest=digest(payload), size_bytes=len(payload), updates=updates
    ), payload


def decode(manifest: WeightsManifest, payload: bytes | memoryview) -> dict[str, Array]:
    """The arrays of `payload`, once its size and digest are those that `manifest` claims.

    Raises:
        WireError: size, digest or content do not fit; discard the payload and wait for the next version.
    """
    if not manifest.size_bytes == len(payload) <= MAX_PAYLOAD_BYTES:
        raise WireError(f"weights {manifest.version}: {len(payload)} bytes came, {manifest.size_bytes} were announced")
    if digest(payload) != manifest.digest:
        raise WireError(f"weights {manifest.version}: the payload's digest is not the manifest's; it was damaged")
    try:
        return dict(load(bytes(payload)))
    except (SafetensorError, KeyError, ValueError) as error:
        raise WireError(f"weights {manifest.version}: the payload is not safetensors: {error}") from None


def digest(payload: bytes | memoryview) -> str:
    """BLAKE2b-256 of `payload`, in hex."""
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).hexdigest()
