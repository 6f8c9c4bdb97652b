# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler: which requests fetch, which requests offer.

It decides and keeps no KV; commands travel to the worker with the next step. Whatever is wrong
with a request's parameters, the request is computed here as if it had none.
"""

import enum
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from pd_connector.agent import Command, Drop, Expect, Hold, Withdraw
from pd_connector.consumer import Load, Source
from pd_connector.errors import Cause
from pd_connector.geometry import pages_for
from pd_connector.identity import token_fingerprint
from pd_connector.producer import Offer
from pd_connector.telemetry import Telemetry
from pd_connector.vllm import params as transfer_params

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger("pd_connector.vllm")

_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class _Stage(enum.Enum):
    HELD = enum.auto()  # waits for pages here; its KV is kept there
    LOADING = enum.auto()
    OVER = enum.auto()  # loaded, failed or not needed: from now on an ordinary request


@dataclass(slots=True)
class _Fetch:
    """A request whose prompt is computed elsewhere."""

    transfer: str
    source: Source
    wait: bool
    stage: _Stage = _Stage.HELD
    computed_tokens: int = 0  # found in the prefix cache when vLLM asked last


class SchedulerSide:
    """Called by vLLM's scheduler only.

    Args:
        engine_id: told to proxies, and checked by consumers when they dial.
        page_size: tokens of a page.
        produces: whether requests may offer their KV.
        consumes: whether requests may fetch their KV.
    """

    def __init__(self, *, engine_id: str, page_size: int, produces: bool, consumes: bool) -> None:
        self.telemetry = Telemetry()
        self._engine_id = engine_id
        self._page_size = page_size
        self._produces = produces
        self._consumes = consumes
        self._host = ""
        self._port = 0
        self._fetches: dict[str, _Fetch] = {}
        self._offers: dict[str, str] = {}  # request -> transfer
        self._describes: set[str] = set()
        self._commands: list[Command] = []
        self._slots_out = 0

    def set_address(self, host: str, port: int) -> None:
        """Where the worker listens."""
        self._host, self._port = host, port

    def on_new_request(self, request: "Request") -> None:
        """A request enters the queue: its KV, kept elsewhere or wanted elsewhere, is announced."""
        try:
            parsed = transfer_params.parse(request.kv_transfer_params)
            if parsed is None:
                return
            if request.prompt_token_ids is None or request.prompt_embeds is not None:
                raise ValueError("the prompt has embeddings: only token prompts are moved")
        except (ValueError, TypeError) as error:
            self._ignore(request, Cause.MALFORMED_PARAMS, str(error))
            return
        if parsed.do_remote_prefill:
            self._announce_fetch(request, parsed)
        elif not self._produces:
            self._ignore(request, Cause.ROLE, "do_remote_decode, but kv_role is kv_consumer")
        elif parsed.describe:
            self._describes.add(request.request_id)
        else:
            transfer = parsed.transfer_id or request.request_id
            self._offers[request.request_id] = transfer
            self._commands.append(Expect(transfer))

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens to fetch beyond what is cached here. May be asked often; changes nothing."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.stage is not _Stage.HELD:
            return 0, False
        fetch.computed_tokens = num_computed_tokens
        missing = request.num_prompt_tokens - num_computed_tokens
        # The last token is computed here in any case: it alone is not worth a fetch.
        return (missing, True) if missing > 1 else (0, False)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Pages have been allocated: fetch into them, or let the producer go."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.stage is not _Stage.HELD:
            return
        if num_external_tokens == 0:
            fetch.stage = _Stage.OVER
            self._commands.append(Drop(request.request_id, Cause.NOT_NEEDED))
            return
        fetch.stage = _Stage.LOADING
        (pages,) = blocks.get_block_ids()
        first_page = fetch.computed_tokens // self._page_size
        stop_page = pages_for(fetch.computed_tokens + num_external_tokens, self._page_size)
        self._commands.append(
            Load(
                request=request.request_id,
                transfer=fetch.transfer,
                source=fetch.source,
                identity=_identity(request),
                first_page=first_page,
                pages=list(pages[first_page:stop_page]),
                wait=fetch.wait,
            )
        )

    def take_commands(self) -> list[Command]:
        """Commands for the worker since the last step."""
        commands, self._commands = self._commands, []
        return commands

    def load_ended(self, request_id: str) -> None:
        """The worker reported the end of a load, good or bad."""
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            fetch.stage = _Stage.OVER

    def worker_reported(self, slots: int) -> None:
        """Slots of the worker that have not come home."""
        self._slots_out = slots

    @property
    def pending_work(self) -> bool:
        """Whether steps are needed although no request is: for commands, and for slots."""
        return bool(self._commands or self._slots_out)

    def request_finished(
        self, request: "Request", pages: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, in whatever way. Returns whether its pages stay, and the answer
        for the proxy."""
        request_id = request.request_id
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None and fetch.stage is not _Stage.OVER:
            self._commands.append(Drop(request_id, Cause.ABORTED))
        if request_id in self._describes:
            self._describes.discard(request_id)
            return False, transfer_params.description(
                engine_id=self._engine_id, host=self._host, port=self._port
            )
        transfer = self._offers.pop(request_id, None)
        if transfer is None:
            return False, None
        tokens = request.num_prompt_tokens
        offered = pages[: pages_for(tokens, self._page_size)]
        complete = request.status in _COMPLETE and request.num_computed_tokens >= tokens
        if not complete or len(offered) < pages_for(tokens, self._page_size):
            self._commands.append(Withdraw(transfer))
            return False, None
        self._commands.append(Offer(transfer, request_id, offered, _identity(request)))
        return True, transfer_params.response(
            engine_id=self._engine_id,
            host=self._host,
            port=self._port,
            transfer=transfer,
            pages=offered,
            tokens=tokens,
        )

    def _announce_fetch(self, request: "Request", parsed: transfer_params.TransferParams) -> None:
        assert parsed.remote_host is not None
        assert parsed.remote_port is not None
        assert parsed.remote_request_id is not None
        transfer = parsed.remote_request_id
        if not self._consumes:
            self._ignore(request, Cause.ROLE, "do_remote_prefill, but kv_role is kv_producer")
            return
        if any(fetch.transfer == transfer for fetch in self._fetches.values()):
            self._ignore(request, Cause.DUPLICATE, f"transfer {transfer} is being fetched already")
            return
        source = Source(parsed.remote_host, parsed.remote_port, parsed.remote_engine_id or "")
        self._fetches[request.request_id] = _Fetch(transfer, source, parsed.wait)
        self._commands.append(Hold(request.request_id, transfer, source))

    def _ignore(self, request: "Request", cause: Cause, detail: str) -> None:
        self.telemetry.count("ignored_params", cause=cause)
        logger.warning(
            "request %s: kv_transfer_params ignored (%s): %s; its prompt is computed here",
            request.request_id,
            cause,
            detail,
        )


def _identity(request: "Request") -> bytes:
    assert request.prompt_token_ids is not None
    features = request.mm_features or []
    return token_fingerprint(
        request.prompt_token_ids,
        salt=request.cache_salt or "",
        adapter=request.lora_request.lora_name if request.lora_request else "",
        inputs=[f"{feature.identifier}@{feature.mm_position.offset}" for feature in features],
    )
