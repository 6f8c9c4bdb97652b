# SPDX-License-Identifier: Apache-2.0
"""Has a prefill engine compute a prompt once more, if its KV did not arrive (`on_failure: recompute`).

SGLang's decode engine computes no prompt. If KV of a prompt has not come, the prefill engine gets the request again,
as a router would send it, for a new transfer. Its radix cache usually has the prompt, so this is cheap. All of it
happens in threads: the engine's thread never waits.

The registry of an SGLang prefill engine names its HTTP server. For a vLLM engine, the router names the HTTP server in
the request (`protocol/wire/prefill_server.py`).
"""

import http
import json
import secrets
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.protocol.wire.params import prefill_params
from pd_connector.protocol.wire.prefill_server import PrefillServer, parse_server
from pd_connector.sglang.exchange import exchange
from pd_connector.sglang.prefill_engines import forbidden, greets
from pd_connector.sglang.registry import ENGINE, ask_row, split

REPEATABLE = frozenset(
    {
        Cause.CHECKSUM,
        Cause.CHUNK_MISMATCH,
        Cause.LEASE_EVICTED,
        Cause.LEASE_EXPIRED,
        Cause.PREEMPTED,
        Cause.PREFILL_ENDED,
        Cause.SESSION_LOST,
        Cause.STALLED,
        Cause.TRANSPORT,
        Cause.UNKNOWN_TRANSFER,
        Cause.UNREACHABLE,
        Cause.UNREAD,
    }
)
"""Causes after which a second attempt may succeed. After others it would fail as the first did (another model, for
example), or the operator's longest wait has already passed."""

_AT_ONCE = 16
_LOOK_UP_S = 5.0
_MOST_BYTES = 1 << 20
_NOT_SENT = frozenset(
    {
        "beam_width",
        "is_normalized",
        "max_new_tokens",
        "n",
        "stop",
        "stop_regex",
        "stop_regex_max_len",
        "stop_regex_strs",
        "stop_str_max_len",
        "stop_strs",
        "stream_interval",
        "watermark",
    }
)
"""Fields of SGLang's `SamplingParams` that do not shape the first token, or are derived from other fields."""


_RANK_HEADER = "X-data-parallel-rank"
"""vLLM's header that sends a request to a data-parallel rank."""
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "sampling_seed": "seed",
    "logit_bias": "logit_bias",
    "stop_token_ids": "stop_token_ids",
    "min_new_tokens": "min_tokens",
}
"""SGLang's fields that shape the first token and mean the same to vLLM, and vLLM's names of them."""
_ALL_TOKENS = 1 << 30
"""SGLang's `top_k` for all tokens."""


class SecondPrefill(NamedTuple):
    """A prompt that is being computed again.

    Attributes:
        room: names its transfer.
        answer: the prefill engine's result once it has ended: empty, or what went wrong.
    """

    room: int
    answer: Future[str]

    @property
    def problem(self) -> str:
        """Why it will not come; empty while it may come."""
        return self.answer.result() if self.answer.done() else ""


class SecondPrefills:
    """Asks prefill engines again. Used by the engine's thread.

    Args:
        api_key: key that the engines' HTTP servers require; empty for none.
    """

    def __init__(self, api_key: str, config: Config) -> None:
        self._api_key = api_key
        self._config = config
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="pd-recompute")

    def ask(
        self, req: Any, address: str, rest: dict[str, Any] | None = None
    ) -> SecondPrefill | None:
        """Have a request's prompt computed again; None if the request cannot be sent again.

        Args:
            req: SGLang's request.
            address: `host:port` of the prefill engine's registry.
            rest: SGLang's own body for a request that it has retracted; None: it has no output.
        """
        room = secrets.randbits(62) + 1
        body = request_body(req, room) if rest is None else {**rest, "bootstrap_room": room}
        server = parse_server(req.sampling_params.custom_params)
        if body is None or (server is not None and _loses_logprob(body)):
            return None
        return self.send(body, address, server)

    def send(
        self, body: dict[str, Any], address: str, server: PrefillServer | None
    ) -> SecondPrefill:
        """Have the prompt of this body for SGLang's `/generate` computed.

        Args:
            server: server of a vLLM engine; None: it is SGLang's, and its registry names it.
        """
        answer = self._threads.submit(self._ask, address, body, server)
        return SecondPrefill(body["bootstrap_room"], answer)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, address: str, body: Mapping[str, Any], server: PrefillServer | None) -> str:
        try:
            if server is None:
                return self._post(*_http_address(address), "/generate", body, {})
            host, port = server.address
            if problem := forbidden(host, self._config):
                return problem
            rank = {} if server.rank is None else {_RANK_HEADER: str(server.rank)}
            return self._post(host, port, "/v1/completions", completion_body(body), rank)
        except Exception as error:  # any server can listen there, with any answer
            return repr(error)

    def _post(
        self, host: str, port: int, path: str, body: Mapping[str, Any], more: Mapping[str, str]
    ) -> str:
        headers = {"Content-Type": "application/json", **more}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        status, _ = exchange(
            host,
            port,
            path,
            timeout_s=self._config.wait_timeout_s,
            most_bytes=_MOST_BYTES,
            method="POST",
            body=json.dumps(body).encode(),
            headers=headers,
        )
        return "" if status == http.HTTPStatus.OK else f"status {status}"


def request_body(req: Any, room: int) -> dict[str, Any] | None:
    """The body for a prefill engine's `/generate`, with which it computes the request's prompt and chooses its first
    token by the same rules. None if token ids and rules do not define the request completely."""
    params = req.sampling_params
    if req.multimodal_inputs is not None or req.input_embeds is not None or req.output_ids:
        return None
    if params.watermark is not None or req.lora_id is not None:
        return None
    defaults = msgspec.structs.asdict(type(params)())
    sampling = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in msgspec.structs.asdict(params).items()
        if name not in _NOT_SENT and value != defaults[name]
    }
    if isinstance(custom := sampling.get("custom_params"), dict):
        # For a custom logit processor SGLang adds the request itself.
        sampling["custom_params"] = {k: v for k, v in custom.items() if k != "__req__"}
    sampling["max_new_tokens"] = 1
    sampling["min_new_tokens"] = min(1, params.min_new_tokens)
    body = {
        "input_ids": [int(token) for token in req.origin_input_ids],
        "sampling_params": sampling,
        "stream": False,
        "return_logprob": req.return_logprob,
        "bootstrap_host": req.bootstrap_host,
        "bootstrap_port": req.bootstrap_port,
        "bootstrap_room": room,
        "cache_salt": req.cache_salt,
        "priority": req.priority,
        "custom_logit_processor": req.custom_logit_processor,
    }
    if req.return_logprob:
        body["top_logprobs_num"] = req.logprob.top_logprobs_num
    return {name: value for name, value in body.items() if value is not None}


def completion_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request for vLLM's `/v1/completions`. Penalties are left out, as in the first request
    (`router/handoff/engine_bodies.py`).

    Args:
        body: for SGLang's `/generate`.
    """
    sampling = body["sampling_params"]
    parameters = {theirs: sampling[ours] for ours, theirs in _SAMPLING.items() if ours in sampling}
    if _is_greedy(body):  # SGLang writes temperature 1 and top_k 1
        parameters = {**parameters, "temperature": 0, "top_k": 0}
    elif parameters.get("top_k", 0) >= _ALL_TOKENS:
        del parameters["top_k"]
    passed = {name: body[name] for name in ("cache_salt", "priority") if name in body}
    return {
        "prompt": body["input_ids"],
        "max_tokens": 1,
        "stream": False,
        **parameters,
        **passed,
        "kv_transfer_params": prefill_params(str(body["bootstrap_room"]), from_first_token=True),
    }


def _is_greedy(body: Mapping[str, Any]) -> bool:
    return bool(body["sampling_params"].get("top_k") == 1)


def _loses_logprob(body: Mapping[str, Any]) -> bool:
    """Whether the answer needs a log probability of the first token, which vLLM does not send to the decode engine. The
    router takes it from the first prefill's answer, so the second prefill must choose the same token."""
    return bool(body.get("return_logprob")) and not _is_greedy(body)


def _http_address(address: str) -> tuple[str, int]:
    """The HTTP address of the prefill engine that has this registry. Raises OSError, ValueError."""
    host, registry_port = split(address)
    if greets(host, registry_port, _LOOK_UP_S):
        raise ValueError("it is not an SGLang engine, and the router has not named its HTTP server")
    port = ask_row(host, registry_port, ENGINE, _LOOK_UP_S).get("prefill_http_port")
    if not isinstance(port, int):
        raise ValueError("its registry does not name its HTTP address")
    return host, port
