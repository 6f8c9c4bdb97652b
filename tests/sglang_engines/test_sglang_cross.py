# SPDX-License-Identifier: Apache-2.0
"""Prefill on vLLM and decode on SGLang, and the reverse, through the router: every token and log
probability as one vLLM engine computes it.

One vLLM engine is on both sides, with two ranks and pages of 32; SGLang's have one rank and pages of 16.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import harness
import pytest
from recipes import COMPILE_NOTHING, PROBE_ARGS, PROBE_ENVIRONMENT
from sglang_engines.sglang_harness import (
    DEADLINE_S,
    TOLERANCE,
    EnginePool,
    SglangEngine,
    assert_idle,
    new_room,
    paused,
    text,
)
from sglang_engines.sglang_recipes import DECODE, PREFILL
from support.engine_nursery import fork_engine
from tools import probe_all

from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch import Client, RouterProcess, Service, VllmEngine, stop_services

TOKENS = 16
LONG_ANSWER = 150
LENGTHS = (1, 31, 32, 33, 700)
"""A token, a page of vLLM's less and more, several steps of SGLang's."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Answer:
    """Tokens' texts and log probabilities, and the likeliest alternatives of each."""

    tokens: list[str]
    logprobs: list[float]
    top: list[dict[str, float]]

    def after_first(self) -> Answer:
        """Without the first token."""
        return Answer(self.tokens[1:], self.logprobs[1:], self.top[1:])

    def difference(self, other: Answer) -> float:
        """The largest of all log probabilities' differences. Infinite where the tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        pairs = list(zip(self.logprobs, other.logprobs, strict=True))
        for mine, theirs in zip(self.top, other.top, strict=True):
            pairs += [(mine[token], theirs[token]) for token in mine.keys() & theirs.keys()]
        return max(abs(a - b) for a, b in pairs)


@dataclass(frozen=True)
class Cross:
    """Two engines of different kinds, a router in front of them, and one engine that answers alone."""

    router: RouterProcess
    prefill: Service
    decode: Service
    alone: VllmEngine
    answers: dict[tuple[str, str], Answer]  # that engine's, by path and prompt

    def wanted(self, path: str, prompt: str) -> Answer:
        """What the engine answers alone; it is asked once."""
        if (path, prompt) not in self.answers:
            self.answers[path, prompt] = ask(self.alone.client, path, prompt)
        assert len(self.answers[path, prompt].tokens) == TOKENS
        return self.answers[path, prompt]

    def received(self) -> float:
        """Transfers that have arrived at the decode engine's ranks."""
        return self.decode.client.metrics().total("pd_connector:received_transfers_total")

    def others(self) -> dict[str, float]:
        """Requests that did not go to both engines, by the router's cause."""
        flows = self.router.client.metrics()
        return {
            dict(labels).get("cause", ""): count
            for (name, labels), count in flows.items()
            if name == "pd_router:flows_total" and ("flow", "disaggregated") not in labels
        }

    def assert_idle(self) -> None:
        """Wait until nothing is under way."""
        harness.assert_idle(self.alone)
        assert_idle(*(each for each in (self.prefill, self.decode) if each is not self.alone))

    def wait_received(self, wanted: float) -> None:
        """Wait until `wanted` transfers have arrived: an engine updates its metrics only now and then."""
        end = time.monotonic() + DEADLINE_S
        while (found := self.received()) < wanted:
            assert time.monotonic() < end, f"{found} of {wanted} transfers: prompts were recomputed"
            time.sleep(0.2)


def ask(
    client: Client,
    path: str,
    prompt: str,
    *,
    stream: bool = False,
    begun: Callable[[], None] = lambda: None,
    **extra: Any,
) -> Answer:
    """A greedy answer of `TOKENS` tokens, whole or streamed. `begun` is called at its first event."""
    body: dict[str, Any] = {
        "model": client.model(),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": uuid.uuid4().hex,
        **extra,
    }
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True}
        body["top_logprobs"] = 2
    else:
        body |= {"prompt": prompt, "logprobs": 2}
    events = client.stream(path, body) if stream else [client.post(path, body)]
    tokens, logprobs, top = list[str](), list[float](), list[dict[str, float]]()
    for number, event in enumerate(events):
        assert "error" not in event, event
        if number == 0:
            begun()
        found = (event["choices"][0].get("logprobs") if event["choices"] else None) or {}
        for entry in found.get("content") or ():
            tokens.append(entry["token"])
            logprobs.append(entry["logprob"])
            top.append({each["token"]: each["logprob"] for each in entry["top_logprobs"]})
        tokens += found.get("tokens") or []
        logprobs += found.get("token_logprobs") or []
        top += found.get("top_logprobs") or []
    return Answer(tokens, logprobs, top)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """The engine of vLLM's, on whatever side a test has it."""
    args = ["--dtype", "float32", "--tensor-parallel-size", "2", *PROBE_ARGS]
    env = {**COMPILE_NOTHING, **PROBE_ENVIRONMENT}
    paths = [PROBE_ENVIRONMENT["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    log = tmp_path_factory.mktemp("cross") / "vllm.log"
    engine = VllmEngine(
        MODEL_DIR,
        "kv_both",
        extra_config={"audit": "off"},  # an audited prompt is computed where its KV goes
        args=args,
        env=env,
        name="vllm",
        log_path=log,
    )
    engine.popen = fork_engine
    yield engine.start()
    engine.stop()


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], Answer]:
    return {}


@pytest.fixture(scope="module", params=["vllm:sglang", "sglang:vllm"])
def cross(
    request: pytest.FixtureRequest,
    engines: EnginePool,
    vllm: VllmEngine,
    answers: dict[tuple[str, str], Answer],
) -> Iterator[Cross]:
    p, d = engines.pair(PREFILL, DECODE)
    vllm.wait_ready()
    prefill, decode = (vllm, d) if request.param == "vllm:sglang" else (p, vllm)
    # Other policies would have vLLM compute short prompts where it decodes.
    args = ["--policy", "round_robin"]
    router = RouterProcess([prefill.base_url], [decode.base_url], args=args).start()
    router.wait_ready()
    yield Cross(router, prefill, decode, vllm, answers)
    stop_services([router])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_every_token_is_as_one_engine_computes_it(cross: Cross, path: str, stream: bool) -> None:
    before = cross.received()
    for length in LENGTHS:
        prompt = bytes(text(length)).decode()
        wanted = cross.wanted(path, prompt)
        found = ask(cross.router.client, path, prompt, stream=stream)
        assert found.difference(wanted) <= TOLERANCE, (length, found, wanted)
    assert cross.others() == {}, "not every prompt was handed over"
    computes_last = cross.decode is cross.alone  # vLLM fetches nothing for a prompt of one token
    cross.wait_received(before + len(LENGTHS) - (computes_last and path == COMPLETIONS))
    cross.assert_idle()


def test_an_answer_that_needs_no_kv_is_not_given_up(cross: Cross) -> None:
    """vLLM fetches nothing for a prompt of one token, and its whole answer takes longer than a router waits
    for a decode engine whose prefill engine has failed."""
    if cross.decode is not cross.alone:
        pytest.skip("SGLang's decode engine fetches the KV of every prompt")
    prompt = bytes(text(1)).decode()
    wanted = ask(cross.alone.client, COMPLETIONS, prompt, max_tokens=LONG_ANSWER)
    found = ask(cross.router.client, COMPLETIONS, prompt, max_tokens=LONG_ANSWER)
    assert found.difference(wanted) <= TOLERANCE
    assert cross.others() == {}, "another engine was asked"


def test_a_stream_goes_on_that_was_retracted(cross: Cross) -> None:
    """SGLang's `pause_generation` for new weights: its decode engine has all of it computed again by vLLM."""
    if cross.decode is cross.alone:
        pytest.skip("vLLM retracts nothing")
    assert isinstance(cross.decode, SglangEngine)
    prompt, limit = bytes(text(100)).decode(), {"max_tokens": LONG_ANSWER}
    wanted = ask(cross.alone.client, COMPLETIONS, prompt, **limit)
    before, begun = cross.received(), Barrier(5)
    with ThreadPoolExecutor(4) as pool:
        streams = {"stream": True, "begun": lambda: begun.wait(DEADLINE_S), **limit}
        asked = [
            pool.submit(ask, cross.router.client, COMPLETIONS, prompt, **streams) for _ in range(4)
        ]
        begun.wait(DEADLINE_S)
        with paused(cross.decode, "retract"):
            pass
        for future in asked:
            assert future.result().difference(wanted) <= TOLERANCE
    cross.wait_received(before + len(asked) + 1)
    cross.assert_idle()


def test_one_damaged_page_moves_the_logprobs(cross: Cross) -> None:
    if cross.decode is cross.alone:
        pytest.skip(
            "pages are damaged in vLLM's cache, which is the prefill side's in the other half"
        )
    prompt = bytes(text(200)).decode()
    wanted = ask(cross.alone.client, COMPLETIONS, prompt).after_first()
    found = [_in_two_steps(cross, prompt, damaged=damaged) for damaged in (False, True)]
    assert found[0].difference(wanted) <= TOLERANCE
    assert found[1].difference(wanted) > 100 * TOLERANCE


def _in_two_steps(cross: Cross, prompt: str, *, damaged: bool) -> Answer:
    """Prefill, then decode; between the two a page of the prompt may be damaged in the prefill
    engine's cache, before its checksum is made."""
    room, salt = new_room(), uuid.uuid4().hex
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": str(room)}
    client = cross.alone.client
    asked = {"model": client.model(), "prompt": prompt, "max_tokens": 1, "temperature": 0}
    told = client.post(COMPLETIONS, {**asked, "cache_salt": salt, "kv_transfer_params": params})
    told = told["kv_transfer_params"]
    if damaged:
        probe_all(cross.alone, "damage_page", told["remote_block_ids"][0][2])
    named = {"bootstrap_host": told["remote_host"], "bootstrap_port": told["remote_port"]}
    answer = ask(
        cross.decode.client, COMPLETIONS, prompt, cache_salt=salt, bootstrap_room=room, **named
    )
    # The door of vLLM tells no logprob; through the router it comes from the prefill's answer.
    return answer.after_first()
