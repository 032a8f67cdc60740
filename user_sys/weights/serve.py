"""The answers to a request for grains, the same at the learner, the gateway and a relay."""

from __future__ import annotations

from user_sys.messages import WeightsGone, WeightsGrains, WeightsRequest
from user_sys.weights.catalogue import Catalogue
from user_sys.weights.fetch import MESSAGE_BYTES, REQUEST_BYTES

Answer = tuple[WeightsGrains, memoryview] | tuple[WeightsGone, None]


def answers(catalogue: Catalogue, request: WeightsRequest) -> list[Answer]:
    """The grains that were asked for, in messages one after the other, or word that they are gone.

    They are of at most `fetch.MESSAGE_BYTES` each and `fetch.REQUEST_BYTES` in sum, but one grain at least. Copies
    nothing.
    """
    parcel = catalogue.parcels.get(request.parcel)
    if parcel is None or not 0 <= request.first < parcel.info.grains or request.count < 1:
        return [(WeightsGone(parcel=request.parcel), None)]
    end = min(request.first + request.count, parcel.info.grains)
    end = min(end, request.first + max(1, REQUEST_BYTES // parcel.info.grain_bytes))
    step = max(1, MESSAGE_BYTES // parcel.info.grain_bytes)
    return [
        (WeightsGrains(parcel=request.parcel, first=first), parcel.grains(first, min(step, end - first)))
        for first in range(request.first, end, step)
    ]
