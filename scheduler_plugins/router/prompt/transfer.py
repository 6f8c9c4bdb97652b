# SPDX-License-Identifier: Apache-2.0
"""Decides from a request's body whether a pair of engines can serve it, and makes the copies for vLLM's two engines.
Pure functions."""

from collections.abc import Mapping
from typing import Any

from pd_connector.protocol.wire.params import (
    ProducerAddress,
    decode_params,
    describe_params,
    parse_address,
    prefill_params,
)
from scheduler_plugins.router.prompt.body import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    ONLY_VLLM,
    POOL,
    SAMPLING,
    TOKENIZERS,
)

# These fields do not affect the prompt, so a copy without them computes the same KV. A list of allowed fields would
# break when an engine gets a new field that affects the prompt. Chat templates already see tools, tool_choice,
# response_format and reasoning_effort.
NOT_FOR_PREFILL = (
    "best_of",
    "logprob_token_ids",
    "logprobs",
    "min_tokens",  # a value above max_tokens=1 is an error
    "n",
    "output_mode",
    "prompt_logprobs",
    "return_prompt_text",
    "return_token_ids",
    "stream_options",  # an error without stream
    "structured_outputs",  # its grammar would be compiled for one unused token
    "top_logprobs",
    "trace_decode_token_ids",
)


def why_not_disaggregated(body: Mapping[str, Any]) -> str | None:
    """Why one transfer id cannot name this request's KV, as a metric label; None if it can.

    Args:
        body: the request `as_completion`.
    """
    for name in ("n", "best_of"):
        if (body.get(name) or 1) > 1:
            return "several_answers"
    if body.get("use_beam_search"):
        return "beam_search"
    # Logprobs of the prompt need its computation, which a handoff replaces.
    prompt_logprobs = (body.get(name) for name in ("prompt_logprobs", "prompt_logprob_token_ids"))
    if any(value is not None for value in prompt_logprobs) or body.get("echo"):
        return "prompt_logprobs"
    if "messages" in body:
        return None
    prompt = body.get("prompt")
    if body.get("prompt_embeds") is not None or not prompt:
        return "no_tokens"
    # If the first element is a token id, all are, or the engine refuses the prompt.
    if isinstance(prompt, list) and len(prompt) > 1 and type(prompt[0]) is not int:
        return "batch"
    return None


def needs_one_engine(body: Mapping[str, Any], endpoint: str) -> str:
    """The part of a request that no pair of SGLang engines can answer, with advice; empty if a pair can. SGLang uses
    one transfer for all answers of a request, and returns logprobs of the prompt in the prefill engine's answer.

    Args:
        endpoint: one of `ONE_ENGINE`; empty for all other endpoints.
    """
    alone = "or add an engine that works alone to the router (--decode): vLLM's, or SGLang's without --disaggregation-mode"
    if endpoint:
        served = f"use {COMPLETIONS} or {CHAT}, {alone}"
        return (
            ""
            if endpoint in (*TOKENIZERS, *ONLY_VLLM)
            else f"{endpoint}: pairs of SGLang engines cannot answer it; {served}"
        )
    if (body.get("n") or 1) > 1:
        return f"n {body['n']}: pairs of SGLang's engines give one answer; send the request n times, {alone}"
    if body.get("use_beam_search"):
        return f"use_beam_search: pairs of SGLang engines cannot do it; leave it out, {alone}"
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs")):
        return f"logprobs of the prompt: pairs of SGLang engines cannot return them; leave them out, {alone}"
    return ""


def prefill_copy(body: Mapping[str, Any], path: str, transfer: str) -> dict[str, Any]:
    """The same prompt with one token to generate. The engine keeps its KV under the id `transfer`."""
    copy = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
    copy["stream"] = False
    if path == GENERATE:
        sampling = body[SAMPLING].items()
        kept = {name: value for name, value in sampling if name not in NOT_FOR_PREFILL}
        copy[SAMPLING] = {**kept, "max_tokens": 1}
    else:
        copy["max_tokens"] = 1
    if "max_completion_tokens" in body:
        copy["max_completion_tokens"] = 1
    copy["kv_transfer_params"] = {**prefill_params(transfer), **pool_wishes(body)}
    return copy


def decode_copy(body: Mapping[str, Any], address: ProducerAddress, transfer: str) -> dict[str, Any]:
    """The client's request, with the prompt's KV from `address` under the id `transfer`."""
    params = {**decode_params(address, transfer), **pool_wishes(body)}
    return {**body, "kv_transfer_params": params}


def pool_wishes(body: Mapping[str, Any]) -> dict[str, Any]:
    """The client's wishes about the KV pool, as a part of `kv_transfer_params`; empty without any."""
    transfer = body.get("kv_transfer_params")
    return {POOL: transfer[POOL]} if isinstance(transfer, dict) and POOL in transfer else {}


def probe(model: str) -> dict[str, Any]:
    """A request that a prefill engine answers with its address. The request leases nothing."""
    return {
        "model": model,
        "prompt": [0],  # an engine of token ids only (vLLM's `--tokens-only`) reads no text
        "max_tokens": 1,
        "kv_transfer_params": describe_params(),
    }


def address_in(answer: object) -> ProducerAddress | None:
    """The address in a prefill engine's answer; None if there is none."""
    return parse_address(answer.get("kv_transfer_params")) if isinstance(answer, dict) else None
