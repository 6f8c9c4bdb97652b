# SPDX-License-Identifier: Apache-2.0
"""Requests of the clients that load engines."""

import random

from pd_connector.tools.launch import Client

DECODED_TOKENS = 8
REQUEST_S = 120.0
"""A request without an answer after this time is lost. The longest fault is a restart of the prefill engine."""

_models: dict[str, str] = {}


def body(client: Client, prompt: str) -> dict[str, object]:
    """A request for a few tokens of a greedy answer."""
    model = _models.setdefault(client.base_url, "") or client.model()
    _models[client.base_url] = model
    told = {"model": model, "prompt": prompt, "max_tokens": DECODED_TOKENS, "temperature": 0}
    # A prompt with the shared salt may be cached, or in the pool.
    salt = random.choice((str(random.random()), "shared"))
    return {**told, "ignore_eos": True, "cache_salt": salt}


def answer(client: Client, prompt: str) -> str:
    """The answer to such a request. Raises HttpError, or OSError."""
    found = client.post("/v1/completions", body(client, prompt), REQUEST_S)
    return str(found["choices"][0]["text"])
