# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler: which requests fetch KV, and which offer it.

It decides and holds no KV; commands travel to the workers with the next step. If a request's parameters are wrong,
the request is computed here as if it had none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from pd_connector.agent.commands import Command, Drop, Hold
from pd_connector.config import Config
from pd_connector.control.seal import UntrustedAddressError, sealed, trusted_peers
from pd_connector.errors import Cause
from pd_connector.kv.model import ModelFacts
from pd_connector.pool.codecs import pool_codecs
from pd_connector.pool.host import open_pool
from pd_connector.protocol.wire import params as transfer_params
from pd_connector.protocol.wire.peers import Peer
from pd_connector.telemetry import Telemetry
from pd_connector.vllm.fetching import Fetching, fetched_tokens
from pd_connector.vllm.ignored import IgnoredParams
from pd_connector.vllm.inputs import RequestIdentity
from pd_connector.vllm.messages import Cut, StepCommands, WorkerActivity
from pd_connector.vllm.metrics import PDStats, RankGauges
from pd_connector.vllm.movable import check_movable
from pd_connector.vllm.offers import Offers
from pd_connector.vllm.pool import PoolSide
from pd_connector.vllm.stale import StalePages
from pd_connector.vllm.uncomputable import Uncomputable
from pd_connector.vllm.unmoved import UnmovedPrompts
from pd_connector.vllm.unverified import UnverifiedPages
from pd_connector.vllm.windows import Windows

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """Called by vLLM's scheduler only.

    Attributes:
        offers: the prompts that are computed here for other engines.
        pool: chunks of KV that outlive their request; None without a pool.

    Args:
        config: settings.
        engine_id: told to proxies; consumers check it when they dial.
        windows: page sizes and windows of the engine's page tables.
        ranks: number of ranks of this engine.
        produces: whether requests may offer their KV.
        consumes: whether requests may fetch their KV.
        adapters: the engine's settings for adapters (`inputs.adapter_settings`).
        processor: how it processes images and other inputs (`inputs.processor_settings`).
        encoded_elsewhere: whether an encode engine sends it the embeddings of such inputs.
        whole: as `movable.check_movable` has it.
    """

    def __init__(
        self,
        config: Config,
        *,
        engine_id: str,
        windows: Windows,
        ranks: int,
        produces: bool,
        consumes: bool,
        adapters: str = "",
        processor: str = "",
        encoded_elsewhere: bool = False,
        whole: bool = False,
    ) -> None:
        self.telemetry = Telemetry()
        self._ignored = IgnoredParams(self.telemetry)
        self._unmoved = UnmovedPrompts(self.telemetry, max(windows.page_sizes, default=0))
        self._config = config
        self._produces, self._consumes, self._whole = produces, consumes, whole
        address = transfer_params.ProducerAddress(engine_id, consumes=consumes)
        self.offers = Offers(windows, address, streams=config.overlap != "off")
        self.identity = RequestIdentity(adapters, processor)
        self._uncomputable = Uncomputable(encoded_elsewhere=encoded_elsewhere or not consumes)
        known = self._uncomputable, self.identity.adapters
        self._fetching = Fetching(config, windows, ranks, self.telemetry, *known)
        self.pool: PoolSide | None = None
        if opened := open_pool(config.pool):
            codecs = pool_codecs(config, consumes=consumes)
            told, unfilled = (self.telemetry, self._ignored), self._fetching.unfilled
            self.pool = PoolSide(
                *opened, codecs, windows, self.identity, *told, unfilled, ranks, engine_id
            )
        self._commands: list[Command] = []
        self._gauges = RankGauges()
        self._stale = StalePages()
        self._unverified = UnverifiedPages(windows.page_sizes)
        self._weights_may_change = False
        self._workers_called = False

    def bind(self, manager: "KVCacheManager") -> None:
        """Attach vLLM's pages."""
        self._unverified.bind(manager)
        self._fetching.bind(manager)
        self._stale.bind(manager)
        if self.pool:
            self.pool.bind(manager.block_pool)

    def set_peers(
        self, peers: tuple[Peer, ...], ports: tuple[int, ...] = (), model: ModelFacts | None = None
    ) -> None:
        """The addresses of the workers, each worker's shard, their ports for data, and the first one's model."""
        address = self.offers.address._replace(peers=peers, data_ports=ports)
        self.offers.address, self.offers.model = sealed(address, self._config.key), model
        if self._config.address_file:
            self.offers.publish(Path(self._config.address_file))

    def on_new_request(self, request: "Request") -> None:
        """A request enters the queue: announce KV that it will fetch, or that it will offer."""
        self.identity.note(request)
        self._uncomputable.add(request)
        if self.pool:
            self.pool.add(request)
        try:
            parsed = transfer_params.parse(request.kv_transfer_params)
            if parsed is None:
                alone = self.pool and self._produces and self._consumes  # for its pool only
                if not alone:
                    self._unmoved.note(request.num_prompt_tokens, request.kv_transfer_params)
                return
            check_movable(request, parsed, whole=self._whole)
        except (ValueError, TypeError) as error:
            self._ignore(request, Cause.MALFORMED_PARAMS, str(error))
            return
        if parsed.describe:
            self.offers.describe(request)
        elif parsed.do_remote_prefill:
            self._announce_fetch(request, parsed)
        elif not self._produces:
            self._ignore(request, Cause.ROLE, "do_remote_decode, but kv_role is kv_consumer")
        else:
            self._unmoved.used()
            transfer = parsed.transfer_id or request.request_id
            identity = self._identity_of(request)
            if identity is None:
                return
            self._commands.append(self.offers.add(request, transfer, identity[0]))

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to fetch or to load beyond those cached here; None: ask again. May be asked often."""
        found = self._fetching.matched(request, num_computed_tokens)
        if found == 0 and self.pool is not None and not self._fetching.computes(request.request_id):
            found = self.pool.matched(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Pages have been allocated: fill them, or tell the producer that no KV is wanted."""
        self._stale.admitted(request.request_id)
        own, exact = num_external_tokens, self.identity.exact(request)
        verified = self._unverified.allocated(request.request_id, blocks, own) and exact
        if self.pool and (fill := self.pool.allocated(request, blocks, own, verified=verified)):
            self._fetching.fills(request.request_id, blocks, fill.first_token, fill.stop_token)
            self._commands.append(fill)
            return

        def alike() -> bool:
            known = request.request_id not in self._unverified
            return known and self.identity.unchanged(request)

        self._commands += self._fetching.allocated(request, blocks, own, alike)

    def take_step(self, output: "SchedulerOutput") -> StepCommands:
        """Commands for the workers since the last step, and what this step computes."""
        commands, prefills = self.offers.step(output)
        compared, over = self._fetching.step(output)
        self._commands += [*commands, *compared]
        if self.pool:
            self._commands += self.pool.step(output)
        commands, self._commands = self._commands, []
        idle = output.total_num_scheduled_tokens == 0
        # An engine that is paused for new weights computes nothing until the weights have changed.
        compare = self._workers_called or (self._weights_may_change and not idle)
        self._workers_called = False
        self._weights_may_change &= idle
        return StepCommands(commands, prefills, idle, compare, over, dict(self._stale.changes))

    def reset(self) -> None:
        """vLLM's caches were reset, as they are before weights change."""
        self._weights_may_change = True
        if self.pool:
            self.pool.reset()

    def workers_called(self) -> None:
        """An operator has called a method of the workers. It may have changed the weights."""
        self._workers_called = True

    def loads_broke_off(self, cuts: Mapping[str, Cut]) -> None:
        """Ranks could not load all chunks of requests. The end of these loads is told with it, or later."""
        if self.pool:
            self.pool.broke_off(cuts)

    def load_ended(self, request_id: str, *, failed: bool) -> None:
        """The workers reported the end of a load."""
        if self.pool and self.pool.load_ended(request_id, failed=failed):
            self._fetching.unfilled.load_ended(request_id, failed=failed)
        else:
            self._fetching.load_ended(request_id, failed=failed)

    def workers_reported(self, activity: WorkerActivity) -> None:
        """What the workers did since the last step."""
        self._gauges.update(activity.gauges)
        self._stale.distrusted(activity.gauges)
        if self._stale.changed(activity.weight_changes):
            self._commands += [*self.offers.weights_changed(), *self._fetching.weights_changed()]
            if self.pool:
                self.pool.forget_all()
        self._commands += self._fetching.reported(activity)
        if self.pool:
            self.pool.reported(activity)

    def stats(self) -> PDStats | None:
        """What was counted here since the last call, and the ranks' gauges if one has changed."""
        return PDStats.of(self.telemetry, self._gauges.changed())

    @property
    def pending_work(self) -> bool:
        """Whether steps are needed even without a request: for commands, audits, weights that may have changed, or
        ranks that have not yet reported the end of their transfers. vLLM reports metrics only with steps."""
        moves = self._gauges.under_way(queued=self.offers.pending or self._fetching.pending)
        waits = moves or self._fetching.audits.pending or self._workers_called
        return bool(self._commands or waits or (self.pool and self.pool.pending))

    @property
    def saving(self) -> bool:
        """Whether pages are kept until they are copied into the pool."""
        return self.pool is not None and self.pool.saving

    def request_finished(
        self, request: "Request", pages: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request with these pages has ended in some way. Returns whether they stay, and the answer for the proxy."""
        request_id = request.request_id
        self._stale.finished(request_id)
        verified = not self._unverified.finished(request_id)
        unchanged = self.identity.finished(request)
        complete = request.status in _COMPLETE and unchanged
        if self.pool:
            self._commands += self.pool.finished(request, pages, unchanged=unchanged)
        compared, commands = self._fetching.finished(request, complete=complete and verified)
        self._commands += commands
        if compared:
            return True, None
        ended = self.offers.finished(request, pages, complete=complete)
        self._commands += ended.commands
        return ended.keeps_pages, ended.answer

    def _announce_fetch(self, request: "Request", parsed: transfer_params.TransferParams) -> None:
        transfer = str(parsed.remote_request_id)  # `parse` has seen that it is there
        if not self._consumes:
            self._ignore(request, Cause.ROLE, "do_remote_prefill, but kv_role is kv_producer")
            return
        if self._fetching.fetches(transfer):
            self._ignore(request, Cause.DUPLICATE, f"transfer {transfer} is being fetched already")
            return
        try:
            peers = trusted_peers(parsed, self._config)
        except UntrustedAddressError as error:
            self._ignore(request, Cause.UNTRUSTED_ADDRESS, str(error))
            return
        watch = parsed.wait and self._config.defer_pages
        self._unmoved.used()
        identity = self._identity_of(request, fetched_tokens(request, parsed))
        self._commands.append(Hold(request.request_id, transfer, peers, watch))
        if identity is None:  # its pages are not needed
            self._commands.append(Drop(request.request_id, Cause.MODEL))
            return
        self._fetching.add(request, parsed, peers, identity, watch=watch)

    def _identity_of(
        self, request: "Request", tokens: int | None = None
    ) -> tuple[bytes, str] | None:
        """What KV of its first tokens (all by default) depends on, and its adapter. None if that is unknown; the
        request is then computed here."""
        try:
            return self.identity.of(request, tokens), self.identity.adapters.name(request)
        except OSError as error:
            self._ignore(request, Cause.MODEL, f"its adapter's content is not known: {error}")
            return None

    def _ignore(self, request: "Request", cause: Cause, detail: str) -> None:
        self._ignored.note(request.request_id, cause, detail)
        asked = request.kv_transfer_params
        if isinstance(asked, dict) and asked.get("do_remote_prefill"):
            self.telemetry.count("handoffs", cause=cause)
