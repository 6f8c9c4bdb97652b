# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler: which requests fetch KV, and which offer it.

It decides and holds no KV; commands travel to the workers with the next step. If a request's parameters are wrong,
the request is computed here as if it had none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from pd_connector.vllm.engine_facts import EngineFacts
from pd_connector.vllm.handoff.fetching import Fetching
from pd_connector.vllm.handoff.ignored import IgnoredParams
from pd_connector.vllm.handoff.left_tokens import leave_tokens, stop_after_prompt
from pd_connector.vllm.handoff.movable import check_movable
from pd_connector.vllm.handoff.no_handoff_requests import NoHandoffRequests
from pd_connector.vllm.handoff.offers import Offers
from pd_connector.vllm.handoff.uncomputable import Uncomputable
from pd_connector.vllm.identity.inputs import AmbiguousInputs, RequestIdentity
from pd_connector.vllm.identity.loaded_model import LoadedModel
from pd_connector.vllm.messages import Cut, StepCommands, WorkerActivity
from pd_connector.vllm.metrics import PDStats, RankGauges
from pd_connector.vllm.pages.partial import PartialPages
from pd_connector.vllm.pages.replayed import ReplayedWindow
from pd_connector.vllm.pages.stale import StalePages
from pd_connector.vllm.pages.status import PageStatus
from pd_connector.vllm.pages.unverified import UnverifiedPages
from pd_connector.vllm.part import Part
from pd_connector.vllm.pool.side import PoolSide

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class SchedulerSide:
    """Called by vLLM's scheduler only.

    Attributes:
        offers: the prompts that are computed here for other engines.
        pool: chunks of KV that outlive their request; None without a pool.

    Args:
        config: the operator's settings.
        engine: what the engine is.
    """

    def __init__(self, config: Config, engine: EngineFacts) -> None:
        windows, states, ranks = engine.windows, engine.states, engine.ranks
        left = engine.left_tokens
        self.telemetry = Telemetry()
        self._ignored = IgnoredParams(self.telemetry)
        self._no_handoff = NoHandoffRequests(self.telemetry, _largest_page(engine))
        self._config = config
        self._engine = engine
        self.identity = RequestIdentity(engine.adapters, engine.processor)
        self._stale, unfilled = StalePages(), PartialPages(windows)
        self._status = PageStatus(
            AmbiguousInputs(self.identity),
            UnverifiedPages(windows.page_sizes),
            unfilled,
            self._stale,
        )
        elsewhere = engine.embeddings_come or not engine.consumes
        uncomputable = Uncomputable(encoded_elsewhere=elsewhere)
        shared = self._status, unfilled, uncomputable, self.identity.adapters
        self._fetching = Fetching(
            config,
            windows,
            states,
            left,
            ranks,
            self.telemetry,
            *shared,
            replays=engine.replays,
        )
        self._status.add(*self._fetching.rules)
        if engine.replays:
            self._status.add(ReplayedWindow())
        address = transfer_params.ProducerAddress(
            engine.engine_id,
            consumes=engine.consumes,
            left_tokens=left if engine.may_leave_tokens else None,
        )
        self._model = LoadedModel(ranks, pool=bool(config.pool))
        self.offers = Offers(
            windows,
            states,
            self._status,
            self._model,
            address,
            streams=config.overlap != "off",
            replays=engine.replays,
        )
        self._parts: list[Part] = [self._model, self._fetching, self.offers]
        self.pool: PoolSide | None = None
        if opened := open_pool(config.pool):
            codecs = pool_codecs(config, consumes=engine.consumes)
            store, settings = opened
            self.pool = PoolSide(
                store,
                settings,
                codecs,
                windows,
                self.identity,
                self.telemetry,
                self._ignored,
                self._status,
                unfilled,
                self._model,
                ranks,
                engine.engine_id,
            )
            # It saves a request's pages before another part keeps them.
            self._parts.insert(1, self.pool)
        self._commands: list[Command] = []
        self._of_before: list[Command] = []  # from before the last change of weights
        self._gauges = RankGauges()
        self._weights_may_change = False
        self._workers_called = False

    def bind(self, manager: "KVCacheManager") -> None:
        """Attach vLLM's pages."""
        self._status.bind(manager)
        for part in self._parts:
            part.bind(manager)

    def set_peers(
        self, peers: tuple[Peer, ...], ports: tuple[int, ...] = (), model: ModelFacts | None = None
    ) -> None:
        """The addresses of the workers, each worker's shard, their ports for data, and the first one's model."""
        address = self.offers.address._replace(peers=peers, data_ports=ports)
        self.offers.address = sealed(address, self._config.key)
        self._model.introduce(model)
        if self._config.address_file:
            self.offers.publish(Path(self._config.address_file))

    def on_new_request(self, request: "Request") -> None:
        """A request enters the queue: announce KV that it will fetch, or that it will offer."""
        self._status.queued(request)
        for part in self._parts:
            part.queued(request)
        try:
            parsed = transfer_params.parse(request.kv_transfer_params)
            if parsed is None:
                alone = (
                    self.pool and self._engine.produces and self._engine.consumes
                )  # for its pool only
                if not alone:
                    self._no_handoff.note(request.num_prompt_tokens, request.kv_transfer_params)
                return
            check_movable(request, parsed, whole=self._engine.attends_ahead)
            offers = parsed.do_remote_decode and not parsed.describe
            if offers and self._engine.produces and self._engine.left_tokens:
                if not parsed.from_first_token:
                    leave_tokens(
                        request, self._engine.left_tokens, inputs_whole=self._engine.inputs_whole
                    )
                    if self.pool:
                        self.pool.queued(request)  # its chunks are those of the shorter prompt
                stop_after_prompt(request)
        except (ValueError, TypeError) as error:
            self._ignore(request, Cause.MALFORMED_PARAMS, str(error))
            return
        if parsed.describe:
            self.offers.describe(request)
        elif parsed.do_remote_prefill:
            self._announce_fetch(request, parsed)
        elif not self._engine.produces:
            self._ignore(request, Cause.ROLE, "do_remote_decode, but kv_role is kv_consumer")
        else:
            self._no_handoff.used()
            transfer = parsed.transfer_id or request.request_id
            identity = self._identity_of(request)
            if identity is None:
                return
            chooses = parsed.from_first_token or not self._engine.left_tokens
            self._commands.append(
                self.offers.add(request, transfer, identity[0], chooses_first=chooses)
            )

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to fetch or to load beyond those cached here; None: ask again. May be asked often."""
        for part in reversed(self._parts):  # a handoff goes before the pool
            tokens = part.matched(request, num_computed_tokens)
            if tokens != 0:
                return tokens, bool(tokens)
        return 0, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Pages have been allocated: fill them, or tell the producer that its KV is not needed."""
        self._status.admitted(request, blocks, num_external_tokens)
        for part in self._parts:
            commands = part.allocated(request, blocks, num_external_tokens)
            if commands is not None:
                self._commands += commands
                return

    def take_step(self, output: "SchedulerOutput") -> StepCommands:
        """Commands for the workers since the last step, and what this step computes."""
        step = StepCommands(
            self._commands, weight_changes=dict(self._stale.changes), of_before=self._of_before
        )
        self._commands, self._of_before = [], []
        self._status.stepped()
        for part in self._parts:
            part.step(output, step)
        step.idle = output.total_num_scheduled_tokens == 0
        # An engine that is paused for new weights computes nothing until the weights have changed.
        step.compare_weights = self._workers_called or (self._weights_may_change and not step.idle)
        self._workers_called = False
        self._weights_may_change &= step.idle
        return step

    def reset(self) -> None:
        """vLLM's caches were reset, as they are before weights change."""
        self._weights_may_change = True
        for part in self._parts:
            part.reset()

    def workers_called(self) -> None:
        """An operator has called a method of the workers. It may have changed the weights."""
        self._workers_called = True

    def loads_broke_off(self, cuts: Mapping[str, Cut]) -> None:
        """Ranks could not load all chunks of some requests. The ends of these loads are reported in the same step, or later."""
        for part in self._parts:
            part.broke_off(cuts)

    def load_ended(self, request_id: str, *, failed: bool) -> None:
        """The workers reported the end of a load."""
        self._status.load_ended(request_id, failed=failed)
        for part in self._parts:
            if part.load_ended(request_id, failed=failed):
                return

    def workers_reported(self, activity: WorkerActivity) -> None:
        """What the workers did since the last step."""
        self._gauges.update(activity.gauges)
        self._stale.distrusted(activity.gauges)
        if self._stale.changed(activity.weight_changes):
            # vLLM ends the requests of a step before it passes on what the workers say about this step.
            self._of_before += self._commands
            self._commands = []
            for part in self._parts:
                self._commands += part.weights_changed()
        for part in self._parts:
            self._commands += part.reported(activity)

    def stats(self) -> PDStats | None:
        """The counts of this side since the last call, and the ranks' gauges if a gauge has changed."""
        return PDStats.of(self.telemetry, self._gauges.changed())

    @property
    def pending_work(self) -> bool:
        """Whether steps are needed even without a request: for commands, audits, weights that may have changed, or
        ranks that have not yet reported the end of their transfers. vLLM reports metrics only with steps."""
        expected = self.offers.expected or self._fetching.expected
        moves = self._gauges.under_way(queued=expected)
        waits = moves or self._workers_called or bool(self._commands or self._of_before)
        return waits or any(part.pending for part in self._parts)

    @property
    def saving(self) -> bool:
        """Whether pages are kept until they are copied into the pool."""
        return self.pool is not None and self.pool.saving

    def request_finished(
        self, request: "Request", pages: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request with these pages has ended. Returns whether they stay allocated, and the answer for the proxy."""
        for part in self._parts:
            ended = part.finished(request, pages)
            self._commands += ended.commands
            if ended.keeps_pages or ended.answer:
                break
        self._status.finished(request)
        return ended.keeps_pages, ended.answer

    def close(self) -> None:
        """The engine ends."""
        for part in self._parts:
            part.close()

    def _announce_fetch(self, request: "Request", parsed: transfer_params.TransferParams) -> None:
        transfer = str(parsed.remote_request_id)  # `parse` has seen that it is there
        if not self._engine.consumes:
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
        self._no_handoff.used()
        identity = self._identity_of(request, self._fetching.tokens(request, parsed))
        self._commands.append(Hold(request.request_id, transfer, peers, watch))
        if identity is None:  # its pages are not needed
            self._commands.append(Drop(request.request_id, Cause.MODEL))
            return
        self._fetching.add(request, parsed, peers, identity, watch=watch)

    def _identity_of(
        self, request: "Request", tokens: int | None = None
    ) -> tuple[bytes, str] | None:
        """Identity of everything that KV of the request's first tokens (all by default) depends on, and its adapter.
        None if unknown; the request is then computed here."""
        try:
            return self.identity.of(request, tokens), self.identity.adapters.name(request)
        except OSError as error:
            self._ignore(request, Cause.MODEL, f"its adapter's content is not known: {error}")
            return None

    def _ignore(self, request: "Request", cause: Cause, detail: str) -> None:
        self._ignored.note(request.request_id, cause, detail)
        params = request.kv_transfer_params
        if isinstance(params, dict) and params.get("do_remote_prefill"):
            self.telemetry.count("handoffs", cause=cause)


def _largest_page(engine: EngineFacts) -> int:
    """Tokens of the largest page of KV."""
    sizes = engine.windows.page_sizes
    listed = engine.states.list_states if engine.states else [False] * len(sizes)
    pages = (size for size, of_states in zip(sizes, listed, strict=True) if not of_states)
    return max(pages, default=0)
