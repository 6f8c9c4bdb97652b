# SPDX-License-Identifier: Apache-2.0
"""Sends requests at their times, whether or not earlier requests are answered, and records each answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pd_bench.serve.trace import TimedRequest
from pd_connector.tools.launch import Client, HttpError

_PATH = "/v1/completions"
_PATIENCE_S = 120.0
"""A request has failed after this silence, in seconds."""


@dataclass(frozen=True)
class Answer:
    """The answer to one request; without a `failure` both times are set."""

    ttft_s: float = 0.0  # due -> first token read
    tpot_s: float = 0.0  # average time between two later tokens
    failure: str = ""
    text: str = ""
    status: int = 200  # of HTTP


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
    """Requests a second that are answered while `at_once` requests are under way at all times. The requests' own
    times are ignored."""
    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as threads:
        answers = list(
            threads.map(lambda request: _ask(client, model, request, time.monotonic()), requests)
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
    texts = list[str]()
    try:
        for event in client.stream(_PATH, body, _PATIENCE_S):
            if "error" in event:
                return Answer(failure=str(event["error"]))
            if choices := event.get("choices"):
                texts += [choice.get("text", "") for choice in choices]
                last = time.monotonic()
                first = first or last
    except HttpError as error:
        return Answer(failure=str(error), status=error.status)
    except (OSError, ValueError) as error:
        return Answer(failure=str(error))
    if not first:
        return Answer(failure="the answer ended without a token")
    # An event can hold several tokens. Only their total is known.
    each_s = (last - first) / (request.max_tokens - 1)
    return Answer(first - due, each_s, text="".join(texts))
