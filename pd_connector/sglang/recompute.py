# SPDX-License-Identifier: Apache-2.0
"""A prompt computed once more, by the prefill engine it came from (`on_failure: recompute`).

SGLang's decode engine computes no prompt. Where the KV of one has not come, the prefill engine is sent the
request again, as a router would send it, for a transfer of its own. Its radix cache has the prompt,
as a rule, so that this is cheap. All of it happens in threads: the engine's thread never waits.
"""

import http
import json
import logging
import secrets
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from pd_connector.errors import Cause
from pd_connector.sglang.exchange import exchange
from pd_connector.sglang.registry import ENGINE, ask_row, split

logger = logging.getLogger("pd_connector.sglang")

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
    }
)
"""A second attempt may end better. Others would end as the first, such as another model, or have waited as
long as the operator wants them to."""

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
"""Of SGLang's `SamplingParams`: what does not shape the first token, or is made from other fields."""


class SecondPrefill(NamedTuple):
    """A prompt that is being computed again.

    Attributes:
        room: names its transfer.
        answer: of the prefill engine, once it has ended; empty, or what went wrong.
    """

    room: int
    answer: Future[str]

    @property
    def problem(self) -> str:
        """Why it will not come; empty while it may."""
        return self.answer.result() if self.answer.done() else ""


class SecondPrefills:
    """Asks prefill engines again. For the engine's thread.

    Args:
        api_key: what the engines' HTTP servers ask for; empty for nothing.
        timeout_s: longest wait for a prefill.
    """

    def __init__(self, api_key: str, timeout_s: float) -> None:
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="pd-recompute")

    def ask(self, req: Any, address: str) -> SecondPrefill | None:
        """Have a request's prompt computed again; None where a request cannot be sent again.

        Args:
            req: SGLang's request, which has no output yet.
            address: `host:port` of the prefill engine's registry.
        """
        room = secrets.randbits(62) + 1
        body = request_body(req, room)
        if body is None:
            return None
        return self.send(body, address)

    def send(self, body: dict[str, Any], address: str) -> SecondPrefill:
        """Send this to the prefill engine's `/generate`."""
        return SecondPrefill(body["bootstrap_room"], self._threads.submit(self._ask, address, body))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, address: str, body: Mapping[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            status, _ = exchange(
                *_http_address(address),
                "/generate",
                timeout_s=self._timeout_s,
                most_bytes=_MOST_BYTES,
                method="POST",
                body=json.dumps(body).encode(),
                headers=headers,
            )
        except Exception as error:  # whatever listens there may answer anything
            return repr(error)
        return "" if status == http.HTTPStatus.OK else f"status {status}"


def request_body(req: Any, room: int) -> dict[str, Any] | None:
    """What a prefill engine's `/generate` is sent, so that it computes the request's prompt and chooses
    its first token by the same rules; None where ids and rules are not all of it."""
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


def _http_address(address: str) -> tuple[str, int]:
    """Where the prefill engine whose registry is here takes requests. Raises OSError, ValueError."""
    host, registry_port = split(address)
    port = ask_row(host, registry_port, ENGINE, _LOOK_UP_S).get("prefill_http_port")
    if not isinstance(port, int):
        raise ValueError("its registry does not tell where it takes requests")
    return host, port
