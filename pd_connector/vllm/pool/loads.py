# SPDX-License-Identifier: Apache-2.0
"""Loads from the pool that are under way, and what their ends change in the scheduler."""

import time
from collections.abc import Sequence

from pd_connector.errors import Cause, Miss
from pd_connector.pool.jobs import Fill
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.load_breakeven import LoadBreakeven
from pd_connector.pool.store.base import FAR, Found
from pd_connector.telemetry import Telemetry
from pd_connector.vllm.messages import Cut, earliest
from pd_connector.vllm.pool.audit import PoolAudit
from pd_connector.vllm.pool.lookups import PoolLookups
from pd_connector.vllm.pool.prompt import Loading, PoolPrompt

_MOST_SHORTENED = 2
"""Times that a load is tried again with fewer chunks: chunks of answers can lack their windows, one after another."""


class PoolLoads:
    """Used by the scheduler's thread only.

    Args:
        looks: the look-ups. They keep chunks from eviction while they are loaded, and make other requests wait for the
            load.
        audit: gets the chunks whose writers are not trusted.
        worth: gets the speeds of loads.
    """

    def __init__(
        self, looks: PoolLookups, audit: PoolAudit, worth: LoadBreakeven, telemetry: Telemetry
    ) -> None:
        self._looks = looks
        self._audit = audit
        self._breakeven = worth
        self._telemetry = telemetry
        self._pages: dict[str, frozenset[int]] = {}  # of loads under way, by request

    @property
    def requests(self) -> set[str]:
        """Requests with a load under way."""
        return set(self._pages)

    @property
    def pages(self) -> set[int]:
        """What loads under way fill."""
        return {page for pages in self._pages.values() for page in pages}

    def begin(self, prompt: PoolPrompt, loading: Loading, fill: Fill) -> None:
        """A load begins: the ranks get a command for it."""
        prompt.loading = loading._replace(wait_s=self._looks.wait_s(loading.hits))
        afar = sum(hit.nbytes for hit in loading.hits if hit.tier == FAR)
        if afar:
            self._looks.coming[fill.request] = afar
        pages = frozenset(page for table in fill.pages for page in table if page >= 0)
        self._pages[fill.request] = pages
        self._looks.pin(loading.keys)
        self._looks.shared.begin(prompt.request.request_id, loading.keys)

    def over(self, request_id: str) -> None:
        """Forget a request's load: all ranks have ended it, or the request has ended. Does nothing if there is none."""
        self._pages.pop(request_id, None)
        self._looks.coming.pop(request_id, None)

    def broke_off(self, prompt: PoolPrompt, cut: Cut) -> None:
        """A rank could not load all chunks."""
        if prompt.loading is not None:
            before = {} if prompt.loading.cut is None else {"": prompt.loading.cut}
            prompt.loading = prompt.loading._replace(cut=earliest(before, {"": cut})[""])

    def ended(self, prompt: PoolPrompt, loading: Loading, *, failed: bool) -> int:
        """All ranks have ended a load. Returns the bytes of a chunk if the load was complete, otherwise 0.

        Args:
            failed: whether vLLM keeps none of the load's pages. Otherwise it keeps the pages up to the load's cut.
        """
        request_id, prompt.loading = prompt.request.request_id, None
        self._looks.unpin(loading.keys)
        if failed:
            self._looks.shared.forget(request_id)
        else:
            self._looks.shared.ended(request_id)
        if failed or loading.cut:
            self._cut(prompt, loading, failed=failed)
            return 0
        seconds = time.monotonic() - loading.began_s
        nbytes = sum(hit.nbytes for hit in loading.hits)
        self._count_hits(loading.hits)
        tiers = {hit.tier for hit in loading.hits}
        if len(tiers) == 1:
            self._breakeven.loaded(tiers.pop(), nbytes, seconds, loading.wait_s)
        return nbytes // len(loading.hits)

    def _count_hits(self, hits: Sequence[Found]) -> None:
        self._telemetry.count("pool_hits", len(hits))
        self._telemetry.count("pool_far_hits", sum(hit.tier == FAR for hit in hits))

    def _cut(self, prompt: PoolPrompt, loading: Loading, *, failed: bool) -> None:
        """A load broke off at an unusable chunk. The chunks before it count as loaded; the rest is not loaded again."""
        cut = loading.cut or Cut(loading.tokens.start, Cause.INTERNAL, None)
        loading = loading._replace(cut=cut)
        prompt.failed, prompt.there = loading, None
        bad = loading.loaded
        prompt.kept = cut.stop_token // CHUNK_TOKENS  # what is damaged was removed: save it again
        if cut.miss in (
            Miss.UNLIKE,
            Miss.CODEC,
            Miss.DRAFT,
        ):  # what is damaged or gone is found no more
            self._audit.refuse(loading.keys[bad : bad + 1])
        if not failed:
            self._count_hits(loading.hits[:bad])
        elif bad and cut.cause is not Cause.STALLED and prompt.shortened < _MOST_SHORTENED:
            # vLLM asks again. It has kept nothing, because a window slides over this cache.
            prompt.shortened += 1
            prompt.look, prompt.pays = loading.look, prompt.kept

    def failed(self, prompt: PoolPrompt, cause: Cause) -> None:
        """A load of this prompt has failed, or broken off; the rest of the prompt is computed here."""
        loading, prompt.failed = prompt.failed, None
        if loading is None:
            return
        bad = loading.loaded
        if loading.cut and loading.cut.miss == Miss.LATE:  # only the far store is waited for
            self._breakeven.silent(FAR, time.monotonic())
        elif cause is Cause.STALLED:
            self._breakeven.silent(loading.hits[bad].tier, time.monotonic())
        elif cause is Cause.UNAUDITED:
            self._audit.begin(prompt, range(loading.stop_token, loading.tokens.stop))
        elif cause is Cause.AUDIT:
            self._audit.refuse(loading.keys[bad:])
