# SPDX-License-Identifier: Apache-2.0
"""The request bodies for the two engines of a pair, by their kinds. Pure functions.

    prefill  decode   prefill is sent                      decode is sent
    vLLM     vLLM     the client's body, one token         the client's body, `kv_transfer_params`
    SGLang   SGLang   the client's body, `bootstrap_*`     the client's body, `bootstrap_*`
    vLLM     SGLang   the prompt's ids, one token          the client's body, `bootstrap_*`
    SGLang   vLLM     the prompt's ids, one token          the client's body, `kv_transfer_params`

Two engines of one kind tokenize a prompt alike. If the kinds differ, the decode engine tokenizes the prompt, and the
prefill engine gets the ids. If an SGLang engine takes part, the transfer id is the decimal digits of its
`bootstrap_room`.
"""

import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pd_connector.protocol.wire.params import ProducerAddress, prefill_params
from pd_connector.protocol.wire.prefill_server import PrefillServer, without_server
from scheduler_plugins.router.engines.kinds import Bootstrap, Kind
from scheduler_plugins.router.prompt.body import COMPLETIONS
from scheduler_plugins.router.prompt.transfer import decode_copy, pool_wishes, prefill_copy

GENERATE = "/generate"
_MOST_LOGPROBS = 20
"""Default of vLLM's `--max-logprobs`."""

_GRAMMARS = (
    "ebnf",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "json_schema",
    "regex",
    "structured_outputs",
)
_LOGIT_PROCESSORS = ("custom_logit_processor", "custom_params", "logits_processors", "watermark")
_SGLANGS = (
    "custom_logit_processor",
    "ebnf",
    "json_schema",
    "lora_path",
    "no_stop_trim",
    "regex",
    "stop_regex",
    "watermark",
)
_VLLMS = (
    "allowed_token_ids",
    "bad_words",
    "chat_template",
    "documents",
    "include_stop_str_in_output",
    "repetition_detection",
    "structured_outputs",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "vllm_xargs",
    "watermarking",
)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "stop_token_ids")
"""Fields that shape the first token and mean the same to both kinds. Penalties are left out: SGLang penalizes
generated tokens only, and at the first token there are none."""
_PASSED = ("cache_salt", "priority")
_OURS = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields about transfers. Clients are not trusted with them. Only wishes about the KV pool reach vLLM engines."""


class Prefill(NamedTuple):
    """A prefill engine, as its decode engine finds it."""

    kind: Kind
    model: str
    addresses: tuple[ProducerAddress, ...]
    """Addresses of all data-parallel ranks for SGLang, which chooses the rank by the room; one address for vLLM."""
    bootstrap: tuple[str, int]
    """Host and port that an SGLang decode engine asks."""
    server: PrefillServer | None = None
    """Where an SGLang decode engine has a prompt computed again by vLLM."""


class Handoff(NamedTuple):
    """The requests of one attempt.

    Attributes:
        path: path of the prefill engine's request. The decode engine's request has the client's path.
        prefill, decode: the bodies.
        lends_logprobs: number of likeliest tokens whose log probabilities move from the prefill engine's answer into
            the decode engine's, for the first token; -1: none move.
    """

    path: str
    prefill: dict[str, Any]
    decode: dict[str, Any]
    lends_logprobs: int = -1


def why_one_kind(request: Mapping[str, Any], decode: Kind) -> str | None:
    """Why a pair of different kinds cannot answer a request, as a metric label; None if it can.

    Args:
        request: the client's body.
        decode: kind of the answering engine. SGLang goes on from the first token that the prefill engine chooses.
            vLLM chooses the first token itself.
    """
    if has_inputs(request):
        return "inputs"
    if request.get("input_ids") is not None or request.get("prompt_embeds") is not None:
        return "inputs"
    if request.get("truncate_prompt_tokens") is not None:
        return "truncated"  # /tokenize returns the ids of the whole prompt
    if decode is Kind.VLLM:
        return None
    if any(request.get(name) is not None for name in _GRAMMARS) or _constrained(request):
        return "grammar"
    if any(request.get(name) is not None for name in _LOGIT_PROCESSORS):
        return "logit_processor"
    if request.get("lora_path") is not None:
        return "adapter"
    if request.get("return_hidden_states") or request.get("logprob_token_ids"):
        return "more_than_a_token"
    if _logprobs_of(request) > _MOST_LOGPROBS:
        return "logprobs"
    return None


def sglangs_own(request: Mapping[str, Any]) -> str:
    """Name of a field that only SGLang knows and that changes the answer; vLLM would silently ignore it. Empty: there
    is none."""
    return next((name for name in _SGLANGS if request.get(name) is not None), "")


def vllms_own(request: Mapping[str, Any]) -> bool:
    """Whether the request has a field that only vLLM knows and that changes the answer; SGLang would silently ignore
    it."""
    if any(request.get(name) for name in _VLLMS):
        return True
    is_chat = "messages" in request
    special = request.get("add_special_tokens")
    unlike_default = special is not None and bool(special) is is_chat
    return unlike_default or (is_chat and request.get("add_generation_prompt") is False)


def of_one_kind(request: Mapping[str, Any], path: str, prefill: Prefill) -> Handoff:
    """The requests for two engines of the same kind."""
    if prefill.kind is Kind.VLLM:
        transfer = uuid.uuid4().hex
        return Handoff(
            path,
            prefill_copy(request, path, transfer),
            decode_copy(alone(request), prefill.addresses[0], transfer),
        )
    both = {**_clean(request), **Bootstrap(*prefill.bootstrap, _new_room()).fields()}
    copy = {name: value for name, value in both.items() if name != "stream_options"}
    # The prefill engine generates one token, so the rest of the answer need not fit into its context.
    copy |= {"stream": False, "max_tokens": 1}
    for name in ("max_completion_tokens", "min_tokens"):
        if copy.get(name):
            copy[name] = 1
    return Handoff(path, copy, both)


def of_two_kinds(request: Mapping[str, Any], prefill: Prefill, ids: Sequence[int]) -> Handoff:
    """The requests for two engines of different kinds.

    Args:
        ids: token ids of the prompt, by the decode engine's tokenizer.
    """
    room = _new_room()
    passed = {name: request[name] for name in _PASSED if request.get(name) is not None}
    bootstrap = Bootstrap(*prefill.bootstrap, room).fields()
    if prefill.kind is Kind.SGLANG:
        address = prefill.addresses[room % len(prefill.addresses)]
        sampling = {"max_new_tokens": 1, "temperature": 0}
        # vLLM computes the last token, from the states before it.
        left = int(address.keeps_states and len(ids) > 1)
        ids, address = ids[: len(ids) - left], address._replace(left_tokens=left)
        copy = {"input_ids": list(ids), "sampling_params": sampling, "stream": False}
        return Handoff(
            GENERATE,
            {**copy, **passed, **bootstrap},
            decode_copy(alone(request), address, str(room)),
        )
    logprobs = _logprobs_of(request)
    return Handoff(
        COMPLETIONS,
        {
            "model": prefill.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "stream": False,
            **{name: request[name] for name in _SAMPLING if request.get(name) is not None},
            **({"min_tokens": 1} if request.get("min_tokens") else {}),
            **({} if logprobs < 0 else {"logprobs": logprobs}),
            **passed,
            "kv_transfer_params": {
                **prefill_params(str(room), from_first_token=True),
                **pool_wishes(request),
            },
        },
        {
            **_clean(request),
            **bootstrap,
            **({"custom_params": prefill.server.params()} if prefill.server else {}),
        },
        lends_logprobs=logprobs,
    )


def alone(request: Mapping[str, Any]) -> dict[str, Any]:
    """The client's request for one engine, without a transfer."""
    wishes = pool_wishes(request)
    return _clean(request) | ({"kv_transfer_params": wishes} if wishes else {})


def tokenize_body(request: Mapping[str, Any], decode: Kind) -> dict[str, Any]:
    """The body for the decode engine's `/tokenize`, so it reads the prompt as it will read the request."""
    if "messages" not in request:
        fields = {name: request[name] for name in ("model", "prompt") if name in request}
        if "add_special_tokens" in request:
            fields["add_special_tokens"] = request["add_special_tokens"]
        return fields
    fields = {name: value for name, value in _clean(request).items() if name not in _NOT_READ}
    if decode is Kind.VLLM and request.get("reasoning_effort") is not None:
        # vLLM's /tokenize has no such field. Its chat endpoint passes the field to the template.
        effort = request["reasoning_effort"]
        template_fields = {
            "enable_thinking": effort != "none",
            **(request.get("chat_template_kwargs") or {}),
        }
        fields["chat_template_kwargs"] = {**template_fields, "reasoning_effort": effort}
    return fields


_NOT_READ = ("stream", "stream_options", "n", "logprobs", "top_logprobs", "stop")


def _clean(request: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = {name: value for name, value in request.items() if name not in _OURS}
    if isinstance(custom := cleaned.get("custom_params"), dict):
        cleaned["custom_params"] = without_server(custom)
    return cleaned


def _new_room() -> int:
    """A fresh transfer id. SGLang accepts 1 to 2^63 - 1."""
    return secrets.randbits(62) + 1


def has_inputs(request: Mapping[str, Any]) -> bool:
    """Whether a message has parts other than text, or a request of tokens has images beside them."""
    if request.get("features") or request.get("content_parts"):
        return True
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type", "text") not in ("text", "refusal"):
                return True
    return False


def _constrained(request: Mapping[str, Any]) -> bool:
    """Whether a format or a required tool call fixes the form of the answer."""
    form = request.get("response_format")
    if isinstance(form, dict) and form.get("type", "text") != "text":
        return True
    if request.get("tool_choice") not in (None, "none", "auto"):
        return True
    tools = request.get("tools")
    functions = [
        tool.get("function")
        for tool in (tools if isinstance(tools, list) else ())
        if isinstance(tool, dict)
    ]
    return any(
        isinstance(function, dict) and bool(function.get("strict")) for function in functions
    )


def _logprobs_of(request: Mapping[str, Any]) -> int:
    """Number of alternatives that the client wants for each token; -1 if it wants no log probabilities.

    A value that is not a number counts as -1; the answering engine refuses it.
    """
    logprobs = request.get("logprobs")
    if "messages" in request:
        return _number(request.get("top_logprobs")) if logprobs else -1
    return -1 if logprobs is None or logprobs is False else _number(logprobs)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
