# SPDX-License-Identifier: Apache-2.0
"""Audits of the pool's writers: a prompt with chunks that were not compared yet is computed here, and then compared.

One audit is under way at a time. Until it is over, all prompts are computed here.
"""

from collections.abc import Iterable, Sequence

from pd_connector.pool.jobs import Fill
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.vllm.handoff.streaming import kept_pages
from pd_connector.vllm.messages import AuditReport
from pd_connector.vllm.pages.windows import NULL_PAGE, Windows
from pd_connector.vllm.pool.prompt import PoolPrompt
from pd_connector.vllm.pool.saves import PoolSaves

_MOST_REFUSED = 65536


class PoolAudit:
    """Used by the scheduler's thread only.

    Args:
        windows: page sizes of the engine's page tables.
        saves: keeps pages while they are compared.
    """

    def __init__(self, windows: Windows, saves: PoolSaves) -> None:
        self._windows = windows
        self._saves = saves
        self._under_way = ""  # the request whose KV will be compared, or the name of the comparison
        self._refused: dict[bytes, None] = {}  # keys of chunks by writers that are not believed

    def __bool__(self) -> bool:
        """Whether an audit is under way."""
        return bool(self._under_way)

    def refused(self, key: bytes) -> bool:
        """Whether an audit has found this chunk's writer wrong."""
        return key in self._refused

    def begin(self, prompt: PoolPrompt, tokens: range) -> None:
        """Begin an audit, if none is under way, of a prompt's tokens whose writer has not been compared yet."""
        if not self._under_way:
            self._under_way, prompt.audited = prompt.request.request_id, tokens

    def refuse(self, keys: Iterable[bytes]) -> None:
        """These chunks were not loaded, because an audit has found their writer wrong."""
        self._refused.update(dict.fromkeys(keys))
        while len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]

    def compare(
        self, prompt: PoolPrompt, computed: int, pages: Sequence[Sequence[int]], model: bytes
    ) -> list[Fill]:
        """The command that compares KV computed here, once the audited prompt is computed far enough; otherwise None.

        Args:
            computed: tokens of the request that are computed.
            pages: its page ids by table.
        """
        span = prompt.audited
        if not span or computed < span.stop:
            return []
        prompt.audited = range(0)
        tables = []
        for table, size in zip(pages, self._windows.page_sizes, strict=True):
            first = span.start // size
            tables.append([NULL_PAGE] * first + list(table[first : -(-span.stop // size)]))
        self._under_way = self._saves.keep("audit", tables)
        chunks = range(span.start // CHUNK_TOKENS, -(-span.stop // CHUNK_TOKENS))
        return [
            Fill(
                self._under_way,
                model,
                tuple(prompt.chunk(number) for number in chunks),
                span.start,
                span.stop,
                kept_pages(tables),
                compares=True,
            )
        ]

    def give_up(self, prompt: PoolPrompt) -> None:
        """A prompt has ended before it could be compared: another prompt will be compared instead."""
        if prompt.audited:
            prompt.audited, self._under_way = range(0), ""

    def reported(self, reports: Iterable[AuditReport]) -> None:
        """Ranks have ended comparisons."""
        if any(report.request == self._under_way for report in reports):
            self._under_way = ""

    def forget(self) -> None:
        """The engine serves other weights."""
        self._under_way = ""
        self._refused.clear()
