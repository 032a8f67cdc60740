"""The answer to a request for grains, the same at the learner, the gateway and a relay."""

from __future__ import annotations

from user_sys.messages import WeightsGone, WeightsGrains, WeightsRequest
from user_sys.weights.catalogue import Catalogue
from user_sys.weights.fetch import MESSAGE_BYTES


def answer(catalogue: Catalogue, request: WeightsRequest) -> tuple[WeightsGrains, memoryview] | tuple[WeightsGone]:
    """The grains that were asked for (of at most `fetch.MESSAGE_BYTES`, but one at least), or word that they are gone.

    Copies nothing.
    """
    parcel = catalogue.parcels.get(request.parcel)
    if parcel is None or not 0 <= request.first < parcel.info.grains or request.count < 1:
        return (WeightsGone(parcel=request.parcel),)
    count = min(request.count, max(1, MESSAGE_BYTES // parcel.info.grain_bytes))
    return WeightsGrains(parcel=request.parcel, first=request.first), parcel.grains(request.first, count)
