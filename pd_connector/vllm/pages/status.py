# SPDX-License-Identifier: Apache-2.0
"""Decides whether KV of a request may be used for more than the request itself; if not, gives the cause.

Each reason is a rule: a class with hooks for the events that it watches, and the uses that it forbids. A new rule is a
new file, and a line in the list of rules in `scheduler_side`.
"""

import enum
from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request


class Use(enum.Enum):
    """What KV of a request can be used for."""

    OFFER = "handed over to a consumer"
    COMPARE = "compared with KV of another engine, which is believed or not from then on"
    SAVE = "saved in the pool"
    LOAD = "loaded from the pool, in place of being computed"


class PageRule:
    """One reason why KV of a request must not be used. Called by vLLM's scheduler only; hooks do nothing by default.

    Attributes:
        cause: the reason in a word, as metrics label it.
        forbids: the uses that it rules out.
    """

    cause: ClassVar[str]
    forbids: ClassVar[Collection[Use]] = ()

    def bind(self, manager: "KVCacheManager") -> None:
        """Attach vLLM's pages, before the first request."""

    def queued(self, request: "Request") -> None:
        """A request has come."""

    def admitted(self, request: "Request", blocks: "KVCacheBlocks", own_tokens: int) -> None:
        """vLLM has given pages to a request, to compute or to load KV.

        Args:
            blocks: all its pages.
            own_tokens: tokens that PDConnector loads.
        """

    def load_ended(self, request_id: str, *, failed: bool) -> None:
        """The workers reported the end of a load."""

    def stepped(self) -> None:
        """A step was scheduled."""

    def finished(self, request: "Request") -> None:
        """A request has ended, and every part of the connector has dealt with it."""

    def holds(self, request: "Request") -> bool:
        """Whether the reason is there for this request now."""
        return False

    def partial_pages(self, request_id: str) -> Collection[int]:
        """Pages of a request that hold only a part of its KV."""
        return ()


class PageStatus:
    """The rules of one engine, asked in this order."""

    def __init__(self, *rules: PageRule) -> None:
        self._rules = list(rules)

    def add(self, *rules: PageRule) -> None:
        """Add rules, before `bind`."""
        self._rules += rules

    def problem(self, request: "Request", use: Use) -> str:
        """The cause that forbids this use of a request's KV; empty if the use is allowed."""
        for rule in self._rules:
            if use in rule.forbids and rule.holds(request):
                return rule.cause
        return ""

    def partial_pages(self, request_id: str) -> set[int]:
        """Pages of a request that hold only a part of its KV."""
        return {page for rule in self._rules for page in rule.partial_pages(request_id)}

    def bind(self, manager: "KVCacheManager") -> None:
        """See `PageRule`; as are the other hooks."""
        for rule in self._rules:
            rule.bind(manager)

    def queued(self, request: "Request") -> None:
        for rule in self._rules:
            rule.queued(request)

    def admitted(self, request: "Request", blocks: "KVCacheBlocks", own_tokens: int) -> None:
        for rule in self._rules:
            rule.admitted(request, blocks, own_tokens)

    def load_ended(self, request_id: str, *, failed: bool) -> None:
        for rule in self._rules:
            rule.load_ended(request_id, failed=failed)

    def stepped(self) -> None:
        for rule in self._rules:
            rule.stepped()

    def finished(self, request: "Request") -> None:
        for rule in self._rules:
            rule.finished(request)
