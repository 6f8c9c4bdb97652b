# SPDX-License-Identifier: Apache-2.0
"""Objects that the requests of one rank share: its agent and the agent's reports, SGLang's buffers, and the pages of
its pool."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from pd_connector.agent.agent import Agent
from pd_connector.agent.commands import Expect, Withdraw
from pd_connector.agent.pending_outcomes import Outcome
from pd_connector.protocol.consuming.incoming import Finished, Held
from pd_connector.protocol.producing.outgoing import Free
from pd_connector.sglang.adapters import Adapters
from pd_connector.sglang.admission import Admission
from pd_connector.sglang.requests import fingerprint, transfer_of

Kind = TypeVar("Kind", Free, Finished, Held)


class PoolPages:
    """The pages of SGLang's pool, as requests name them.

    Args:
        scheduler: SGLang's; it has the pool's allocator.
        size: tokens of a page.
        limit: the first number above those of the pool's pages.
        windows: whether there are layers with a sliding window. Their pages have numbers of their own.
        slots: number of slots of the pool of recurrent states; 0: the model has none.
    """

    def __init__(
        self, scheduler: Any, size: int, *, limit: int, windows: bool, slots: int = 0
    ) -> None:
        self.size = size
        self.limit = limit
        self.slots = slots
        self._scheduler = scheduler
        self.windows = windows

    def check(self, pages: Sequence[int]) -> None:
        """Raise ValueError if a page is not one of the pool's. (The agent would find out, too, and end all requests
        of its session.)"""
        if not all(0 <= page < self.limit for page in pages):
            wrong = next(page for page in pages if not 0 <= page < self.limit)
            raise ValueError(f"page {wrong}: the pool has pages 0 to {self.limit - 1}")

    def state_slot(self, payload: Sequence[Any]) -> tuple[int, ...]:
        """The slot of a request's recurrent states, as a page table.

        Args:
            payload: as SGLang passes it with the request's KV.

        Raises:
            ValueError: it is not one of the pool's; slot 0 belongs to no request.
        """
        (slot,) = (int(each) for each in payload)
        if not 0 < slot < self.slots:
            raise ValueError(f"state in slot {slot}: the pool has slots 1 to {self.slots - 1}")
        return (slot,)

    def tables(
        self, pages: Sequence[int], state: tuple[int, ...] = ()
    ) -> tuple[tuple[int, ...], ...]:
        """A request's pages by page table. Pages of layers with a sliding window are translated from the other pages;
        -1 for pages that SGLang has freed because the window has passed them.

        Args:
            state: its slot (`state_slot`), once its states are computed.
        """
        if self.slots:
            return tuple(pages), state
        if not self.windows:
            return (tuple(pages),)
        slots = torch.tensor(pages, dtype=torch.int64) * self.size
        allocator = self._scheduler.token_to_kv_pool_allocator
        window_slots = allocator.translate_swa_indices_for_transfer(
            slots.to(self._scheduler.device)
        )
        windowed = (window_slots // self.size).tolist()
        return tuple(pages), tuple(page if page > 0 else -1 for page in windowed)

    def forward_fence(self) -> Any:
        """A point in the stream on which SGLang computes: a forward pass that is under way may still write pages of a
        request that has just ended. None on a CPU."""
        stream = getattr(self._scheduler, "forward_stream", None)
        return stream.record_event() if isinstance(stream, torch.cuda.Stream) else None


class Outcomes:
    """Outcomes of one rank's requests. Used by the engine's thread.

    Attributes:
        watched: requests whose outcomes are kept.
    """

    def __init__(self, agent: Agent) -> None:
        self.watched: set[str] = set()
        self._agent = agent
        self._reported: dict[tuple[type[Outcome], str], Outcome] = {}

    def watch(self, request: str) -> None:
        """Keep the agent's reports about this request, until `forget`."""
        self.watched.add(request)

    def take(self, kind: type[Kind], request: str) -> Kind | None:
        """Take the agent's report about a request, if it is of this kind."""
        for outcome in self._agent.outcomes():
            if outcome.request in self.watched:
                self._reported[type(outcome), outcome.request] = outcome
        taken = self._reported.pop((kind, request), None)
        assert taken is None or isinstance(taken, kind)
        return taken

    def forget(self, request: str) -> None:
        """The request is over: drop its reports."""
        self.watched.discard(request)
        for kind in (Free, Finished, Held):
            self._reported.pop((kind, request), None)


class Rank:
    """Used by the scheduler's thread.

    Attributes:
        agent: agent of this rank.
        admission: which requests enter SGLang's queues.
        outcomes: what the agent has reported of requests.
        buffers: SGLang's metadata buffers.
        pages: pages of SGLang's pool.
        produces: whether this is a prefill engine.
        offers_early: whether KV of a prompt is sent before all of it is computed (config key `overlap`).
        leads: whether this is the first of the ranks that have parts of the same requests.
        vocabulary: size of the model's vocabulary, the first number that is not a token.
        drafted: number of tokens of a first draft; 0: the engine does not draft (no speculative decoding).
        draft_vocabulary: size of the draft model's vocabulary, if the engine drafts.
    """

    def __init__(
        self,
        agent: Agent,
        admission: Admission,
        buffers: Any,
        pages: PoolPages,
        adapters: Adapters,
        *,
        produces: bool,
        offers_early: bool,
        leads: bool,
        vocabulary: int,
        drafted: int = 0,
        draft_vocabulary: int = 0,
    ) -> None:
        self.agent = agent
        self.admission = admission
        self.outcomes = Outcomes(agent)
        self.buffers = buffers
        self.pages = pages
        self.produces = produces
        self.offers_early = offers_early
        self.leads = leads
        self.vocabulary = vocabulary
        self.drafted = drafted
        self.draft_vocabulary = draft_vocabulary
        self._adapters = adapters

    def identity(self, req: Any, tokens: Sequence[int]) -> bytes:
        """Fingerprint of everything that KV of these tokens of a request depends on.

        Raises:
            PDConnectorError: its adapter cannot be identified by its content.
        """
        return fingerprint(req, tokens, self._adapters.name(req.lora_id))

    @staticmethod
    def request_name(rid: str, room: int) -> str:
        """The agent's name for a request. It is not SGLang's own id, because that may come twice."""
        return f"{room}/{rid}"

    def refused(self, req: Any) -> None:
        """SGLang has refused a request of this prefill engine before it entered a queue, such as a prompt that is
        longer than the pool. A decode engine that waits for it is notified."""
        transfer = transfer_of(req.bootstrap_room)
        self.agent.submit(Expect(transfer))
        self.agent.submit(Withdraw(transfer, self.request_name(req.rid, req.bootstrap_room)))

    def count_handoff(self, outcome: str) -> None:
        """A request of this decode engine has its KV, or will not get it. One rank counts for all."""
        if self.leads:
            self.agent.telemetry.count("handoffs", cause=outcome)
