"""What was published comes back bit for bit, whatever changed; and nothing else is ever taken for it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import replace
from weights_kit import changed, random_weights

from user_sys.codec import Array, encode_packet
from user_sys.errors import WireError
from user_sys.messages import MAX_BLOCKS, WeightsManifest
from user_sys.weights.patches import (
    BLOCK_BYTES,
    IncrementalDigests,
    Patch,
    apply_delta,
    apply_patches,
    block_size_bytes,
    changed_values,
    delta_patch,
    full_patch,
)
from user_sys.weights.state import BF16, NotFinite, TensorSet, build_manifest, build_tensor_set, raw_bytes

VALUES = [np.float32, np.float64, np.int64, np.uint8, np.float16, np.bool_]
ARRAYS = hnp.arrays(
    dtype=st.sampled_from(VALUES),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
    elements={"allow_nan": False, "allow_infinity": False},
)
WEIGHTS = st.dictionaries(st.text("abc.xyz0123", min_size=1, max_size=12), ARRAYS, max_size=4)


def manifest_of(state: TensorSet, version: int = 1) -> WeightsManifest:
    return build_manifest(state, version, 0, 0, (0.0, 0.0))


def same(a: TensorSet, b: TensorSet) -> bool:
    return a.digest == b.digest and all(
        raw_bytes(a.tensors[name]).tobytes() == raw_bytes(b.tensors[name]).tobytes() for name in b.tensors
    )


def parts(*patches: Patch) -> list[tuple]:  # type: ignore[type-arg]
    return [(patch.info, patch.payload) for patch in patches]


@settings(max_examples=80, deadline=None)
@given(WEIGHTS)
def test_a_full_parcel_gives_back_every_bit(weights: dict[str, Array]) -> None:
    state = build_tensor_set({name: array.copy() for name, array in weights.items()})
    found = apply_patches(manifest_of(state), parts(full_patch(state, 1)), None)
    assert same(found, state) and found.tensors.keys() == weights.keys()
    for name, array in weights.items():
        assert found.tensors[name].dtype == array.dtype and found.tensors[name].shape == array.shape
        assert found.tensors[name].tobytes() == array.tobytes()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_difference_gives_back_every_bit(draw: st.DataObject) -> None:
    weights = draw.draw(WEIGHTS)
    fresh = {name: array.copy() for name, array in weights.items()}
    for array in fresh.values():
        flat = array.reshape(-1)
        for index in draw.draw(st.sets(st.integers(0, max(0, flat.size - 1)), max_size=5)) if flat.size else ():
            flat[index] = flat[draw.draw(st.integers(0, flat.size - 1))]
    base, new = build_tensor_set(weights), build_tensor_set(fresh, previous=None)
    patch = delta_patch(1, base, 2, new)
    if patch is not None:
        assert same(apply_patches(manifest_of(new, 2), parts(patch), base), new)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**32 - 1))
def test_every_changed_value_is_found(size: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 200, size * width, dtype=np.uint8).view(f"<u{width}")
    new = np.where(rng.random(size) < 0.02, old + 1, old).astype(old.dtype)
    found = changed_values(old, new, size)
    assert found is not None
    np.testing.assert_array_equal(found, np.flatnonzero(old != new))


def test_one_percent_of_changed_bf16_values_is_forty_times_smaller() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0x3000, 0x4000, 1 << 20).astype(np.uint16)
    new = np.where(rng.random(old.size) < 0.01, rng.integers(0x3000, 0x4000, old.size), old).astype(np.uint16)
    base, fresh = (build_tensor_set({"w": values.view(BF16)}) for values in (old, new))
    patch = delta_patch(0, base, 1, fresh)
    assert patch is not None and patch.info.codec == "delta"
    assert patch.info.size_bytes * 40 < fresh.size_bytes
    assert same(apply_patches(manifest_of(fresh), parts(patch), base), fresh)


@pytest.mark.parametrize(("share", "pays"), [(0.0001, True), (0.1, True), (0.6, False), (1.0, False)])
def test_a_difference_is_chosen_where_it_pays(share: float, pays: bool) -> None:
    weights = random_weights(0, rows=2048)
    base, new = build_tensor_set(weights), build_tensor_set(changed(weights, share, seed=1))
    assert (delta_patch(0, base, 1, new) is not None) is pays


def test_of_a_policy_of_which_an_adapter_is_trained_only_that_travels() -> None:
    weights = random_weights(0, rows=2048)
    base = build_tensor_set(weights)
    assert all(not array.flags.writeable for array in weights.values())
    trained = {**weights, "adapter": random_weights(1, rows=2048)["adapter"]}
    new = build_tensor_set(trained, previous=base)
    patch = delta_patch(0, base, 1, new)
    assert patch is not None and patch.info.codec == "parts"
    assert patch.info.size_bytes < 1.1 * weights["adapter"].nbytes
    found = apply_patches(manifest_of(new), parts(patch), base)
    assert same(found, new) and found.tensors["hidden.0.weight"] is base.tensors["hidden.0.weight"], "kept once"


def test_a_difference_that_no_packet_holds_is_not_made() -> None:
    """Whoever fetched it could not apply it. So many tensors, with such names, take more than a packet's header."""
    weights = {f"{n:04d}".ljust(600, "x"): np.zeros(64, np.float32) for n in range(2000)}
    base, new = (
        build_tensor_set(weights),
        build_tensor_set({name: one_changed(array) for name, array in weights.items()}),
    )
    assert delta_patch(0, base, 1, new) is None
    some = dict(list(weights.items())[:1000])
    new = build_tensor_set(base.tensors | {name: one_changed(array) for name, array in some.items()})
    patch = delta_patch(0, base, 1, new)
    assert patch is not None
    found = apply_patches(replace(manifest_of(new), tensors=new.entries), parts(patch), base)
    assert found.digest == new.digest


def one_changed(array: Array) -> Array:
    fresh = array.copy()
    fresh[0] = 1
    return fresh


def test_a_chain_of_differences_leads_to_the_last() -> None:
    states = [build_tensor_set(random_weights(0))]
    chain = []
    for version in range(1, 6):
        states.append(build_tensor_set(changed(states[-1].tensors, 0.02, version)))
        patch = delta_patch(version - 1, states[-2], version, states[-1])
        assert patch is not None
        chain.append(patch)
    assert same(apply_patches(manifest_of(states[5], 5), parts(*chain), states[0]), states[5])
    assert same(apply_patches(manifest_of(states[5], 5), parts(full_patch(states[0], 0), *chain), None), states[5])
    with pytest.raises(WireError, match="base"):
        apply_patches(manifest_of(states[5], 5), parts(*chain[1:]), states[0])
    with pytest.raises(WireError):
        apply_patches(manifest_of(states[5], 5), parts(chain[0], *chain[2:]), states[0])


def test_a_wrong_base_is_found() -> None:
    right, other = build_tensor_set(random_weights(0)), build_tensor_set(random_weights(1))
    new = build_tensor_set(changed(right.tensors, 0.01, 2))
    patch = delta_patch(0, right, 1, new)
    assert patch is not None
    with pytest.raises(WireError, match="base"):
        apply_patches(manifest_of(new), parts(patch), other)
    forged = Patch(replace(patch.info, base_digest=other.digest), patch.payload)
    with pytest.raises(WireError, match="digest"):
        apply_patches(manifest_of(new), parts(forged), other)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_is_found_and_nothing_but_an_error_comes_of_it(draw: st.DataObject) -> None:
    base = build_tensor_set(random_weights(0))
    new = build_tensor_set(changed(base.tensors, 0.02, 1))
    patch = draw.draw(st.sampled_from([full_patch(new, 1), delta_patch(0, base, 1, new)]))
    assert patch is not None
    spoiled = bytearray(patch.payload)
    if draw.draw(st.booleans()):
        spoiled = spoiled[: draw.draw(st.integers(0, len(spoiled) - 1))]
    else:
        spoiled[draw.draw(st.integers(0, len(spoiled) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    try:
        found = apply_patches(manifest_of(new), [(patch.info, memoryview(bytes(spoiled)))], base)
    except WireError:
        return
    assert same(found, new), "a flipped bit of padding changes nothing"


@pytest.mark.parametrize(
    ("parts", "streams"),
    [
        ([("w", "sparse", "float32", (4,), 2, 1)], {"0.gaps": np.zeros(2, np.int64), "0.bits": np.zeros(8, np.uint8)}),
        ([("w", "sparse", "float32", (4,), 1, 1)], {"0.gaps": np.uint8(0), "0.bits": np.zeros(4, np.uint8)}),
        ([("w", "whole", "float32", (4,))], {"0.whole": np.zeros(16, np.float64)}),
        ([("w", "whole", "float32", (4,))] * 2, {f"{n}.whole": np.zeros(16, np.uint8) for n in (0, 1)}),
    ],
)
def test_a_difference_that_is_made_up_is_refused(parts: list[object], streams: dict[str, Array]) -> None:
    class Header(msgspec.Struct, array_like=True):
        parts: list[object]

    payload = encode_packet(Header(parts), {name: np.asarray(stream) for name, stream in streams.items()})
    with pytest.raises(WireError, match="repeats a tensor name, or has a stream that is not"):
        apply_delta({"w": np.zeros(4, np.float32)}, payload)


def test_a_manifest_that_contradicts_itself_is_refused() -> None:
    state = build_tensor_set(random_weights(0))
    patch = full_patch(state, 1)
    manifest = manifest_of(state)
    for wrong in (replace(manifest, digest=bytes(32)), replace(manifest, tensors=manifest.tensors[1:])):
        with pytest.raises(WireError):
            apply_patches(wrong, parts(patch), None)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BF16])
def test_weights_that_are_not_finite_stay_at_their_source(value: float, dtype: object) -> None:
    spoiled = np.full(3, value, np.float32)
    array = (spoiled.view(np.uint32) >> 16).astype(np.uint16).view(BF16) if dtype is BF16 else spoiled.astype(dtype)  # type: ignore[call-overload]
    with pytest.raises(NotFinite, match="mean.bias"):
        build_tensor_set({"ok": np.zeros(3), "mean.bias": array})


@given(st.integers(1, 1 << 34))
def test_a_parcel_of_any_size_has_grains_that_its_receiver_takes(size_bytes: int) -> None:
    block = block_size_bytes(size_bytes)
    assert block % BLOCK_BYTES == 0 and -(-size_bytes // block) <= MAX_BLOCKS


def test_digests_taken_while_a_parcel_comes_are_those_of_its_tensors() -> None:
    state = build_tensor_set(random_weights(3, rows=512))
    manifest, patch = build_manifest(state, 1, 1, 0, (0.0, 0.0)), full_patch(state, 1)
    running = IncrementalDigests(manifest, patch.payload)
    for end in (0, 1, 64, 65, 70_000, 70_000, len(patch.payload) - 1, len(patch.payload)):
        running.update(end)
        assert set(running.digests.items()) <= {(entry.name, entry.digest) for entry in state.entries}
    assert running.digests == {entry.name: entry.digest for entry in state.entries}
    with pytest.raises(WireError):
        IncrementalDigests(manifest, patch.payload[:-1])
