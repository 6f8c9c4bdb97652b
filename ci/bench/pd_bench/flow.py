# SPDX-License-Identifier: Apache-2.0
"""One request through a prefill and a decode engine, as a proxy sends it: two orders, one clock.

Both report the same handoff: the time from the prefill engine's answer to the decode engine's first token.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pd_bench.report import BenchError
from pd_connector.protocol.wire.params import (
    ProducerAddress,
    decode_params,
    describe_params,
    parse_address,
    prefill_params,
)
from pd_connector.tools.launch import Client

DECODED_TOKENS = 2  # the first ends the measurement, the second shows that decoding continues

_PATH = "/v1/completions"
# As a proxy for NixlConnector writes it, so that both connectors get the same request.
_KEEP: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Run(NamedTuple):
    """One request through both engines."""

    prefill_s: float  # request sent -> the prefill engine's answer read
    handoff_s: float  # that answer -> first token streamed by the decode engine
    text: str  # the decode engine's answer


class _Decoded(NamedTuple):
    first_at: float
    text: str


Flow = Callable[[Client, Client, Mapping[str, Any]], Run]
"""Sends a request through the prefill and the decode engine. The latter decodes the body's `max_tokens`, by default
`DECODED_TOKENS`."""


def two_steps(prefill: Client, decode: Client, body: Mapping[str, Any]) -> Run:
    """Asks the decode engine after the prefill engine's answer, with the parameters from that answer.

    Raises:
        BenchError: the prefill engine offered nothing.
    """
    started = time.perf_counter()
    whereabouts = _prefill(prefill, body, _KEEP)
    prefilled = time.perf_counter()
    decoded = _decode(decode, body, whereabouts)
    return Run(prefilled - started, decoded.first_at - prefilled, decoded.text)


def together(prefill: Client, decode: Client, body: Mapping[str, Any]) -> Run:
    """Asks both engines at once, as our router does: KV can move while the prefill computes.

    Raises:
        BenchError: the prefill engine offered nothing, or does not describe itself.
    """
    address = _address(prefill, body)
    transfer = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as threads:
        started = time.perf_counter()
        decoding = threads.submit(_decode, decode, body, decode_params(address, transfer))
        _prefill(prefill, body, prefill_params(transfer))
        prefilled = time.perf_counter()
        decoded = decoding.result()
    return Run(prefilled - started, decoded.first_at - prefilled, decoded.text)


def _address(prefill: Client, body: Mapping[str, Any]) -> ProducerAddress:
    answer = _prefill(prefill, {"model": body["model"], "prompt": [1]}, describe_params())
    address = parse_address(answer)
    if address is None:
        raise BenchError(f"{prefill.base_url} does not describe itself: {dict(answer)}")
    return address


def _prefill(
    client: Client, body: Mapping[str, Any], params: Mapping[str, Any]
) -> Mapping[str, Any]:
    request = {**body, "max_tokens": 1, "kv_transfer_params": _with_own(body, params)}
    answer = client.post(_PATH, request)
    whereabouts = answer.get("kv_transfer_params")
    if not isinstance(whereabouts, dict) or not whereabouts:
        raise BenchError(f"{client.base_url} answers without kv_transfer_params: {answer}")
    return whereabouts


def _decode(client: Client, body: Mapping[str, Any], params: Mapping[str, Any]) -> _Decoded:
    transfer = _with_own(body, params)
    request = {"max_tokens": DECODED_TOKENS, **body, "kv_transfer_params": transfer}
    texts: list[str] = []
    first_at = 0.0
    for event in client.stream(_PATH, request):
        if event.get("choices"):
            first_at = first_at or time.perf_counter()
            texts += [choice["text"] for choice in event["choices"]]
    if not first_at:
        raise BenchError(f"{client.base_url} ended its answer without a token")
    return _Decoded(first_at, "".join(texts))


def _with_own(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The request's own parameters, with the parameters of one step added."""
    return {**body.get("kv_transfer_params", {}), **params}
