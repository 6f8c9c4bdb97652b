# SPDX-License-Identifier: Apache-2.0
"""A rolling upgrade to a wire schema that is made up here: one schema apart transfers, two apart are refused."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.agents import KEY, LONG, TRANSPORTS, Rank, Ranks, geometry_of, ranks
from support.children import Child, Children, children, nursery

from pd_connector.errors import Cause
from pd_connector.plan.rules import NEWEST_RULES, RULES, PlanRules
from pd_connector.protocol.consuming.incoming import Finished
from pd_connector.protocol.wire import messages

__all__ = ["children", "nursery", "ranks"]

OTHER_RULES: dict[str, int] = {"chunk_tokens": 96, "min_chunk_tokens": 32, "spare_bytes": 1}
GEOMETRY = geometry_of(page_size=16, key_dim=64, value_dim=64)
"""1 KiB a token and layer: a prompt is several chunks."""
OPTIONS: dict[str, Any] = {"geometry": GEOMETRY, "pages": 160}
SENT = [(11 * n + 5) % 160 for n in range(63)]
RECEIVED = [(7 * n + 3) % 160 for n in range(63)]

each_transport = pytest.mark.parametrize(
    "transport", ["shm", "shm written", "tcp", "tcp with a key"]
)
each_side = pytest.mark.parametrize("newer", ["producer", "consumer"])


def speak(steps: int, changed: dict[int, dict[str, int]]) -> None:
    """In a process of its own: speak a schema that is later by `steps`, and the one before that.

    Args:
        changed: by schema, what differs from today's rules of plans.
    """
    newest = messages.SCHEMA + steps
    messages.SCHEMA, messages.OLDEST_SCHEMA = newest, newest - 1
    rules: PlanRules = NEWEST_RULES
    for schema in (newest - 1, newest):
        RULES[schema] = replace(rules, **changed.get(schema, {}))


def later(steps: int, **changed: dict[str, int]) -> Callable[[], None]:
    """What a child does to speak a later schema; `now` and `new` name the schema whose rules differ."""
    named = {"now": messages.SCHEMA, "new": messages.SCHEMA + steps}
    return functools.partial(speak, steps, {named[name]: of for name, of in changed.items()})


def transfer(
    ranks: Ranks, children: Children, newer: str, transport: str, before: Callable[[], None]
) -> tuple[Rank, Child, Finished]:
    """Move a prompt between this version and a later one; the side `newer` is the later one."""
    settings = LONG | TRANSPORTS[transport]
    child = children(
        settings,
        before=before,
        seed=1,
        produces=newer == "producer",
        consumes=newer == "consumer",
        **OPTIONS,
    )
    rank = ranks(settings, produces=newer == "consumer", consumes=newer == "producer", **OPTIONS)
    if newer == "producer":
        child.call("offer", "t", SENT)
        rank.load(child.call("source"), "t", RECEIVED)
        return rank, child, rank.loaded("t")
    rank.offer("t", SENT)
    child.call("load", rank.source, "t", RECEIVED)
    return rank, child, child.call("loaded", "t")


@each_transport
@each_side
def test_a_version_one_schema_later_transfers_by_the_rules_of_todays(
    ranks: Ranks, children: Children, newer: str, transport: str
) -> None:
    rank, child, finished = transfer(ranks, children, newer, transport, later(1, new=OTHER_RULES))
    assert finished.cause is None, finished
    assert finished.chunks >= 4
    for sent, received in zip(SENT, RECEIVED, strict=True):
        if newer == "producer":
            assert rank.page(received) == child.call("page", sent)
        else:
            assert child.call("page", received) == rank.page(sent)


def test_among_themselves_later_versions_plan_by_rules_of_their_own(
    ranks: Ranks, children: Children
) -> None:
    """So that the rules of the made-up schema are seen to differ."""
    _, _, mixed = transfer(ranks, children, "consumer", "tcp", later(1, new=OTHER_RULES))
    options: dict[str, Any] = {"before": later(1, new=OTHER_RULES), **OPTIONS}
    settings = LONG | TRANSPORTS["tcp"]
    producer = children(settings, consumes=False, **options)
    consumer = children(settings, seed=1, produces=False, **options)
    producer.call("offer", "t", SENT)
    consumer.call("load", producer.call("source"), "t", RECEIVED)
    found = consumer.call("loaded", "t")
    assert found.cause is None
    assert found.chunks > mixed.chunks


@each_side
def test_a_version_that_changes_todays_rules_fails(
    ranks: Ranks, children: Children, newer: str
) -> None:
    """A constant that changes without a schema of its own is what a rolling upgrade must not meet."""
    *_, finished = transfer(ranks, children, newer, "tcp", later(1, now=OTHER_RULES))
    assert finished.cause is Cause.CHUNK_MISMATCH


@pytest.mark.parametrize("key", ["", KEY], ids=["plain", "key"])
@each_side
def test_two_schemas_apart_are_refused_with_both_versions(
    ranks: Ranks, children: Children, newer: str, key: str
) -> None:
    transport = "tcp with a key" if key else "tcp"
    rank, _, finished = transfer(ranks, children, newer, transport, later(2))
    assert finished.cause is Cause.VERSION
    ours = f"{messages.OLDEST_SCHEMA}-{messages.SCHEMA}"
    theirs = f"{messages.SCHEMA + 1}-{messages.SCHEMA + 2}"
    producer, consumer = (theirs, ours) if newer == "producer" else (ours, theirs)
    older = "consumer" if newer == "producer" else "producer"
    said = f"producer speaks {producer}, consumer {consumer}: upgrade pd-connector on the {older}"
    assert said in finished.detail
    if newer == "consumer":
        assert rank.count("rejected_sessions", cause="version") == 1
