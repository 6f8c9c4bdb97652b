# SPDX-License-Identifier: Apache-2.0
"""A token that met other experts is not wrong KV: no engine is distrusted for it. What a transfer does wrong does not look
like that."""

import pytest
from support.machines import ROUTES

from pd_connector.errors import Cause
from pd_connector.kv.coding import Part
from pd_connector.protocol.consuming.audit import Comparison, Distance
from pd_connector.protocol.consuming.experts import MOST_MOVED, Moved

(ROUTE,) = ROUTES  # float32: 0.3 of a token
TOKENS, PAGE = 64, ROUTE.destination.page_size
LAYERS = 4


def judged(far: dict[int, dict[int, float]], *, experts: bool = True) -> str:
    """What is wrong where these tokens are so far apart, by layer; "" for nothing."""
    problem = compared(far, {}, experts=experts).judge([], [])
    return problem[1] if problem else ""


def compared(
    far: dict[int, dict[int, float]], states: dict[int, float], *, experts: bool = True
) -> Comparison:
    """A comparison in which these tokens are so far apart, by layer.

    Every token of every layer counts 1: the distance of a page, or of a layer, follows.

    Args:
        states: by layer that keeps a state and no KV, the distance of its state behind the last token.
    """
    comparison = Comparison(experts=experts, states=bool(states))
    for layer, apart in states.items():
        last = range(TOKENS - 1, TOKENS)
        own = {"apart": apart * apart, "own": 1.0, "span": last, "section": "ssm"}
        state = Distance(layer, Part.KEY, [0], [apart], [TOKENS - 1], [apart], **own)
        comparison.note(ROUTE, [state])
    for layer in range(LAYERS):
        if layer in states:
            continue
        tokens = {t: far.get(layer, {}).get(t, 0.01) for t in range(TOKENS)}
        pages = range(TOKENS // PAGE)
        of_page = [[tokens[t] for t in range(PAGE * p, PAGE * p + PAGE)] for p in pages]
        worst = [max(range(PAGE), key=one.__getitem__) for one in of_page]
        for part in Part:
            moved = [Moved(t, d, d * d) for t, d in tokens.items() if d > 1 / 16]
            distance = Distance(
                layer,
                part,
                pages=list(pages),
                by_page=[(sum(d * d for d in one) / PAGE) ** 0.5 for one in of_page],
                tokens=[PAGE * p + w for p, w in zip(pages, worst, strict=True)],
                by_token=[max(one) for one in of_page],
                apart=sum(d * d for d in tokens.values()),
                own=float(TOKENS),
                span=range(TOKENS),
                moved=sorted(moved, key=lambda one: -one.distance)[:MOST_MOVED],
            )
            comparison.note(ROUTE, [distance])
    return comparison


STAYS = {1: {5: 1.1, 40: 0.1}, 2: {5: 0.8, 40: 0.9}, 3: {5: 0.4, 40: 0.5, 41: 1.0}}


def test_tokens_that_met_other_experts_are_no_wrong_kv() -> None:
    assert judged(STAYS) == ""


def test_in_a_model_without_experts_they_are() -> None:
    """The harm, for a model that has them."""
    assert judged(STAYS, experts=False).startswith("layer 1, page 2, K: KV is 0.778 apart")


@pytest.mark.parametrize(
    ("far", "found"),
    [
        ({0: {5: 1.0}, 1: {5: 1.0}, 2: {5: 1.0}, 3: {5: 1.0}}, "layer 0, page 2"),
        ({1: {5: 1.0}, 2: {5: 1.0}}, "layer 2, page 2"),
        ({2: {63: 0.35}}, "layer 2, page 31"),
        ({1: {5: 1.0, 6: 1.0}, 2: {5: 1.0}, 3: {5: 1.0}}, "layer 1, page 3"),
    ],
    ids=["in the first layer", "not in the next layer", "a little", "beside one that stays"],
)
def test_what_no_expert_does_is_wrong(far: dict[int, dict[int, float]], found: str) -> None:
    assert found in judged(far)


def test_a_layer_that_is_wrong_in_all_tokens_is_not_the_experts_doing() -> None:
    wrong = {layer: dict.fromkeys(range(TOKENS), 1.0) for layer in (2, 3)}
    assert judged(wrong).startswith("layer 2, page 0, K")


STATES = {0: 0.01, 2: 0.01}
"""A model whose layers 0 and 2 keep states, and whose layers 1 and 3 keep KV."""


def test_between_layers_that_keep_states_the_next_layer_with_kv_counts() -> None:
    assert compared({1: {5: 1.0}, 3: {5: 0.4}}, STATES).judge([], []) is None


def test_what_has_faded_behind_layers_that_keep_states_shows_nothing() -> None:
    """Neither that the producer is right, nor that it is wrong: another prompt is compared. More of it than experts move is
    wrong, and so is what has ended in the layer just behind, or is beside it in other tokens of the same layer."""
    few = dict.fromkeys(range(TOKENS // 4), 1.0)
    for far, states, cause in (
        ({1: {5: 1.0}}, STATES, Cause.WINDOW),
        ({1: few}, STATES, Cause.WINDOW),
        ({1: few | {63: 1.0}}, STATES, Cause.AUDIT),
        ({1: {5: 1.0}}, {0: 0.01}, Cause.AUDIT),
        ({1: {5: 1.0}, 3: {7: 1.0}}, STATES | {0: 0.9}, Cause.AUDIT),
    ):
        found = compared(far, states).judge([], [])
        assert (found and found[0]) == cause, found
    _, detail = compared({1: {5: 1.0}}, STATES).judge([], []) or ("", "")
    assert detail.startswith("layer 1, token 5, K: KV is apart")
    without = compared({1: {5: 1.0}}, STATES, experts=False).judge([], [])
    assert without is not None
    assert without[0] is Cause.AUDIT


@pytest.mark.parametrize("apart", [0.09, 0.7])
def test_a_state_behind_a_token_that_moved_shows_nothing(apart: float) -> None:
    """Neither that its producer is right, nor that it is wrong: another prompt is compared. A state of the first layer, and
    a state behind tokens that have not moved, are wrong."""
    moved = {1: {TOKENS - 2: 0.4}, 3: {TOKENS - 2: 0.4}}
    for far, states, cause in (
        (moved, {0: 0.01, 2: apart}, Cause.WINDOW),
        ({}, {0: 0.01, 2: apart}, Cause.AUDIT),
        (moved, {0: apart, 2: 0.01}, Cause.AUDIT),
        (moved, STATES, None),
    ):
        found = compared(far, states).judge([], [])
        assert (found and found[0]) == cause, found
    without = compared(moved, {0: 0.01, 2: apart}, experts=False).judge([], [])
    assert without is not None
    assert without[0] is Cause.AUDIT
