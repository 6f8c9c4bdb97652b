# SPDX-License-Identifier: Apache-2.0
"""One engine as the router knows it: its state, its load, and the addresses where it hands KV over."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol
from urllib.parse import urlsplit

from prometheus_client import Gauge

from pd_connector.protocol.wire.params import ProducerAddress
from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.cost.online import OnlineFit
from scheduler_plugins.router.engines.about import About
from scheduler_plugins.router.engines.circuit import Circuit
from scheduler_plugins.router.engines.counted_load import EngineLoad, Loaded
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.engines.progress import Signs
from scheduler_plugins.router.engines.role_state import RoleState
from scheduler_plugins.router.engines.traffic import Traffic
from scheduler_plugins.router.index.stored import StorePlace
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import Role as Role
from scheduler_plugins.router.prompt.describe import BLOCK_TOKENS
from scheduler_plugins.router.settings.elastic import MOVABLE


class Follower(Protocol):
    """Follows an engine's KV events (`caches.FollowedRanks`)."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one block of the engine; 0 before the engine has reported it."""


@dataclass(eq=False)
class BackendEngine(Loaded):
    """One engine as the router knows it. Changed on the event loop only.

    Policies see it as an `EngineView`.
    """

    url: str
    role: Role
    metrics: Metrics = field(repr=False)
    role_given: bool = True
    """Whether the operator has given its side; else the engine is asked each time it comes up."""
    up: bool = False
    """Whether the engine gets requests."""
    reason: str = "not checked yet"
    """Why the engine is not up, or why it has no address."""
    addresses: tuple[ProducerAddress, ...] = ()
    """Handover address of each data-parallel rank; empty for an engine that hands nothing over."""
    warning: str = ""
    """What is wrong although the engine serves, such as KV that does not arrive."""
    handoffs: dict[str, int] = field(default_factory=dict)
    """Outcomes of requests whose prompts another engine computed, counted since its start, by its last report."""
    traffic: Traffic = field(default_factory=Traffic)
    """Its KV traffic, by its last report."""
    about: About = field(default_factory=About)
    """What `/health` and the live page show of it."""
    kind: Kind | None = None
    """Kind of engine; None until the engine has been asked."""
    role_state: RoleState = field(default_factory=RoleState)
    """What is settled about its role."""
    was_vllm: bool = False
    """Whether the last answer came from vLLM. It stays while the engine is down."""
    whole: bool = False
    """Whether the engine is an SGLang engine outside a pair: it computes its own prompts and takes no KV."""
    model: str = ""
    """Name of the model, for a prefill engine."""
    models: frozenset[str] = frozenset()
    """Names of served models and adapters, by its last report; empty: not reported."""
    context_tokens: int = 0
    """Most tokens of a prompt and its answer together, by its last report; 0: not reported."""
    handover_known: bool = False
    """Whether the engine has reported since its start if it hands KV over."""
    switches: bool = False
    """Whether the engine is an SGLang engine that changes its side on request (`--enable-pd-role-switch`)."""
    bootstrap_port: int | None = None
    """Port where SGLang decode engines look up the ranks of an SGLang prefill engine."""
    down_since: float | None = None
    """When the engine went down, on the event loop's clock; None: it is up."""
    starts: int = 0
    """How often the engine came up. Each start may bring a new tokenizer, for example."""
    refusing: bool = False
    """Down because the engine takes no new connections. It may be draining."""
    answers: bool = False
    """Down although it answers: `/health` says that it takes no requests, as SGLang's does while it drains."""
    ended: int = 0
    """How often it began to refuse connections: its process may have ended each time."""
    signs: Signs = field(default_factory=Signs, repr=False)
    """What still moves, since it came up."""
    load: EngineLoad = field(default_factory=EngineLoad, repr=False)
    """Load that this router has sent to the engine."""
    costs: CostModel = field(default_factory=CostModel.token_count, repr=False)
    """Predicts how long prefill and decode take. Counts tokens until more is known."""
    circuit: Circuit = field(default_factory=Circuit, repr=False)
    """Stops requests to the engine for a while after several failures in a row."""
    paused_for: set[str] = field(default_factory=set, repr=False)
    """Causes that have opened the circuit, since the engine joined."""
    draining: bool = False
    """Whether the engine finishes its requests and gets no new ones."""
    costs_reported: bool = False
    """Whether costs come from a profile or from the engine itself, so nothing need be learnt."""
    _fit: OnlineFit = field(default_factory=OnlineFit, repr=False)
    ranks: tuple[int, ...] = (0,)
    """Data-parallel ranks, by the engine's load report or metrics."""
    copies: dict[str, int] = field(default_factory=dict, repr=False)
    """Prompts that the engine computes for other engines: id of the copy to the index of its rank in `addresses`."""
    copies_sent: Counter[int] = field(default_factory=Counter, repr=False)
    """Prompts for other engines that each rank has been sent so far."""
    reported_block_tokens: int = 0
    """Tokens of one block, by the engine's load report or metrics; 0: not reported."""
    free_kv: float = inf
    pull_prefix: bool = False
    follower: Follower | None = field(default=None, repr=False)
    """Receives the engine's KV events; None: no events are known."""
    _gauge: Gauge | None = field(default=None, repr=False)
    _refuses: bool = field(default=False, repr=False)
    store: StorePlace | None = None
    """Its place in the KV pool of its host, by its last report; None: it uses none, or does not tell."""

    @property
    def name(self) -> str:
        return self.url

    @property
    def hands_over(self) -> bool:
        """Whether the router uses the engine to compute prompts for other engines."""
        return self.role in (Role.PREFILL, Role.CPU_PREFILL, Role.BOTH)

    @property
    def able(self) -> frozenset[Role]:
        """Roles that the engine can have besides its present one, as far as it is known."""
        if self.kind is Kind.SGLANG:
            return frozenset((Role.PREFILL, Role.DECODE) if self.switches else ())
        if self.only_produces:
            return frozenset((Role.PREFILL,))
        return MOVABLE if self.addresses else frozenset((Role.DECODE,))

    @property
    def only_produces(self) -> bool:
        """Whether it takes no KV (`kv_producer`), as far as it is known."""
        return bool(self.addresses) and not all(address.consumes for address in self.addresses)

    def serves(self, role: Role) -> bool:
        """Whether the engine serves this side. An engine may serve both."""
        return self.role is role or (self.role is Role.BOTH and role in (Role.PREFILL, Role.DECODE))

    @property
    def in_flight(self) -> int:
        """Open requests to the engine."""
        return self.load.open_exchanges

    @property
    def block_tokens(self) -> int:
        """Tokens of one block: from KV events, else from reports, else assumed."""
        by_events = self.follower.block_tokens if self.follower is not None else 0
        return by_events or self.reported_block_tokens or BLOCK_TOKENS

    def queued_s(self, now_s: float) -> float:
        return self.load.queued_s(now_s)

    def accepts(self, now_s: float) -> bool:
        return self.load.accepts(now_s)

    def learn(self, load: StepLoad, duration_s: float) -> bool:
        """Learn from one step, unless the engine reports its costs. A step is a prompt computed alone, or one token
        of a stream. `duration_s` is its time in seconds. Returns whether `costs` have changed."""
        if self.costs_reported:
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
        """Whether the costs of prefill are known."""
        return self.costs_reported or self._fit.knows_prefill

    def assume(self, peers: Sequence[CostModel]) -> None:
        """Assume the mean prefill costs of these peers, because this engine's own costs are unknown.

        With an invented rate, a new engine would look far better than the others and get everything, or far worse and
        get nothing.
        """
        mean = CostModel.mean(peers)
        prefill = replace(self._fit.model, a=mean.a, b=mean.b, c=mean.c)
        self.costs = replace(prefill, chunk_tokens=mean.chunk_tokens)

    @property
    def computes_prompts(self) -> bool:
        """Whether the engine can answer a request alone. SGLang engines of a pair cannot."""
        return self.kind is not Kind.SGLANG or self.whole

    @property
    def address(self) -> ProducerAddress | None:
        """Handover address of its first rank; None: no address is known."""
        return self.addresses[0] if self.addresses else None

    def moved(self, rank: int, seen: ProducerAddress) -> bool:
        """Whether a rank answered from another address than the known one."""
        addresses = self.addresses[rank : rank + 1]
        return bool(self.addresses) and not any(map(seen.same_place, addresses))

    def bootstrap(self, rank: int) -> tuple[str, int]:
        """Host and port that an SGLang decode engine asks for this prefill engine's ranks: SGLang's registry if there
        is one, else the control port of the rank."""
        if self.bootstrap_port is not None:
            return urlsplit(self.url).hostname or "", self.bootstrap_port
        return self.addresses[rank].host, self.addresses[rank].port

    @property
    def gone(self) -> bool:
        """Whether the engine is down and does not finish its requests: it hangs, cannot be reached, or was removed."""
        return self.down_since is not None and not (self.refusing or self.answers)

    def set_up(self) -> None:
        if not self.up:
            self.starts += 1
            self.signs, self._refuses = Signs(), False
        self.up, self.refusing, self.answers, self.down_since = True, False, False, None
        if self.address is not None or not self.hands_over:
            self.reason = ""
        self._report()

    def set_down(self, now: float, reason: str, *, refusing: bool, answers: bool = False) -> bool:
        """Take the engine out of service. Its address is void, because a restart changes it.

        Returns whether the engine was up.
        """
        was_up = self.up
        self.ended += refusing and not self._refuses
        self._refuses = refusing
        # A hung engine counts as hung until it answers, even if it refuses connections later.
        hung = not (was_up or self.refusing or self.answers or self.down_since is None)
        self.refusing, self.answers = refusing and not hung, answers
        if was_up or self.down_since is None:
            self.down_since = now
        self.up, self.reason, self.addresses = False, reason, ()
        self.handover_known = False
        self.traffic = Traffic()
        self._report()
        self.kind = None
        return was_up

    def set_addresses(self, addresses: tuple[ProducerAddress, ...], reason: str = "") -> None:
        """Set the handover addresses of the ranks, or the reason why there are none."""
        self.addresses, self.reason, self.handover_known = addresses, reason, True
        self._report()

    def change_role(self, role: Role, now_s: float) -> None:
        """Use the engine for this side from now on. Its metrics are those of its new side."""
        self.forget_metrics()
        self.role, self.role_state.since_s = role, now_s
        self._gauge = None
        self._open_gauge().set(self.load.own_open)
        self._report()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count one open request."""
        self.load.opened(1)
        self._open_gauge().inc()
        try:
            yield
        finally:
            self.load.opened(-1)
            self._open_gauge().dec()

    def _open_gauge(self) -> Gauge:
        if self._gauge is None:
            self._gauge = self.metrics.engine_in_flight.labels(self.url, self.role)
        return self._gauge

    @contextmanager
    def decoding(self, request_id: str, tokens: int, max_tokens: int) -> Iterator[None]:
        """Count one request that the engine answers. Policies see the count at once."""
        self.load.decode_sent(request_id, tokens, max_tokens)
        try:
            yield
        finally:
            self.load.decode_ended(request_id)

    def forget_metrics(self) -> None:
        """Remove the engine's metric series. They carry its side, so they end when it changes sides or leaves."""
        metrics = self.metrics
        for gauge in (metrics.engine_up, metrics.engine_in_flight):
            with suppress(KeyError):
                gauge.remove(self.url, str(self.role))
        for series in (metrics.event_lag_s, metrics.events_connected, metrics.prefill_addressable):
            with suppress(KeyError):
                series.remove(self.url)
        for cause in self.paused_for:
            with suppress(KeyError):
                metrics.circuit_opened.remove(self.url, cause)
        self.paused_for.clear()

    def _report(self) -> None:
        if not self.role_given and self.kind is None:
            return  # its side is not known yet
        self.metrics.engine_up.labels(self.url, self.role).set(self.up)
        if self.hands_over:
            self.metrics.prefill_addressable.labels(self.url).set(self.address is not None)
