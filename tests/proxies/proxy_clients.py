# SPDX-License-Identifier: Apache-2.0
"""What other people's proxies send for one request, rebuilt from their protocols: fields, values, order.

Each client is called with a completion's body and returns what its user would get. The engines behind it are real.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

Body = dict[str, Any]
Send = Callable[[str, Body, Mapping[str, str]], Body]
"""POST a body with these headers to an engine's base URL; returns the answer's."""

UNSET = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
ASKS_TO_KEEP = {"do_remote_decode": True, "do_remote_prefill": False, **UNSET}
ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}


def send(url: str, body: Body, headers: Mapping[str, str]) -> Body:
    """See `Send`. Raises OSError."""
    given = {"Content-Type": "application/json", **headers}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), given)
    with build_opener(ProxyHandler({})).open(request, timeout=300) as response:
        found: Body = json.load(response)
        return found


def through_float64(value: Any) -> Any:
    """A JSON value as a program in Go re-marshals what it has not typed."""
    if isinstance(value, Mapping):
        return {key: through_float64(each) for key, each in value.items()}
    if isinstance(value, list):
        return [through_float64(each) for each in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return int(float(value))
    return value


class Proxy(ABC):
    """One proxy in front of one prefill and one decode engine."""

    def __init__(self, prefill: str, decode: str, send: Send = send) -> None:
        self.prefill = prefill
        self.decode = decode
        self.send = send

    @abstractmethod
    def __call__(self, body: Body) -> Body:
        """Serve one request."""

    def keep(self, body: Body, params: Body | None, headers: Mapping[str, str] = {}) -> Body:
        """The prefill engine computes the prompt, and one token."""
        extra = {} if params is None else {"kv_transfer_params": params}
        return self.send(self.prefill, {**body, **ONE_TOKEN, **extra}, headers)


class ToyProxy(Proxy):
    """vLLM's toy proxy: one engine after the other, the answer's parameters unchanged."""

    def __call__(self, body: Body) -> Body:
        answer = self.keep(body, ASKS_TO_KEEP)
        return self.send(self.decode, {**body, **_params(answer)}, {})


class VllmRouter(Proxy):
    """vllm-router 0.1.17: as the toy proxy. If an answer says `push`, it keeps the answer's texts and numbers, and names
    the KV with its own id of the request, which it has told the prefill engine in a header only."""

    scalars = ("remote_engine_id", "remote_host", "remote_port", "tp_size")

    def __call__(self, body: Body) -> Body:
        request = {"x-request-id": f"___prefill_addr_a___decode_addr_b_{uuid.uuid4().hex}"}
        answer = self.keep(body, ASKS_TO_KEEP, request)
        params = answer.get("kv_transfer_params") or {}
        if params.get("transfer_mode") == "push":
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                **{name: params[name] for name in self.scalars},
                "remote_request_id": request["x-request-id"],
            }
        return self.send(self.decode, {**body, "kv_transfer_params": params}, request)


class AppendingProxy(Proxy):
    """A proxy that continues the prompt with the prefill engine's token."""

    def __call__(self, body: Body) -> Body:
        answer = self.keep(body, ASKS_TO_KEEP)
        first = int(answer["choices"][0]["logprobs"]["tokens"][0].removeprefix("token_id:"))
        longer = {"prompt": [*body["prompt"], first], "max_tokens": body["max_tokens"] - 1}
        return self.send(self.decode, {**body, **longer, **_params(answer)}, {})


class ProductionStack(Proxy):
    """production-stack with orchestrated disaggregation, and AIBrix with `shfs`: as vLLM's, but the host of the answer
    is overwritten with the proxy's own idea of it."""

    host = "prefill-0.prefill.svc"

    def __call__(self, body: Body) -> Body:
        answer = self.keep(body, ASKS_TO_KEEP)
        params = answer.get("kv_transfer_params")
        if params is not None:
            params["remote_host"] = self.host
        return self.send(self.decode, {**body, "kv_transfer_params": params}, {})


class LMCacheMode(Proxy):
    """production-stack for LMCache: both engines get the prompt, and no parameters."""

    def __call__(self, body: Body) -> Body:
        self.keep(body, None)
        return self.send(self.decode, body, {})


class AIBrixNixl(Proxy):
    """AIBrix with `nixl`: the whole answer of the prefill engine in a field that vLLM does not know."""

    def __call__(self, body: Body) -> Body:
        answer = self.keep(body, None)
        return self.send(self.decode, {**body, "disagg_prefill_resp": answer}, {})


class Sidecar(Proxy):
    """llm-d's routing sidecar with `nixlv2`: one engine after the other."""

    def __call__(self, body: Body) -> Body:
        request = {"x-request-id": str(uuid.uuid4())}
        answer = self.keep(body, ASKS_TO_KEEP, request)
        return self.send(self.decode, {**body, **through_float64(_params(answer))}, request)


class PushSidecar(Proxy):
    """llm-d's routing sidecar in push mode: both engines at once, from the second request on.

    Attributes:
        identity: what it keeps of the prefill engine's last answer.
    """

    needed = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "transfer_mode")
    optional = ("pp_size", "dcp_size")

    def __init__(self, prefill: str, decode: str, send: Send = send) -> None:
        super().__init__(prefill, decode, send)
        self.identity: Body | None = None

    def __call__(self, body: Body) -> Body:
        transfer, request = f"xfer-{uuid.uuid4()}", {"x-request-id": str(uuid.uuid4())}
        asks = {**ASKS_TO_KEEP, "transfer_id": transfer}
        if self.identity is None:
            answer = self.keep(body, asks, request)
            self.identity = self._identity(answer)
            params = {**answer["kv_transfer_params"], "transfer_id": transfer}
            return self.send(self.decode, {**body, "kv_transfer_params": params}, request)
        params = {
            **self.identity,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": request["x-request-id"],
            "transfer_id": transfer,
        }
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(self.keep, body, asks, request)
            found = self.send(self.decode, {**body, "kv_transfer_params": params}, request)
            self.identity = self._identity(first.result())
        return found

    def _identity(self, answer: Body) -> Body | None:
        params = answer.get("kv_transfer_params") or {}
        kept = {name: params[name] for name in (*self.needed, *self.optional) if name in params}
        scalars = all(type(value) in (str, int, float) for value in kept.values())
        whole = all(name in kept for name in self.needed)
        return kept if whole and scalars and kept["transfer_mode"] == "push" else None


class MooncakeSidecar(Proxy):
    """llm-d's routing sidecar with `mooncake`: both at once. What it would ask the bootstrap server is given here."""

    engine_id = "an engine"
    bootstrap = "http://127.0.0.1:8998"

    def __call__(self, body: Body) -> Body:
        transfer = f"xfer-{uuid.uuid4()}"
        asks = {"do_remote_prefill": False, "do_remote_decode": True, "transfer_id": transfer}
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_bootstrap_addr": self.bootstrap,
            "remote_engine_id": self.engine_id,
        }
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(self.keep, body, asks)
            found = self.send(self.decode, {**body, "kv_transfer_params": params}, {})
            first.result()
        return found


class MoriSidecar(Proxy):
    """llm-d's routing sidecar in MoRI-IO's write mode: ports of its own config, and nothing of an answer."""

    def __call__(self, body: Body) -> Body:
        transfer = f"tx{uuid.uuid4()}"
        ports = {"remote_notify_port": 61005, "remote_handshake_port": 6301, "remote_dp_size": 1}
        asks = {**ASKS_TO_KEEP, **ports, "transfer_id": transfer, "remote_host": "10.0.0.2"}
        params = {
            **ports,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "127.0.0.1:6301",
            "remote_block_ids": [],
            "remote_host": "127.0.0.1",
            "remote_port": 6301,
            "transfer_id": transfer,
            "tp_size": 1,
        }
        self.keep(body, asks)
        return self.send(self.decode, {**body, "kv_transfer_params": params}, {})


def _params(answer: Body) -> Body:
    return {"kv_transfer_params": answer.get("kv_transfer_params")}
