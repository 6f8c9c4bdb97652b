# SPDX-License-Identifier: Apache-2.0
"""Router and simulator show a policy the same: one log of events, equal decisions."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.engines.counted_load import EngineLoad
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.index.events import Batch, Stored
from scheduler_plugins.router.index.hashes import token_bytes
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import (
    BlockHash,
    Decision,
    Request,
    Role,
    Route,
    cached_tokens,
)
from scheduler_plugins.router.policies.registry import DECODE, PREFILL, create
from scheduler_plugins.router.routing.view import LiveView
from scheduler_plugins.sim.links import Links, Network
from scheduler_plugins.sim.node import ClusterView, Node, NodeSettings

COSTS = CostModel(a=1e-3, d0=0.01, d1=1e-3, d2=1e-6)
BLOCK = 16
ROLES = {"http://p0": Role.PREFILL, "http://p1": Role.PREFILL, "http://p2": Role.PREFILL} | {
    "http://d0": Role.DECODE,
    "http://d1": Role.DECODE,
}


class Prompt(NamedTuple):
    """One that begins as others of its conversation do, in the forms that the two sides know."""

    tokens: list[int]
    digests: tuple[bytes, ...]  # one for each block

    @classmethod
    def of(cls, conversation: str, blocks: int) -> Prompt:
        first = ord(conversation) * 10_000
        digests = tuple(
            blake2b(f"{conversation}{k}".encode(), digest_size=16).digest() for k in range(blocks)
        )
        return cls([first + k for k in range(blocks * BLOCK + 1)], digests)


class Live:
    """The live router's engines, without sockets."""

    def __init__(self) -> None:
        metrics = Metrics()
        self.prefixes = Prefixes()
        self.engines = {
            name: BackendEngine(name, role, metrics, costs=COSTS, reported_block_tokens=BLOCK)
            for name, role in ROLES.items()
        }
        for engine in self.engines.values():
            engine.set_up()

    def set_up(self, name: str, up: bool, now_s: float) -> None:
        engine = self.engines[name]
        if up:
            engine.set_up()
        else:
            engine.set_down(now_s, "down", refusing=False)

    def load(self, name: str) -> EngineLoad:
        return self.engines[name].load

    def computed(self, name: str, prompt: Prompt, now_s: float) -> None:
        """Its KV event comes. Engines name blocks as they like."""
        names = [int.from_bytes(digest[:8], "big") for digest in prompt.digests]
        event = Stored(names, None, prompt.tokens[:-1], BLOCK, medium="GPU")
        self.prefixes.apply_events(name, Batch(now_s, [event]))

    def hashes(self, prompt: Prompt) -> Sequence[BlockHash]:
        return PromptKeys(prompt.digests, token_bytes(prompt.tokens))

    def view(self, now_s: float) -> LiveView:
        up = [one for one in self.engines.values() if one.up]
        return LiveView(
            {role: [one for one in up if one.role is role] for role in (Role.PREFILL, Role.DECODE)},
            self.prefixes,
            now_s,
        )


class Simulated:
    """A simulated cluster's engines, without its heap."""

    def __init__(self) -> None:
        settings = NodeSettings(truth=COSTS, block_tokens=BLOCK)
        self.nodes = {name: Node(name, role, settings) for name, role in ROLES.items()}
        self._view = ClusterView(self.nodes, Links(Network()))

    def set_up(self, name: str, up: bool, now_s: float) -> None:
        self.nodes[name].up = up
        self._view.update()

    def load(self, name: str) -> EngineLoad:
        return self.nodes[name].load

    def computed(self, name: str, prompt: Prompt, now_s: float) -> None:
        self.nodes[name].cache.store(prompt.digests)
        self.nodes[name].cache.computed(now_s)

    def hashes(self, prompt: Prompt) -> Sequence[BlockHash]:
        return prompt.digests

    def view(self, now_s: float) -> ClusterView:
        self._view.begin(now_s)
        return self._view


def play(world: Live | Simulated, log: list[tuple], policy: str, decode: str) -> list[Decision]:
    """Decide every request of the log, and keep the counts as its caller does."""
    made, random, decisions = create(policy, decode), Random(7), list[Decision]()
    prefills, decodes = list[tuple[str, str, Prompt]](), list[tuple[str, str]]()
    for n, (kind, *what) in enumerate(log):
        now_s = n * 0.01
        if kind == "request":
            conversation, blocks, more = what
            prompt = Prompt.of(conversation, blocks)
            hashes, tokens = world.hashes(prompt), len(prompt.tokens)
            request = Request(str(n), tokens, hashes, more, now_s, session=conversation)
            view = world.view(now_s)
            decision = made.decide(request, view, now_s, random)
            decisions.append(decision)
            if not isinstance(decision, Route):
                continue
            world.load(decision.d).decode_sent(request.id, request.tokens, more)
            decodes.append((decision.d, request.id))
            if decision.p is not None:
                p = next(one for one in view.engines(Role.PREFILL) if one.name == decision.p)
                cached = cached_tokens(request, p, view.match(hashes, [p])[0])
                cost_s = p.costs.prefill_s(request.tokens, cached)
                world.load(p.name).prefill_sent(request.id, request.tokens - cached, cost_s, now_s)
                prefills.append((p.name, request.id, prompt))
        elif kind == "computed" and prefills:
            name, request_id, prompt = prefills.pop(what[0] % len(prefills))
            world.load(name).prefill_ended(request_id, now_s)
            world.computed(name, prompt, now_s)
        elif kind == "ended" and decodes:
            name, request_id = decodes.pop(what[0] % len(decodes))
            world.load(name).decode_ended(request_id)
        elif kind == "down":
            world.set_up(what[0], False, now_s)
        elif kind == "up":
            world.set_up(what[0], True, now_s)
    return decisions


# One decode engine always stays: a policy is never asked without one.
some = st.sampled_from([name for name in ROLES if name != "http://d0"])
events = st.one_of(
    st.tuples(
        st.just("request"), st.sampled_from("abcde"), st.integers(1, 12), st.integers(1, 400)
    ),
    st.tuples(st.just("computed"), st.integers(0, 5)),
    st.tuples(st.just("ended"), st.integers(0, 5)),
    st.tuples(st.just("down"), some),
    st.tuples(st.just("up"), some),
)


@pytest.mark.parametrize("policy", [*PREFILL, "length"])
@settings(deadline=None, max_examples=15)
@given(log=st.lists(events, max_size=40), decode=st.sampled_from(["", *DECODE]))
def test_router_and_simulator_decide_alike(policy: str, log: list[tuple], decode: str) -> None:
    assert play(Live(), log, policy, decode) == play(Simulated(), log, policy, decode)


def test_the_log_matters() -> None:
    """Negative control: a view that misses what was cached decides otherwise."""
    log = [
        ("request", "a", 12, 1),
        ("computed", 0),
        ("request", "b", 1, 1),
        ("request", "a", 12, 1),
    ]

    class Forgetful(Live):
        def computed(self, name: str, prompt: Prompt, now_s: float) -> None:
            pass

    assert play(Live(), log, "conductor", "") != play(Forgetful(), log, "conductor", "")
