# SPDX-License-Identifier: Apache-2.0
"""Prompts whose KV must not pass, whatever their parameters ask for."""

from typing import TYPE_CHECKING

from pd_connector.protocol.wire.params import TransferParams

if TYPE_CHECKING:
    from vllm.v1.request import Request


def check_movable(request: "Request", params: TransferParams, *, whole: bool) -> None:
    """Raises ValueError if KV of this prompt must not pass.

    Args:
        whole: whether a token's KV depends on the whole prompt, so that a shorter prompt's KV cannot be used for a
            longer one.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise ValueError("the prompt has embeddings: only token prompts are moved")
    if getattr(request, "resumable", False):
        raise ValueError("the prompt may grow: only whole prompts are moved")
    there = params.remote_num_tokens
    if whole and params.do_remote_prefill and there not in (None, request.num_prompt_tokens):
        raise ValueError(
            f"the KV is of a prompt of {there} tokens, and this one has {request.num_prompt_tokens}: prompts of this "
            "model attend to what follows (prefix LM), so only KV of the very same prompt can be used"
        )
