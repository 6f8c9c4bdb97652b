# SPDX-License-Identifier: Apache-2.0
"""One request of a decode engine, as SGLang's queues see it.

SGLang calls `init` when it knows the prefill engine, `send_metadata` when the request has pages, and `poll` in each
turn of its loop. Before it frees the request's pages it calls `abort`, `clear`, or, if a poll said `Failed` on any
rank, `failure_exception`.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVPoll, KVTransferDestination

from pd_connector.agent.commands import Drop, Hold
from pd_connector.errors import Cause
from pd_connector.protocol.consuming.incoming import Finished, Held, Load
from pd_connector.protocol.wire.peers import Peer
from pd_connector.protocol.wire.prefill_server import parse_server
from pd_connector.sglang.failure import TransferError, contained
from pd_connector.sglang.final_token import draft_problem, write_row
from pd_connector.sglang.recompute import SecondPrefill
from pd_connector.sglang.requests import room_after_retraction, transfer_of

if TYPE_CHECKING:
    from pd_connector.sglang.manager import Manager

_LEFT_OUT = (
    "; if vLLM has computed the prompt without its last token, set from_first_token in the kv_transfer_params of its "
    "request (this project's router does)"
)


class Receiver(BaseKVReceiver):
    """Made when the request comes into the decode engine; `bind` follows at once."""

    require_staging = False
    abort_notified = False

    def __init__(
        self, mgr: "Manager", bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        assert bootstrap_room is not None  # such requests are not admitted
        self.kv_mgr = mgr
        self._rank = mgr.rank
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self._transfer = transfer_of(bootstrap_room)
        self._request = ""
        self._state = KVPoll.Bootstrapping
        self._failure: tuple[Cause, str] | None = None
        self._peers: tuple[Peer, ...] = ()
        self._row = -1
        self._prefix = 0
        self._tables: tuple[tuple[int, ...], ...] | None = None  # its pages here, once it has pages
        self._requested = False  # the agent has a command for this request
        self._again: SecondPrefill | None = None
        self._resumed: SecondPrefill | None = None
        self._rest: dict[str, Any] | None = None  # what a retracted request asks a prefill engine
        self._first_failure: tuple[Cause, str] | None = None  # of the first attempt

    @property
    def conclude_state(self) -> int | None:
        """The final state, if the request has ended."""
        if self._failure:
            return int(KVPoll.Failed)
        return int(KVPoll.Success) if self._state == KVPoll.Success else None

    @contained
    def bind(self, req: Any) -> None:
        """Attach the request, which a receiver is not given when it is made."""
        self._rank.admission.enter(self.bootstrap_room)
        self._req = req
        tokens, room = req.origin_input_ids, self.bootstrap_room
        # SGLang has retracted the request because its weights change (`pause_generation`, mode `retract`).
        self._retracted = bool(getattr(req, "pd_rebootstrap_in_progress", False))
        if self._retracted:
            tokens, room = [*tokens, *req.output_ids], room_after_retraction(req)
            self._transfer = transfer_of(room)
        self._prompt_tokens = len(tokens)
        self._identity = self._rank.identity(req, tokens)
        self._request = self._rank.request_name(req.rid, room)
        self._rank.outcomes.watch(self._request)
        if problem := self._rank.admission.length_problem(len(tokens)):
            self.fail(Cause.NO_ROOM, problem)

    @contained
    def init(self, prefill_dp_rank: int) -> None:
        """The prefill engine is known: wait until its KV begins to arrive.

        Args:
            prefill_dp_rank: the replica that has the request.
        """
        engine = self.kv_mgr.prefill_engine(self.bootstrap_addr)
        if engine.problem is not None:
            self.fail(*engine.problem)
            return
        if not 0 <= prefill_dp_rank < len(engine.replicas):
            self.fail(
                Cause.ROLE,
                f"prefill replica {prefill_dp_rank} of {len(engine.replicas)}: there is none",
            )
            return
        self._peers = engine.replicas[prefill_dp_rank]
        if self._retracted:
            self._state = (
                KVPoll.WaitingForInput
            )  # the request to the prefill engine follows once there are pages
            return
        self._ask()

    @contained
    def compute_again(self, payload: dict[str, Any]) -> None:
        """SGLang has retracted the request: request KV of its prompt, and of the answer up to now, from the prefill
        engine.

        Args:
            payload: SGLang's own body for this request.
        """
        if self._failure is not None:
            return
        if self._req.multimodal_inputs is not None or self._req.lora_id is not None:
            request = "a retracted request with images or an adapter"
            self.fail(Cause.ROLE, f"{request} is not computed again by a prefill engine")
            return
        body = {name: value for name, value in payload.items() if value is not None}
        body.pop("rid", None)  # the prefill engine may still know it
        body["bootstrap_room"] = int(self._transfer)
        self._rest = body
        server = parse_server(self._req.sampling_params.custom_params)
        self._resumed = self.kv_mgr.resume(body, self.bootstrap_addr, server)

    @contained
    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
    ) -> None:
        """The request has pages for its KV.

        Args:
            kv_indices: the pages of the tokens after the prefix.
            aux_index: the request's row of the metadata buffers.
            state_indices: if layers have a sliding window, the pages of the prompt's last tokens in the pool of
                these layers; if layers are recurrent, the slot of their states. Index keys have the pages of the KV.
            decode_prefix_len: tokens at the prompt's start that this engine already has.
        """
        prefix = decode_prefix_len or 0
        assert aux_index is not None
        self._row = aux_index
        self._state = KVPoll.Transferring
        held = [-1] * (prefix // self._rank.pages.size)
        self._rank.pages.check(pages := kv_indices.tolist())
        tables = [(*held, *pages)]
        for state in state_indices or ():
            if self._rank.pages.slots:
                tables.append(self._rank.pages.state_slot(state))
            elif self._rank.pages.windows:
                tables.append((*[-1] * (len(tables[0]) - len(state)), *state.tolist()))
        self._tables = tuple(tables)
        self._prefix = prefix
        self._ask()

    def poll(self) -> int:
        if self.conclude_state is None and self._again is not None:
            self._look_again(self._again)
        if self.conclude_state is None and self._requested:
            self._look()
        if self.conclude_state is None and self._resumed is not None and self._resumed.problem:
            self._not_computed(self._resumed.problem)
        return int(KVPoll.Failed if self._failure else self._state)

    def poll_pp_consensus(self) -> int:
        return self.poll()

    def failure_exception(self) -> None:
        """Raise why the request failed. Other ranks may have failed without this one; this rank then stops, too."""
        self._drop()
        self._rank.count_handoff(self._failure[0] if self._failure else Cause.ABORTED)
        raise TransferError(self.bootstrap_room, self._failure)

    def abort(self) -> None:
        """The request has ended: after the return nothing writes to its pages."""
        self._failure = self._failure or (Cause.ABORTED, "the request was aborted")
        self._drop()

    def clear(self) -> None:
        self._rank.admission.leave(self.bootstrap_room)
        self._drop()
        self._rank.outcomes.forget(self._request)

    def fail(self, cause: Cause, detail: str) -> None:
        """This side cannot continue."""
        self._failure = self._failure or (cause, detail)
        self._drop()

    @contained
    def _look(self) -> None:
        if self._state == KVPoll.Bootstrapping:
            held = self._rank.outcomes.take(Held, self._request)
            if held is None:
                return
            if held.cause is None:
                self._state = KVPoll.WaitingForInput
            else:
                self._ended(held.cause, held.detail)
            return
        finished = self._rank.outcomes.take(Finished, self._request)
        if finished is None:
            return
        if finished.cause is not None or finished.final_token is None:
            self._ended(finished.cause or Cause.INTERNAL, finished.detail)
            return
        self._requested = False
        token = finished.final_token.first_token
        if token >= self._rank.vocabulary:  # SGLang would answer with status 200, and end early
            detail = f"first token {token}: the model's vocabulary has {self._rank.vocabulary}"
            self._ended(Cause.WORDS, detail)
            return
        buffers, drafted = self._rank.buffers, self._rank.drafted
        if drafted:
            vocabulary = self._rank.draft_vocabulary
            problem = draft_problem(buffers, finished.final_token, drafted, vocabulary)
            if problem:
                self._ended(Cause.WORDS, problem)
                return
        room, drafts = self.bootstrap_room, drafted > 0
        write_row(buffers, self._row, finished.final_token, room, drafts=drafts)
        self._state = KVPoll.Success
        self._rank.count_handoff("handed_over")

    def _ask(self) -> None:
        """Have the agent wait for the transfer, or fetch it if there are pages for it."""
        self._requested = True
        agent = self._rank.agent
        if self._tables is None:
            agent.submit(Hold(self._request, self._transfer, self._peers, watch=True))
            return
        load = Load(
            self._request,
            self._transfer,
            self._peers,
            self._identity,
            first_token=self._prefix,
            stop_token=self._prompt_tokens,
            pages=self._tables,
            wait=True,
            # SGLang goes on from the prefill engine's token.
            state_token=self._prompt_tokens if self._rank.pages.slots else 0,
        )
        agent.submit(load, fence=self._rank.pages.forward_fence())

    def _ended(self, cause: Cause, detail: str) -> None:
        """The agent has ended the transfer: the prompt is computed again, or the request fails."""
        if cause is Cause.TOKENS and self._rank.pages.slots:
            detail += _LEFT_OUT
        self._requested = False
        if cause in (Cause.UNREACHABLE, Cause.SESSION_LOST):
            self.kv_mgr.forget_prefill_engine(self.bootstrap_addr)  # it may have been restarted
        if self._first_failure is not None:
            first = self._first_failure[0]
            self._failure = cause, f"{detail} (the second attempt, after {first})"
            return
        self._resumed = None
        self._again = self.kv_mgr.compute_again(self._req, self.bootstrap_addr, cause, self._rest)
        if self._again is None:
            self._failure = cause, detail
            return
        self._first_failure = cause, detail
        self._rank.outcomes.forget(self._request)
        self._transfer = transfer_of(self._again.room)
        self._request = self._rank.request_name(self._req.rid, self._again.room)
        self._rank.outcomes.watch(self._request)
        self._peers = ()

    @contained
    def _not_computed(self, problem: str) -> None:
        """The prefill engine has failed a retracted request."""
        self._drop()
        self._ended(Cause.PREFILL_ENDED, f"retracted, and not computed again: {problem}")

    @contained
    def _look_again(self, again: SecondPrefill) -> None:
        """Ask for the second attempt's KV once the prefill engine is known."""
        assert self._first_failure is not None
        cause, detail = self._first_failure
        if again.problem:
            self.fail(cause, f"{detail}; the prefill engine was asked again: {again.problem}")
            return
        if self._peers:
            return
        engine = self.kv_mgr.look_up(self.bootstrap_addr)
        if engine is None:
            return
        if engine.problem is not None:
            self.kv_mgr.forget_prefill_engine(self.bootstrap_addr)
            self.fail(cause, f"{detail}; asked again: {engine.problem[1]}")
            return
        # As SGLang chooses the replica that computes it (`--load-balance-method follow_bootstrap_room`).
        self._peers = engine.replicas[again.room % len(engine.replicas)]
        self._ask()

    def _drop(self) -> None:
        if self._requested:
            self._requested = False
            cause = self._failure[0] if self._failure else Cause.ABORTED
            self._rank.agent.submit(Drop(self._request, cause))
