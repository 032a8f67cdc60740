"""An offer fits one message, whatever the policy: too many tensors are refused, the oldest differences left out."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.msgpack import encode

from user_sys.codec import Array
from user_sys.errors import ConfigError
from user_sys.messages import WeightsOffer
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.catalogue import cheapest
from user_sys.weights.forms import convert
from user_sys.weights.offers import MAX_CHAIN, MAX_CHAIN_GRAINS, fitting_offer, require_room
from user_sys.weights.parcel import GRAIN_BYTES
from user_sys.weights.records import CRC_BYTES, MAX_GRAINS, NO_VERSION, Form, ParcelInfo, Signed
from user_sys.weights.signing import new_signer
from user_sys.weights.state import build_state, describe

SIGNER = new_signer()
NEWEST = 100


def tensors(count: int) -> dict[str, Array]:
    return {f"model.layers.{n:04d}.attention.q_proj.weight": np.ones((2, 2), np.float32) for n in range(count)}


def manifests(weights: dict[str, Array], *forms: Form) -> list[Signed]:
    states = [build_state(convert(weights, form)[0], form) for form in forms]
    return [SIGNER.sign(describe(state, 1 << 40, 1 << 40, 1 << 62, (0.1, 0.1))) for state in states]


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


@pytest.mark.parametrize(("count", "forms"), [(5000, ("exact",)), (1000, ("exact", "bf16", "int8"))])
def test_more_tensors_than_an_offer_can_name_are_refused(count: int, forms: tuple[Form, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"{count} tensors in the forms {', '.join(forms)}"):
        require_room(tensors(count), forms)


@pytest.mark.parametrize("forms", [("exact",), ("exact", "bf16", "int8")])
def test_what_is_accepted_fits_one_message_however_much_has_changed(forms: tuple[Form, ...]) -> None:
    least, most = 1, 5000
    while most - least > 10:
        middle = (least + most) // 2
        try:
            require_room(tensors(middle), forms)
            least = middle
        except ConfigError:
            most = middle
    infos = [info for form in forms for info in history(form, 60, MAX_CHAIN_GRAINS // MAX_CHAIN)]
    offer = fitting_offer(manifests(tensors(least), *forms), infos, forms, NEWEST, signer=SIGNER.public_key)
    assert record_bytes(offer) <= TunnelLimits().max_record_bytes
    assert all(cheapest(offer.parcels, form, NEWEST, {}) is not None for form in forms), "latecomers find their way"


def test_where_not_all_differences_have_room_the_oldest_are_left_out() -> None:
    infos = history("exact", 99, 1000)
    offer = fitting_offer(manifests(tensors(3), "exact"), infos, ["exact"], NEWEST, signer=SIGNER.public_key)
    assert record_bytes(offer) <= TunnelLimits().max_record_bytes
    named = sorted(info.version for info in offer.parcels if info.base != NO_VERSION)
    assert named == list(range(named[0], NEWEST + 1)) and MAX_CHAIN < len(named) < 99


def test_a_small_policy_names_all_that_is_of_use_and_nothing_newer() -> None:
    infos = history("exact", 40, 1)
    offer = fitting_offer(manifests(tensors(3), "exact"), infos, ["exact"], NEWEST - 2, signer=SIGNER.public_key)
    assert {info.id for info in offer.parcels} == {info.id for info in infos if info.version <= NEWEST - 2}
