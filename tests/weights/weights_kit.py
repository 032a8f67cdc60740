"""What the tests of weights share: random weights, versions and their patches, and a learner's key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from user_sys.codec import Array
from user_sys.messages import Precision, SignedRecord, WeightsManifest
from user_sys.weights.patches import Patch, full_patch
from user_sys.weights.signing import PUBLIC_SUFFIX, SECRET_SUFFIX, Signer, TrustedLearnerKey, ensure_signer
from user_sys.weights.state import BF16, TensorSet, build_manifest, build_tensor_set


def random_weights(seed: int, rows: int = 64) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "hidden.0.weight": rng.normal(size=(rows, 48)).astype(np.float32),
        "hidden.0.bias": rng.normal(size=48).astype(np.float32),
        "adapter": rng.integers(0x3000, 0x4000, (rows, 8)).astype(np.uint16).view(BF16),
        "input.offset": rng.normal(size=5).astype(np.float32),
        "steps": np.array(seed),
    }


def changed(weights: Mapping[str, Array], share: float, seed: int) -> dict[str, Array]:
    """Copies in which that share of the values (one at least) has another lowest bit."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, array in weights.items():
        fresh = array.copy()
        bits = fresh.reshape(-1).view(f"<u{array.itemsize}")
        chosen = rng.permutation(bits.size)[: max(1, round(share * bits.size))]
        bits[chosen] ^= 1
        found[name] = fresh
    return found


def version_of(state: TensorSet, version: int, signer: Signer) -> tuple[WeightsManifest, SignedRecord]:
    manifest = build_manifest(state, version, 10 * version, 0, (0.0, 0.0))
    return manifest, signer.sign(manifest)


def full_version(
    weights: Mapping[str, Array], version: int, signer: Signer, form: Precision = "exact"
) -> tuple[WeightsManifest, SignedRecord, Patch]:
    state = build_tensor_set(dict(weights), form)
    return *version_of(state, version, signer), full_patch(state, version)


def learner_key(folder: Path) -> tuple[Signer, TrustedLearnerKey]:
    """A learner's key pair, and the trust of a robot that was given the public half."""
    signer = ensure_signer(folder, "learner")
    assert (folder / f"learner{SECRET_SUFFIX}").stat().st_mode & 0o077 == 0
    return signer, TrustedLearnerKey(folder / f"learner{PUBLIC_SUFFIX}")
