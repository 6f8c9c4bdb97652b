# SPDX-License-Identifier: Apache-2.0
"""The interface of policies. The live router and the simulator call it.

| name | what it is |
|---|---|
| `Policy` | decides which engines serve a request |
| `Request` | what a policy knows of a request |
| `View`, `EngineView`, `PrefixSource` | what a policy knows of the engines and KV pools now |
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
ASSUMED_TTFT_S = 2.0
"""The promise that is assumed where a decision needs one, and no class has a promise of TTFT."""
ASSUMED_TPOT_S = 0.1
"""The same for TPOT."""


class Role(StrEnum):
    """What the router uses an engine for. Most engines could do all of it."""

    PREFILL = "prefill"
    """Computes prompts and hands their KV over."""
    DECODE = "decode"
    """Generates tokens from KV that another engine hands over."""
    BOTH = "both"
    """Prefills for other engines, and decodes from KV of other engines. Each request uses one side
    of it."""
    WHOLE = "whole"
    """Computes prompts and generates their tokens itself. It takes part in no handoff."""
    CPU_PREFILL = "cpu_prefill"
    """A prefill engine without a GPU, for long prompts of classes that are not interactive (policy
    `length`)."""


class Request(NamedTuple):
    """What a policy knows of a request."""

    id: str
    tokens: int  # of the prompt; an estimate if the router has not tokenized it
    hashes: Sequence[BlockHash] = ()
    """One hash for each whole block of the prompt, in order. Each hash covers the prompt up to the
    end of its block, so equal hashes mean equal prefixes. Empty: the prompt is unknown."""
    max_tokens: int = 16  # most tokens it may generate
    arrival_s: float = 0.0
    qos: str = ""  # name of its class; empty: the default class
    interactive: bool = True  # whether a user waits for the answer
    session: str = ""  # the user or session (a header, or the field `user`); empty: unknown
    ttft_slo_s: float = inf  # promised to its class
    tpot_slo_s: float = inf
    deadline_s: float = inf  # after this time the answer is of no use
    group: str = "default"  # of engines that serve it


class PrefixSource(Protocol):
    """A place with cached prefixes: an engine, or a KV pool that engines share."""

    @property
    def name(self) -> str:
        """Unique among engines and pools. It stays the same when the engine restarts."""

    @property
    def block_tokens(self) -> int:
        """Tokens in one hashed block."""


class EngineView(PrefixSource, Protocol):
    """One engine as the router knows it now. Policies only read it."""

    @property
    def role(self) -> Role: ...

    @property
    def costs(self) -> CostModel:
        """Predicts how long prefill and decode take on this engine."""

    @property
    def open_requests(self) -> int:
        """Requests that were sent to this engine and have not ended."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that the engine has yet to compute, without cached ones."""

    @property
    def prefills(self) -> int:
        """Requests whose prompt is not computed yet. The prompt under way counts."""

    @property
    def batch(self) -> int:
        """Sequences that decode on this engine."""

    @property
    def context(self) -> int:
        """Tokens in the caches of the sequences that decode."""

    @property
    def heavy(self) -> int:
        """Decoding sequences that may generate more than `HEAVY_TOKENS` tokens."""

    @property
    def free_kv(self) -> float:
        """Tokens of KV that still fit; infinite if unknown."""

    @property
    def pull_prefix(self) -> bool:
        """Whether the engine can fetch a cached prefix from another engine."""

    def queued_s(self, now_s: float) -> float:
        """Predicted seconds until the engine has computed all prompts that it has."""

    def accepts(self, now_s: float) -> bool:
        """Whether the engine takes one more prompt at once; False after it answered "no room"."""


class View(Protocol):
    """All engines, as far as this request may use them.

    It leaves out engines that are down or draining, and engines that have already failed the
    request.
    """

    def engines(self, role: Role) -> Sequence[EngineView]:
        """The engines for one part of the request, always in the same order.

        Args:
            role: `PREFILL`: engines that can compute the prompt and hand it over, and engines of
                role `WHOLE`; empty if the request cannot be split. `DECODE`: engines that can
                answer the client; never empty when a policy is asked. An engine of role `BOTH` is
                in both lists.
        """

    def pools(self) -> Sequence[PrefixSource]:
        """KV pools. Every engine can fetch a prefix from them before it computes the rest. Most
        deployments have none."""

    def match(self, hashes: Sequence[BlockHash], engines: Sequence[PrefixSource]) -> Sequence[int]:
        """Leading blocks that each of these engines or pools has cached. A number may be late or
        wrong; that costs time only."""

    def transfer_s(self, source: PrefixSource, target: EngineView, tokens: int) -> float:
        """Predicted seconds to move the KV of `tokens` tokens; 0 if the link is unknown."""


HEAVY_TOKENS = 200
"""Answers above this many tokens are heavy (TetriInfer's buckets have 200 tokens)."""


class Route(NamedTuple):
    """Send the request to these engines, by name."""

    p: str | None  # computes the prompt; None or the same as `d`: `d` computes it
    d: str  # answers the client
    pull_from: str | None = None  # `p` first fetches the longest cached prefix from here


class Reject(NamedTuple):
    """Tell the client to come back later."""

    cause: str  # metric label: `ttft`, `tpot`, `deadline`
    retry_after_s: float


class Defer(NamedTuple):
    """No decision yet. Ask again at this time, or earlier when an engine has ended a request."""

    until_s: float


Decision = Route | Reject | Defer


class Policy(ABC):
    """Decides which engines serve a request.

    One object serves one router, or one simulation. A policy may remember its decisions. It must
    take random numbers from `random` only, so equal events give equal decisions, live and
    simulated.
    """

    @abstractmethod
    def decide(self, request: Request, view: View, now_s: float, random: Random) -> Decision:
        """Decide for one attempt of a request. No I/O, no clock.

        Args:
            now_s: the time now, on
        the clock of `request.arrival_s`.
        """


def cached_tokens(request: Request, engine: PrefixSource, blocks: int) -> int:
    """Tokens that the engine need not compute, as `blocks` blocks are cached. The last token is
    always computed."""
    return max(0, min(blocks * engine.block_tokens, request.tokens - 1))
