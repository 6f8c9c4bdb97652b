# SPDX-License-Identifier: Apache-2.0
"""The prompts that an engine computes for consumers: the offers of their KV, and how long their pages are kept."""

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from pd_connector.agent.commands import Command, Expect, Withdraw
from pd_connector.errors import ConfigError
from pd_connector.kv.geometry import pages_for
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire import about
from pd_connector.protocol.wire import params as transfer_params
from pd_connector.protocol.wire.final_token import FinalToken
from pd_connector.vllm.handoff.streaming import Streaming, kept_pages
from pd_connector.vllm.identity.loaded_model import LoadedModel
from pd_connector.vllm.messages import StepCommands
from pd_connector.vllm.pages.held_states import HeldStates
from pd_connector.vllm.pages.replayed import WHOLE_EVERY, replayed
from pd_connector.vllm.pages.state_tables import StateTables
from pd_connector.vllm.pages.status import PageStatus, Use
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.part import COMPLETE, Ended, Part

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class Offers(Part):
    """Used by the scheduler's thread only.

    Args:
        windows: page sizes and windows of the engine's page tables.
        states: the page tables that list states.
        status: decides whether a request's KV may be handed over.
        model: the model that the ranks have loaded.
        address: this engine's address in the form that proxies get.
        streams: whether KV is sent while its prompt is computed.
        replays: vLLM replays a window behind a prefix hit.
    """

    def __init__(
        self,
        windows: Windows,
        states: StateTables,
        status: PageStatus,
        model: LoadedModel,
        address: transfer_params.ProducerAddress,
        *,
        streams: bool,
        replays: bool = False,
    ) -> None:
        self._replays = replays
        self._status = status
        self.address = address
        self._model = model
        self._windows, self._states = windows, states
        # By request: transfer, identity, and whether what it samples is the answer's first token.
        self._transfers: dict[str, tuple[str, bytes, bool]] = {}
        self._describes: set[str] = set()
        # Requests whose states at a boundary will be kept for audits, and until when.
        self._keeps: dict[str, Request] = {}
        self._held = HeldStates(states)
        self._streaming = Streaming(windows, states) if streams else None

    def bind(self, manager: "KVCacheManager") -> None:
        self._held.bind(manager)

    @property
    def expected(self) -> bool:
        """Whether a request that has not ended is to be offered."""
        return bool(self._transfers)

    def publish(self, file: Path) -> None:
        """Write this engine's address into a file.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            file.write_text(json.dumps(self.address.fields()))
        except OSError as error:
            raise ConfigError(
                f"address_file {str(file)!r}: {error.strerror}; must be a file that this engine can write "
                "(config key address_file)"
            ) from None

    def describe(self, request: "Request") -> None:
        """Answer a request that only asks for this engine's description and its ranks' addresses."""
        self._describes.add(request.request_id)

    def add(
        self, request: "Request", transfer: str, identity: bytes, *, chooses_first: bool
    ) -> Command:
        """Add a request whose KV another engine will fetch. Returns a command for the agents.

        Args:
            chooses_first: whether the prompt is whole, so that the sampled token is the answer's first token.
        """
        self._transfers[request.request_id] = transfer, identity, chooses_first
        # By chance: of every 16th prompt, a router that takes turns would send all to the same decode engine.
        if self._replays and random.randrange(WHOLE_EVERY) == 0:
            request.skip_reading_prefix_cache = True
        if self._states.boundary(request.num_prompt_tokens):
            self._keeps[request.request_id] = request
        if self._streaming:
            self._streaming.add(request, transfer, identity)
        return Expect(transfer)

    def weights_changed(self) -> list[Command]:
        withdrawn, self._transfers = self._transfers, {}
        for request_id in list(self._keeps):
            self._keeps.pop(request_id)
            self._held.release(request_id)
        for request_id in withdrawn if self._streaming else ():
            self._streaming.discard(request_id)  # type: ignore[union-attr]
        return [Withdraw(transfer, request) for request, (transfer, *_) in withdrawn.items()]

    def step(self, output: "SchedulerOutput", commands: StepCommands) -> None:
        for request_id in output.preempted_req_ids or () if self._keeps else ():
            self._held.release(request_id)
        for request_id, request in self._keeps.items():
            tokens = output.num_scheduled_tokens.get(request_id, 0)
            boundary = self._states.boundary(request.num_prompt_tokens)
            if tokens and request.num_computed_tokens + tokens >= boundary:
                self._held.hold(request_id, boundary)
        if self._streaming:
            offers, prefills = self._streaming.step(output)
            commands.commands += offers
            commands.prefills += prefills

    def finished(self, request: "Request", pages: tuple[list[int], ...]) -> Ended:
        request_id = request.request_id
        if request_id in self._describes:
            self._describes.discard(request_id)
            tokens = self._states.shortest_with_boundary
            description = about.written(self._model.facts, tokens)
            return Ended(False, transfer_params.description(self.address, description))
        if request_id not in self._transfers:
            return Ended(False, None)
        transfer, identity, chooses_first = self._transfers.pop(request_id)
        self._keeps.pop(request_id, None)
        if self._streaming:
            self._streaming.discard(request_id)
        tokens = request.num_prompt_tokens
        needed = [pages_for(tokens, size) for size in self._windows.page_sizes]
        computed = request.num_computed_tokens
        complete = request.status in COMPLETE and computed >= tokens
        if self._states:  # a state that has gone on stands for other tokens
            complete &= computed == tokens
        if (
            self._status.problem(request, Use.OFFER)
            or not complete
            or any(len(a) < b for a, b in zip(pages, needed, strict=True))
        ):
            self._held.release(request_id)
            return Ended(False, None, (Withdraw(transfer, request_id),))
        kept = [table[:count] for table, count in zip(pages, needed, strict=True)]
        offered = self._states.only(kept, tokens)
        boundary = 0
        if held := self._held.pages(request_id):
            boundary = self._states.boundary(tokens)
            offered = tuple([*a, *b] for a, b in zip(offered, held, strict=True))
        offer = Offer(
            transfer,
            request_id,
            kept_pages(offered),
            identity,
            prompt_tokens=tokens,
            tokens=tokens,
            final=True,
            final_token=_final_token(request, transfer, identity) if chooses_first else None,
            state_token=tokens if self._states else 0,
            boundary_token=boundary,
            approximated=replayed(request),
        )
        answer = transfer_params.response(
            self.address,
            transfer=transfer,
            pages=kept,
            tokens=tokens,
            push=transfer != request_id,
        )
        return Ended(True, answer, (offer,))

    def sent(self, request_id: str) -> None:
        """The pages of a request that has ended are free again."""
        self._held.release(request_id)


def _final_token(request: "Request", transfer: str, identity: bytes) -> FinalToken | None:
    """The first token, for decode engines that continue from it. vLLM gives a connector no log probability of the
    token; a router takes it from this engine's answer."""
    if not request.output_token_ids:
        return None
    first = request.output_token_ids[0]
    return FinalToken(transfer=transfer, identity=identity, first_token=first)
