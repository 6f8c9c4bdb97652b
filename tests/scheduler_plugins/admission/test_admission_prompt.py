# SPDX-License-Identifier: Apache-2.0
"""Length and cached prefix of a prompt, without tokenizing it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.admission.prompt import Prompt, PromptMemory, prompt_of


def seen(memory: PromptMemory, body: dict) -> tuple[int, int]:
    """Expected tokens, and how many of them are cached."""
    prompt = prompt_of(body)
    tokens = memory.tokens(prompt)
    return tokens, memory.cached(prompt, tokens)


def text(words: int, seed: str = "word") -> str:
    return " ".join(f"{seed}{n:04}" for n in range(words))


def test_token_ids_are_counted() -> None:
    memory = PromptMemory(1000)
    assert seen(memory, {"prompt": [5] * 77})[0] == 77
    assert seen(memory, {"prompt": [[5] * 70, [6] * 30]})[0] == 100


@pytest.mark.parametrize("per_token", [1, 3, 6])
def test_the_length_of_a_text_is_learnt_from_what_answers_say(per_token: int) -> None:
    memory = PromptMemory(1000)
    for _ in range(50):
        memory.answered(prompt_of({"prompt": "x" * 1200}), 1200 // per_token, None)
    assert seen(memory, {"prompt": "x" * 600})[0] == pytest.approx(600 / per_token, rel=0.05)


def test_chats_have_a_ratio_of_their_own() -> None:
    memory = PromptMemory(1000)
    for _ in range(50):
        memory.answered(prompt_of({"prompt": "x" * 1000}), 1000, None)
    chat = {"messages": [{"role": "user", "content": "x" * 1000}]}
    assert seen(memory, chat)[0] < 400


def test_all_that_a_template_shows_counts() -> None:
    plain = prompt_of({"messages": [{"role": "user", "content": "a" * 100}]})
    parts = [{"type": "text", "text": "a" * 50}, {"type": "text", "text": "a" * 50}]
    assert prompt_of({"messages": [{"role": "user", "content": parts}]}).size_bytes >= 100
    with_tools = {"tools": [{"name": "t" * 50}], "messages": [{"role": "user", "content": "a"}]}
    assert prompt_of(with_tools).size_bytes > 50
    assert plain.size_bytes < 120


def test_a_prompt_that_was_computed_is_cached_and_so_is_its_beginning() -> None:
    memory = PromptMemory(100_000)
    shared = text(500)
    assert seen(memory, {"prompt": shared + text(100, "post")})[1] == 0
    memory.prefilled(prompt_of({"prompt": shared + text(100, "post")}))
    tokens, cached = seen(memory, {"prompt": shared + text(100, "other")})
    assert 0.75 * tokens < cached < 0.85 * tokens


def test_what_differs_at_its_beginning_is_not() -> None:
    memory = PromptMemory(100_000)
    memory.prefilled(prompt_of({"prompt": "a" + text(500)}))
    assert seen(memory, {"prompt": "b" + text(500)})[1] == 0


@pytest.mark.parametrize("other", [{"cache_salt": "s"}, {"model": "adapter"}])
def test_what_does_not_share_kv_is_not(other: dict) -> None:
    memory = PromptMemory(100_000)
    body = {"prompt": text(500)}
    memory.prefilled(prompt_of(body))
    assert seen(memory, body)[1] > 0
    assert seen(memory, {**body, **other})[1] == 0


def test_the_oldest_is_forgotten_when_the_cache_of_the_engine_is_full() -> None:
    memory = PromptMemory(1000)
    ids = [list(range(start, start + 512)) for start in (0, 10_000, 20_000)]
    memory.prefilled(prompt_of({"prompt": ids[0]}))
    assert seen(memory, {"prompt": ids[0]})[1] == 511
    for one in ids[1:]:
        memory.prefilled(prompt_of({"prompt": one}))
    assert seen(memory, {"prompt": ids[2]})[1] == 511
    assert seen(memory, {"prompt": ids[0]})[1] == 0


def test_an_engine_without_a_prefix_cache_has_nothing_cached() -> None:
    memory = PromptMemory(0)
    memory.prefilled(prompt_of({"prompt": text(500)}))
    assert seen(memory, {"prompt": text(500)})[1] == 0


def test_expected_hits_that_do_not_come_are_expected_less() -> None:
    memory = PromptMemory(100_000)
    prompt = prompt_of({"prompt": list(range(1000))})
    memory.prefilled(prompt)
    expected = memory.cached(prompt, 1000)
    for _ in range(200):
        memory.answered(prompt, 1000, (memory.cached(prompt, 1000), expected // 2))
    assert memory.cached(prompt, 1000) == pytest.approx(expected / 2, rel=0.05)


def test_kv_that_another_engine_sends_needs_no_computing() -> None:
    body = {"prompt": [1] * 500, "kv_transfer_params": {"do_remote_prefill": True}}
    assert seen(PromptMemory(0), body) == (500, 499)


_wild = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "tool_calls"]), inner)
    ),
    max_leaves=10,
)


@given(
    body=st.dictionaries(
        st.sampled_from(["prompt", "messages", "tools", "model", "cache_salt"]), _wild
    )
)
def test_whatever_a_body_holds_there_is_an_expectation(body: dict) -> None:
    memory = PromptMemory(1000)
    prompt = prompt_of(body)
    assert isinstance(prompt, Prompt)
    memory.prefilled(prompt)
    tokens, cached = seen(memory, body)
    assert 0 <= cached < tokens
