# SPDX-License-Identifier: Apache-2.0
"""From settings to results, for one trace and one or several policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import QosClass, Slo
from scheduler_plugins.router.policies.added import added_names
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.policies.registry import BOTH_SIDES, DEFAULT, PREFILL, create
from scheduler_plugins.router.roles.controller import RoleController
from scheduler_plugins.router.roles.registry import create as create_roles
from scheduler_plugins.sim.cluster import Change, Cluster
from scheduler_plugins.sim.fleet import MOST_ENGINES, Fleet, Part
from scheduler_plugins.sim.kv_pool import FAR, KvPool, PoolSettings
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.node import Node, NodeSettings
from scheduler_plugins.sim.report import RoleMove, Summary, summarize
from scheduler_plugins.sim.served import Served
from scheduler_plugins.sim.trace import at_rate, jittered, one_after_another

COSTS = CostModel(a=6e-5, b=6e-10, c=0.02, d0=0.01, d1=2e-4, d2=1e-8)
"""An invented engine of about 15,000 tokens per second. Ratios count, not seconds. `pd-connector profile` measures a
real engine."""
CPU_COSTS = CostModel(a=6e-4, b=6e-9, c=0.2, d0=0.1, d1=2e-3, d2=1e-7)
"""An invented engine without a GPU, ten times slower."""
CHUNK_TOKENS = 2048
HOST_RETURNS_S = 60.0
"""After its death a host serves again, in seconds."""
ONLY_CLASS, BACKGROUND = "default", "background"
"""Classes of requests for which a user waits, and of background requests."""
_BACKGROUND_PART = 0.05
"""Fraction of every engine's time that is reserved for background requests."""
_LETTERS = {
    Role.PREFILL: "p",
    Role.DECODE: "d",
    Role.BOTH: "e",
    Role.WHOLE: "b",
    Role.CPU_PREFILL: "c",
}
"""Names of engines begin with these."""
CONDUCTOR_GLOBAL = "conductor+pull"
"""The policy `conductor` with engines that fetch prefixes from each other."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A cluster and its use."""

    prefill: int = 4
    decode: int = 4
    both: int = 0
    """Engines that compute prompts and generate their tokens, without any transfer."""
    cpu_prefill: int = 0
    """Engines for long prompts of background requests: policy `length`."""
    costs: CostModel = COSTS
    fleet: Fleet | None = None
    """Unlike engines, in place of the numbers above, `costs`, `kv_tokens` and, if it says so, `network`."""
    cpu_costs: CostModel = CPU_COSTS
    """Cost model of the `cpu_prefill` engines."""
    level: int = 1
    """1: a step is one whole prompt, and all KV fits. 2: prompts are cut into chunks that share steps, and KV must
    fit."""
    order: str = "srjf_calibrated"
    """Policy of the engines' queues."""
    cache_blocks: int = 8000
    block_tokens: int = 512
    kv_tokens: float = 1e6
    """Room for the KV of an engine's decodes. Level 2 only."""
    lag_s: float = 0.0
    pull_prefix: bool = False
    network: Network = field(default_factory=Network)
    pool: PoolSettings = field(default_factory=PoolSettings)
    """A KV pool that all engines share, or one for each host; none by default."""
    hosts: int = 0
    """Hosts, over which engines are spread, each with a pool of its own. 0: all engines share one pool."""
    far: PoolSettings = field(default_factory=PoolSettings)
    """A far store behind the pools of hosts; none by default."""
    host_deaths: int = 0
    """How often a host dies, evenly over the trace, each host in turn. It loses its engines' caches and its pool, and serves again
    after `HOST_RETURNS_S`."""
    background: float = 0.0
    """Fraction of background requests. They have a separate class with the lowest priority."""
    speed: float = 1.0
    """Speed of arrivals as a multiple of the recorded speed."""
    ttft_slo_s: float = inf
    tpot_slo_s: float = inf
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises: ValueError: naming the setting, the value found and the value wanted."""
        for name in ("prefill", "decode", "both", "cpu_prefill"):
            if not 0 <= (count := getattr(self, name)) <= MOST_ENGINES:
                raise ValueError(
                    f"{name} {count}: must be a number of engines up to {MOST_ENGINES:,}"
                )
        for name in ("speed", "kv_tokens"):
            if not (value := getattr(self, name)) > 0 or (name == "speed" and value == inf):
                raise ValueError(f"{name} {value}: must be a number above 0")
        for name in ("cache_blocks", "block_tokens"):
            if not (count := getattr(self, name)) >= 1:
                raise ValueError(f"{name} {count}: must be 1 or more")
        for name in ("hosts", "host_deaths"):
            if (count := getattr(self, name)) < 0:
                raise ValueError(f"{name} {count}: must be 0 or more")
        if self.far.blocks < 0 or (self.far.blocks and not self.hosts):
            raise ValueError(
                f"far_blocks {self.far.blocks}: must be 0 (no far store) or more, with hosts (--hosts); one pool that all engines "
                "share is --pool-blocks"
            )
        if self.host_deaths and not self.hosts:
            raise ValueError(f"host_deaths {self.host_deaths}: needs hosts (--hosts)")
        if not 0 <= self.lag_s < inf:
            raise ValueError(f"lag_s {self.lag_s}: must be a number of seconds from 0 on")
        if self.level not in (1, 2):
            raise ValueError(f"level {self.level}: must be 1 (whole prompts) or 2 (steps)")
        number = self.parts.number
        if not number(Role.DECODE, Role.WHOLE):
            raise ValueError("decode 0: at least one engine must answer (--decode or --both)")
        # A fleet's decode engines without others serve alone, as behind the live router.
        alone = self.fleet is not None
        if number(Role.DECODE) and not alone and not number(Role.PREFILL, Role.WHOLE):
            raise ValueError("prefill 0: at least one engine must compute prompts (--prefill)")
        if number(Role.DECODE) and number(Role.WHOLE):
            raise ValueError(
                "both: engines that do both replace --prefill and --decode: give 0 for them"
            )
        if number(Role.CPU_PREFILL) and not number(Role.PREFILL):
            raise ValueError(
                "cpu_prefill: these engines only help --prefill engines; give at least one of those"
            )
        if not 0 <= self.background <= 1:
            raise ValueError(f"background {self.background}: must be between 0 and 1")

    def _at_level(self, costs: CostModel) -> CostModel:
        if self.level == 1:
            return replace(costs, chunk_tokens=0)
        return replace(costs, chunk_tokens=costs.chunk_tokens or CHUNK_TOKENS)

    @property
    def parts(self) -> Fleet:
        """The fleet, or one of the numbers of engines."""
        if self.fleet is not None:
            return self.fleet
        like = EngineProfile(costs=self.costs, kv_tokens=self.kv_tokens)
        slow = EngineProfile(costs=self.cpu_costs, kv_tokens=self.kv_tokens)
        parts = (
            Part(role=Role.PREFILL, profile=like, number=self.prefill),
            Part(role=Role.DECODE, profile=like, number=self.decode),
            Part(role=Role.WHOLE, profile=like, number=self.both),
            Part(role=Role.CPU_PREFILL, profile=slow, number=self.cpu_prefill),
        )
        return Fleet(parts=parts)

    def nodes(self) -> list[Node]:
        """Idle engines with empty caches, in the order of the parts: `p0`, `p1`, ..., `d0`, ... or `b0`, ..., and `c0`,
        ..."""
        nodes, counts = list[Node](), Counter[str]()
        for part in self.parts.parts:
            settings, letter = self._settings(part), _LETTERS[part.role]
            for _ in range(part.number):
                own = self._at_host(settings, counts[letter])
                nodes.append(Node(f"{letter}{counts[letter]}", part.role, own))
                counts[letter] += 1
        return nodes

    def node(self, name: str, role: Role) -> Node:
        """An idle engine like the first part of this role.

        Raises:
            ValueError: the scenario has no engine of this role.
        """
        for part in self.parts.parts:
            if part.role is role and part.number:
                return Node(name, role, self._settings(part))
        raise ValueError(
            f"{role}: the scenario has no engine of this role to start another like it"
        )

    def _at_host(self, settings: NodeSettings, number: int) -> NodeSettings:
        if not self.hosts:
            return settings
        host = _host(number % self.hosts)
        return replace(settings, host=host, place=settings.place._replace(node=host))

    def _pools(self) -> list[KvPool]:
        """The pool of each host and the far store; or one pool for all engines."""
        tokens = self.block_tokens
        if not self.hosts:
            return [KvPool(self.pool, tokens)] if self.pool.blocks else []
        names = [_host(number) for number in range(self.hosts)]
        own = [KvPool(self.pool, tokens, f"pool {host}", host) for host in names]
        far = [KvPool(self.far, tokens, FAR)] if self.far.blocks else []
        return [*(own if self.pool.blocks else []), *far]

    def deaths(self, until_s: float) -> list[Change]:
        """The deaths of hosts in a trace that ends then. Each host returns, with empty caches."""
        return [
            Change(until_s * (number + 1) / (self.host_deaths + 1), self._dies(number % self.hosts))
            for number in range(self.host_deaths)
        ]

    def _dies(self, number: int) -> Callable[[Cluster, float], None]:
        def dies(cluster: Cluster, now_s: float) -> None:
            for dead in cluster.host_dies(_host(number), now_s):
                cluster.join(Node(dead.name, dead.role, dead.settings), now_s, HOST_RETURNS_S)

        return dies

    def _settings(self, part: Part) -> NodeSettings:
        return NodeSettings(
            truth=self._at_level(part.profile.costs),
            cache_blocks=part.profile.cache_blocks or self.cache_blocks,
            block_tokens=self.block_tokens,
            kv_tokens=part.profile.kv_tokens if self.level == 2 else inf,
            order=self.order,
            classes=self._classes,
            lag_s=self.lag_s,
            pull_prefix=self.pull_prefix,
            place=part.place,
        )

    def cluster(self, policy: str, decode_policy: str = "") -> Cluster:
        """An idle cluster with this policy."""
        return Cluster(
            self.nodes(),
            create(policy, decode_policy),
            network=self.parts.network or self.network,
            pools=self._pools(),
            classes=self._classes,
            seed=self.seed,
        )

    def arrivals(self, *traces: Sequence[Waiting], per_s: Sequence[float] = ()) -> list[Waiting]:
        """Traces one after another as this scenario plays them: from 0 on, at its speed, with binned times spread out.

        `per_s`: mean requests a second of each trace, before the speed counts; empty: as recorded.
        """
        moved = [
            at_rate(trace, per_s[n], self.seed) if per_s else jittered(trace, self.seed)
            for n, trace in enumerate(traces)
        ]
        joined = moved[0] if len(moved) == 1 else one_after_another(moved)
        begun_s, random = joined[0].arrival_s, Random(self.seed)
        return [
            replace(
                request,
                arrival_s=(request.arrival_s - begun_s) / self.speed,
                qos=BACKGROUND if random.random() < self.background else ONLY_CLASS,
            )
            for request in joined
        ]

    @property
    def _classes(self) -> tuple[QosClass, ...]:
        ttft_ms, tpot_ms = (
            None if slo_s == inf else slo_s * 1e3 for slo_s in (self.ttft_slo_s, self.tpot_slo_s)
        )
        slo = Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms)
        if not self.background:
            return (QosClass(name=ONLY_CLASS, reserved_fraction=1.0, slo=slo),)
        rest = 1 - _BACKGROUND_PART
        return (
            QosClass(name=ONLY_CLASS, reserved_fraction=rest, slo=slo),
            QosClass(
                name=BACKGROUND,
                reserved_fraction=_BACKGROUND_PART,
                priority=-1,
                interactive=False,
            ),
        )


def _host(number: int) -> str:
    return f"h{number}"


def simulate(
    scenario: Scenario,
    arrivals: Sequence[Waiting],
    policy: str = "",
    decode_policy: str = "",
    roles: str = "",
) -> tuple[Summary, list[Served]]:
    """Play a trace with one policy.

    Args:
        arrivals: see `Scenario.arrivals`.
        policy: a value of the router's `--policy`, or `conductor+pull`; empty: the policy that belongs to `roles`, or
            the default.
        roles: a value of the router's `--roles`; empty: no engine changes its role.

    Raises:
        ConfigError: no policy has that name.
        ValueError: the role policy starts engines.
    """
    controller = RoleController(create_roles(roles)) if roles else None
    if controller is not None and controller.policy.scales:
        raise ValueError(
            f"roles {roles!r}: it starts and stops engines, and the number of engines is fixed here; name another policy"
        )
    belongs = controller.policy.route if controller is not None else ""
    name = shown = policy or belongs or DEFAULT
    if shown == CONDUCTOR_GLOBAL:
        name, scenario = "conductor", replace(scenario, pull_prefix=True)
    cluster = scenario.cluster(name, decode_policy)
    deaths = scenario.deaths(arrivals[-1].arrival_s) if scenario.host_deaths else ()
    served = cluster.run(arrivals, deaths, controller=controller)
    summary = summarize(
        f"{roles}, {shown}" if roles else shown,
        served,
        cluster.nodes.values(),
        ttft_slo_s=scenario.ttft_slo_s,
        tpot_slo_s=scenario.tpot_slo_s,
        moved_bytes=cluster.links.moved_bytes,
        moves=[
            RoleMove(
                round(moved.at_s, 3),
                moved.move.engine,
                moved.before,
                moved.move.role,
                moved.move.cause,
            )
            for moved in cluster.roles.moved
        ],
    )
    return summary, served


def policies(text: str) -> list[str]:
    """The policies that `--compare` names: a list with commas, or `all`."""
    if text != "all":
        return [name.strip() for name in text.split(",") if name.strip()]
    return [*PREFILL, *BOTH_SIDES, CONDUCTOR_GLOBAL, *added_names()]
