# SPDX-License-Identifier: Apache-2.0
"""Running prefills in the scheduler: how much of their KV is computed after each step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pd_connector.agent.commands import Command, Revoke
from pd_connector.kv.geometry import pages_for
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.vllm.messages import Prefill
from pd_connector.vllm.pages.replayed import replayed
from pd_connector.vllm.pages.state_tables import StateTables
from pd_connector.vllm.pages.windows import NULL_PAGE, Windows

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Prompt:
    transfer: str
    identity: bytes
    tokens: int
    provisional: bool  # known to be right only at its end
    request: "Request"
    pages: list[list[int]] = field(default_factory=list)
    computed: int = 0
    # First offered page of each table, once the prompt is computed; empty before.
    offered: tuple[int, ...] = ()


class _HasPages(Protocol):
    pages: list[list[int]]


class Streaming:
    """Prompts that are being computed for a consumer.

    Args:
        windows: page sizes and windows of the engine's page tables.
        states: the page tables that list states. States are offered with the final offer.
    """

    def __init__(self, windows: Windows, states: StateTables) -> None:
        self._windows = windows
        self._states = states
        self._prompts: dict[str, _Prompt] = {}

    def add(self, request: "Request", transfer: str, identity: bytes) -> None:
        """A request has been queued. A consumer will fetch its KV."""
        # Its adapter may be replaced, or another client's image come under the same identifier.
        provisional = bool(request.lora_request or request.mm_features)
        tokens = request.num_prompt_tokens
        prompt = _Prompt(transfer, identity, tokens, provisional, request)
        self._prompts[request.request_id] = prompt

    def discard(self, request_id: str) -> None:
        """The request has ended; it streams no more."""
        self._prompts.pop(request_id, None)

    def step(self, output: "SchedulerOutput") -> tuple[list[Command], list[Prefill]]:
        """Commands for this step, and the prompts that the step will compute."""
        commands: list[Command] = []
        for request_id in output.preempted_req_ids or ():
            prompt = self._prompts.get(request_id)
            if prompt is not None and prompt.pages:
                prompt.pages, prompt.computed, prompt.offered = [], 0, ()
                commands.append(Revoke(prompt.transfer, request_id))
        prefills: list[Prefill] = []
        for request_id, computed in scheduled(output, self._prompts):
            prompt = self._prompts[request_id]
            if not prompt.computed and getattr(output, "has_sync_kv_loads", False):
                # Another connector fills pages within the step, and reports only later whether it could.
                self.discard(request_id)  # offered when it has ended
                continue
            if prompt.computed >= prompt.tokens:  # it decodes here; its whole prompt is on offer
                commands += self._take_back(request_id, prompt, computed)
                continue
            before = computed if prompt.computed or _all_computed_before(output) else 0
            prompt.computed = min(
                prompt.tokens, computed + output.num_scheduled_tokens.get(request_id, 0)
            )
            commands.append(self._offer(request_id, prompt, min(before, prompt.tokens)))
            prefills.append(Prefill(prompt.transfer, request_id, prompt.computed))
        return commands, prefills

    def _take_back(self, request_id: str, prompt: _Prompt, computed: int) -> list[Command]:
        """Stop offering pages that vLLM has freed because a sliding window has passed them during decoding. Other pages
        stay offered. A consumer that needs a freed page is refused."""
        first = prompt.offered or self._windows.first_wanted(prompt.tokens)
        ends = (pages_for(prompt.tokens, size) for size in self._windows.page_sizes)
        kept = map(max, first, self._windows.first_kept(computed))
        prompt.offered = tuple(map(min, kept, ends))
        if prompt.offered == first:
            return []
        prompt.pages = [
            [NULL_PAGE] * stop + pages[stop:]
            for pages, stop in zip(prompt.pages, prompt.offered, strict=True)
        ]
        return [
            Revoke(prompt.transfer, request_id),
            self._offer(request_id, prompt, prompt.tokens),
        ]

    def _offer(self, request_id: str, prompt: _Prompt, tokens: int) -> Offer:
        return Offer(
            prompt.transfer,
            request_id,
            kept_pages(self._states.only(prompt.pages)),
            prompt.identity,
            prompt_tokens=prompt.tokens,
            tokens=tokens,
            final=False,
            provisional=prompt.provisional,
            state_token=prompt.tokens if self._states else 0,
            boundary_token=self._states.boundary(prompt.tokens),
            approximated=replayed(prompt.request),
        )


def scheduled(
    output: "SchedulerOutput", requests: Mapping[str, _HasPages]
) -> Iterator[tuple[str, int]]:
    """Yield the ids of `requests` that this step computes, each with its number of tokens that earlier steps have
    computed. Updates these requests' page tables."""
    for new in output.scheduled_new_reqs:
        request = requests.get(new.req_id)
        if request is not None:
            request.pages = [list(table) for table in new.block_ids]
            yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for request_id, tables, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        request = requests.get(request_id)
        if request is None:
            continue
        if request_id in cached.resumed_req_ids:
            request.pages = [list(table) for table in tables or ()]
        else:
            for pages, added in zip(request.pages, tables or (), strict=False):
                pages.extend(added)
        yield request_id, computed


def _all_computed_before(output: "SchedulerOutput") -> bool:
    """Whether the cached KV that a request has found is there when the request's first step begins.

    vLLM puts pages into the cache when it schedules their computation. Another request of the same step can find
    such pages, which fill only during that step. The same holds for copies of cached pages, and for pages that
    another connector loads within the step (0.31 does not tell).
    """
    alone = len(output.num_scheduled_tokens) == 1
    loads = getattr(output, "has_sync_kv_loads", True)
    return alone and not loads and not getattr(output, "kv_cache_block_copies", None)


def kept_pages(tables: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
    """vLLM's page tables, with the id -1 for pages that vLLM does not keep."""
    return tuple(
        [page if page != NULL_PAGE else -1 for page in table] if NULL_PAGE in table else list(table)
        for table in tables
    )
