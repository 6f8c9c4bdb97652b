# SPDX-License-Identifier: Apache-2.0
"""Prompts whose last tokens are left to the decode engine.

A decode engine computes the last token of a prompt itself, for its logits. With a state (recurrent, or a ring) it begins with
the state before that token, and a state cannot be taken back by a token. So the prefill engine computes all tokens but the
last one. A decode engine that goes on from the prefill engine's token (SGLang) needs the state after the whole prompt, and
says so in the request. A window that vLLM replays after a prefix hit (DeepSeek V4.1) must stand there, too.

Each module of a multi-module MTP (MiMo, Step) reads one token further ahead than the one before it. Where the prompt ends,
modules of the prefill engine read drafts, and keep KV of them. So the decode engine computes those tokens, in all layers.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.pages.state_tables import StateTables

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def left_tokens(vllm_config: "VllmConfig", specs: Iterable[Any]) -> int:
    """Tokens at the end of a prompt that an engine's prefill side leaves to a decode engine. 0: none; a decode engine
    computes the last one all the same.

    Args:
        specs: of vLLM's KV cache groups.
    """
    specs = list(specs)
    stands = StateTables.of(specs) or any(spec.prefix_replay_tokens for spec in specs)
    return max(1 if stands else 0, int(vllm_config.num_prefill_lookahead_tokens) - 1)


def stop_after_prompt(request: "Request") -> None:
    """Let the engine stop with the first token: a state that has gone on stands for other tokens."""
    request.max_tokens = 1


def leave_tokens(request: "Request", count: int) -> None:
    """Take `count` tokens off a prompt that has just been queued.

    The sampled token follows the shorter prompt, so it is not an answer. A prompt of no more tokens stays as it is: its
    consumer computes it and fetches nothing.

    Raises:
        ValueError: the request wants to know more of its prompt than a shorter one has, or an image would be cut.
    """
    params = request.sampling_params
    if params is not None and params.prompt_logprobs is not None:
        raise ValueError(
            "prompt_logprobs: with this model (recurrent states, or several MTP modules) a prefill engine computes a prompt "
            f"without its last {count} tokens, and has no logprobs of them; ask the decode engine for them"
        )
    tokens = request.num_prompt_tokens - count
    if tokens < 1:
        return
    for feature in request.mm_features:
        place = feature.mm_position
        if place.offset + place.length > tokens:
            raise ValueError(
                f"its last {count} tokens, which a prefill engine of this model leaves to the decode engine, are of an image "
                "or of another input: put text behind it"
            )
    assert request.prompt_token_ids is not None  # `check_movable` has seen to it
    # vLLM's own object may belong to the client's half of the engine, too.
    request.prompt_token_ids = request.prompt_token_ids[:tokens]
    del request._all_token_ids[tokens:]
    request.num_prompt_tokens = tokens
