# SPDX-License-Identifier: Apache-2.0
"""What engines say of their caches, and what a router makes of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugins.router.index.events import Batch, EventError, Removed, Stored, decode
from scheduler_plugins.router.index.hashes import prompt_extras, token_bytes
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys

SIZE = 4


class Engine(NamedTuple):
    name: str
    block_tokens: int = SIZE


A, B = Engine("a"), Engine("b")


def prompt(tokens: list[int], adapter: str = "", salt: str = "") -> PromptKeys:
    return PromptKeys((), token_bytes(tokens), prompt_extras(adapter, salt))


def stored(tokens: list[int], names: list[Any], parent: Any = None, **more: Any) -> Stored:
    return Stored(names, parent, tokens, SIZE, **more)


def told(*events: Any) -> Batch:
    return Batch(0.0, list(events))


def found(prefixes: Prefixes, asked: PromptKeys, *engines: Engine) -> list[int]:
    return prefixes.match(asked, engines or (A,), 64, 0.0)


TOKENS = list(range(100, 116))


def test_engines_with_other_names_for_blocks_are_compared() -> None:
    """The hash seed of an engine does not matter: what counts are the tokens."""
    prefixes = Prefixes()
    prefixes.apply_events("a", told(stored(TOKENS[:8], [b"x" * 32, b"y" * 32])))
    prefixes.apply_events("a", told(stored(TOKENS[8:12], [b"z" * 32], b"y" * 32)))
    prefixes.apply_events("b", told(stored(TOKENS[:4], [-17])))
    assert found(prefixes, prompt(TOKENS), A, B) == [3, 1]
    assert found(prefixes, prompt([1, *TOKENS]), A, B) == [0, 0]


def test_salt_and_adapter_are_part_of_a_block() -> None:
    prefixes = Prefixes()
    first = stored(TOKENS[:8], [1, 2], extra_keys=[["lora", "salt"], ["lora"]], lora_name="lora")
    later = stored(TOKENS[8:], [3, 4], 2, extra_keys=[["lora"], ["lora"]], lora_name="lora")
    prefixes.apply_events("a", told(first, later))
    assert found(prefixes, prompt(TOKENS, "lora", "salt")) == [4]
    for other in (prompt(TOKENS), prompt(TOKENS, "lora"), prompt(TOKENS, "", "salt")):
        assert found(prefixes, other) == [0]
    prefixes.apply_events("b", told(stored(TOKENS[:8], [1, 2], extra_keys=[["salt"], None])))
    assert found(prefixes, prompt(TOKENS, "", "salt"), B) == [2]


def test_blocks_behind_an_unknown_one_are_counted_and_not_believed() -> None:
    prefixes = Prefixes()
    prefixes.apply_events("a", told(stored(TOKENS[4:8], [2], 1)))
    assert found(prefixes, prompt(TOKENS)) == [0]
    assert prefixes.state("a").unknown == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        stored(TOKENS[:7], [1, 2]),  # a window's masked blocks are not told apart
        Stored([1], None, [], 0),
        Stored([1], None, [-1, 0, 0, 0], 4),
        stored(TOKENS[:4], [1], medium="CPU"),
        stored(TOKENS[:4], [1], kv_cache_spec_sliding_window=128),
        Removed([99]),
    ],
)
def test_events_that_say_nothing_of_a_prefix_change_nothing(nonsense: Any) -> None:
    prefixes = Prefixes()
    prefixes.apply_events("a", told(nonsense))
    assert found(prefixes, prompt(TOKENS)) == [0]
    prefixes.apply_events("a", told(stored(TOKENS, [5, 6, 7, 8])))
    assert found(prefixes, prompt(TOKENS)) == [4]


def test_a_model_with_several_kinds_of_attention_is_counted_once() -> None:
    prefixes = Prefixes()
    both = [stored(TOKENS, [1, 2, 3, 4], group_idx=n) for n in (0, 1)]
    prefixes.apply_events("a", told(*both, Removed([3, 4], group_idx=1)))
    assert found(prefixes, prompt(TOKENS)) == [4]
    prefixes.apply_events("a", told(Removed([3, 4], group_idx=0)))
    assert found(prefixes, prompt(TOKENS)) == [2]


NAMES = st.integers(0, 9)
EVENTS = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 2), st.integers(0, 4), st.integers(1, 3)),
    st.tuples(st.just("remove"), st.integers(0, 2), st.integers(0, 4), st.just(0)),
    st.tuples(st.just("clear"), st.just(0), st.just(0), st.just(0)),
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=25))
def test_the_index_is_what_a_dictionary_of_prefixes_would_be(
    events: list[tuple[str, int, int, int]],
) -> None:
    """Three prompts that share nothing; each block stands for all tokens before it."""
    prompts = [[1000 * n + i for i in range(8 * SIZE)] for n in range(3)]
    held: set[tuple[int, int]] = set()
    prefixes = Prefixes()
    batch: list[Any] = []
    for what, which, first, count in events:
        names = [100 * which + n + 1 for n in range(first, first + count)]
        if what == "store" and (first == 0 or (which, first - 1) in held):
            part = prompts[which][first * SIZE : (first + count) * SIZE]
            parent = 100 * which + first if first else None
            batch.append(stored(part, names, parent))
            held |= {(which, n) for n in range(first, first + count)}
        elif what == "remove":
            batch.append(Removed([100 * which + first + 1]))
            held -= {(which, first)}
        elif what == "clear":
            batch.append(decode(WIRE.encode([0.0, [{"type": "AllBlocksCleared"}]])).events[0])
            held.clear()
    prefixes.apply_events("a", told(*batch))
    for which, tokens in enumerate(prompts):
        leading = 0
        while (which, leading) in held:
            leading += 1
        assert found(prefixes, prompt(tokens)) == [leading]


WIRE = msgspec.msgpack.Encoder()


def test_events_as_maps_and_as_arrays_are_read() -> None:
    fields = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
    as_map = {"type": "BlockStored", **fields, "medium": "GPU", "news": 1}
    as_array = ["BlockStored", *fields.values(), None]
    for event in (as_map, as_array):
        (read,) = decode(WIRE.encode([1.5, [event], 0])).events
        assert isinstance(read, Stored)
        assert (read.token_ids, read.block_size) == ([1, 2], 2)


@pytest.mark.parametrize("payload", [b"", b"\xc1", WIRE.encode([1.0, [["Other"]]]), WIRE.encode(7)])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(EventError):
        decode(payload)


def test_an_engine_without_events_is_taken_to_have_what_it_computed() -> None:
    prefixes = Prefixes()
    prefixes.prefilled(A, prompt(TOKENS), 0.0)
    assert found(prefixes, prompt(TOKENS), A, B) == [4, 0]
    assert prefixes.match(prompt(TOKENS), [A], 64, 119.0) == [4]
    assert prefixes.match(prompt(TOKENS), [A], 64, 121.0) == [0]


def test_the_prompt_unused_for_longest_is_forgotten_first() -> None:
    prefixes = Prefixes()
    prefixes.has_room("a", 8)
    one, two, three = ([n] * 16 for n in (1, 2, 3))
    for tokens in (one, two, one, three):
        prefixes.prefilled(A, prompt(tokens), 0.0)
    assert [found(prefixes, prompt(tokens)) for tokens in (one, two, three)] == [[4], [0], [4]]


def test_events_are_believed_more_than_the_guess() -> None:
    prefixes = Prefixes()
    prefixes.apply_events("a", told(stored(TOKENS[:4], [1])))
    prefixes.prefilled(A, prompt(TOKENS), 0.0)
    assert found(prefixes, prompt(TOKENS)) == [1]


def test_a_prompt_that_nobody_tokenized_is_known_by_its_text() -> None:
    prefixes = Prefixes()
    text = PromptKeys([bytes([n]) * 16 for n in (11, 12, 13)])
    prefixes.apply_events("a", told(stored(TOKENS[:4], [1])))
    prefixes.prefilled(A, text, 0.0)
    # A hash of text stands for 64 tokens here: sixteen blocks of this engine.
    assert found(prefixes, text) == [48]


def test_an_engine_that_ended_has_nothing() -> None:
    prefixes = Prefixes()
    prefixes.apply_events("a", told(stored(TOKENS, [1, 2, 3, 4])))
    prefixes.prefilled(B, prompt(TOKENS), 0.0)
    prefixes.forget("a")
    prefixes.forget("b")
    assert found(prefixes, prompt(TOKENS), A, B) == [0, 0]
    prefixes.remove("a")
    assert prefixes.state("a").source == "recent"


def test_several_prompts_settle_together_when_somebody_asks() -> None:
    """As if each had been put into the index at once; and what nobody asks for stays out of it."""
    prefixes = Prefixes()
    others = [[1000 * n, *TOKENS[1:]] for n in range(1, 4)]
    for n, tokens in enumerate([TOKENS, *others, TOKENS]):
        prefixes.prefilled(A, prompt(tokens), float(n))
    assert prefixes._recent_index.blocks("a") == 0
    assert [found(prefixes, prompt(tokens))[0] for tokens in (TOKENS, *others)] == [4] * 4
    assert prefixes._recent_index.blocks("a") == 16
    # The first prompt was used again at 4: it outlives those that were used at 3.
    assert prefixes.match(prompt(TOKENS), [A], 64, 123.5) == [4]
    assert prefixes.match(prompt(others[2]), [A], 64, 123.5) == [0]


def test_prompts_that_nobody_asks_for_take_no_more_room_than_the_engine_has() -> None:
    prefixes = Prefixes()
    prefixes.has_room("a", 8)
    for n in range(100):
        prefixes.prefilled(A, prompt([1000 * n, *TOKENS[1:]]), 0.0)
    assert prefixes.state("a").blocks <= 4 * 8 + 4
    assert found(prefixes, prompt([1000 * 99, *TOKENS[1:]])) == [4]
    assert prefixes.state("a").blocks <= 8
    assert found(prefixes, prompt([0, *TOKENS[1:]])) == [0]
