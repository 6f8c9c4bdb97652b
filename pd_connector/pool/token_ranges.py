# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a chunk a load wants, and which of its own pages it may write.

A page table lists a request's pages from its first token on; -1 stands for a page that is not held, or must not be
written.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pd_connector.errors import Miss, PoolError
from pd_connector.kv.coding import ELEMENT_BYTES
from pd_connector.kv.geometry import Geometry, Group, page_span
from pd_connector.plan.route import Route
from pd_connector.pool.keys import CHUNK_TOKENS

Tables = Sequence[Sequence[int]]


class LoadTokens(NamedTuple):
    """The tokens of a chunk that are loaded."""

    number: int
    first_token: int
    stop_token: int

    @property
    def start(self) -> int:
        """The chunk's first token."""
        return self.number * CHUNK_TOKENS

    @property
    def stop(self) -> int:
        return min(self.stop_token, self.start + CHUNK_TOKENS)

    def check_tables(self, own: Geometry, tables: Tables) -> None:
        """Raises IndexError if a table ends before the tokens that are loaded. A page that is merely missing would pass
        for one that must not be written."""
        for group in own.groups:
            held = len(tables[group.table]) * group.page_size
            if max(self.start, self.first_token) < self.stop and held < self.stop:
                raise IndexError(
                    f"page table {group.table} ends at token {held}: tokens up to {self.stop} are loaded"
                )

    def intervals(
        self, route: Route, tables: Tables, first: int
    ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Tokens [low, high) that lie in consecutive pages which can be written, with these pages.

        Args:
            first: the first token that the run holds.
        """
        group = route.destination
        opaque = group.dtype not in ELEMENT_BYTES
        low = max(first, self.first_token)
        low = max(first, low - low % group.page_size) if opaque else low
        for begin, stop, pages in _runs_of_pages(
            tables[group.table], group.page_size, low, self.stop
        ):
            yield max(low, begin), min(self.stop, stop), pages

    def first_wanted(self, group: Group, tables: Tables) -> int | None:
        """The first token that the next one to be computed attends to, in a page that can be written."""
        window = max(0, self.stop_token - group.window + 1) if group.window else 0
        low = max(self.start, self.first_token, window)
        runs = _runs_of_pages(tables[group.table], group.page_size, low, self.stop)
        return next((max(low, begin) for begin, _, _ in runs), None)


def _runs_of_pages(
    table: Sequence[int], page_size: int, low: int, high: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Runs of consecutive pages of a request that can be written and hold some of tokens [low, high): their first and
    stop token, and their ids."""
    run: list[int] = []
    span = page_span(low, high, page_size) if low < high else range(0)
    for place in span:
        if table[place] >= 0:
            run.append(table[place])
        elif run:
            yield (place - len(run)) * page_size, place * page_size, tuple(run)
            run = []
    if run:
        yield (span.stop - len(run)) * page_size, span.stop * page_size, tuple(run)


def check_covered(
    covered: Mapping[tuple[int, int], int], own: Geometry, tables: Tables, span: LoadTokens
) -> None:
    """Raises PoolError if a token that is wanted is in no part."""
    for group in own.groups:
        first = span.first_wanted(group, tables)
        if first is None:
            continue
        for layer in group.layers:
            for head in own.heads(group):
                if covered.get((layer, head), span.stop) > first:
                    raise PoolError(
                        Miss.UNLIKE,
                        f"chunk {span.number} was stored without token {first} of layer {layer} head {head}",
                    )
