# SPDX-License-Identifier: Apache-2.0
"""A prompt whose last token is left to the decode engine.

A decode engine computes the last token of a prompt itself, for its logits. With a recurrent state it begins with the
state before that token, and a state cannot be taken back by a token. So the prefill engine computes all tokens but the
last one. A decode engine that goes on from the prefill engine's token (SGLang) needs the state after the whole prompt.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def stop_after_prompt(request: "Request") -> None:
    """Lets the engine stop with the first token: a state that has gone on stands for other tokens."""
    request.max_tokens = 1


def leave_last_token(request: "Request") -> None:
    """Takes the last token off a prompt that has just been queued. What the engine samples follows another prompt, and is
    not an answer. A prompt of one token stays: its consumer computes it, and wants nothing.

    Raises:
        ValueError: the request wants to know more of its prompt than a shorter one has.
    """
    asked = request.sampling_params
    if asked is not None and asked.prompt_logprobs is not None:
        raise ValueError(
            "prompt_logprobs: this model keeps recurrent states, so a prefill engine computes a prompt without its last "
            "token, and has no logprobs of it; ask the decode engine for them"
        )
    if request.num_prompt_tokens < 2:
        return
    assert request.prompt_token_ids is not None  # `check_movable` has seen to it
    # vLLM's own object may belong to the client's half of the engine, too.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
