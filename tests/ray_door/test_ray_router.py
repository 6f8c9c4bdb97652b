# SPDX-License-Identifier: Apache-2.0
"""Our route policies among the replicas of a Serve deployment."""

import asyncio
from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    CompletionRequest,
)
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.config import RequestRouterConfig

from pd_connector.errors import ConfigError
from scheduler_plugins.ray.fleet import FORGOTTEN_S, Fleet
from scheduler_plugins.ray.request_router import PolicyRequestRouter
from scheduler_plugins.router.policies import registry
from scheduler_plugins.router.policies.base import Role

NAMES = ["a", "b", "c"]


def fleet(policy, role=Role.PREFILL, names=NAMES, decode=""):
    made = Fleet(registry.create(policy, decode), role, Random(1))
    made.set_replicas(names)
    return made


def prompt(n, blocks=8):
    return {"prompt": f"{n:04d}" + "x" * 256 * blocks, "max_tokens": 8}


@pytest.mark.parametrize("policy", sorted(registry.PREFILL))
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.WHOLE])
def test_every_policy_chooses_among_the_candidates(policy, role):
    found = fleet(policy, role)
    for n in range(12):
        assert found.choose(f"r{n}", prompt(n), {}, NAMES[:2], float(n)) in NAMES[:2]
        found.ended(f"r{n - 2}", float(n))  # two are always under way


def test_serve_asks_again_where_a_policy_waits():
    found = fleet("on_demand")
    names = [f"r{n}" for n in range(40)]
    waits = next(n for n in names if found.choose(n, prompt(1), {}, NAMES, 0.0) is None)
    found.ended("r0", 1.0)
    assert found.choose(waits, prompt(1), {}, NAMES, 1.0) is not None


def test_prompts_that_begin_alike_go_to_the_same_replica():
    found = fleet("cache_aware")
    homes = {}
    for n in range(6):
        homes[n] = found.choose(f"first {n}", prompt(n), {}, NAMES, 0.0)
        found.ended(f"first {n}", 0.1)
    again = {n: found.choose(f"again {n}", prompt(n), {}, NAMES, 1.0) for n in range(6)}
    assert again == homes


def test_another_policy_does_not_look_at_prompts():
    found = fleet("round_robin")
    chosen = [found.choose(f"r{n}", prompt(0), {}, NAMES, 0.0) for n in range(6)]
    assert Counter(chosen) == {"a": 2, "b": 2, "c": 2}


def test_what_is_under_way_counts_and_what_has_ended_does_not():
    found = fleet("least_work")
    first = found.choose("long", prompt(1, 80), {}, NAMES, 0.0)
    others = {found.choose(f"s{n}", prompt(2 + n, 1), {}, NAMES, 0.0) for n in range(2)}
    assert others == set(NAMES) - {first}
    for n in range(2):
        found.ended(f"s{n}", 0.0)
    found.ended("long", 0.0)
    assert all(one.open_requests == 0 for one in found._replicas.values())


def test_a_request_asked_for_again_counts_once():
    found = fleet("jsq")
    for now in range(3):
        found.choose("r", prompt(1), {}, NAMES, float(now))
    assert sum(one.open_requests for one in found._replicas.values()) == 1


def test_a_request_that_was_never_sent_is_forgotten():
    found = fleet("jsq")
    found.choose("lost", prompt(1), {}, NAMES, 0.0)
    found.choose("later", prompt(2), {}, NAMES, FORGOTTEN_S + 1.0)
    assert sum(one.open_requests for one in found._replicas.values()) == 1


def test_replicas_come_and_go():
    found = fleet("jsq", names=["a"])
    assert found.choose("r1", prompt(1), {}, ["a"], 0.0) == "a"
    found.set_replicas(["b"])
    assert found.choose("r2", prompt(1), {}, ["a"], 0.0) is None
    assert found.choose("r3", prompt(1), {}, ["b"], 0.0) == "b"
    found.ended("r1", 1.0)  # of a replica that is gone


def test_a_session_stays_where_it_was():
    found = fleet("session")
    homes = [found.choose(f"r{n}", prompt(n), {"X-Session-Id": "me"}, NAMES, 0.0) for n in range(4)]
    assert len(set(homes)) == 1


class _Replica:
    def __init__(self, name):
        self.replica_id = ReplicaID(name, DeploymentID("Prefill:m", "app"))


def router(**kwargs):
    made = PolicyRequestRouter.__new__(PolicyRequestRouter)
    made._deployment_id = DeploymentID("Prefill:m", "app")
    made._handle_source = DeploymentHandleSource.REPLICA
    made.initialize_state(**kwargs)
    made._fleet.set_replicas(NAMES)
    return made


def pending(request, number=0, headers=None, session=""):
    info = SimpleNamespace(headers=headers or {})
    metadata = SimpleNamespace(internal_request_id=f"i{number}", session_id=session)
    context = SimpleNamespace(should_backoff=False)
    return SimpleNamespace(args=[request, info], metadata=metadata, routing_context=context)


def chosen(found, asked):
    ranks = asyncio.run(found.choose_replicas([_Replica(name) for name in NAMES], asked))
    assert sorted(one.replica_id.unique_id for rank in ranks for one in rank) == NAMES
    return ranks[0][0].replica_id.unique_id


def test_serve_is_told_the_choice_first_and_the_others_after_it():
    found = router(policy="cache_aware")
    body = CompletionRequest(model="m", prompt="x" * 2000)
    home = chosen(found, pending(body, 0))
    found.on_request_completed(ReplicaID("p", DeploymentID("Prefill:m", "app")), "i0")
    assert chosen(found, pending(body, 1)) == home


def test_a_chat_is_understood():
    found = router(policy="cache_aware")
    chat = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x" * 2000}])
    home = chosen(found, pending(chat, 0))
    found.on_request_completed(ReplicaID("p", DeploymentID("Prefill:m", "app")), "i0")
    assert chosen(found, pending(chat, 1)) == home


def test_serves_session_is_the_policys():
    found = router(policy="session")
    body = CompletionRequest(model="m", prompt="x")
    assert len({chosen(found, pending(body, n, session="me")) for n in range(4)}) == 1
    assert len({chosen(found, pending(body, 9 + n)) for n in range(4)}) > 1


def test_a_call_that_is_no_client_request_is_routed_too():
    assert chosen(router(policy="cache_aware"), pending(None)) in NAMES


def test_a_policy_that_fails_leaves_serve_all_replicas(caplog):
    """Serve catches what a router raises, and then the request waits without end."""
    found = router(policy="cache_aware")

    def fails(*_):
        raise ZeroDivisionError("a policy's error")

    found._fleet._policy.decide = fails
    body = CompletionRequest(model="m", prompt="x")
    assert chosen(found, pending(body)) in NAMES
    assert "a policy's error" in caplog.text


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"cache_salt": "\ud800"}, {}),
        ({"prompt": "\ud800"}, {}),
        ({"prompt": []}, {}),
        ({"prompt": [[]]}, {}),
        ({"max_tokens": 0}, {}),
        ({"max_tokens": None}, {"X-Request-Timeout-Ms": "soon"}),
        ({}, {"x-request-timeout-ms": "\u0663"}),
        ({}, {"X-Session-Id": "\ud800" * 10_000}),
        ({}, {"": ""}),
    ],
)
def test_no_request_breaks_it(fields, headers):
    body = CompletionRequest.model_construct(model="m", **{"prompt": "x", **fields})
    assert chosen(router(policy="cache_aware"), pending(body, headers=headers)) in NAMES


def test_a_policy_that_there_is_not_is_refused_by_name():
    with pytest.raises(ConfigError, match="fastest"):
        router(policy="fastest")


def test_serve_finds_it_by_its_path():
    path = "scheduler_plugins.ray:PolicyRequestRouter"
    config = RequestRouterConfig(request_router_class=path)
    assert config.get_request_router_class() is PolicyRequestRouter
