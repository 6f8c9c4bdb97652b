# SPDX-License-Identifier: Apache-2.0
"""Sends a prompt to a pair of SGLang engines, as SGLang's router does, and to one engine alone."""

from __future__ import annotations

import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
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
from pd_connector.tools.launch.sglang import SglangEngine


class SglangAsker:
    """Sends prompts to the pair and to the reference, and compares the answers."""

    def __init__(
        self, prefill: SglangEngine, decode: SglangEngine, reference: SglangEngine
    ) -> None:
        self._prefill = prefill
        self._decode = decode
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
        room: dict[str, Any] = {
            "bootstrap_host": self._prefill.host,
            "bootstrap_port": self._prefill.bootstrap_port,
            "bootstrap_room": random.getrandbits(62) + 1,
        }
        with ThreadPoolExecutor(1) as pool:
            body = _body(prompt) | room
            prefilled = pool.submit(self._prefill.client.post, "/generate", body)
            handed_over = _stream(self._decode.client, body)
            prefilled.result()
        alone = _stream(self._reference.client, _body(prompt))
        return one_transfer(handed_over, alone, wait_for_transfer(self._decode.client, before))


def _body(prompt: str) -> dict[str, Any]:
    sampling = {"max_new_tokens": DECODED_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"text": prompt, "sampling_params": sampling, "return_logprob": True}


def _stream(client: Client, body: dict[str, Any]) -> StreamedAnswer:
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
