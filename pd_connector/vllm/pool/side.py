# SPDX-License-Identifier: Apache-2.0
"""The pool in the scheduler: which chunks are saved, and which are loaded instead of being computed.

Look-ups: `pool_looks.py`. Loads that end: `pool_loads.py`. Pages that are kept for saves: `pool_saves.py`. Comparisons: `pool_audit.py`.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pd_connector.agent.commands import Command
from pd_connector.errors import Cause
from pd_connector.pool.advertised import AdvertisedEngine
from pd_connector.pool.codecs import PoolCodecs
from pd_connector.pool.jobs import Fill, Save
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.load_breakeven import LoadBreakeven
from pd_connector.pool.settings import PoolSettings
from pd_connector.pool.store.base import Store
from pd_connector.telemetry import Telemetry
from pd_connector.vllm.handoff.ignored import IgnoredParams
from pd_connector.vllm.handoff.streaming import kept_pages, scheduled
from pd_connector.vllm.identity.inputs import RequestIdentity
from pd_connector.vllm.identity.loaded_model import LoadedModel
from pd_connector.vllm.messages import Cut, StepCommands, WorkerActivity
from pd_connector.vllm.pages.partial import PartialPages
from pd_connector.vllm.pages.status import PageStatus, Use
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.part import Ended, Part
from pd_connector.vllm.pool.audit import PoolAudit
from pd_connector.vllm.pool.events import PoolEvents
from pd_connector.vllm.pool.loads import PoolLoads
from pd_connector.vllm.pool.lookups import PoolLookups
from pd_connector.vllm.pool.prompt import Loading, PoolPrompt, pool_ask
from pd_connector.vllm.pool.saves import PoolSaves

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("pd_connector.vllm")


class PoolSide(Part):
    """Called by vLLM's scheduler only.

    Attributes:
        events: events of chunks, for other routers; None unless vLLM publishes KV events.
        loads: the loads under way.

    Args:
        store: the store of the chunks.
        settings: this engine's use of the pool.
        codecs: this engine's codecs. KV that may have passed in FP8 is not saved.
        windows: page sizes and windows of the engine's page tables.
        identity: makes the identities of prompts.
        ignored: gets the requests whose pool parameters cannot be followed.
        status: decides how a request's KV may be used.
        unfilled: gets the loads.
        model: the model that the ranks have loaded.
        ranks: number of ranks of this engine.
        engine_id: as the engine's API server knows it.
    """

    def __init__(
        self,
        store: Store,
        settings: PoolSettings,
        codecs: PoolCodecs,
        windows: Windows,
        identity: RequestIdentity,
        telemetry: Telemetry,
        ignored: IgnoredParams,
        status: PageStatus,
        unfilled: PartialPages,
        model: LoadedModel,
        ranks: int,
        engine_id: str = "",
    ) -> None:
        settings = settings.within(codecs)
        self._store = store
        self._engine_id = engine_id
        self._ignored = ignored
        self._windows = windows
        self._identity = identity
        self._telemetry = telemetry
        self._settings = settings
        self._breakeven = LoadBreakeven()
        self._status, self._partial_pages = status, unfilled
        self._saves = PoolSaves(windows, ranks, status)
        self._audit = PoolAudit(windows, self._saves)
        self._stepped: tuple[float, int] = (0.0, 0)  # when the last step was scheduled, its tokens
        self._model, self._root = model, b""
        self._quiet = False  # what is said once of the model is said, or need not be
        self._prompts: dict[str, PoolPrompt] = {}
        self.events: PoolEvents | None = None
        self._looks = PoolLookups(store, self._audit, self._breakeven, telemetry, codecs.readable)
        self.loads = PoolLoads(self._looks, self._audit, self._breakeven, telemetry)
        self._tell()

    def bind(self, manager: "KVCacheManager") -> None:
        self._saves.bind(manager.block_pool)
        self._looks.shared.caching = manager.block_pool.enable_caching

    def publish_events(self) -> None:
        """vLLM publishes KV events. They name blocks of caches with one page table only."""
        (page_size, window), *others = self._windows.tables
        if not others and not window:
            self.events = PoolEvents(self._store, page_size)

    def take_events(self) -> Iterable["KVCacheEvent"]:
        """KV events of chunks since the last call."""
        return self.events.take() if self.events else ()

    def close(self) -> None:
        if self.events:
            self.events.close()

    @property
    def model(self) -> bytes:
        """The model that all ranks have loaded, as the pool knows it; empty where the pool cannot be used."""
        return self._model.root

    @property
    def saving(self) -> bool:
        """Whether pages are kept for saves."""
        return bool(self._saves)

    @property
    def pending(self) -> bool:
        """Whether a step is needed without a request: for the ranks' reports of saves, or for vLLM to take KV
        events."""
        return self.saving or bool(self.events and self.events.pending)

    def reported(self, activity: WorkerActivity) -> list[Command]:
        began, tokens = self._stepped
        if tokens >= CHUNK_TOKENS:  # a part of a prefill
            self._breakeven.computed(tokens, time.monotonic() - began)
        self._stepped = 0.0, 0
        self._looks.draft = activity.draft or self._looks.draft
        before, self._root = self._root, self.model
        if self._root != before:
            self._quiet = True
            used = "in use" if self._root else "not used: the weights are not known"
            logger.info("pool: %s", used)
            if before:
                self.weights_changed()
            self._tell()
        elif self._model.unknown and not self._quiet:
            self._quiet = True
            logger.warning(
                "pool: not used so far: this engine does not know all bytes of its weights. It reads them from the "
                "model's files; weights that are streamed have none"
            )
        for request_id, cause in activity.causes.items():
            if prompt := self._prompts.get(request_id):
                self.loads.failed(prompt, cause)
        self._saves.answered(activity.saved)
        self._saves.answered(Counter(report.request for report in activity.audits))
        self._audit.reported(activity.audits)
        return []

    def _tell(self, chunk_bytes: int = 0) -> None:
        """Advertise the facts that routers need. The engine's API server answers with them."""
        advertised = AdvertisedEngine(
            engine=self._engine_id,
            model=self.model.hex(),
            chunk_bytes=chunk_bytes,
            bytes_per_s=self._breakeven.bytes_per_s(),
        )
        self._store.advertise(advertised.encode())

    def weights_changed(self) -> list[Command]:
        """KV of the requests that run now must be neither saved nor compared. Chunks from before a reset can be used
        again, because from now on keys have the new weights' identity."""
        self._looks.forget_reset()
        for request_id in self._prompts:
            self._looks.shared.forget(request_id)
        self._prompts.clear()
        self._audit.forget()
        return []

    def reset(self) -> None:
        """vLLM's caches were reset, and a client expects that nothing from before is used."""
        self._looks.reset(self._prompts.values(), self._saves.keys)

    def queued(self, request: "Request") -> None:
        tokens_only = request.prompt_token_ids is not None and request.prompt_embeds is None
        if not tokens_only or getattr(request, "resumable", False):
            return
        try:
            ask = pool_ask(request, self._settings.tenants, self._ignored)
            adapter = self._identity.adapters.content(request)
        except OSError:
            return  # its content is not known
        except ValueError as error:
            self._ignored.note(request.request_id, Cause.MALFORMED_PARAMS, str(error))
            return
        prompt = PoolPrompt(
            request,
            adapter,
            self._identity.inputs(request),
            None,
            ask=ask,
            reads=self._settings.read and ask.read,
            writes=self._settings.write and ask.write,
        )
        self._prompts[request.request_id] = prompt
        self._looks.begin(prompt, self.model)

    def matched(self, request: "Request", computed: int) -> int | None:
        prompt = self._prompts.get(request.request_id)
        if prompt is None or self._status.problem(request, Use.LOAD):
            return 0
        if self._model.awaited_by(prompt):
            return None
        self._looks.begin(prompt, self.model)  # the model was not known when the request came
        return self._looks.matched(prompt, computed)

    def allocated(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> list[Command] | None:
        prompt = self._prompts.get(request.request_id)
        if prompt and (cause := self._status.problem(request, Use.SAVE)):
            if prompt.writes:
                self._telemetry.count("pool_misses", cause=cause)
            prompt.writes = False
            self._audit.give_up(prompt)
        self._looks.shared.forget(request.request_id)
        if prompt is None or not prompt.loads or prompt.look is None:
            if prompt and external_tokens:
                prompt.handed_over = True
            return None
        look, first, prompt.loads, prompt.look = prompt.look, prompt.loads.start, range(0), None
        stop = first + external_tokens  # vLLM may want fewer
        if not external_tokens or not self.model:
            return None
        chunks = range(first // CHUNK_TOKENS, -(-stop // CHUNK_TOKENS))
        keys = prompt.keys[chunks.start + 1 : chunks.stop + 1]
        hits = prompt.hits[chunks.start : chunks.stop]
        tables = self._windows.from_token(first, kept_pages(blocks.get_block_ids()))
        needed = tuple(map(prompt.chunk, chunks))
        fill = Fill(request.request_id, self.model, needed, first, stop, tables)
        loading = Loading(keys, hits, range(first, stop), time.monotonic(), look)
        self.loads.begin(prompt, loading, fill)
        self._partial_pages.load(request.request_id, blocks, first, stop)
        return [fill]

    def tiers(self, request_id: str) -> dict[str, int]:
        """Tokens of the load of this request by the tier that they come from; empty if it loads nothing from the pool."""
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.loading is None:
            return {}
        tokens, tiers = prompt.loading.tokens, Counter[str]()
        first = tokens.start // CHUNK_TOKENS * CHUNK_TOKENS
        starts = range(first, tokens.stop, CHUNK_TOKENS)
        for start, hit in zip(starts, prompt.loading.hits, strict=True):
            stop = min(start + CHUNK_TOKENS, tokens.stop)
            tiers[hit.tier] += stop - max(start, tokens.start)
        return dict(tiers)

    def broke_off(self, cuts: Mapping[str, Cut]) -> None:
        for request_id, cut in cuts.items():
            if prompt := self._prompts.get(request_id):
                self.loads.broke_off(prompt, cut)

    def load_ended(self, request_id: str, *, failed: bool) -> bool:
        """Note the end of a load. Unless it has `failed`, vLLM keeps its pages up to the load's cut."""
        self.loads.over(request_id)
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.loading is None:
            return False
        if chunk_bytes := self.loads.ended(prompt, prompt.loading, failed=failed):
            self._tell(chunk_bytes)
        return True

    def step(self, output: "SchedulerOutput", commands: StepCommands) -> None:
        """Adds saves of chunks that earlier steps have computed, and comparisons."""
        self._stepped = time.monotonic(), output.total_num_scheduled_tokens
        self._looks.next_step()
        for (tier, cause), number in self._store.take_failures().items():
            self._telemetry.count("pool_unwritten", number, tier=tier, cause=cause)
        if not self._prompts:
            return
        for request_id in output.preempted_req_ids or ():
            if prompt := self._prompts.get(request_id):
                prompt.stepped = False
        for request_id, computed in scheduled(output, self._prompts):
            prompt = self._prompts[request_id]
            resumed = request_id in output.scheduled_cached_reqs.resumed_req_ids
            self._saves.note(prompt, moved=resumed or not prompt.stepped)
            if not prompt.stepped:  # this step may fill pages that it found in the cache
                prompt.stepped = True
                continue
            saved = self.model and prompt.writes and not prompt.adapter
            saved = saved and not self._status.problem(prompt.request, Use.SAVE)
            new = prompt.new_chunks(computed if saved else 0)
            pages = self._saves.present(prompt) if new or prompt.audited else ()
            commands.commands += self._audit.compare(prompt, computed, pages, self.model)
            commands.commands += self._saves_of(prompt, new, pages)

    def finished(self, request: "Request", pages: tuple[list[int], ...]) -> Ended:
        """A request has ended: save its last computed chunks, or compare them."""
        prompt = self._prompts.pop(request.request_id, None)
        self.loads.over(request.request_id)
        self._looks.shared.forget(request.request_id)
        if prompt is None:
            return Ended()
        if prompt.loading:
            self._looks.unpin(prompt.loading.keys)
            return Ended()
        commands: list[Command] = []
        if prompt.stepped and not self._status.problem(request, Use.SAVE):
            computed, present = request.num_computed_tokens, self._saves.present(prompt, pages)
            commands += self._audit.compare(prompt, computed, present, self.model)
            self._looks.computed(prompt, computed, self.model)
            if prompt.writes and self.model:
                new = prompt.new_chunks(computed, ended=True)
                commands += self._saves_of(prompt, new, present)
                if prompt.kept < new.stop:
                    self._telemetry.count("pool_misses", cause="busy")
        self._audit.give_up(prompt)
        if prompt.ask.pin_s:
            self._looks.pin_for_client(prompt, tenants=1 + len(self._settings.tenants))
        return Ended(commands=commands)

    def _saves_of(
        self, prompt: PoolPrompt, new: range, pages: Sequence[Sequence[int]]
    ) -> list[Save]:
        """Saves of these chunks, or of the first of them if too many saves are under way. The others come later."""
        if not new:
            return []
        prompt.know_keys(self.model, new.stop)
        if self.events:
            self.events.served(prompt, range(prompt.kept, new.stop))
        first = max(prompt.kept, self._looks.stored(prompt))
        saves = self._saves.begin(self.model, prompt, range(first, new.stop), pages)
        prompt.kept = first + len(saves)
        return saves
