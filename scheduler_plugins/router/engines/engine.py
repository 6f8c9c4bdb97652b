# SPDX-License-Identifier: Apache-2.0
"""Engines: who is alive, who is busy, and where prefill engines hand over KV."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol
from urllib.parse import urlsplit

from pd_connector.protocol.params import ProducerAddress
from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.cost.online import OnlineFit
from scheduler_plugins.router.engines.circuit import Circuit
from scheduler_plugins.router.engines.counted_load import EngineLoad, Loaded
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.metrics import OUTCOMES, Metrics
from scheduler_plugins.router.policies.base import Role as Role
from scheduler_plugins.router.prompt.describe import BLOCK_TOKENS


class Follower(Protocol):
    """Follows an engine's KV events, here or in another process."""

    @property
    def block_tokens(self) -> int:
        """Tokens of the engine's blocks; 0 before it has said."""


@dataclass(eq=False)
class BackendEngine(Loaded):
    """One engine as the router knows it. Changed on the event loop only.

    Policies see it as an `EngineView`.
    """

    url: str
    role: Role
    metrics: Metrics = field(repr=False)
    role_given: bool = True
    """Whether the operator has said on which side it is; else it is asked, each time it comes up."""
    up: bool = False
    """Whether it gets requests."""
    reason: str = "not checked yet"
    """Why it is not up, or why it has no address."""
    addresses: tuple[ProducerAddress, ...] = ()
    """Where each of its data-parallel ranks hands over KV; empty on the decode side, and for an engine without our connector."""
    warning: str = ""
    """What is wrong although it serves: no KV arrives there."""
    handoffs: dict[str, int] = field(default_factory=dict)
    """What became of requests whose prompts were computed for it, since its start, as it told last."""
    kind: Kind | None = None
    """Which engine it is; None until it has been asked."""
    was_vllm: bool = False
    """Whether it was vLLM's when it was asked last, also while it is down."""
    whole: bool = False
    """Whether it is SGLang's and no half of a pair: it computes its prompts, and takes nobody's KV."""
    model: str = ""
    """The name of its model, where it is a prefill engine."""
    models: frozenset[str] = frozenset()
    """Names of the models and adapters that it serves, as it told last; empty: it has not."""
    context_tokens: int = 0
    """Most tokens of a prompt and its answer together, as it told last; 0: it has not."""
    bootstrap_port: int | None = None
    """Where SGLang's decode engines ask for an SGLang prefill engine's ranks."""
    down_since: float | None = None
    """When it went down, on the event loop's clock."""
    starts: int = 0
    """How often it came up: a tokenizer, say, may be another one each time."""
    refusing: bool = False
    """Down, but only known to take no new connections: it may be draining."""
    load: EngineLoad = field(default_factory=EngineLoad, repr=False)
    """What this router has sent to it."""
    costs: CostModel = field(default_factory=CostModel.token_count, repr=False)
    """How long prefill and decode take there. Counts tokens until more is known."""
    circuit: Circuit = field(default_factory=Circuit, repr=False)
    """Keeps requests from it for a while after it failed several in a row."""
    paused_for: set[str] = field(default_factory=set, repr=False)
    """Causes for which the circuit has opened, since it came."""
    draining: bool = False
    """Whether it gets no new requests, and goes on with those it has."""
    told_costs: bool = False
    """Whether a profile or the engine itself says what it costs, so that nothing need be learnt."""
    _fit: OnlineFit = field(default_factory=OnlineFit, repr=False)
    ranks: tuple[int, ...] = (0,)
    """Its data-parallel ranks, as its load report or its metrics tell."""
    copies: dict[str, int] = field(default_factory=dict, repr=False)
    """Prompts that it computes for other engines, each with its data-parallel rank's place among `addresses`."""
    copies_sent: Counter[int] = field(default_factory=Counter, repr=False)
    """How many of them each rank has been sent so far."""
    told_block_tokens: int = 0
    """Tokens of its blocks, as its load report or its metrics tell; 0: they do not."""
    free_kv: float = inf
    pull_prefix: bool = False
    follower: Follower | None = field(default=None, repr=False)
    """Receives its KV events; None: it sends none, as far as is known."""

    @property
    def name(self) -> str:
        return self.url

    @property
    def hands_over(self) -> bool:
        """Whether it is used to compute prompts for other engines."""
        return self.role in (Role.PREFILL, Role.CPU_PREFILL, Role.BOTH)

    def serves(self, role: Role) -> bool:
        """Whether it is on this side, among others."""
        return self.role is role or (self.role is Role.BOTH and role in (Role.PREFILL, Role.DECODE))

    @property
    def in_flight(self) -> int:
        """Requests open to it."""
        return self.load.open_exchanges

    @property
    def block_tokens(self) -> int:
        """Tokens of its blocks: by its events, else as it told, else assumed."""
        by_events = self.follower.block_tokens if self.follower is not None else 0
        return by_events or self.told_block_tokens or BLOCK_TOKENS

    def queued_s(self, now_s: float) -> float:
        return self.load.queued_s(now_s)

    def accepts(self, now_s: float) -> bool:
        return self.load.accepts(now_s)

    def learn(self, load: StepLoad, duration_s: float) -> bool:
        """A step of this load took so long: a prompt that it computed alone, or one token of a stream. Teaches what
        steps cost there, unless it tells itself. Returns whether `costs` have changed."""
        if self.told_costs:
            return False
        before = self._fit.model
        self._fit.note(load, duration_s)
        self._fit.catch_up()
        if self._fit.model is before:
            return False
        self.costs = self._fit.model
        return True

    @property
    def knows_prefill(self) -> bool:
        """Whether it is known what prefill costs there."""
        return self.told_costs or self._fit.knows_prefill

    def assume(self, peers: Sequence[CostModel]) -> None:
        """Nothing is known of its prefills: take them to cost what they cost at these engines, on average.

        With an invented rate an engine that has just come would look far better than the others and get everything, or
        far worse and get nothing.
        """
        mean = CostModel.mean(peers)
        prefill = replace(self._fit.model, a=mean.a, b=mean.b, c=mean.c)
        self.costs = replace(prefill, chunk_tokens=mean.chunk_tokens)

    def told_handoffs(self, handoffs: dict[str, int]) -> None:
        """It has told what became of requests since its start. What is new is counted."""
        for outcome, count in handoffs.items():
            before = self.handoffs.get(outcome, 0)
            new = count - before if count >= before else count  # it has started anew
            labels = (outcome, "") if outcome in OUTCOMES else ("recomputed", outcome)
            self.metrics.handoffs.labels(*labels).inc(new)
        self.handoffs = handoffs

    @property
    def computes_prompts(self) -> bool:
        """Whether it answers a request without another engine: SGLang's engines of a pair do not."""
        return self.kind is not Kind.SGLANG or self.whole

    @property
    def address(self) -> ProducerAddress | None:
        """Where its first rank hands over KV; None: it does not, as far as is known."""
        return self.addresses[0] if self.addresses else None

    def moved(self, rank: int, seen: ProducerAddress) -> bool:
        """Whether one of its ranks answers from another address than is known."""
        return bool(self.addresses) and seen not in self.addresses[rank : rank + 1]

    def bootstrap(self, rank: int = 0) -> tuple[str, int]:
        """Host and port that an SGLang decode engine asks for this prefill engine's ranks: SGLang's
        registry where it has one, and the control port of a rank otherwise."""
        if self.bootstrap_port is not None:
            return urlsplit(self.url).hostname or "", self.bootstrap_port
        return self.addresses[rank].host, self.addresses[rank].port

    def lost(self, now: float, drain_timeout_s: float) -> bool:
        """Whether nothing more is to be expected of the requests it has."""
        if self.up or self.down_since is None:
            return False
        return not self.refusing or now - self.down_since >= drain_timeout_s

    def set_up(self) -> None:
        self.starts += not self.up
        self.up, self.refusing, self.down_since = True, False, None
        if self.address is not None or not self.hands_over:
            self.reason = ""
        self._report()

    def set_down(self, now: float, reason: str, *, refusing: bool) -> bool:
        """Take it out of service; its address is void, as a restart changes it.

        Returns whether it was up.
        """
        was_up = self.up
        # Once known to hang it stays so until it answers: a refusal says nothing better.
        self.refusing = refusing and (was_up or self.refusing or self.down_since is None)
        if was_up or self.down_since is None:
            self.down_since = now
        self.up, self.reason, self.addresses = False, reason, ()
        self._report()
        self.kind = None
        return was_up

    def set_addresses(self, addresses: tuple[ProducerAddress, ...], reason: str = "") -> None:
        """Where its ranks hand over KV, or why that is not known."""
        self.addresses, self.reason = addresses, reason
        self._report()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count one open request."""
        gauge = self.metrics.engine_in_flight.labels(self.url, self.role)
        self.load.opened(1)
        gauge.inc()
        try:
            yield
        finally:
            self.load.opened(-1)
            gauge.dec()

    @contextmanager
    def decoding(self, request_id: str, tokens: int, max_tokens: int) -> Iterator[None]:
        """Count one request that it answers. Policies see the count at once."""
        self.load.decode_sent(request_id, tokens, max_tokens)
        try:
            yield
        finally:
            self.load.decode_ended(request_id)

    def describe(self) -> dict[str, Any]:
        """Its state as `/health` shows it."""
        state: dict[str, Any] = {
            "url": self.url,
            "role": self.role,
            "state": "up" if self.up else "down",
            "in_flight": self.in_flight,
        }
        if self.kind is not None:
            state["kind"] = self.kind
        elif not self.role_given:
            state["role"] = "unknown"
        if self.hands_over:
            state["hands_over_kv"] = self.address is not None
        if self.handoffs:
            state["handoffs"] = self.handoffs
        if self.draining:
            state["draining"] = True
        if self.circuit.cause:
            state["circuit"] = self.circuit.cause
        if self.reason:
            state["reason"] = self.reason
        if self.warning:
            state["warning"] = self.warning
        return state

    def forget_metrics(self) -> None:
        """Its series are for its side: they end when it changes sides, or leaves."""
        known = self.metrics
        for gauge in (known.engine_up, known.engine_in_flight):
            with suppress(KeyError):
                gauge.remove(self.url, str(self.role))
        with suppress(KeyError):
            known.event_lag_s.remove(self.url)
        with suppress(KeyError):
            known.prefill_addressable.remove(self.url)
        for cause in self.paused_for:
            with suppress(KeyError):
                known.circuit_opened.remove(self.url, cause)
        self.paused_for.clear()

    def _report(self) -> None:
        if not self.role_given and self.kind is None:
            return  # nobody knows its side
        self.metrics.engine_up.labels(self.url, self.role).set(self.up)
        if self.hands_over:
            self.metrics.prefill_addressable.labels(self.url).set(self.address is not None)
