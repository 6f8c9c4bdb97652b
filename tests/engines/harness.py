# SPDX-License-Identifier: Apache-2.0
"""Real engines for tests: pairs that tests share, requests to them, and what must hold afterwards."""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pd_connector.tools.launch import Census, Client, Samples, Service, VllmEngine

IDLE_GAUGES = (
    "pd_connector:leased_pages",
    "pd_connector:outgoing_transfers",
    "pd_connector:incoming_transfers",
    "pd_connector:landing_slots",
    "pd_connector:send_slots",
)
"""Gauges of our connector that are zero when nothing is under way."""

IDLE_ENGINE_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)

TWO_STEP_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a proxy written for NixlConnector sends to the prefill engine."""

DEADLINE_S = 120.0
"""For conditions that come true in well under a second on an idle machine."""

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Answer:
    """One completion: tokens, their logprobs, and the alternatives' logprobs by token."""

    tokens: tuple[str, ...]  # "token_id:N"
    logprobs: tuple[float, ...]
    top: tuple[Mapping[str, float], ...]
    text: str
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def kv_transfer_params(self) -> dict[str, Any]:
        """What the prefill engine says for the decode engine; empty when it says nothing."""
        return dict(self.raw.get("kv_transfer_params") or {})

    @property
    def prompt_tokens(self) -> int:
        return int(self.raw["usage"]["prompt_tokens"])


@cache
def _model(base_url: str) -> str:
    return Client(base_url).model()


def url_of(target: Service | str) -> str:
    """Base URL of a service, or the URL itself."""
    return target if isinstance(target, str) else target.base_url


def fresh_salt() -> str:
    """A prefix-cache salt that nothing has used: the prompt is computed whole, in one order.

    KV from the prefix cache was computed in other portions, and may differ in the last bit.
    """
    return uuid.uuid4().hex


def request_body(
    target: Service | str, prompt: Prompt, max_tokens: int = 32, logprobs: int = 5, **extra: Any
) -> dict[str, Any]:
    """Body of a greedy completion that always has `max_tokens` tokens."""
    return {
        "model": _model(url_of(target)),
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": logprobs,
        "return_tokens_as_token_ids": True,
        **extra,
    }


def completion(target: Service | str, prompt: Prompt, max_tokens: int = 32, **extra: Any) -> Answer:
    """A completion, not streamed, that finds nothing in a prefix cache unless told otherwise.

    Args:
        extra: goes into the body. `cache_salt` is a fresh one by default; None shares the cache
            with all requests without a salt. `timeout_s` is the client's limit.
    """
    timeout_s = extra.pop("timeout_s", None)
    extra.setdefault("cache_salt", fresh_salt())
    body = request_body(target, prompt, max_tokens, **extra)
    return answer_of(Client(url_of(target)).post("/v1/completions", body, timeout_s))


def answer_of(raw: Mapping[str, Any]) -> Answer:
    """A completion's answer, as the engine sent it, not streamed."""
    choice = raw["choices"][0]
    found = choice["logprobs"]
    return Answer(
        tuple(found["tokens"]),
        tuple(found["token_logprobs"]),
        tuple(found["top_logprobs"]),
        choice["text"],
        raw,
    )


def prefill_step(p: Service | str, prompt: Prompt, **extra: Any) -> dict[str, Any]:
    """First step of a two-step proxy: prefill, and the parameters for the decode engine."""
    answer = completion(p, prompt, 1, kv_transfer_params=dict(TWO_STEP_PARAMS), **extra)
    return answer.kv_transfer_params


def two_step(
    p: Service | str, d: Service | str, prompt: Prompt, max_tokens: int = 32, **extra: Any
) -> Answer:
    """A whole request as a two-step proxy written for NixlConnector makes it."""
    extra.setdefault("cache_salt", fresh_salt())
    params = prefill_step(p, prompt, **extra)
    return completion(d, prompt, max_tokens, kv_transfer_params=params, **extra)


def assert_same_logprobs(found: Answer, wanted: Answer, tolerance: float = 0.0) -> None:
    """Same tokens, same logprobs, same alternatives; the first difference is in the message."""
    rows = itertools.zip_longest(
        zip(found.tokens, found.logprobs, found.top, strict=True),
        zip(wanted.tokens, wanted.logprobs, wanted.top, strict=True),
    )
    for index, (here, there) in enumerate(rows):
        assert here is not None, f"{len(found.tokens)} tokens, wanted {len(wanted.tokens)}"
        assert there is not None, f"{len(found.tokens)} tokens, wanted {len(wanted.tokens)}"
        where = f"token {index} of {len(wanted.tokens)}: found {here}, wanted {there}"
        assert here[0] == there[0], f"another token at {where}"
        assert abs(here[1] - there[1]) <= tolerance, f"another logprob at {where}"
        # The order of near-equal alternatives may change within the tolerance, and so may who is
        # the last of them: compare those that both have.
        common = here[2].keys() & there[2].keys()
        assert tolerance > 0 or len(common) == len(there[2]), f"other alternatives at {where}"
        for token in common:
            apart = abs(here[2][token] - there[2][token])
            assert apart <= tolerance, f"another logprob of {token} at {where}"


def largest_difference(found: Answer, other: Answer) -> float:
    """Largest distance of two logprobs at the same place; infinite when the tokens differ."""
    if found.tokens != other.tokens:
        return math.inf
    return max(abs(a - b) for a, b in zip(found.logprobs, other.logprobs, strict=True))


def wait_until(
    condition: Callable[[], Any],
    what: str | Callable[[], str],
    deadline_s: float = DEADLINE_S,
    every_s: float = 0.1,
) -> Any:
    """Wait until a condition is true and return its value; `what` says what was waited for."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {deadline_s:.0f} s: {text}")
        time.sleep(every_s)
    return value


def busy(samples: Samples, *, connector: bool) -> dict[str, float]:
    """Gauges that say that something is under way."""
    names = IDLE_ENGINE_GAUGES + (IDLE_GAUGES if connector else ())
    missing = [name for name in names if not samples.has(name)]
    assert not missing, f"/metrics does not have {missing}"
    return {name: value for name in names if (value := samples.total(name))}


def assert_idle(engine: VllmEngine, deadline_s: float = DEADLINE_S) -> None:
    """Wait until the engine has no request, no used page, no lease, no slot in use, no transfer."""
    connector = engine.connector == "PDConnector"
    left: dict[str, float] = {}
    looks = itertools.count(1)

    def idle() -> bool:
        nonlocal left
        left = busy(engine.metrics(), connector=connector)
        if left and next(looks) % 20 == 2:
            # vLLM updates its gauges only when it steps; one token makes it step.
            completion(engine, "a", 1)
        return not left

    wait_until(idle, lambda: f"{engine.name} idle; still above zero: {left}", deadline_s)


def assert_no_leaks(engine: VllmEngine, before: Census, deadline_s: float = DEADLINE_S) -> None:
    """Wait until the engine has no more processes, threads and open files than before."""
    now = before

    def back() -> bool:
        nonlocal now
        assert engine.family is not None
        now = Census.of(engine.family)
        return all(a <= b for a, b in zip(now, before, strict=True))

    wait_until(back, lambda: f"{engine.name} as small as before: {now}, was {before}", deadline_s)
