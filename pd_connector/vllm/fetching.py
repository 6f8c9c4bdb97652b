# SPDX-License-Identifier: Apache-2.0
"""The requests of a scheduler whose prompts are computed elsewhere: when their KV is wanted, and what became of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pd_connector.agent.commands import Command, Drop, Hold
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.protocol.wire.params import TransferParams
from pd_connector.protocol.wire.peers import Peer
from pd_connector.telemetry import Telemetry
from pd_connector.vllm.adapters import Adapters
from pd_connector.vllm.audits import Audits
from pd_connector.vllm.fetch import Fetch, Stage
from pd_connector.vllm.messages import WorkerActivity
from pd_connector.vllm.outdated import OutdatedKV
from pd_connector.vllm.recomputed import Recomputed
from pd_connector.vllm.streaming import kept_pages
from pd_connector.vllm.uncomputable import Uncomputable
from pd_connector.vllm.unfilled import UnfilledPages
from pd_connector.vllm.windows import Windows

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class Fetching:
    """Used by the scheduler's thread only.

    Attributes:
        audits: the prompts that are computed here to compare them.
        unfilled: pages that other requests must not find in vLLM's prefix cache.

    Args:
        windows: page sizes and windows of the engine's page tables.
        ranks: number of ranks of this engine.
        uncomputable: requests that only a fetch can serve.
        adapters: what is known of the engine's adapters.
    """

    def __init__(
        self,
        config: Config,
        windows: Windows,
        ranks: int,
        telemetry: Telemetry,
        uncomputable: Uncomputable,
        adapters: Adapters,
    ) -> None:
        self._windows = windows
        self._telemetry = telemetry
        self._uncomputable = uncomputable
        self._fetches: dict[str, Fetch] = {}
        self._adapters = adapters
        self._outdated = OutdatedKV(adapters, uncomputable, self._given_up)
        self._recomputed = Recomputed(windows.page_sizes)
        self.audits = Audits(config, windows, ranks)
        self.unfilled = UnfilledPages()

    def bind(self, manager: "KVCacheManager") -> None:
        """Attach vLLM's pages."""
        self._outdated.bind(manager)
        self.unfilled.evict = manager.block_pool.evict_blocks
        self._recomputed.free_pages = manager.block_pool.get_num_free_blocks

    @property
    def pending(self) -> bool:
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
        """A request has been queued whose KV is elsewhere.

        Args:
            identity: what KV of its prompt depends on, and its adapter.
            watch: it waits without pages until its KV begins to arrive.
        """
        assert params.remote_request_id is not None
        tokens = min(fetched_tokens(request, params), request.num_prompt_tokens - 1)
        stage = Stage.WATCHED if watch else Stage.HELD
        self._fetches[request.request_id] = Fetch(
            params.remote_request_id, *identity, peers, params.wait, tokens, stage
        )

    def matched(self, request: "Request", computed: int) -> int | None:
        """Tokens to fetch beyond the `computed` ones that are here; None: ask again."""
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
                self._recomputed.asked(request, fetch)
            return 0
        fetch.computed_tokens = computed
        missing = fetch.tokens - computed
        audited = request_id not in self._uncomputable and self.audits.computes(
            request_id, fetch, missing
        )
        if missing <= 0 or audited:
            return 0
        return None if fetch.stage is Stage.WATCHED else missing

    def allocated(
        self,
        request: "Request",
        blocks: "KVCacheBlocks",
        external_tokens: int,
        unchanged: Callable[[], bool],
    ) -> list[Command]:
        """Pages have been allocated. Returns commands: fetch into them, or tell the producer that no KV is wanted.

        Args:
            unchanged: asked later: whether its KV was computed here, with the adapter with which it came.
        """
        fetch = self._fetches.get(request.request_id)
        if fetch is None:
            return []
        if not fetch.waiting:
            fetch.had_room = False
            self.unfilled.settle(request.request_id)
            return []
        if external_tokens:
            fetch.stage = Stage.LOADING
            first, stop = fetch.computed_tokens, fetch.computed_tokens + external_tokens
            self.fills(request.request_id, blocks, first, stop)
            return [fetch.load(request.request_id, stop, kept_pages(blocks.get_block_ids()))]
        if fetch.outdated:
            fetch.stage, fetch.outcome = Stage.OVER, Cause.MODEL
            return [Drop(request.request_id, Cause.MODEL)]
        if self.audits.begin(request.request_id, fetch, unchanged):
            fetch.stage, fetch.outcome = Stage.AUDITED, "audited"
            held = Hold(request.request_id, fetch.transfer, fetch.peers, watch=False, keep=True)
            return [held]
        missing = request.num_prompt_tokens - 1 - fetch.computed_tokens
        fetch.outcome = "unaudited" if missing > 0 else "cached"
        fetch.stage = Stage.OVER
        return [Drop(request.request_id, Cause.NOT_NEEDED)]

    def computes(self, request_id: str) -> bool:
        """Whether a request is computed here to compare its KV, or before its producer may be trusted."""
        fetch = self._fetches.get(request_id)
        return fetch is not None and fetch.stage is not Stage.OVER

    def fills(
        self, request_id: str, blocks: "KVCacheBlocks", first_token: int, stop_token: int
    ) -> None:
        """Tokens of a request are loaded, by a fetch or from elsewhere: some pages may be filled only in part."""
        tables = blocks.get_block_ids()
        unfilled = self._windows.unfilled(tables, first_token, stop_token)
        self.unfilled.load(request_id, unfilled)

    def weights_changed(self) -> list[Command]:
        """As `Audits.weights_changed`."""
        return self.audits.weights_changed()

    def step(self, output: "SchedulerOutput") -> tuple[list[Command], list[str]]:
        """A step was scheduled. As `Audits.step`."""
        self.unfilled.scheduled()
        return self.audits.step(output)

    def load_ended(self, request_id: str, *, failed: bool) -> None:
        """The workers reported the end of a load."""
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            fetch.stage = Stage.OVER
            fetch.failed = failed
            fetch.outcome = fetch.outcome or ("recomputed" if failed else "handed_over")
            self.unfilled.load_ended(request_id, failed=failed)

    def reported(self, activity: WorkerActivity) -> list[Command]:
        """What the workers did since the last step. Returns commands for them."""
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

    def finished(self, request: "Request", *, complete: bool) -> tuple[bool, list[Command]]:
        """A request has ended; it may be one without a fetch.

        Args:
            complete: it has come to its own end, with the adapter with which it began.

        Returns:
            Whether its pages stay for a comparison, and commands for the workers.
        """
        request_id = request.request_id
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            self._telemetry.count("handoffs", cause=fetch.outcome or Cause.ABORTED)
        self._outdated.finished(request_id)
        self.unfilled.finished(request_id)
        self._uncomputable.discard(request_id)
        compared, commands = self.audits.finished(
            request_id, request.num_computed_tokens, complete=complete
        )
        if not compared and fetch is not None and fetch.stage not in (Stage.AUDITED, Stage.OVER):
            commands = [*commands, Drop(request_id, Cause.ABORTED)]
        return compared, commands

    def _given_up(self, request_id: str) -> None:
        """KV that was loaded for a request is not used: its adapter was replaced before its first step."""
        if fetch := self._fetches.get(request_id):
            fetch.failed, fetch.outcome = True, Cause.MODEL


def fetched_tokens(request: "Request", params: TransferParams) -> int:
    """Tokens that the producer has computed. A prompt may continue after the producer's, for example if a proxy has
    appended its first token."""
    return (
        request.num_prompt_tokens if params.remote_num_tokens is None else params.remote_num_tokens
    )
