# SPDX-License-Identifier: Apache-2.0
"""Which requests one transfer can carry."""

from typing import Any

from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest


def why_alone(request: Any) -> str | None:
    """Why one transfer cannot carry this request's KV; None if it can."""
    if any((getattr(request, name, None) or 1) > 1 for name in ("n", "best_of")):
        return "several_answers"
    if getattr(request, "use_beam_search", False):
        return "beam_search"
    # Logprobs of the prompt come only from computing it; received KV replaces that work.
    if getattr(request, "prompt_logprobs", None) is not None or getattr(request, "echo", False):
        return "prompt_logprobs"
    if isinstance(request, ChatCompletionRequest):
        return None
    prompt = request.prompt
    if getattr(request, "prompt_embeds", None) is not None or not prompt:
        return "no_tokens"
    several = isinstance(prompt, list) and len(prompt) > 1
    return "batch" if several and not all(type(token) is int for token in prompt) else None
