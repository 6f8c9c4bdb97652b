# SPDX-License-Identifier: Apache-2.0
"""Keeps the states after the last whole page of a prompt, for audits. Without this vLLM would free their page with one
of the next steps, or when the request ends. The page stays in the prefix cache meanwhile."""

from typing import TYPE_CHECKING

from pd_connector.vllm.pages.state_tables import StateTables

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class HeldStates:
    """Pages of states that stay allocated after their request, because this object holds a reference. Used by the
    scheduler's thread only.

    Args:
        states: the engine's tables of states.
    """

    def __init__(self, states: StateTables) -> None:
        self._states = states
        self._manager: KVCacheManager | None = None
        self._held: dict[str, list[list[KVCacheBlock]]] = {}  # by table

    def bind(self, manager: "KVCacheManager") -> None:
        """Attach vLLM's pages, before the first request."""
        self._manager = manager

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def hold(self, request_id: str, position: int) -> bool:
        """Keep the states after `position` tokens, a page boundary. The step that was just scheduled computes them, or
        an earlier step has. Returns False if vLLM keeps no states there."""
        if request_id in self._held:
            return True
        assert self._manager is not None
        tables = self._manager.get_blocks(request_id).blocks
        held: list[list[KVCacheBlock]] = []
        for of_states, table in zip(self._states.list_states, tables, strict=True):
            if not of_states:
                held.append([])
                continue
            # By the position that vLLM has recorded: a page may hold an earlier one than its place in the table says.
            page = [b for b in table if not b.is_null and b.block_hash_num_tokens == position][:1]
            if not page:
                return False
            held.append(page)
        blocks = [block for page in held for block in page]
        if not blocks:
            return False
        self._manager.block_pool.touch(blocks)
        self._held[request_id] = held
        return True

    def pages(self, request_id: str) -> list[list[int]]:
        """The pages that are held for a request, by table; empty if none are."""
        return [[block.block_id for block in page] for page in self._held.get(request_id, ())]

    def release(self, request_id: str) -> None:
        """The request's states are not needed any more."""
        if held := self._held.pop(request_id, None):
            assert self._manager is not None
            self._manager.block_pool.free_blocks([block for page in held for block in page])
