# SPDX-License-Identifier: Apache-2.0
"""One attempt of a request: the engines it may use, the engines it uses, and the errors if no
engine can serve it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from scheduler_plugins.router.client.answers import LONGEST_RETRY_S
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.policies.base import Reject


class UnavailableError(Exception):
    """No engine could serve the request.

    The message is for the operator's log and has every engine's URL. `causes` is for the client:
    the number of engines of each role that failed, by cause.
    """

    def __init__(self, engines: list[tuple[BackendEngine, str, str]]) -> None:
        """`engines`: each with its cause (a label) and its reason (a text)."""
        tried = "; ".join(f"{e.url} ({e.role}): {reason}" for e, _, reason in engines)
        super().__init__(f"no engine could serve the request: {tried}")
        counted = Counter((str(engine.role), cause) for engine, cause, _ in engines)
        self.causes: dict[str, dict[str, int]] = {}
        for (role, cause), count in sorted(counted.items()):
            self.causes.setdefault(role, {})[cause] = count


class AllOverloadedError(Exception):
    """All engines that could serve the request are overloaded."""

    def __init__(self, retry_after_s: int, message: str = "") -> None:
        super().__init__(
            message or f"all engines are overloaded; the first has room in {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class RejectedError(AllOverloadedError):
    """The policy rejected the request."""

    def __init__(self, reject: Reject) -> None:
        retry_after_s = max(1, ceil(min(reject.retry_after_s, LONGEST_RETRY_S)))
        super().__init__(
            retry_after_s,
            f"the request would break its promise ({reject.cause}); retry in {retry_after_s} s",
        )


@dataclass(frozen=True)
class Attempt:
    """The engine that answers the client, and the engine that prefills for it."""

    answering: BackendEngine
    prefill: BackendEngine | None
    cause: str
    """Why there is no prefill engine; empty if there is one."""
    fresh_tokens: int = 0
    """Prompt tokens that `prefill` is expected to compute."""

    expected_s: float | None = None
    """Predicted time to the first token; None: costs are not known."""
    pool: str = ""
    """The KV pool from which a part of the prompt is expected to be loaded; empty: none."""

    def __str__(self) -> str:
        """The decision, for the log."""
        source = f", the beginning from {self.pool}" if self.pool else ""
        if self.prefill is None:
            return f"{self.answering.url} answers alone ({self.cause}){source}"
        return (
            f"{self.prefill.url} prefills, {self.fresh_tokens} tokens are new{source}; "
            f"{self.answering.url} answers"
        )

    @property
    def flow(self) -> str:
        if self.prefill is not None:
            return "disaggregated"
        return "decode_alone" if self.answering.serves(Role.DECODE) else "prefill_alone"


class AbleEngines(NamedTuple):
    """Engines for one attempt."""

    decode: list[BackendEngine]  # can answer the client; never empty
    prefill: list[BackendEngine]
    cause: str  # why there is no prefill engine
    cpu_prefill: Sequence[BackendEngine] = ()  # for requests that are not interactive
