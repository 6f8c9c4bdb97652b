# SPDX-License-Identifier: Apache-2.0
"""Prompts whose last tokens are left to the decode engine.

A decode engine computes the last token of a prompt itself, for its logits. With a state (recurrent, or a ring) it begins with
the state before that token, and a state cannot be taken back by a token. So the prefill engine computes all tokens but the
last one. A decode engine that goes on from the prefill engine's token (SGLang) needs the state after the whole prompt,
and says so in the request. A window that vLLM replays after a prefix hit (DeepSeek V4.1) must end at the same place.

Each module of a multi-module MTP (MiMo, Step) reads one token further ahead than the previous module. At the prompt's
end, the prefill engine's modules read draft tokens, and their KV is that of drafts. So the decode engine computes these
last tokens, in all layers.
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
        specs: specs of vLLM's KV cache groups.
    """
    specs = list(specs)
    stands = StateTables.of(specs) or any(spec.prefix_replay_tokens for spec in specs)
    return max(1 if stands else 0, int(vllm_config.num_prefill_lookahead_tokens) - 1)


def stop_after_prompt(request: "Request") -> None:
    """Let the engine stop after the first token: after a second token the state would no longer be the prompt's."""
    request.max_tokens = 1


def takes_inputs_whole(vllm_config: "VllmConfig") -> bool:
    """Whether vLLM never splits an image, or another input, between steps, and also counts tokens that drafts read
    ahead as computed. With both, a request with only a part of an input's tokens would never be scheduled again."""
    reads_ahead = vllm_config.num_prefill_lookahead_tokens > 0
    return bool(vllm_config.scheduler_config.disable_chunked_mm_input) and reads_ahead


def leave_tokens(request: "Request", count: int, *, inputs_whole: bool = False) -> None:
    """Remove the last `count` tokens of a prompt that has just been queued, and images and other inputs that begin
    within them. An input that begins earlier stays whole; its last tokens are not computed.

    The sampled token follows the shorter prompt, so it is not part of the answer. A prompt of `count` tokens or fewer
    is not changed: its consumer computes it and fetches nothing.

    Args:
        inputs_whole: see `takes_inputs_whole`.

    Raises:
        ValueError: the request asks for log probabilities of its prompt, or vLLM cannot compute the shorter prompt.
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
    assert request.prompt_token_ids is not None  # `check_movable` has seen to it
    places = [feature.mm_position for feature in request.mm_features]
    if inputs_whole and any(p.offset < tokens < p.offset + p.length for p in places):
        raise ValueError(
            f"an image or other input ends within the prompt's last {count} tokens, which are left to the decode engine, and "
            "vLLM computes no part of an input: leave out --disable-chunked-mm-input"
        )
    request.mm_features = [
        feature for feature in request.mm_features if feature.mm_position.offset < tokens
    ]
    # vLLM's own object may belong to the client's half of the engine, too.
    request.prompt_token_ids = request.prompt_token_ids[:tokens]
    del request._all_token_ids[tokens:]
    request.num_prompt_tokens = tokens
