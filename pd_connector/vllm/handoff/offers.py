# SPDX-License-Identifier: Apache-2.0
"""The prompts that an engine computes for others: what their consumers are told, and when pages are kept for them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pd_connector.agent.commands import Command, Expect, Withdraw
from pd_connector.errors import ConfigError
from pd_connector.kv.geometry import pages_for
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire import about
from pd_connector.protocol.wire import params as transfer_params
from pd_connector.protocol.wire.final_token import FinalToken
from pd_connector.vllm.handoff.streaming import Streaming, kept_pages
from pd_connector.vllm.messages import StepCommands
from pd_connector.vllm.pages.status import PageStatus, Use
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.part import COMPLETE, Ended, Part

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class Offers(Part):
    """Used by the scheduler's thread only.

    Args:
        windows: page sizes and windows of the engine's page tables.
        status: says whether a request's KV may be handed over.
        address: this engine's address, as proxies are told it.
        streams: whether KV is sent while its prompt is computed.
    """

    def __init__(
        self,
        windows: Windows,
        status: PageStatus,
        address: transfer_params.ProducerAddress,
        *,
        streams: bool,
    ) -> None:
        self._status = status
        self.address = address
        self.model: ModelFacts | None = None  # of the first rank, as it was at the start
        self._windows = windows
        self._known: dict[str, tuple[str, bytes]] = {}  # transfer and identity by request
        self._describes: set[str] = set()
        self._streaming = Streaming(windows) if streams else None

    @property
    def expected(self) -> bool:
        """Whether a request that has not ended is to be offered."""
        return bool(self._known)

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
        """A request has come that only asks what this engine is, and for the addresses of its ranks."""
        self._describes.add(request.request_id)

    def add(self, request: "Request", transfer: str, identity: bytes) -> Command:
        """A request has come, and another engine wants its KV. Returns a command for the agents."""
        self._known[request.request_id] = transfer, identity
        if self._streaming:
            self._streaming.add(request, transfer, identity)
        return Expect(transfer)

    def weights_changed(self) -> list[Command]:
        known, self._known = self._known, {}
        for request_id in known if self._streaming else ():
            self._streaming.discard(request_id)  # type: ignore[union-attr]
        return [Withdraw(transfer, request) for request, (transfer, _) in known.items()]

    def step(self, output: "SchedulerOutput", commands: StepCommands) -> None:
        if self._streaming:
            offers, prefills = self._streaming.step(output)
            commands.commands += offers
            commands.prefills += prefills

    def finished(self, request: "Request", pages: tuple[list[int], ...]) -> Ended:
        request_id = request.request_id
        if request_id in self._describes:
            self._describes.discard(request_id)
            told = about.written(self.model)
            return Ended(False, transfer_params.description(self.address, told))
        if request_id not in self._known:
            return Ended(False, None)
        transfer, identity = self._known.pop(request_id)
        if self._streaming:
            self._streaming.discard(request_id)
        tokens = request.num_prompt_tokens
        wanted = [pages_for(tokens, size) for size in self._windows.page_sizes]
        complete = request.status in COMPLETE and request.num_computed_tokens >= tokens
        if (
            self._status.problem(request, Use.OFFER)
            or not complete
            or any(len(a) < b for a, b in zip(pages, wanted, strict=True))
        ):
            return Ended(False, None, (Withdraw(transfer, request_id),))
        kept = [table[:count] for table, count in zip(pages, wanted, strict=True)]
        offer = Offer(
            transfer,
            request_id,
            kept_pages(kept),
            identity,
            prompt_tokens=tokens,
            tokens=tokens,
            final=True,
            final_token=_final_token(request, transfer, identity),
        )
        answer = transfer_params.response(
            self.address,
            transfer=transfer,
            pages=kept,
            tokens=tokens,
            push=transfer != request_id,
        )
        return Ended(True, answer, (offer,))


def _final_token(request: "Request", transfer: str, identity: bytes) -> FinalToken | None:
    """The first token, for decode engines that continue from it. vLLM does not tell a connector the token's log
    probability; a router takes that from this engine's answer."""
    if not request.output_token_ids:
        return None
    first = request.output_token_ids[0]
    return FinalToken(transfer=transfer, identity=identity, first_token=first)
