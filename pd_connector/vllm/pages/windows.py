# SPDX-License-Identifier: Apache-2.0
"""Computes which pages of a running request vLLM has freed because a sliding window has passed them.

vLLM does not report freed pages: its step output has only the pages that were added.
"""

from collections.abc import Iterable, Sequence
from typing import Any

WHOLE_SEQUENCE = 1 << 31
"""Tokens of a page of a ring: a request has one page of it, however long it is."""
NULL_PAGE = 0
"""vLLM's page id for a page that a sliding window has passed."""


class Windows:
    """Page sizes and windows of an engine's page tables.

    Args:
        tables: for each page table, the tokens of the sequence that a page stands for and those of the window (0: no window).
            Context-parallel ranks hold a part of a page's tokens each.
    """

    def __init__(self, tables: Iterable[tuple[int, int]]) -> None:
        self.tables: Sequence[tuple[int, int]] = tuple(tables)

    @classmethod
    def of(cls, specs: Iterable[Any], cp_size: int = 1) -> "Windows":
        """The windows of vLLM's KV cache groups, from each group's `kv_cache_spec`.

        Args:
            cp_size: ranks of decode context parallelism.
        """
        return cls((_page_tokens(spec, cp_size), _window(spec)) for spec in specs)

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Tokens of the sequence that a page stands for, by table."""
        return tuple(page_size for page_size, _ in self.tables)

    def first_kept(self, computed: int) -> tuple[int, ...]:
        """The first page of each table that vLLM may still have, after `computed` tokens of a request. vLLM frees
        pages when it schedules the request, and never frees this page or a later one earlier.

        >>> Windows([(16, 0), (16, 32)]).first_kept(100)  # tokens 69 to 99 are attended next
        (0, 4)
        """
        return tuple(
            max(0, computed - window + 1) // page_size if window else 0
            for page_size, window in self.tables
        )

    def first_wanted(self, prompt_tokens: int) -> tuple[int, ...]:
        """The first page of each table that a consumer of the prompt may need. The consumer computes the last token
        itself."""
        return self.first_kept(prompt_tokens - 1)

    def from_token(
        self, first_token: int, tables: Iterable[Sequence[int]]
    ) -> tuple[Sequence[int], ...]:
        """Page ids by table, with -1 for pages before the one that holds this token.

        >>> Windows([(16, 0)]).from_token(40, [[7, 8, 9]])
        ([-1, -1, 9],)
        """
        rest = list[Sequence[int]]()
        for table, size in zip(tables, self.page_sizes, strict=True):
            before = min(len(table), first_token // size)
            rest.append([-1] * before + list(table[before:]))
        return tuple(rest)

    def unfilled(
        self, tables: Iterable[Sequence[int]], first_token: int, stop_token: int
    ) -> frozenset[int]:
        """Pages that a load of tokens [first_token, stop_token) may fill only in part, because a window begins within
        them. vLLM counts every page of a load as filled.

        Args:
            tables: vLLM's page ids by table.

        >>> sorted(Windows([(16, 0), (16, 40)]).unfilled(([1, 2, 3, 4], [0, 5, 6, 7]), 0, 63))
        [5]
        """
        partial: set[int] = set()
        for pages, (page_size, window) in zip(tables, self.tables, strict=True):
            kept = max(0, stop_token - window + 1) if window else 0
            partial.update(pages[first_token // page_size : -(-kept // page_size)])
        return frozenset(partial - {NULL_PAGE})


def _page_tokens(spec: Any, cp_size: int) -> int:
    from vllm.v1.kv_cache_interface import CircularBufferSpec, UniformTypeKVCacheSpecs

    layer = spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        layer = next(iter(spec.kv_cache_specs.values()))
    if isinstance(layer, CircularBufferSpec):
        return WHOLE_SEQUENCE
    return int(spec.block_size) * (cp_size if spec.dcp_sharded else 1)


def _window(spec: Any) -> int:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec, UniformTypeKVCacheSpecs

    if isinstance(spec, UniformTypeKVCacheSpecs):
        return min(_window(inner) for inner in spec.kv_cache_specs.values())
    return int(spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else 0
