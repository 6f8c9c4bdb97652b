# SPDX-License-Identifier: Apache-2.0
"""What the scheduler knows of running prefills: which of their KV is computed, step by step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_connector.agent.commands import Command, Revoke
from pd_connector.protocol.outgoing import Offer
from pd_connector.vllm.messages import Prefill

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_NULL_PAGE = 0
"""vLLM's page id for a page that a sliding window has passed."""


@dataclass(slots=True)
class _Prompt:
    transfer: str
    identity: bytes
    tokens: int
    pages: list[list[int]] = field(default_factory=list)
    computed: int = 0


class Streaming:
    """Prompts that are being computed for a consumer."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}

    def add(self, request: "Request", transfer: str, identity: bytes) -> None:
        """A request has been queued whose KV will be fetched."""
        self._prompts[request.request_id] = _Prompt(transfer, identity, request.num_prompt_tokens)

    def discard(self, request_id: str) -> None:
        """The request has ended; it streams no more."""
        self._prompts.pop(request_id, None)

    def step(self, output: "SchedulerOutput") -> tuple[list[Command], list[Prefill]]:
        """What has changed with this step, and what the step will compute."""
        commands: list[Command] = []
        for request_id in output.preempted_req_ids or ():
            prompt = self._prompts.get(request_id)
            if prompt is not None and prompt.pages:
                prompt.pages, prompt.computed = [], 0
                commands.append(Revoke(prompt.transfer, request_id))
        prefills: list[Prefill] = []
        for request_id, computed in self._scheduled(output):
            prompt = self._prompts[request_id]
            if prompt.computed >= prompt.tokens:
                continue  # it decodes here; its whole prompt is on offer
            prompt.computed = min(
                prompt.tokens, computed + output.num_scheduled_tokens.get(request_id, 0)
            )
            commands.append(
                Offer(
                    prompt.transfer,
                    request_id,
                    kept_pages(prompt.pages),
                    prompt.identity,
                    prompt_tokens=prompt.tokens,
                    tokens=min(computed, prompt.tokens),
                    final=False,
                )
            )
            prefills.append(Prefill(prompt.transfer, request_id, prompt.computed))
        return commands, prefills

    def _scheduled(self, output: "SchedulerOutput") -> Iterable[tuple[str, int]]:
        """Our requests in this step, with their tokens computed before it."""
        for new in output.scheduled_new_reqs:
            prompt = self._prompts.get(new.req_id)
            if prompt is not None:
                prompt.pages = [list(table) for table in new.block_ids]
                yield new.req_id, new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, tables, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            if request_id in cached.resumed_req_ids:
                prompt.pages = [list(table) for table in tables or ()]
            else:
                for known, added in zip(prompt.pages, tables or (), strict=False):
                    known.extend(added)
            yield request_id, computed


def kept_pages(tables: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
    """vLLM's page tables as ours: a page that is not kept has the id -1."""
    return tuple(
        [page if page != _NULL_PAGE else -1 for page in table]
        if _NULL_PAGE in table
        else list(table)
        for table in tables
    )
