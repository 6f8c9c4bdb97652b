# SPDX-License-Identifier: Apache-2.0
"""The client's request body: its JSON, and the fields that the router itself reads. Pure functions."""

import gc
import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from scheduler_plugins.admission.endpoints import GENERATE as GENERATE
from scheduler_plugins.admission.endpoints import POOLING_PATHS
from scheduler_plugins.router.prompt.pieces import (
    PIECE_BYTES,
    PieceDecoder,
    Steps,
    TooComplexError,
    memory_of,
)
from scheduler_plugins.router.prompt.raw_field import RawField

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATES_ALONE = (
    "/v1/responses",
    "/v1/messages",
    "/v1/chat/completions/batch",
    "/invocations",
)
TOKENIZERS = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")
"""Endpoints that only tokenize. Any engine can answer them."""
RENDERERS = (
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/completions/derender",
    "/v1/chat/completions/derender",
)
"""Endpoints that turn a request into tokens for `GENERATE`, or its answer into text."""
ONE_ENGINE = (*GENERATES_ALONE, *POOLING_PATHS, "/generative_scoring", *TOKENIZERS, *RENDERERS)
"""Endpoints that one engine serves alone: their bodies have no field for a transfer, or nothing is generated. Their
streams end without `[DONE]`."""

PAIRED = (COMPLETIONS, CHAT, GENERATE)
"""Endpoints that a pair of engines serves."""
ONLY_VLLM = (GENERATE, *RENDERERS)
"""Endpoints that only vLLM has (`--enable-scale-out`)."""

_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""Fields with the address from which an engine fetches KV and encoder outputs. Clients must not set them."""
SAMPLING = "sampling_params"
POOL = "pool"
"""The only part of `kv_transfer_params` that clients may set: their wishes about the KV pool (docs/pool.md)."""

_READS_TEXT = ("echo", "suffix", "truncate_prompt_tokens", "return_prompt_text")
"""With these fields, the text of a prompt cannot be replaced by its tokens."""


class BadRequestError(ValueError):
    """A request that the router itself finds wrong. `param` names the field, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def parse(raw: bytes | bytearray, path: str) -> dict[str, Any]:
    """Decode a request body in one call; see `parsing`."""
    steps = parsing(raw, path)
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            body: dict[str, Any] = ended.value
            return body


def parsing(raw: bytes | bytearray, path: str) -> Steps:
    """Decode a request body in pieces, and check the fields that the router acts on.

    Yields the size in memory of the next piece, in bytes, so other requests can run in between. Returns the body.

    Raises:
        BadRequestError: the body is not a JSON object, or a field that the router reads has a wrong type. The engine
            checks all other fields.

    Fields about transfers are dropped, because clients are not trusted with them. Only the part `pool` of
    `kv_transfer_params` stays, where a pair of engines can answer.
    """
    try:
        if len(raw) <= PIECE_BYTES:
            yield memory_of(raw)
            body = _decoded(raw)
        elif (start := _OBJECT_START.match(raw)) is not None:
            body = yield from PieceDecoder(raw, _decoded, start.end() - 1).steps()
        else:
            raise BadRequestError("the request body: must be a JSON object in UTF-8")
    except RecursionError:
        raise BadRequestError("the request body is nested too deeply") from None
    except BadRequestError:
        raise
    except TooComplexError as error:
        raise BadRequestError(f"the request body cannot be served: {error}") from None
    except ValueError as error:
        raise BadRequestError(f"the request body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError(f"the request body is {_kind(body)}: must be a JSON object")
    return _checked(body, path)


def _checked(body: dict[str, Any], path: str) -> dict[str, Any]:
    # A field of the other endpoint must not be taken for the prompt.
    if path == CHAT:
        body.pop("prompt", None)
        _check(body, "messages", "a list of messages", isinstance(body.get("messages"), list))
    elif path == COMPLETIONS:
        body.pop("messages", None)
        prompt = body.get("prompt")
        _check(
            body, "prompt", "a string or a list", prompt is None or isinstance(prompt, str | list)
        )
    elif path == GENERATE:
        ids, sampling = body.get("token_ids"), body.get(SAMPLING)
        _check(body, "token_ids", "a list of token ids", isinstance(ids, list))
        _check(body, SAMPLING, "an object", isinstance(sampling, dict))
        for name in _OTHER_PROMPTS:
            body.pop(name, None)
        # A new dict, because the client's own JSON text of a large one would be sent on in place of its changes.
        body[SAMPLING] = _checked_counts(dict(body[SAMPLING]), "extra_args")
    transfer = body.get("kv_transfer_params")
    for name in _TRANSFERS:
        body.pop(name, None)
    if path in PAIRED and isinstance(transfer, dict) and transfer.get(POOL) is not None:
        body["kv_transfer_params"] = {POOL: transfer[POOL]}
    for name, meaning, types in (("stream", "a boolean", bool), ("model", "a string", str)):
        if name in body:
            body[name] = _flag(body[name]) if types is bool else body[name]
        value = body.get(name)
        _check(body, name, meaning, value is None or isinstance(value, types))
    return _checked_counts(body, "vllm_xargs")


def _checked_counts(fields: dict[str, Any], further: str) -> dict[str, Any]:
    """Check the numbers of answers and tokens, and drop the fields about transfers that vLLM also reads from the
    object `further`."""
    if isinstance(extra := fields.get(further), dict):
        # The new dict also loses the client's own JSON text.
        fields[further] = {name: kept for name, kept in extra.items() if name not in _TRANSFERS}
    for name in _COUNTS:
        if name in fields:
            fields[name] = _whole(fields[name])
        value = fields.get(name)
        _check(fields, name, "an integer", value is None or type(value) is int)
    return fields


def as_completion(body: dict[str, Any], path: str) -> dict[str, Any]:
    """A body from `parsing`, for all that only reads it: the fields of a request to `GENERATE` have their names in a
    completion. Any other body stays as it is."""
    if path != GENERATE:
        return body
    sampling = {name: value for name, value in body[SAMPLING].items() if name in _SAMPLING}
    others = {name: value for name, value in body.items() if name not in ("token_ids", SAMPLING)}
    return {**others, **sampling, "prompt": body["token_ids"]}


def _whole(value: Any) -> Any:
    """`5.0` and `"5"` as 5; any other value unchanged. Some languages have only floats, and some clients send numbers
    as text."""
    if type(value) is float and value.is_integer():
        return int(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    return value


def _flag(value: Any) -> Any:
    """1, `"true"` and the like as True, their opposites as False; any other value unchanged."""
    word = value.lower() if isinstance(value, str) else value
    if type(word) not in (int, float, str):
        return value
    return True if word in _YES else False if word in _NO else value


_OTHER_PROMPTS = ("prompt", "messages", "prompt_embeds", "input", "texts")
_SAMPLING = (
    "n",
    "max_tokens",
    "min_tokens",
    "seed",
    "stop",
    "bad_words",
    "logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_detection",
    "structured_outputs",
    "thinking_token_budget",
    "trace_decode_token_ids",
    "extra_args",
    "allowed_token_ids",
)
"""Fields of `sampling_params` that the router reads."""
_OBJECT_START = re.compile(b"(?:%b)?[ \t\n\r]*+{" % BOM_UTF8)
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_YES, _NO = (1, "1", "on", "t", "true", "y", "yes"), (0, "0", "off", "f", "false", "n", "no")
_COUNTS = ("n", "best_of", "max_tokens", "max_completion_tokens")
"""Both kinds of engines parse requests by pydantic's lax rules, so the router must parse these fields and `stream`
alike."""


def encode(body: Mapping[str, Any]) -> tuple[bytes | memoryview, ...]:
    """A body from `parsing` as JSON, in parts. Values may have been replaced. Large fields keep the client's JSON, and
    are not copied: each engine gets them from the same memory."""
    large = any(isinstance(value, RawField) for value in body.values())
    if not large:
        return (_encoded(body),)
    parts: list[bytes | memoryview] = []
    for name, value in body.items():
        json_of = value.raw if isinstance(value, RawField) else _encoded(value)
        parts += [b"," if parts else b"{", _encoded(name), b":", json_of]
    return (*parts, b"}")


def _encoded(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        # ASCII escapes keep unpaired surrogates.
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def _decoded(raw: bytes | bytearray) -> Any:
    """Decode with Python's own decoder. It is slower, but accepts other encodings and unpaired surrogates, and its
    errors say more."""
    collects = gc.isenabled()
    gc.disable()  # the collector scans all lists so far at every 700th list, which takes four fifths of the time
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError):
        return json.loads(raw, parse_constant=_no_constant, parse_float=_finite)
    finally:
        if collects:
            gc.enable()


def with_tokens(body: Mapping[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
    """The completion with tokens in place of its text, so the engine need not tokenize it.

    A chat, an answer that includes the prompt, and a prompt that the engine must truncate stay as they are.
    """
    if not isinstance(body.get("prompt"), str) or any(body.get(name) for name in _READS_TEXT):
        return dict(body)
    return {**body, "prompt": list(tokens)}


def _check(body: Mapping[str, Any], name: str, meaning: str, right: bool) -> None:
    if not right:
        kind = _kind(body[name]) if name in body else "missing"
        raise BadRequestError(f"{name} is {kind}: must be {meaning}", name)


def _kind(value: object) -> str:
    kinds = {type(None): "null", bool: "a boolean", str: "a string", list: "a list"}
    return kinds.get(type(value), "an object" if isinstance(value, dict) else "a number")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is out of range")
    return number
