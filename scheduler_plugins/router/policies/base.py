# SPDX-License-Identifier: Apache-2.0
"""The seam between a policy and whoever asks it: the live router, or the simulator.

| name | what it is |
|---|---|
| `Policy` | decides which engines serve a request |
| `Request` | what is known of the request |
| `View`, `EngineView`, `PrefixSource` | what is known of the engines and KV pools, now |
| `Route`, `Reject`, `Defer` | the decision |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from enum import StrEnum
from math import inf
from random import Random
from typing import NamedTuple, Protocol

from scheduler_plugins.cost.model import CostModel

BlockHash = Hashable


class Role(StrEnum):
    """What an engine is used for. It is the router's label: engines can do all of it."""

    PREFILL = "prefill"
    """Computes prompts and hands their KV over."""
    DECODE = "decode"
    """Generates tokens from KV that it is handed."""
    BOTH = "both"
    """On both sides, for different requests: it hands KV over to others, and generates from others'."""
    WHOLE = "whole"
    """Computes prompts and generates their tokens itself; it takes part in no handoff."""
    CPU_PREFILL = "cpu_prefill"
    """A prefill engine without a GPU, for long prompts that nobody waits for (policy `length`)."""


class Request(NamedTuple):
    """What a policy knows of a request."""

    id: str
    tokens: int  # of the prompt; an estimate where nobody has tokenized it
    hashes: Sequence[BlockHash] = ()
    """One for each whole block of the prompt, in order. Each stands for the prompt up to its
    block's end, so equal hashes mean equal prefixes. Empty where the prompt is unknown."""
    max_tokens: int = 16  # most tokens it may generate
    arrival_s: float = 0.0
    qos: str = ""  # name of its class; empty: the default class
    interactive: bool = True  # whether somebody waits for it
    session: str = ""  # whose it is (a header, or the field `user`); empty: unknown
    ttft_slo_s: float = inf  # promised to its class
    tpot_slo_s: float = inf
    deadline_s: float = inf  # after this time nobody wants an answer


class PrefixSource(Protocol):
    """Where cached prefixes are: an engine, or a KV pool that engines share."""

    @property
    def name(self) -> str:
        """No other engine or pool has it; it stays when the engine restarts."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block that a hash stands for."""


class EngineView(PrefixSource, Protocol):
    """One engine as it is known now. Policies read it and change nothing."""

    @property
    def role(self) -> Role: ...

    @property
    def costs(self) -> CostModel:
        """How long prefill and decode take there."""

    @property
    def open_requests(self) -> int:
        """Requests that were sent there and have not ended."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that it has yet to compute, cached ones left out."""

    @property
    def prefills(self) -> int:
        """Requests whose prompt it has yet to compute, the one under way included."""

    @property
    def batch(self) -> int:
        """Sequences that decode there."""

    @property
    def context(self) -> int:
        """Tokens in the caches of those sequences."""

    @property
    def heavy(self) -> int:
        """Those of these sequences that may generate more than `HEAVY_TOKENS` tokens."""

    @property
    def free_kv(self) -> float:
        """Tokens for which it has room; infinite where unknown."""

    @property
    def pull_prefix(self) -> bool:
        """Whether it can fetch a cached prefix from another engine."""

    def queued_s(self, now_s: float) -> float:
        """Predicted seconds until it has computed the prompts it has."""

    def accepts(self, now_s: float) -> bool:
        """Whether it would take one more prompt at once; False once it has answered "no room"."""


class View(Protocol):
    """All engines, as far as this request may use them.

    Engines that are down, draining, or have failed the request already are left out.
    """

    def engines(self, role: Role) -> Sequence[EngineView]:
        """The engines for one part of the request, always in the same order.

        Args:
            role: `PREFILL`: those that can compute the prompt and hand it over, or are of role
                `WHOLE`. Empty where the request cannot be split. `DECODE`: those that can answer
                the client. Never empty when a policy is asked. An engine of role `BOTH` is among
                both.
        """

    def pools(self) -> Sequence[PrefixSource]:
        """KV pools from which every engine can fetch a prefix before it computes the rest; mostly
        there are none."""

    def match(self, hashes: Sequence[BlockHash], engines: Sequence[PrefixSource]) -> Sequence[int]:
        """Leading blocks that each of these engines or pools has cached. It may be late or wrong: a
        wrong number costs time only."""

    def transfer_s(self, source: PrefixSource, target: EngineView, tokens: int) -> float:
        """Predicted seconds to move the KV of `tokens` tokens; 0 where nothing is known of the
        link."""


HEAVY_TOKENS = 200
"""Answers above this many tokens are heavy (TetriInfer's buckets have 200 tokens)."""


class Route(NamedTuple):
    """Send the request to these engines, by name."""

    p: str | None  # computes the prompt; None or the same as `d`: `d` does it itself
    d: str  # answers the client
    pull_from: str | None = (
        None  # `p` fetches the longest cached prefix from this engine or pool first
    )


class Reject(NamedTuple):
    """Tell the client to come back later."""

    cause: str  # metric label: `ttft`, `tpot`, `deadline`
    retry_after_s: float


class Defer(NamedTuple):
    """No decision yet: ask again at this time, or as soon as an engine has ended a request."""

    until_s: float


Decision = Route | Reject | Defer


class Policy(ABC):
    """Decides which engines serve a request.

    One object serves one router, or one simulation. It may remember what it decided, and must draw
    chance from `random` only. Equal events then give equal decisions, live and simulated.
    """

    @abstractmethod
    def decide(self, request: Request, view: View, now_s: float, random: Random) -> Decision:
        """Decide for one attempt of a request. No I/O, no clock.

        Args:
            now_s: by the clock of `request.arrival_s`.
        """


def cached_tokens(request: Request, engine: PrefixSource, blocks: int) -> int:
    """Tokens that `blocks` cached blocks spare this engine. The last token is always computed."""
    return max(0, min(blocks * engine.block_tokens, request.tokens - 1))
