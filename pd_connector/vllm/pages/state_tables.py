# SPDX-License-Identifier: Apache-2.0
"""Page tables that list recurrent states: which of their pages holds the state at a position."""

import math
from collections.abc import Iterable, Sequence
from typing import Any


class StateTables:
    """The page tables of an engine's states.

    Args:
        page_sizes: for each page table, 0 if it lists KV; else the tokens after which vLLM keeps a state in a page of
            its own, or None if a request's first page holds its state at any position (`mamba_cache_mode` none, rings).
        drops_last: whether vLLM keeps a prompt's states one page earlier, since it does not reuse the last page of a prompt
            that its draft model has seen (`use_eagle_block_drop`: EAGLE, MTP, DFlash, DSpark).
    """

    def __init__(self, page_sizes: Iterable[int | None], *, drops_last: bool = False) -> None:
        self._page_sizes: Sequence[int | None] = tuple(page_sizes)
        self._drops_last = drops_last

    @classmethod
    def of(cls, specs: Iterable[Any], *, drops_last: bool = False) -> "StateTables":
        """The state tables of vLLM's KV cache groups, from each group's `kv_cache_spec`."""
        return cls((_page_size(spec) for spec in specs), drops_last=drops_last)

    def __bool__(self) -> bool:
        """Whether the model keeps states."""
        return any(self.list_states)

    def only(self, tables: Iterable[Sequence[int]], *positions: int) -> tuple[Sequence[int], ...]:
        """The same page tables, but tables of states list only the pages of the states at these positions, in this order. A
        position is the number of tokens before it. Scratch pages of speculation lie behind the latest state.

        >>> StateTables([0, 16, None]).only([[7, 8, 9], [0, 5, 6], [3, 4]], 32)
        ([7, 8, 9], [5], [3])
        """
        if not self:
            return tuple(tables)
        return tuple(
            table
            if size == 0
            else [page for position in positions for page in self._page(table, size, position)]
            for table, size in zip(tables, self._page_sizes, strict=True)
        )

    @property
    def list_states(self) -> Sequence[bool]:
        """For each page table, whether it lists states."""
        return [size != 0 for size in self._page_sizes]

    @property
    def keeps_boundaries(self) -> bool:
        """Whether vLLM keeps states after whole pages beside the latest one."""
        return None not in self._page_sizes

    def boundary(self, prompt: int) -> int:
        """The last position in a prompt of `prompt` tokens, before its last token, at which vLLM keeps a state in a
        page that it does not write again. vLLM ends a prefill step there (`mamba_cache_mode` align). 0: no such
        position.

        >>> StateTables([0, 16]).boundary(41), StateTables([0, None]).boundary(41)
        (32, 0)
        >>> StateTables([0, 16], drops_last=True).boundary(41)
        16
        """
        if not self or not self.keeps_boundaries:
            return 0
        step = math.lcm(*(size for size in self._page_sizes if size))
        pages = prompt // step - 1 if self._drops_last else (prompt - 1) // step
        return max(0, pages * step)

    @property
    def shortest_with_boundary(self) -> int:
        """Length of the shortest prompt that has a `boundary`, also if its last token is left out. 0: no prompt has one.

        >>> StateTables([0, 16]).shortest_with_boundary
        17
        >>> StateTables([0, 16], drops_last=True).shortest_with_boundary
        33
        >>> StateTables([0]).shortest_with_boundary, StateTables([0, None]).shortest_with_boundary
        (0, 0)
        """
        if not self or not self.keeps_boundaries:
            return 0
        step = math.lcm(*(size for size in self._page_sizes if size))
        return (2 if self._drops_last else 1) * step + 1

    @staticmethod
    def _page(table: Sequence[int], size: int | None, position: int) -> Sequence[int]:
        place = (position - 1) // size if size else 0
        return table[place : place + 1]


NO_STATES = StateTables(())
"""Those of a model that keeps KV alone."""


def _page_size(spec: Any) -> int | None:
    from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec, UniformTypeKVCacheSpecs

    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if isinstance(spec, CircularBufferSpec):
        return None
    if not isinstance(spec, MambaSpec):
        return 0
    return None if spec.mamba_cache_mode == "none" else int(spec.block_size)
