"""An offer fits one message, whatever the policy: long tables travel apart, the oldest differences are left out."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.msgpack import encode

from user_sys.codec import Array
from user_sys.errors import WireError
from user_sys.messages import (
    CRC_BYTES,
    INLINE_TABLE_BYTES,
    MAX_BLOCKS,
    MAX_TENSORS,
    NO_VERSION,
    PatchInfo,
    Precision,
    SignedRecord,
    WeightsManifest,
    WeightsOffer,
    check_patch,
)
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.distribution import MAX_CHAIN_BLOCKS, MAX_CHAIN_LENGTH, build_offer
from user_sys.weights.patches import BLOCK_BYTES, Patch, cheapest_path, find_table, table_patch
from user_sys.weights.precision import quantize
from user_sys.weights.signing import new_signer
from user_sys.weights.state import build_manifest, build_tensor_set, with_tensor_table

SIGNER = new_signer()
NEWEST = 100


def tensors(count: int) -> dict[str, Array]:
    return {f"model.layers.{n:05d}.attention.q_proj.weight": np.ones((2, 2), np.float32) for n in range(count)}


def published(weights: dict[str, Array], *forms: Precision) -> tuple[list[SignedRecord], list[Patch]]:
    """Signed manifests of the newest version, and the tables that travel apart."""
    states = [build_tensor_set(quantize(weights, form)[0], form) for form in forms]
    found = [build_manifest(state, NEWEST, 1 << 40, 1 << 62, (0.1, 0.1)) for state in states]
    tables = [table_patch(s, NEWEST) for s, manifest in zip(states, found, strict=True) if not manifest.has_tensors]
    return [SIGNER.sign(manifest) for manifest in found], tables


def opened(signed: SignedRecord) -> WeightsManifest:
    return SIGNER.verifier.verify(signed, WeightsManifest)


def patch(form: Precision, version: int, base: int, blocks: int) -> PatchInfo:
    codec, digest = ("full", b"") if base == NO_VERSION else ("delta", bytes(32))
    name = f"{form} {base} {version}".encode().ljust(32)
    size = blocks * BLOCK_BYTES
    return PatchInfo(name, form, version, base, digest, codec, size, BLOCK_BYTES, bytes(CRC_BYTES * blocks))  # type: ignore[arg-type]


def history(form: Precision, differences: int, blocks: int) -> list[PatchInfo]:
    """Differences up to the newest, one after the other, and a full patch as many back as may follow one."""
    found = [patch(form, NEWEST - n, NEWEST - n - 1, blocks) for n in range(differences)]
    return [*found, patch(form, NEWEST - min(differences, MAX_CHAIN_LENGTH), NO_VERSION, MAX_BLOCKS)]


def record_bytes(offer: WeightsOffer) -> int:
    return len(encode(offer))


@pytest.mark.parametrize("forms", [("exact",), ("exact", "bf16", "int8")])
@pytest.mark.parametrize("count", [1, 150, 300, 2000])
def test_an_offer_fits_one_message_however_much_has_changed(forms: tuple[Precision, ...], count: int) -> None:
    manifests, tables = published(tensors(count), *forms)
    assert len(tables) == {1: 0, 150: 0, 300: len(forms) // 2, 2000: len(forms)}[count], "those that are long"
    infos = [info for form in forms for info in history(form, 60, MAX_CHAIN_BLOCKS // MAX_CHAIN_LENGTH)]
    infos += [table.info for table in tables]
    offer = build_offer(manifests, infos, forms, NEWEST, signer=SIGNER.public_key)
    assert record_bytes(offer) <= TunnelLimits().max_record_bytes
    assert all(cheapest_path(offer.parcels, form, NEWEST, {}) is not None for form in forms), (
        "latecomers find their way"
    )
    found = [opened(signed) for signed in offer.manifests]
    assert all(manifest.has_tensors or find_table(offer.parcels, manifest) for manifest in found)


def test_a_table_that_travels_apart_has_the_digest_that_is_signed() -> None:
    (signed,), (table,) = published(tensors(1000), "int8")
    manifest = opened(signed)
    check_patch(table.info)
    assert len(signed.body) < 512 and manifest.table_bytes == table.info.size_bytes > INLINE_TABLE_BYTES
    whole = with_tensor_table(manifest, table.payload)
    assert whole.has_tensors and len(whole.tensors) == 2000, "scales count"
    spoilt = bytearray(table.payload)
    spoilt[-1] ^= 1
    with pytest.raises(WireError, match="differs from the manifest"):
        with_tensor_table(manifest, bytes(spoilt))


def test_more_tensors_than_travel_are_refused() -> None:
    tiny = np.zeros((), np.int8)
    tiny.flags.writeable = False
    most = {f"{n}": tiny for n in range(MAX_TENSORS)}
    assert len(build_tensor_set(most).entries) == MAX_TENSORS
    with pytest.raises(WireError, match=rf"{MAX_TENSORS + 1} tensors .* exceed the limits of {MAX_TENSORS} "):
        build_tensor_set(most | {"one more": tiny})


def test_where_not_all_differences_have_room_the_oldest_are_left_out() -> None:
    infos = history("exact", 99, 1000)
    manifests, _ = published(tensors(3), "exact")
    offer = build_offer(manifests, infos, ["exact"], NEWEST, signer=SIGNER.public_key)
    assert record_bytes(offer) <= TunnelLimits().max_record_bytes
    named = sorted(info.version for info in offer.parcels if info.base != NO_VERSION)
    assert named == list(range(named[0], NEWEST + 1)) and MAX_CHAIN_LENGTH < len(named) < 99


def test_a_small_policy_names_all_that_is_of_use_and_nothing_newer() -> None:
    infos = history("exact", 40, 1)
    manifests, _ = published(tensors(3), "exact")
    offer = build_offer(manifests, infos, ["exact"], NEWEST - 2, signer=SIGNER.public_key)
    assert {info.id for info in offer.parcels} == {info.id for info in infos if info.version <= NEWEST - 2}
