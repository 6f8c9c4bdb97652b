# SPDX-License-Identifier: Apache-2.0
"""Asks engines the same prompt in several ways, and compares the answers.

Every prompt is sent with a cache salt of its own each time, so that no prefix cache helps. The reference is the answer
of one engine alone, computed without disaggregation.
"""

from __future__ import annotations

import math
import random
import time
import uuid
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pd_connector.errors import PDConnectorError
from pd_connector.tools.launch import Client, Samples
from pd_connector.tools.launch.sglang import SglangEngine

DECODED_TOKENS = 32
METRICS_DEADLINE_S = 20.0


class DemoError(PDConnectorError):
    """The engines run, but do not do what the demo should show."""


class StreamedAnswer(NamedTuple):
    """One streamed answer."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    first_token_s: float  # request sent -> first token streamed


class PromptResult(NamedTuple):
    """The figures shown for one prompt."""

    prompt_tokens: int
    first_token_s: float
    handoff_s: float
    wire_bytes: int
    descriptors: int
    difference: float  # largest logprob difference from the reference; infinite if tokens differ


class Asker(ABC):
    """Sends prompts in all ways, and compares the answers."""

    @abstractmethod
    def ask(self, prompt: str) -> PromptResult:
        """Send this prompt in all ways.

        Raises:
            DemoError: an engine answered with an error, or the decode engine got no KV and computed the prompt itself.
        """

    def warm_up(self) -> None:
        """Send one request each way, so that no shown request is an engine's first."""
        self.ask("Once upon a time")


class VllmAsker(Asker):
    """Sends a prompt in three ways: through the router (time to first token, bytes, descriptors); in the two steps of a
    simpler proxy, which show the handoff from outside; and to the prefill engine alone."""

    def __init__(self, prefill: Client, decode: Client, router: Client) -> None:
        self._prefill = prefill
        self._decode = decode
        self._router = router
        self._model = prefill.model()

    def ask(self, prompt: str) -> PromptResult:
        before = self._decode.metrics()
        routed = self._complete(self._router, prompt)
        moved = wait_for_transfer(self._decode, before)
        stepped = self._two_steps(prompt)
        alone = self._complete(self._prefill, prompt)
        return PromptResult(
            routed.prompt_tokens,
            routed.first_token_s,
            stepped.first_token_s,
            int(moved.total("pd_connector:received_bytes_total")),
            int(moved.total("pd_connector:received_chunks_total")),
            max(difference(reply, alone) for reply in (routed, stepped)),
        )

    def _two_steps(self, prompt: str) -> StreamedAnswer:
        """Prefill, then decode: the time of the decode engine's first token is the handoff."""
        salt = {"cache_salt": uuid.uuid4().hex}
        body = {**_completion(self._model, prompt, **salt), "max_tokens": 1}
        body["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        params = self._prefill.post("/v1/completions", body).get("kv_transfer_params")
        if not params:
            raise DemoError("the prefill engine answered without kv_transfer_params")
        return self._complete(self._decode, prompt, **salt, kv_transfer_params=params)

    def _complete(self, client: Client, prompt: str, **more: Any) -> StreamedAnswer:
        body = _completion(self._model, prompt, return_tokens_as_token_ids=True, **more)
        return _stream_completion(client, body)


class CrossAsker(Asker):
    """Sends a prompt through the router to a prefill engine of one kind and a decode engine of the other kind, and to
    the vLLM engine of the two alone."""

    def __init__(self, decode: Client, router: Client, reference: Client) -> None:
        self._decode = decode
        self._router = router
        self._reference = reference

    def ask(self, prompt: str) -> PromptResult:
        before = self._decode.metrics()
        routed, alone = (
            _stream_completion(client, _completion(client.model(), prompt))
            for client in (self._router, self._reference)
        )
        return one_transfer(routed, alone, wait_for_transfer(self._decode, before))


class SglangAsker(Asker):
    """Sends a prompt to a pair of SGLang engines, as SGLang's router does, and to one engine alone."""

    def __init__(
        self, prefill: SglangEngine, decode: SglangEngine, reference: SglangEngine
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._reference = reference

    def ask(self, prompt: str) -> PromptResult:
        before = self._decode.metrics()
        room: dict[str, Any] = {
            "bootstrap_host": self._prefill.host,
            "bootstrap_port": self._prefill.bootstrap_port,
            "bootstrap_room": random.getrandbits(62) + 1,
        }
        with ThreadPoolExecutor(1) as pool:
            body = _generation(prompt) | room
            prefilled = pool.submit(self._prefill.client.post, "/generate", body)
            handed_over = _stream_generation(self._decode.client, body)
            prefilled.result()
        alone = _stream_generation(self._reference.client, _generation(prompt))
        return one_transfer(handed_over, alone, wait_for_transfer(self._decode.client, before))


def _completion(model: str, prompt: str, **more: Any) -> dict[str, Any]:
    """The body of a request to `/v1/completions`, with a cache salt of its own unless `more` has one."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": DECODED_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "cache_salt": uuid.uuid4().hex,
        **more,
    }


def _stream_completion(client: Client, body: dict[str, Any]) -> StreamedAnswer:
    tokens, logprobs = list[str](), list[float]()
    prompt_tokens, first_s = 0, math.nan
    sent = time.perf_counter()
    body = {**body, "stream_options": {"include_usage": True}}
    for event in client.stream("/v1/completions", body):
        if "error" in event:
            raise DemoError(f"{client.base_url} answered with an error: {event['error']}")
        for choice in event["choices"]:
            if not choice.get("logprobs"):
                continue
            if not tokens:
                first_s = time.perf_counter() - sent
            tokens += choice["logprobs"]["tokens"]
            logprobs += choice["logprobs"]["token_logprobs"]
        if event.get("usage"):
            prompt_tokens = int(event["usage"]["prompt_tokens"])
    return StreamedAnswer(tuple(tokens), tuple(logprobs), prompt_tokens, first_s)


def _generation(prompt: str) -> dict[str, Any]:
    """The body of a request to SGLang's `/generate`."""
    sampling = {"max_new_tokens": DECODED_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"text": prompt, "sampling_params": sampling, "return_logprob": True}


def _stream_generation(client: Client, body: dict[str, Any]) -> StreamedAnswer:
    first_s, meta = math.nan, dict[str, Any]()
    rows: list[Any] = []
    sent = time.perf_counter()
    for event in client.stream("/generate", body):
        if "error" in event:
            raise DemoError(f"{client.base_url} answered with an error: {event['error']}")
        if not rows:
            first_s = time.perf_counter() - sent
        meta = event["meta_info"]
        rows += meta["output_token_logprobs"][len(rows) :]
    tokens = tuple(str(row[1]) for row in rows)
    return StreamedAnswer(tokens, tuple(row[0] for row in rows), meta["prompt_tokens"], first_s)


def wait_for_transfer(decode: Client, before: Samples) -> Samples:
    """The growth of a decode engine's metrics, once they show the transfer. Raises DemoError."""
    deadline = time.monotonic() + METRICS_DEADLINE_S
    while True:
        grown = decode.metrics().since(before)
        if grown.total("pd_connector:received_transfers_total"):
            return grown
        if time.monotonic() > deadline:
            raise DemoError(
                "the decode engine received no KV; its failure counters: " + failures(grown)
            )
        time.sleep(0.1)


def one_transfer(reply: StreamedAnswer, alone: StreamedAnswer, moved: Samples) -> PromptResult:
    """The figures for a prompt after the arrival of its one transfer.

    Args:
        reply: the pair's answer.
        alone: one engine's answer.
        moved: growth of the decode engine's metrics.
    """
    return PromptResult(
        reply.prompt_tokens,
        reply.first_token_s,
        moved.total("pd_connector:transfer_seconds_sum"),
        int(moved.total("pd_connector:received_bytes_total")),
        int(moved.total("pd_connector:received_chunks_total")),
        difference(reply, alone),
    )


def difference(reply: StreamedAnswer, reference: StreamedAnswer) -> float:
    if reply.tokens != reference.tokens:
        return math.inf
    return max(abs(a - b) for a, b in zip(reply.logprobs, reference.logprobs, strict=True))


def failures(grown: Samples) -> str:
    """Failure counters that have grown, with their causes."""
    grown_counters = [
        f"{name.removeprefix('pd_connector:')}{sorted(v for k, v in labels if k == 'cause')}"
        for (name, labels), value in grown.items()
        if value > 0
        and name.startswith("pd_connector:")
        and any(k == "cause" for k, _ in labels)
        and name.endswith("_total")
    ]
    return ", ".join(grown_counters) or "none has grown (did the router find the prefill engine?)"
