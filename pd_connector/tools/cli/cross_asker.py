# SPDX-License-Identifier: Apache-2.0
"""Sends prompts to a prefill engine of one kind and a decode engine of another, through the router, and to the vLLM
engine of the two alone."""

from __future__ import annotations

import math
import time
import uuid
from typing import Any

from pd_connector.tools.cli.asker import (
    DECODED_TOKENS,
    DemoError,
    PromptResult,
    StreamedAnswer,
    one_transfer,
    wait_for_transfer,
)
from pd_connector.tools.launch import Client


class CrossAsker:
    """Sends prompts both ways, and compares the answers. Each has a cache salt of its own, so that no prefix cache
    helps."""

    def __init__(self, decode: Client, router: Client, reference: Client) -> None:
        self._decode = decode
        self._router = router
        self._reference = reference

    def warm_up(self) -> None:
        """Send one request, so that no shown request is an engine's first."""
        self.ask("Once upon a time")

    def ask(self, prompt: str) -> PromptResult:
        """Send this prompt to the pair and to the reference.

        Raises:
            DemoError: an engine answered with an error, or the KV did not come.
        """
        before = self._decode.metrics()
        routed = self._stream(self._router, prompt)
        alone = self._stream(self._reference, prompt)
        return one_transfer(routed, alone, wait_for_transfer(self._decode, before))

    def _stream(self, client: Client, prompt: str) -> StreamedAnswer:
        tokens, logprobs = list[str](), list[float]()
        prompt_tokens, first_s = 0, math.nan
        sent = time.perf_counter()
        for event in client.stream("/v1/completions", _body(client.model(), prompt)):
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


def _body(model: str, prompt: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": DECODED_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "cache_salt": uuid.uuid4().hex,
        "stream_options": {"include_usage": True},
    }
