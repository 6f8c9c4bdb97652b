# SPDX-License-Identifier: Apache-2.0
"""Tells differences that a mixture of experts makes from wrong KV.

Two experts can have nearly the same score for a token. Two engines that round differently can then choose different
experts, and both are right. From the next layer on the token's KV differs between them. Two things distinguish this from an
error:

- In the first layer no token has passed an expert.
- The token's difference continues in the next layer. The error of a wrong chunk ends with the chunk's layers.

Both can be missing. A difference fades from layer to layer. If there are layers without compared KV between two
compared layers, a difference that is gone in the second layer proves nothing. A recurrent state depends on all tokens,
and most on the last ones. So the state after a moved token proves nothing either.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pd_connector.kv.coding import Part

MOVED = 1 / 16
"""Distance from which on a token counts as moved by other experts. Rounding alone stays below."""
MOST_MOVED = 1024
"""Most moved tokens that are kept of a chunk, or of a layer. With more of them the whole layer's distance is large, too."""
REACH = 64
"""A token that has moved may move states up to this number of tokens behind it."""
_MOST_SHARE = 1 / 4
"""If more than this part of a layer's tokens is far apart, experts are not the cause."""


class Moved(NamedTuple):
    """A token whose K or V in one layer was moved by other experts.

    Attributes:
        distance: as in `Tolerance.token`.
        apart: sum of squares of the differences, over all heads.
    """

    token: int
    distance: float
    apart: float


class MovedTokens:
    """The moved tokens of one comparison, in the layers of this rank."""

    def __init__(self) -> None:
        self._spans: dict[int, set[range]] = {}  # tokens that were compared, by layer
        self._moved: dict[int, dict[int, dict[Part, tuple[float, float]]]] = {}  # by layer, token

    def add(self, layer: int, part: Part, span: range, moved: Iterable[Moved]) -> None:
        """Add the moved tokens of a chunk, or of some heads of it.

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
        """Tokens of a layer whose distance is above `most` because of other experts."""
        return {t for t in self._far(layer, most) if self._next(t, layer)[1]}

    def unsure(self, layer: int, most: float) -> set[int]:
        """Tokens of a layer whose distance is above `most`, but not in the next layer in which they were compared, with
        other layers in between. Either other experts have moved these tokens, or their KV is wrong."""
        later = ((token, self._next(token, layer)) for token in self._far(layer, most))
        return {token for token, (after, moved) in later if not moved and after > layer + 1}

    def moved_in(self, tokens: range) -> bool:
        """Whether any of these tokens has moved, in any layer."""
        return any(token in tokens for layer in self._moved.values() for token in layer)

    def _far(self, layer: int, most: float) -> set[int]:
        """Tokens of a layer whose distance is above `most`; none if other experts cannot be the cause."""
        far = {token for token, distance in self.distances(layer) if distance > most}
        compared = set[int]().union(*self._spans.get(layer, ()))
        return far if layer and len(far) <= _MOST_SHARE * len(compared) else set()

    def _next(self, token: int, layer: int) -> tuple[int, bool]:
        """The next layer in which a token was compared, and whether it has moved there, too. True if there is no such
        layer: the others keep states, have dropped the token, or belong to another rank."""
        for number in sorted(number for number in self._spans if number > layer):
            if any(token in span for span in self._spans[number]):
                moved = self._moved[number]
                return number, token in moved or len(moved) >= MOST_MOVED
        return layer, True

    def distances(self, layer: int) -> Iterator[tuple[int, float]]:
        """Each moved token of a layer with its distance: the larger one of K and V."""
        for token, parts in self._moved.get(layer, {}).items():
            yield token, max(distance for distance, _ in parts.values())

    def apart(self, layer: int, part: Part, tokens: Iterable[int]) -> float:
        """Sum of squares of the differences of these tokens."""
        moved = self._moved.get(layer, {})
        return sum(moved[token].get(part, (0.0, 0.0))[1] for token in tokens)
