"""What one call of `load` or `save` moves: its batches in order, and how far a set of landed ones reaches."""

from __future__ import annotations

from collections.abc import Iterable

from kvbelay.core.model import TransferBatch
from kvbelay.errors import InvalidBatch


class Cargo:
    """The batches of one request in one direction.

    Batches cut tokens x layers: ranges of tokens follow one another without a gap, and each range may be cut into
    several ranges of layers, the same layers in all.
    """

    def __init__(self, batches: Iterable[TransferBatch]) -> None:
        order = sorted(batches, key=lambda batch: (batch.id.start, batch.id.layers))
        if not order:
            msg = "there is nothing to move"
            raise InvalidBatch(msg, remedy="pass at least one batch")
        self.start = order[0].id.start
        self.stop = order[-1].id.stop
        _check(order)
        follows = [batch.id.start for batch in order[1:]] + [self.stop]
        self._moves = list(zip(order, follows, strict=True))

    def beyond(self, watermark: int) -> list[tuple[TransferBatch, int]]:
        """The batches still wanted, in the order in which they move: by tokens, then by layers.

        Each with the number of leading tokens that are good in all layers once it and all before it have landed.
        """
        return [(batch, reach) for batch, reach in self._moves if batch.id.stop > watermark]


def _check(order: list[TransferBatch]) -> None:
    """Raise `InvalidBatch` unless the batches tile one range of tokens x one range of layers."""
    remedy = "cut tokens and layers into ranges without gaps or overlaps"
    layers = [batch.id.layers for batch in order if batch.id.start == order[0].id.start]
    expected: list[tuple[int, int, tuple[int, int]]] = []
    at = order[0].id.start
    for first in order[:: len(layers)]:
        if first.id.start != at:
            msg = f"tokens from {first.id.start} on do not follow on {at}"
            raise InvalidBatch(msg, remedy=remedy)
        at = first.id.stop
        expected.extend((first.id.start, first.id.stop, part) for part in layers)
    if [(batch.id.start, batch.id.stop, batch.id.layers) for batch in order] != expected:
        msg = "some ranges of tokens are cut into other layers than the first"
        raise InvalidBatch(msg, remedy=remedy)
    edge = layers[0][0]
    for first_layer, last_layer in layers:
        if first_layer != edge or last_layer <= first_layer:
            msg = f"layers from {first_layer} on do not follow on {edge}"
            raise InvalidBatch(msg, remedy=remedy)
        edge = last_layer
    if any(batch.id.stop <= batch.id.start for batch in order):
        msg = "a batch has no tokens"
        raise InvalidBatch(msg, remedy=remedy)
