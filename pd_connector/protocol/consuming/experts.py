# SPDX-License-Identifier: Apache-2.0
"""Which differences of single tokens come from a mixture of experts, and not from wrong KV.

Two experts can have nearly the same score for a token. Two engines that round otherwise then choose different
ones, and both are right. The token's KV is another from the next layer on. Two things tell this from an error:

- in the first layer no token has met an expert;
- what a token has become stays in the next layer, where a chunk that is wrong ends with its layers.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pd_connector.kv.coding import Part

MOVED = 1 / 16
"""A token that is this far apart, or further, has been moved. Rounding alone stays below."""
MOST_MOVED = 1024
"""Tokens of one chunk, or of one layer, that are kept. With more of them the layer as a whole is far, too."""
_MOST_SHARE = 1 / 4
"""Where more of a layer's tokens are far than this part, experts are not the cause."""


class Moved(NamedTuple):
    """A token of one part of a layer that has been moved.

    Attributes:
        distance: as `Tolerance.token` has it.
        apart: sum of squares of the differences, over all heads.
    """

    token: int
    distance: float
    apart: float


class MovedTokens:
    """What one comparison has found, of the layers that this rank holds."""

    def __init__(self) -> None:
        self._spans: dict[int, set[range]] = {}  # tokens that were compared, by layer
        self._moved: dict[int, dict[int, dict[Part, tuple[float, float]]]] = {}  # by layer, token

    def add(self, layer: int, part: Part, span: range, moved: Iterable[Moved]) -> None:
        """Take note of a chunk, or of some heads of it.

        Args:
            span: the tokens that were compared.
        """
        self._spans.setdefault(layer, set()).add(span)
        tokens = self._moved.setdefault(layer, {})
        for token, distance, apart in moved:
            if token in tokens or len(tokens) < MOST_MOVED:
                parts = tokens.setdefault(token, {})
                before = parts.get(part, (0.0, 0.0))
                parts[part] = max(distance, before[0]), apart + before[1]

    def excused(self, layer: int, most: float) -> set[int]:
        """Tokens of a layer that are further apart than `most`, because they met other experts."""
        far = {token for token, distance in self.distances(layer) if distance > most}
        compared = set[int]().union(*self._spans.get(layer, ()))
        if layer == 0 or len(far) > _MOST_SHARE * len(compared):
            return set()
        following = self._moved.get(layer + 1, {})
        spans = self._spans.get(layer + 1, ())
        full = len(following) >= MOST_MOVED
        return {
            token
            for token in far
            if token in following or full or not any(token in span for span in spans)
        }

    def distances(self, layer: int) -> Iterator[tuple[int, float]]:
        """Each token of a layer that has been moved, with its distance: the larger of K and V."""
        for token, parts in self._moved.get(layer, {}).items():
            yield token, max(distance for distance, _ in parts.values())

    def apart(self, layer: int, part: Part, tokens: Iterable[int]) -> float:
        """Sum of squares of the differences of these tokens."""
        found = self._moved.get(layer, {})
        return sum(found[token].get(part, (0.0, 0.0))[1] for token in tokens)
