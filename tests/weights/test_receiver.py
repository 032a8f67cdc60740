"""A robot takes new weights: exact, resumed, newest first. Bad input is refused, and the policy that acts goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from weights_kit import DirectTransfer, add_version, assert_equal_weights, manifest_of, other_signer, random_weights

from user_sys.codec import Array
from user_sys.errors import WireError
from user_sys.messages import (
    BLOB_BYTES,
    NO_VERSION,
    PinnedVersion,
    TensorEntry,
    WeightsBlobs,
    WeightsGone,
    WeightsManifest,
    WeightsOffer,
)
from user_sys.tunnel.protocol import AnyMessage
from user_sys.weights.fetcher import MAX_WINDOW_BYTES
from user_sys.weights.receiver import LOAD_RETRY_S, WeightsNotLoaded
from user_sys.weights.signing import TrustedLearnerKey
from user_sys.weights.state import build_tensor_set, dequantize, quantize
from user_sys.weights.version_store import VersionStore, newest_version

FROZEN = np.random.default_rng(9).normal(size=3 * BLOB_BYTES // 8).astype(np.float32)


def version_with_adapter(number: int) -> dict[str, np.ndarray]:
    """A frozen base of 1.5 blobs and a small adapter."""
    return {"base": FROZEN, "adapter": np.full(100, number, np.float32)}


def pin(transfer: DirectTransfer, version: int, serial: int, run: bytes = b"run") -> msgspec.Struct:
    record = PinnedVersion(serial=serial, version=version, by="ada", reason="", given_unix_ns=0, run=run)
    return transfer.signer.sign(record)


def test_frozen_parts_never_travel_twice(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    assert transfer.push(version_with_adapter(1), 1) >= FROZEN.nbytes
    assert transfer.push(version_with_adapter(2), 2) < 1000
    base = transfer.loaded[-1][2]["base"]
    transfer.push(version_with_adapter(3), 3, run=b"other", epoch=2)
    assert transfer.sent_bytes < FROZEN.nbytes + 5000, "not for another run either"
    assert transfer.loaded[-1][2]["base"] is base, "and it is not copied"


def test_few_changed_values_travel_as_a_difference(tmp_path: Path) -> None:
    transfer, weights = (
        DirectTransfer(tmp_path),
        {"w": np.random.default_rng(0).normal(size=100_000).astype(np.float32)},
    )
    full = transfer.push(weights, 1)
    changed = {"w": weights["w"].copy()}
    changed["w"][::1000] += 1
    assert transfer.push(changed, 2) * 40 < full
    assert_equal_weights(transfer.loaded[-1][2], changed)


def test_interrupted_blob_goes_on_at_its_byte(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    seen = list[int]()

    def cut(message: AnyMessage, payload: bytes) -> tuple[AnyMessage, bytes] | None:
        seen.append(len(payload))
        return (message, payload) if len(seen) <= 5 else None

    transfer.tamper = cut
    transfer.add(version_with_adapter(1), 1)
    transfer.planner.on_offer(transfer.offer(1))
    transfer.run(3)
    arrived = sum(seen[:5])
    transfer.tamper = lambda message, payload: (message, payload)
    transfer.restart_server()
    before = transfer.sent_bytes
    transfer.planner.on_offer(transfer.offer(1, greeting=True))
    transfer.run()
    assert transfer.planner.loaded_version == 1
    assert transfer.sent_bytes - before <= FROZEN.nbytes - arrived + 5000


def test_slow_robot_completes_versions_of_a_fast_learner(tmp_path: Path) -> None:
    """A newer version does not replace one that will be complete sooner; after it the newest is next."""
    transfer = DirectTransfer(tmp_path)
    for version in range(1, 21):
        transfer.add({"w": np.random.default_rng(version).normal(size=BLOB_BYTES // 2)}, version)
        transfer.planner.on_offer(transfer.offer(version))
        transfer.planner.step()
        message, payload = transfer.coming.pop(0)
        transfer.deliver(message, payload)
    transfer.run()
    assert [number for number, *_ in transfer.loaded] == [1, 20]


def test_newer_version_that_is_sooner_complete_replaces_the_one_in_transfer(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    transfer.push(version_with_adapter(1), 1)
    transfer.add({**version_with_adapter(2), "base": FROZEN + 1}, 2)
    transfer.add(version_with_adapter(3), 3)
    transfer.tamper = lambda message, payload: None
    transfer.planner.on_offer(transfer.offer(2))
    transfer.planner.step()
    transfer.planner.on_offer(transfer.offer(3))
    transfer.tamper = lambda message, payload: (message, payload)
    transfer.run()
    assert [number for number, *_ in transfer.loaded] == [1, 3] or [n for n, *_ in transfer.loaded] == [1, 2, 3]


def test_precision_is_the_first_that_both_sides_have(tmp_path: Path) -> None:
    weights = random_weights(1)
    for precisions, expected in ((("bf16", "exact"), "bf16"), (("exact", "bf16"), "exact"), (("exact",), "exact")):
        transfer = DirectTransfer(tmp_path, precisions)  # type: ignore[arg-type]
        transfer.add(weights, 1)
        transfer.push(weights, 1, precision="bf16")
        ((_, precision, arrays),) = transfer.loaded
        assert precision == expected
        assert_equal_weights(arrays, dequantize(quantize(weights, precision), precision))
    transfer = DirectTransfer(tmp_path)
    transfer.push(weights, 1, precision="bf16")
    assert not transfer.loaded and transfer.planner.rejected == 1
    assert transfer.planner.rejection == "version 1 comes as bf16; this robot takes exact"
    transfer.push(weights, 2)
    assert [number for number, *_ in transfer.loaded] == [2] and not transfer.planner.rejection


def test_long_table_of_tensors_is_fetched_like_a_blob(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    weights = {f"layers.{n:04d}.weight": np.full(3, n, np.float32) for n in range(2000)}
    first = transfer.push(weights, 1)
    assert transfer.offer(1).tables == () and transfer.planner.loaded_version == 1
    weights["layers.0007.weight"] = np.ones(3, np.float32)
    assert transfer.push(weights, 2) * 100 < first, "its difference is small"
    assert_equal_weights(transfer.loaded[-1][2], weights)


# Order: runs, epochs and pins


def test_older_versions_and_runs_that_are_over_are_ignored(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    transfer.push(random_weights(5), 5, epoch=3)
    transfer.push(random_weights(4), 4, epoch=3)
    transfer.push(random_weights(9), 9, epoch=2, run=b"over")
    assert [number for number, *_ in transfer.loaded] == [5]
    transfer.push(random_weights(2), 2, epoch=4)
    assert transfer.planner.loaded_version == 2, "a restarted learner that lost checkpoints may count again"


def test_only_a_signed_pin_of_this_run_leads_back(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    for version in (1, 2, 3):
        transfer.push(random_weights(version), version)
    transfer.planner.on_offer(transfer.offer(1, pin(transfer, 1, serial=5, run=b"other")))  # type: ignore[arg-type]
    transfer.run(5)
    assert transfer.planner.loaded_version == 3
    before = transfer.sent_bytes
    transfer.planner.on_offer(transfer.offer(1, pin(transfer, 1, serial=7)))  # type: ignore[arg-type]
    transfer.run()
    assert transfer.planner.loaded_version == 1 and transfer.sent_bytes > before
    transfer.push(random_weights(4), 4)
    assert transfer.planner.loaded_version == 1, "the pin holds"
    transfer.planner.on_offer(transfer.offer(4, pin(transfer, NO_VERSION, serial=6)))  # type: ignore[arg-type]
    transfer.run(5)
    assert transfer.planner.loaded_version == 1, "an older pin has no effect"
    transfer.planner.on_offer(transfer.offer(4, pin(transfer, NO_VERSION, serial=8)))  # type: ignore[arg-type]
    transfer.run()
    assert transfer.planner.loaded_version == 4
    assert_equal_weights(transfer.loaded[-1][2], random_weights(4))


# Bad input


def test_unsigned_and_foreign_versions_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transfer = DirectTransfer(tmp_path)
    transfer.push(random_weights(1), 1)
    genuine, transfer.signer = transfer.signer, other_signer()
    transfer.push(random_weights(2), 2)
    transfer.signer = genuine
    transfer.add(random_weights(3), 3)
    offer = transfer.offer(3)
    unsigned = msgspec.structs.replace(offer.manifests[0], signature=b"")
    changed = msgspec.structs.replace(offer.manifests[0], body=offer.manifests[0].body[:-1] + b"\x09")
    for forged in (unsigned, changed):
        transfer.planner.on_offer(msgspec.structs.replace(offer, manifests=(forged,)))
    transfer.run(5)
    assert transfer.planner.loaded_version == 1 and transfer.planner.rejected == 3
    assert caplog.text.count("does not match the learner's key") == 3


def corrupted(times: int) -> object:
    """Changes a byte of the first `times` payloads, and of their checksums' meaning."""
    left = [times]

    def tamper(message: AnyMessage, payload: bytes) -> tuple[AnyMessage, bytes]:
        if isinstance(message, WeightsBlobs) and left[0]:
            left[0] -= 1
            payload = payload[:-1] + bytes([payload[-1] ^ 1])
        return message, payload

    return tamper


def test_damaged_blob_is_fetched_whole_once_and_then_its_version_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = DirectTransfer(tmp_path)
    weights = {"w": np.zeros(1000, np.float32)}
    transfer.push(weights, 1)
    transfer.tamper = corrupted(1)  # type: ignore[assignment]
    transfer.push({"w": np.ones(1000, np.float32)}, 2)
    assert transfer.planner.loaded_version == 2 and transfer.planner.fetcher.damaged == 1
    assert transfer.requests[-1].wants[0].base == b""
    transfer.tamper = corrupted(1000)  # type: ignore[assignment]
    transfer.push(random_weights(3), 3)
    assert transfer.planner.loaded_version == 2 and "weights.rejected version=3" in caplog.text
    assert transfer.planner.rejection.startswith("version 3: ")
    transfer.tamper = lambda message, payload: (message, payload)
    transfer.push(random_weights(4), 4)
    assert transfer.planner.loaded_version == 4, "the next version arrives"


def test_difference_from_a_blob_that_is_not_held_is_refused(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    transfer.push({"w": np.zeros(1000, np.float32)}, 1)

    def rename_base(message: AnyMessage, payload: bytes) -> tuple[AnyMessage, bytes]:
        if isinstance(message, WeightsBlobs):
            parts = tuple(msgspec.structs.replace(part, base=b"x" * 32, codec="xor") for part in message.parts)
            message = msgspec.structs.replace(message, parts=parts)
        return message, payload

    transfer.tamper = rename_base
    transfer.push({"w": np.ones(1000, np.float32)}, 2)
    assert transfer.planner.loaded_version == 1 and transfer.planner.rejected == 1


def test_manifest_of_a_million_tensors_is_refused(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    transfer.push(random_weights(1), 1)
    entry = TensorEntry("w", "uint8", (0,), ())
    table = msgspec.msgpack.encode([entry] * 1_000_000)
    state = build_tensor_set(random_weights(2))
    manifest = msgspec.structs.replace(
        manifest_of(state, 2), digest=blake3(table).digest(), table_bytes=len(table), size_bytes=0
    )
    assert len(table) < 16 << 20
    signed = transfer.signer.sign(manifest)
    transfer.planner.on_offer(WeightsOffer(manifests=(signed,), signer=transfer.signer.public_key, tables=(table,)))
    assert transfer.planner.rejected == 1
    with_long_table = msgspec.structs.replace(manifest, table_bytes=1 << 30)
    transfer.planner.on_offer(
        WeightsOffer(manifests=(transfer.signer.sign(with_long_table),), signer=transfer.signer.public_key)
    )
    assert transfer.planner.rejected == 2 and transfer.planner.loaded_version == 1


def test_version_beyond_the_bound_of_the_cache_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transfer = DirectTransfer(tmp_path, cache_bytes=100_000)
    transfer.push({"w": np.zeros(10_000, np.float32)}, 1)
    transfer.push({"w": np.zeros(30_000, np.float32)}, 2)
    assert transfer.planner.loaded_version == 1
    assert "the cache is bound to 100,000" in caplog.text


def test_full_cache_gives_one_line_and_the_policy_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transfer = DirectTransfer(tmp_path, cache_bytes=100_000)
    draws = np.random.default_rng(0)
    transfer.push({"w": draws.normal(size=8_000)}, 1)
    transfer.push({"w": draws.normal(size=8_001)}, 2)
    assert transfer.planner.loaded_version == 1
    assert len([r for r in caplog.records if "the cache of weights is full" in r.getMessage()]) == 1
    transfer.push({"w": draws.normal(size=1_000)}, 3)
    assert transfer.planner.loaded_version == 3


@pytest.mark.parametrize("is_refused_by_policy", [False, True])
def test_parts_of_a_refused_version_leave_room_for_later_ones(tmp_path: Path, is_refused_by_policy: bool) -> None:
    """The refused version has seven blobs, which fit beside the loaded one, or eight, which do not."""
    transfer = DirectTransfer(tmp_path, cache_bytes=10 * BLOB_BYTES + (1 << 16))
    draws = np.random.default_rng(0)
    new = lambda blobs: {"w": draws.normal(size=blobs * BLOB_BYTES // 8)}  # noqa: E731
    load = transfer.load

    def refuse(manifest: WeightsManifest, arrays: Mapping[str, Array], announced_s: float) -> None:
        if manifest.version == 2:
            raise WireError("these weights do not fit")
        load(manifest, arrays, announced_s)

    transfer.load = refuse  # type: ignore[method-assign]
    transfer.push(new(3), 1)
    transfer.push(new(7 if is_refused_by_policy else 8), 2)
    assert transfer.planner.loaded_version == 1 and transfer.planner.rejected == 1
    transfer.push(new(3), 3)
    assert transfer.planner.loaded_version == 3


def test_version_that_the_policy_refuses_is_not_loaded_again(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    tried = list[int]()

    def refuse(manifest: WeightsManifest, arrays: object, announced_s: float) -> None:
        tried.append(manifest.version)
        raise WireError("these weights do not fit")

    transfer.load = refuse  # type: ignore[method-assign]
    transfer.push(random_weights(1), 1)
    transfer.planner.on_offer(transfer.offer(1))
    transfer.run(5)
    assert tried == [1] and transfer.planner.loaded_version == NO_VERSION
    assert transfer.planner.rejection == "version 1: these weights do not fit"
    transfer.add(random_weights(2), 2, run=b"next", epoch=2)
    transfer.planner.on_offer(transfer.offer(2))
    assert not transfer.planner.rejection, "it tells nothing of the next run"


def without_memory(manifest: WeightsManifest, arrays: object, announced_s: float) -> None:
    raise WeightsNotLoaded("it cannot be loaded: OutOfMemoryError: CUDA out of memory")


@pytest.mark.parametrize("is_pinned", [False, True])
def test_version_without_memory_is_loaded_once_there_is_some(tmp_path: Path, is_pinned: bool) -> None:
    transfer, wanted = DirectTransfer(tmp_path), 1 if is_pinned else 2
    load = transfer.load
    transfer.push(random_weights(1), 1)
    if is_pinned:
        transfer.push(random_weights(2), 2)
    transfer.load = without_memory  # type: ignore[method-assign]
    if is_pinned:
        transfer.planner.on_offer(transfer.offer(1, pin(transfer, 1, serial=1)))
        transfer.run()
    else:
        transfer.push(random_weights(2), 2)
    assert transfer.planner.loaded_version == 3 - wanted
    transfer.now_s += 10 * LOAD_RETRY_S
    transfer.run()
    assert transfer.planner.rejected == 1, "it is logged and counted once"
    transfer.load = load  # type: ignore[method-assign]
    transfer.now_s += LOAD_RETRY_S
    transfer.run()
    assert transfer.planner.loaded_version == wanted == transfer.loaded[-1][0]
    transfer.push(random_weights(3), 3)
    assert [version for version, *_ in transfer.loaded].count(wanted) == 1 + is_pinned


def test_version_without_memory_is_dropped_for_a_newer_one(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    load = transfer.load
    transfer.push(random_weights(1), 1)
    one = transfer.planner.cache.size_bytes
    transfer.load = without_memory  # type: ignore[method-assign]
    for version in range(2, 12):
        transfer.push(random_weights(version), version)
    assert transfer.planner.cache.size_bytes <= 2.1 * one
    transfer.load = load  # type: ignore[method-assign]
    transfer.push(random_weights(12), 12)
    transfer.now_s += LOAD_RETRY_S
    transfer.run()
    assert transfer.loaded[-1][0] == 12 and transfer.planner.cache.size_bytes <= 1.1 * one


def test_version_that_is_gone_is_left_for_the_next_offer(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    transfer.add(random_weights(1), 1)
    transfer.tamper = lambda message, payload: None
    transfer.planner.on_offer(transfer.offer(1))
    transfer.run(3)
    transfer.tamper = lambda message, payload: (message, payload)
    transfer.planner.on_reply(WeightsGone(version=transfer.requests[-1].version))
    transfer.run(3)
    assert transfer.planner.loaded_version == NO_VERSION
    transfer.push(random_weights(2), 2)
    assert transfer.planner.loaded_version == 2


def test_replies_nobody_requested_change_nothing(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    transfer.push(random_weights(1), 1)
    messages = list[tuple[AnyMessage, bytes]]()

    def record(message: AnyMessage, payload: bytes) -> tuple[AnyMessage, bytes]:
        messages.append((message, payload))
        return message, payload

    transfer.tamper = record
    transfer.push(random_weights(2), 2)
    for message, payload in messages:
        transfer.deliver(message, payload)
        transfer.deliver(message, payload[: len(payload) // 2])
    transfer.run(3)
    assert [number for number, *_ in transfer.loaded] == [1, 2] and not transfer.planner.rejected


def test_in_flight_bytes_are_bounded(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    transfer.push({"w": np.random.default_rng(0).normal(size=2 * BLOB_BYTES)}, 1)
    limits = [request.limit_bytes for request in transfer.requests]
    assert transfer.planner.loaded_version == 1
    assert max(np.diff([0, *sorted(limits)])) <= MAX_WINDOW_BYTES


# The start from a stored version


def test_saved_version_is_loaded_and_its_blobs_are_bases(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path)
    transfer.push(version_with_adapter(1), 1)
    store = VersionStore(tmp_path / "kept")
    store.save([transfer.planner.loaded], transfer.planner.cache)  # type: ignore[list-item]
    transfer.start_robot()
    catalog = VersionStore(tmp_path / "kept").load()
    saved = newest_version(catalog)
    assert saved is not None
    transfer.planner.load_saved(saved, catalog.cache)
    assert_equal_weights(transfer.loaded[-1][2], version_with_adapter(1))
    assert transfer.push(version_with_adapter(2), 2) < 1000
    stranger = add_version(transfer.catalog, random_weights(3), 3, other_signer())
    with pytest.raises(WireError, match="does not match the learner's key"):
        transfer.planner.load_saved(stranger, transfer.catalog.cache)


def test_first_key_is_trusted_and_stored(tmp_path: Path) -> None:
    transfer = DirectTransfer(tmp_path / "keys")
    transfer.trust = TrustedLearnerKey(tmp_path / "robot" / "learner.verify")
    transfer.trust.require_persistent()
    transfer.start_robot()
    transfer.push(random_weights(1), 1)
    assert transfer.planner.loaded_version == 1 and (tmp_path / "robot" / "learner.verify").exists()
    transfer.signer = other_signer()
    transfer.push(random_weights(2), 2)
    assert transfer.planner.loaded_version == 1
