# SPDX-License-Identifier: Apache-2.0
"""The requests of a scheduler whose prompts are computed elsewhere: when their KV is fetched, and how the fetch
ended."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pd_connector.agent.commands import Command, Drop, Hold
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.kv.geometry import pages_for
from pd_connector.protocol.wire.params import TransferParams
from pd_connector.protocol.wire.peers import Peer
from pd_connector.telemetry import Telemetry
from pd_connector.vllm.handoff.audits import Audits
from pd_connector.vllm.handoff.fetch import Fetch, Stage
from pd_connector.vllm.handoff.streaming import kept_pages
from pd_connector.vllm.handoff.uncomputable import Uncomputable
from pd_connector.vllm.identity.adapters import Adapters
from pd_connector.vllm.messages import StepCommands, WorkerActivity
from pd_connector.vllm.pages.partial import PartialPages
from pd_connector.vllm.pages.replayed import replayed
from pd_connector.vllm.pages.stale_adapter import StaleAdapterPages
from pd_connector.vllm.pages.state_tables import StateTables
from pd_connector.vllm.pages.status import PageRule, PageStatus, Use
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.part import COMPLETE, Ended, Part

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


def _not_told() -> int:
    """Placeholder until vLLM hands over its pages."""
    return 0


class Recomputed:
    """Requests whose load failed while another part of vLLM's MultiConnector could load them, too. Called by vLLM's
    scheduler only.

    For such a request, vLLM adds up the pages of the failed load and those of the other part's load, so it waits for
    room for twice the prompt. Requests behind it in the queue wait, too, even if their loads have ended. A smaller
    cache never has this room. So such a request is computed here, and nothing is loaded for it.

    Attributes:
        free_pages: returns the number of free pages in vLLM's cache.

    Args:
        page_sizes: tokens of a page, by table.
    """

    def __init__(self, page_sizes: tuple[int, ...]) -> None:
        self.free_pages: Callable[[], int] = _not_told
        self._page_sizes = page_sizes

    def looks_for_room(self, request: "Request", fetch: Fetch) -> None:
        """vLLM is about to schedule a request whose load failed.

        If there was room the last time, and vLLM still did not schedule it, the other part's load blocks the request.
        vLLM then skips the prefix cache for it, so that neither part loads.
        """
        if fetch.had_room:
            request.skip_reading_prefix_cache = True
        needed = sum(pages_for(request.num_tokens, size) for size in self._page_sizes)
        fetch.had_room = needed <= self.free_pages()


class FetchGoesFirst(PageRule):
    """The pool loads nothing for a request that waits for a handoff, or is computed to compare it.

    Args:
        computes: returns, for a request id, whether the request waits for a handoff or is computed for an audit.
    """

    cause = "handoff"
    forbids = (Use.LOAD,)

    def __init__(self, computes: Callable[[str], bool]) -> None:
        self._computes = computes

    def holds(self, request: "Request") -> bool:
        return self._computes(request.request_id)


class Fetching(Part):
    """Used by the scheduler's thread only.

    Attributes:
        audits: the prompts that are computed here to compare them.
        rules: the page rules of this part.

    Args:
        windows: page sizes and windows of the engine's page tables.
        states: the page tables that list states.
        left: number of tokens at a prompt's end that this engine computes itself; also the number that a producer
            leaves to it, unless the producer's address gives another number.
        ranks: number of ranks of this engine.
        status: decides whether a request's KV may be compared.
        unfilled: records pages that a load fills only in part.
        uncomputable: requests that only a fetch can serve.
        adapters: the engine's known adapters.
        replays: whether vLLM replays a window behind a prefix hit.
    """

    def __init__(
        self,
        config: Config,
        windows: Windows,
        states: StateTables,
        left: int,
        ranks: int,
        telemetry: Telemetry,
        status: PageStatus,
        unfilled: PartialPages,
        uncomputable: Uncomputable,
        adapters: Adapters,
        *,
        replays: bool = False,
    ) -> None:
        self._replays = replays
        self._status, self._states, self._left = status, states, left
        self._partial_pages = unfilled
        self._telemetry = telemetry
        self._uncomputable = uncomputable
        self._fetches: dict[str, Fetch] = {}
        self._adapters = adapters
        outdated = StaleAdapterPages(adapters, uncomputable, self._given_up)
        self.rules: tuple[PageRule, ...] = (outdated, FetchGoesFirst(self._computes))
        self._recomputed = Recomputed(windows.page_sizes)
        self.audits = Audits(config, windows, states, ranks)

    def bind(self, manager: "KVCacheManager") -> None:
        self._recomputed.free_pages = manager.block_pool.get_num_free_blocks
        self.audits.bind(manager)

    @property
    def pending(self) -> bool:
        return self.audits.pending

    @property
    def expected(self) -> bool:
        """Whether a request waits for its KV, or compares it."""
        return any(fetch.stage is not Stage.OVER for fetch in self._fetches.values())

    def fetches(self, transfer: str) -> bool:
        """Whether some request fetches this transfer."""
        return any(fetch.transfer == transfer for fetch in self._fetches.values())

    def add(
        self,
        request: "Request",
        params: TransferParams,
        peers: tuple[Peer, ...],
        identity: tuple[bytes, str],
        *,
        watch: bool,
    ) -> None:
        """Add a queued request whose KV another engine has.

        Args:
            identity: what KV of its prompt depends on, and its adapter.
            watch: whether the request waits without pages until its KV can be loaded.
        """
        assert params.remote_request_id is not None
        needed = request.num_prompt_tokens - max(1, self._left)  # the others are computed here
        tokens = min(self.tokens(request, params), max(0, needed))
        stage = Stage.WATCHED if watch else Stage.HELD
        fetch = Fetch(params.remote_request_id, *identity, peers, params.wait, tokens, stage)
        self._fetches[request.request_id] = fetch
        compares = self._replays and request.request_id not in self._uncomputable
        if compares and not request.skip_reading_prefix_cache:
            # KV behind a hit is not compared. `matched` decides: vLLM looks for a hit before it asks there.
            fetch.skips_cache = self.audits.computes(request, fetch, tokens)
            request.skip_reading_prefix_cache = fetch.skips_cache

    def tokens(self, request: "Request", params: TransferParams) -> int:
        """Number of tokens that the producer has computed. This prompt can be longer than the producer's, for example
        if a proxy has appended the first token. A producer can also leave the prompt's last tokens to its consumer."""
        if params.remote_num_tokens is not None:
            return params.remote_num_tokens
        left = self._left if params.left_tokens is None else params.left_tokens
        return max(0, int(request.num_prompt_tokens) - left)

    def queued(self, request: "Request") -> None:
        self._uncomputable.add(request)

    def matched(self, request: "Request", computed: int) -> int | None:
        request_id = request.request_id
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            fetch.outdated = self._adapters.replaced(request, look=False)
        fetches = fetch is not None and fetch.waiting and not fetch.outdated
        there = fetch.tokens if fetch is not None and fetches else computed
        if self._uncomputable.waits(request_id, there):
            return None
        if fetch is None or not fetches:
            if fetch is not None and fetch.failed and request_id not in self._uncomputable:
                self._recomputed.looks_for_room(request, fetch)
            return 0
        if fetch.skips_cache and not self.audits.wants(request, fetch, fetch.tokens):
            fetch.skips_cache = request.skip_reading_prefix_cache = False
            return None  # vLLM looks for a hit when it asks again
        fetch.computed_tokens = computed
        missing = fetch.tokens - computed
        audited = request_id not in self._uncomputable and self.audits.computes(
            request, fetch, missing
        )
        if missing <= 0 or audited:
            return 0
        return None if fetch.stage is Stage.WATCHED else missing

    def allocated(
        self,
        request: "Request",
        blocks: "KVCacheBlocks",
        external_tokens: int,
    ) -> list[Command] | None:
        fetch = self._fetches.get(request.request_id)
        if fetch is None:
            return None
        if not fetch.waiting:
            fetch.had_room = False
            return None
        if external_tokens:
            fetch.stage = Stage.LOADING
            first, stop = fetch.computed_tokens, fetch.computed_tokens + external_tokens
            self._partial_pages.load(request.request_id, blocks, first, stop)
            pages = kept_pages(self._states.only(blocks.get_block_ids(), stop))
            position = stop if self._states else 0
            return [fetch.load(request.request_id, stop, pages, state_token=position)]
        if fetch.outdated:
            fetch.stage, fetch.outcome = Stage.OVER, Cause.MODEL
            return [Drop(request.request_id, Cause.MODEL)]

        def comparable() -> bool:
            return not self._status.problem(request, Use.COMPARE)

        if not replayed(request) and self.audits.begin(request, fetch, comparable):
            fetch.stage, fetch.outcome = Stage.AUDITED, "audited"
            held = Hold(request.request_id, fetch.transfer, fetch.peers, watch=False, keep=True)
            return [held]
        missing = request.num_prompt_tokens - 1 - fetch.computed_tokens
        fetch.outcome = "unaudited" if missing > 0 else "cached"
        fetch.stage = Stage.OVER
        return [Drop(request.request_id, Cause.NOT_NEEDED)]

    def _computes(self, request_id: str) -> bool:
        """Whether a request waits for a handoff, or is computed here for an audit or because its producer is not
        trusted yet."""
        fetch = self._fetches.get(request_id)
        return fetch is not None and fetch.stage is not Stage.OVER

    def weights_changed(self) -> list[Command]:
        return self.audits.weights_changed()

    def step(self, output: "SchedulerOutput", commands: StepCommands) -> None:
        compared, over = self.audits.step(output)
        commands.commands += compared
        commands.over += over

    def load_ended(self, request_id: str, *, failed: bool) -> bool:
        fetch = self._fetches.get(request_id)
        if fetch is None:
            return False
        fetch.stage = Stage.OVER
        fetch.failed = failed
        fetch.outcome = fetch.outcome or ("recomputed" if failed else "handed_over")
        return True

    def reported(self, activity: WorkerActivity) -> list[Command]:
        commands: list[Command] = []
        for request_id, cause in activity.causes.items():
            if fetch := self._fetches.get(request_id):
                fetch.outcome = cause
        for stage, requests in (
            (Stage.HELD, activity.ready),
            (Stage.OVER, activity.unavailable),
        ):
            for request_id in requests:
                fetch = self._fetches.get(request_id)
                if fetch is not None and fetch.stage is Stage.WATCHED:
                    fetch.stage = stage
                    if stage is Stage.OVER:  # other ranks may still wait
                        commands.append(Drop(request_id, Cause.NOT_NEEDED))
        for request_id in activity.unaudited:
            if fetch := self._fetches.get(request_id):
                self.audits.refused(fetch.pair)
        return [*commands, *self.audits.reported(activity.audits)]

    def finished(self, request: "Request", pages: tuple[list[int], ...]) -> Ended:
        request_id = request.request_id
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            self._telemetry.count("handoffs", cause=fetch.outcome or Cause.ABORTED)
        self._uncomputable.discard(request_id)
        complete = (
            request.status in COMPLETE
            and request_id in self.audits
            and not self._status.problem(request, Use.COMPARE)
        )
        compared, commands = self.audits.finished(
            request_id, request.num_computed_tokens, complete=complete
        )
        if not compared and fetch is not None and fetch.stage not in (Stage.AUDITED, Stage.OVER):
            commands = [*commands, Drop(request_id, Cause.ABORTED)]
        return Ended(compared, None, commands)

    def _given_up(self, request_id: str) -> None:
        """Count the request's load as failed: its KV is not used, because its adapter was replaced before its first
        step."""
        if fetch := self._fetches.get(request_id):
            fetch.failed, fetch.outcome = True, Cause.MODEL
