# SPDX-License-Identifier: Apache-2.0
"""One request of a prefill engine, as SGLang's queues see it.

SGLang calls `poll` in each turn of its loop, and moves the request on by the answer. It calls `send` when a
chunk of the prompt has been computed. Before it frees the request's pages it calls `abort`, or, if a poll said
`Failed` on any rank, `failure_exception`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import BaseKVSender, KVPoll, KVTransferMetric

from pd_connector.agent.commands import Computed, Expect, Withdraw
from pd_connector.errors import Cause
from pd_connector.protocol.producing.outgoing import Free, Offer
from pd_connector.protocol.wire.final_token import FinalToken
from pd_connector.sglang.failure import TransferError, contained
from pd_connector.sglang.final_token import read_row
from pd_connector.sglang.rank import Rank
from pd_connector.sglang.requests import transfer_of


class Sender(BaseKVSender):
    """Made when the request comes into the prefill engine; `bind` follows at once."""

    def __init__(
        self,
        mgr: Any,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr  # SGLang looks for it
        self._rank: Rank = mgr.rank
        self.bootstrap_room = bootstrap_room
        self._transfer = transfer_of(bootstrap_room)
        self._request = ""
        self._state = KVPoll.WaitingForInput  # computing needs nothing from the decode engine
        self._failure: tuple[Cause, str] | None = None
        self._pages: list[int] = []
        self._state_slot: tuple[int, ...] = ()  # once its recurrent states are computed
        self._sent_tokens = 0
        self._announced = False  # the agent knows that KV will come
        self._row = -1
        self._withdrawn = False
        self._freed = False  # the agent has ended the transfer

    @contained
    def bind(self, req: Any) -> None:
        """Attach the request, which a sender is not given when it is made."""
        self._rank.admission.enter(self.bootstrap_room)
        self._req = req
        self._request = self._rank.request_name(req.rid, self.bootstrap_room)
        self._rank.outcomes.watch(self._request)
        # First, so that a decode engine that waits for this request is notified if it fails here.
        self._rank.agent.submit(Expect(self._transfer))
        self._prompt_tokens = len(req.origin_input_ids)
        self._identity = self._rank.identity(req, req.origin_input_ids)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """The request has a row of the metadata buffers."""
        self._row = -1 if aux_index is None else aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """The last chunk is sent even without pages: the final token goes with it."""
        return num_pages > 0 or last_chunk

    @contained
    def send(
        self,
        kv_indices: npt.NDArray[np.int32],
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """More of the prompt is computed.

        Args:
            kv_indices: the pages that hold the next `num_kv_tokens` tokens.
            state_indices: the place of each kind of state (`KVArgs.state_types`); given only with the last chunk of the
                prompt.
        """
        assert num_kv_tokens is not None
        final = state_indices is not None
        first = self._sent_tokens // self._rank.pages.size
        self._rank.pages.check(pages := kv_indices.tolist())
        self._pages[first : first + len(pages)] = pages
        self._sent_tokens = min(self._sent_tokens + num_kv_tokens, self._prompt_tokens)
        if state_indices is not None and self._rank.pages.slots:
            (payload,) = state_indices
            self._state_slot = self._rank.pages.state_slot(payload)
        if final and self._failure is None:
            self._state = KVPoll.Transferring
        if final or self._rank.offers_early:
            # With a cached prefix SGLang gives an event: the step before may still write the prefix.
            self._offer(final=final, fence=getattr(self, "_early_send_wait_event", None))

    @contained
    def announce(self) -> None:
        """Announce that this step computes more of the prompt, so more KV will come."""
        if self._failure is None and self._request and not self._announced:
            self._offer(final=False, fence=None)

    def begin_step(self, pages: list[int], tokens: int) -> Computed | None:
        """A step begins that computes the prompt's first `tokens` tokens, into these pages from the prompt's start.
        Returns the message for the agent after each layer; None if the request has failed."""
        if self._failure is not None or not self._request:
            return None
        self._pages[: len(pages)] = pages
        self._offer(final=False, fence=None)
        return Computed(self._transfer, self._request, tokens)

    def poll(self) -> int:
        if self._failure is None and self._state == KVPoll.Transferring:
            self._look()
        return int(KVPoll.Failed if self._failure else self._state)

    def poll_pp_consensus(self) -> int:
        return self.poll()

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric()

    def failure_exception(self) -> None:
        """Raise why the request failed. Other ranks may have failed without this one; this rank then stops, too."""
        self._withdraw()
        self._rank.admission.leave(self.bootstrap_room)
        aborted = self._failure is not None and self._failure[0] is Cause.ABORTED
        handoff = self._freed or aborted or self._failure is None
        raise TransferError(self.bootstrap_room, self._failure, handoff=handoff)

    def abort(self) -> None:
        """The request has ended: after the return nothing reads its pages."""
        self._failure = self._failure or (Cause.ABORTED, "the request was aborted")
        self._withdraw()
        self._rank.admission.leave(self.bootstrap_room)

    def clear(self) -> None:
        self._rank.admission.leave(self.bootstrap_room)
        self._rank.outcomes.forget(self._request)

    def fail(self, cause: Cause, detail: str) -> None:
        """This side cannot continue."""
        self._failure = self._failure or (cause, detail)
        self._withdraw()

    @contained
    def _look(self) -> None:
        freed = self._rank.outcomes.take(Free, self._request)
        if freed is None:
            return
        self._withdrawn = self._freed = True  # the agent no longer uses the pages
        if freed.cause in (None, Cause.NOT_NEEDED):  # a vLLM engine may already have all of it
            self._state = KVPoll.Success
        else:
            self._failure = freed.cause, "the decode engine did not take all of it"

    def _withdraw(self) -> None:
        """Take the pages back, unless the agent no longer uses them."""
        if not self._withdrawn:
            self._withdrawn = True
            self._rank.agent.submit(Withdraw(self._transfer, self._request))
        self._rank.outcomes.forget(self._request)

    def _offer(self, *, final: bool, fence: Any) -> None:
        """Offer the request's pages to the agent. All tokens that SGLang has sent are computed. Later tokens of a
        running step count only once SGLang sends them."""
        self._announced = True
        offer = Offer(
            self._transfer,
            self._request,
            self._rank.pages.tables(self._pages, self._state_slot),
            self._identity,
            prompt_tokens=self._prompt_tokens,
            tokens=self._sent_tokens,
            final=final,
            final_token=self._final_token() if final else None,
            state_token=self._prompt_tokens if self._rank.pages.slots else 0,
        )
        self._rank.agent.submit(offer, fence=fence)

    def _final_token(self) -> FinalToken:
        buffers = self._rank.buffers
        return read_row(buffers, self._row, self._req, self._identity, self._transfer)
