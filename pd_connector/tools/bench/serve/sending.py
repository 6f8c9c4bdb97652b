# SPDX-License-Identifier: Apache-2.0
"""Requests sent at their times, whether or not earlier ones are answered, and how each was answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pd_connector.tools.bench.serve.trace import TimedRequest
from pd_connector.tools.launch import Client, HttpError

_PATH = "/v1/completions"
_PATIENCE_S = 120.0
"""A request that is silent for so long has failed."""


@dataclass(frozen=True)
class Answer:
    """How one request was answered; without `failure` both times are there."""

    ttft_s: float = 0.0  # due -> first token read
    tpot_s: float = 0.0  # between two tokens after that, on average
    failure: str = ""


def send(client: Client, model: str, requests: Sequence[TimedRequest]) -> list[Answer]:
    """Send every request when it is due, and wait for all answers."""
    began = time.monotonic()

    def ask(request: TimedRequest) -> Answer:
        time.sleep(max(0.0, began + request.at_s - time.monotonic()))
        return _ask(client, model, request, began + request.at_s)

    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(ask, requests))


def completion_rate(
    client: Client, model: str, requests: Sequence[TimedRequest], at_once: int
) -> tuple[float, list[Answer]]:
    """Requests a second that are answered if `at_once` are under way all the time; times of the
    requests are left out."""
    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as threads:
        answers = list(
            threads.map(lambda one: _ask(client, model, one, time.monotonic()), requests)
        )
    return len(requests) / (time.monotonic() - began), answers


def _ask(client: Client, model: str, request: TimedRequest, due: float) -> Answer:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    first = last = 0.0
    try:
        for event in client.stream(_PATH, body, _PATIENCE_S):
            if "error" in event:
                return Answer(failure=str(event["error"]))
            if event.get("choices"):
                last = time.monotonic()
                first = first or last
    except (HttpError, OSError, ValueError) as error:
        return Answer(failure=str(error))
    if not first:
        return Answer(failure="the answer ended without a token")
    # Events may hold several tokens each, but their number is known.
    return Answer(first - due, (last - first) / (request.max_tokens - 1))
