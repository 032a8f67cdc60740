"""An offer fits one message, whatever the policy: long tables travel apart, the oldest differences are left out."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.msgpack import encode

from user_sys.codec import Array
from user_sys.errors import WireError
from user_sys.messages import WeightsOffer
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.catalogue import cheapest, table_of
from user_sys.weights.forms import convert
from user_sys.weights.offers import MAX_CHAIN, MAX_CHAIN_GRAINS, fitting_offer
from user_sys.weights.parcel import GRAIN_BYTES, Parcel, table_parcel
from user_sys.weights.records import (
    CRC_BYTES,
    INLINE_TABLE_BYTES,
    MAX_GRAINS,
    MAX_TENSORS,
    NO_VERSION,
    Form,
    Manifest,
    ParcelInfo,
    Signed,
    check_parcel,
)
from user_sys.weights.signing import new_signer
from user_sys.weights.state import build_state, describe, with_table

SIGNER = new_signer()
NEWEST = 100


def tensors(count: int) -> dict[str, Array]:
    return {f"model.layers.{n:05d}.attention.q_proj.weight": np.ones((2, 2), np.float32) for n in range(count)}


def published(weights: dict[str, Array], *forms: Form) -> tuple[list[Signed], list[Parcel]]:
    """Signed manifests of the newest version, and the tables that travel apart."""
    states = [build_state(convert(weights, form)[0], form) for form in forms]
    found = [describe(state, NEWEST, 1 << 40, 1 << 62, (0.1, 0.1)) for state in states]
    tables = [table_parcel(s, NEWEST) for s, manifest in zip(states, found, strict=True) if not manifest.entire]
    return [SIGNER.sign(manifest) for manifest in found], tables


def opened(signed: Signed) -> Manifest:
    return SIGNER.verifier.open(signed, Manifest)


def parcel(form: Form, version: int, base: int, grains: int) -> ParcelInfo:
    codec, digest = ("full", b"") if base == NO_VERSION else ("delta", bytes(32))
    name = f"{form} {base} {version}".encode().ljust(32)
    size = grains * GRAIN_BYTES
    return ParcelInfo(name, form, version, base, digest, codec, size, GRAIN_BYTES, bytes(CRC_BYTES * grains))  # type: ignore[arg-type]


def history(form: Form, differences: int, grains: int) -> list[ParcelInfo]:
    """Differences up to the newest, one after the other, and a full parcel as many back as may follow one."""
    found = [parcel(form, NEWEST - n, NEWEST - n - 1, grains) for n in range(differences)]
    return [*found, parcel(form, NEWEST - min(differences, MAX_CHAIN), NO_VERSION, MAX_GRAINS)]


def record_bytes(offer: WeightsOffer) -> int:
    return len(encode(offer))


@pytest.mark.parametrize("forms", [("exact",), ("exact", "bf16", "int8")])
@pytest.mark.parametrize("count", [1, 150, 300, 2000])
def test_an_offer_fits_one_message_however_much_has_changed(forms: tuple[Form, ...], count: int) -> None:
    manifests, tables = published(tensors(count), *forms)
    assert len(tables) == {1: 0, 150: 0, 300: len(forms) // 2, 2000: len(forms)}[count], "those that are long"
    infos = [info for form in forms for info in history(form, 60, MAX_CHAIN_GRAINS // MAX_CHAIN)]
    infos += [table.info for table in tables]
    offer = fitting_offer(manifests, infos, forms, NEWEST, signer=SIGNER.public_key)
    assert record_bytes(offer) <= TunnelLimits().max_record_bytes
    assert all(cheapest(offer.parcels, form, NEWEST, {}) is not None for form in forms), "latecomers find their way"
    found = [opened(signed) for signed in offer.manifests]
    assert all(manifest.entire or table_of(offer.parcels, manifest) for manifest in found)


def test_a_table_that_travels_apart_has_the_digest_that_is_signed() -> None:
    (signed,), (table,) = published(tensors(1000), "int8")
    manifest = opened(signed)
    check_parcel(table.info)
    assert len(signed.body) < 512 and manifest.table_bytes == table.info.size_bytes > INLINE_TABLE_BYTES
    whole = with_table(manifest, table.payload)
    assert whole.entire and len(whole.tensors) == 2000, "scales count"
    spoilt = bytearray(table.payload)
    spoilt[-1] ^= 1
    with pytest.raises(WireError, match="has not the digest"):
        with_table(manifest, bytes(spoilt))


def test_more_tensors_than_travel_are_refused() -> None:
    tiny = np.zeros((), np.int8)
    tiny.flags.writeable = False
    most = {f"{n}": tiny for n in range(MAX_TENSORS)}
    assert len(build_state(most).entries) == MAX_TENSORS
    with pytest.raises(WireError, match=rf"weights of {MAX_TENSORS + 1} tensors .* at most {MAX_TENSORS} "):
        build_state(most | {"one more": tiny})


def test_where_not_all_differences_have_room_the_oldest_are_left_out() -> None:
    infos = history("exact", 99, 1000)
    manifests, _ = published(tensors(3), "exact")
    offer = fitting_offer(manifests, infos, ["exact"], NEWEST, signer=SIGNER.public_key)
    assert record_bytes(offer) <= TunnelLimits().max_record_bytes
    named = sorted(info.version for info in offer.parcels if info.base != NO_VERSION)
    assert named == list(range(named[0], NEWEST + 1)) and MAX_CHAIN < len(named) < 99


def test_a_small_policy_names_all_that_is_of_use_and_nothing_newer() -> None:
    infos = history("exact", 40, 1)
    manifests, _ = published(tensors(3), "exact")
    offer = fitting_offer(manifests, infos, ["exact"], NEWEST - 2, signer=SIGNER.public_key)
    assert {info.id for info in offer.parcels} == {info.id for info in infos if info.version <= NEWEST - 2}
