# SPDX-License-Identifier: Apache-2.0
"""A test prompt that audits a pair of engines before users come."""

import math
import uuid
from collections.abc import Mapping
from typing import Any

_WORDS = (
    "One engine computes this prompt, and another one computes it as well. The second compares what both have "
    "computed, layer by layer and token by token, before it believes the first: seven grey herons, 1042 small "
    "keys, a violin in the rain, quartz, maps of rivers, bread, and nine questions about the weather at sea."
)


_MOST_CHARACTERS = 8
"""Characters of a token of this text: more than tokenizers make of English. What is too much is cut off."""


def audit_body(model: str, params: Mapping[str, Any], salt: str, tokens: int = 0) -> dict[str, Any]:
    """A completion of one token.

    Args:
        model: the name under which this engine serves its model.
        params: its `kv_transfer_params`.
        salt: from `fresh_salt`; the same for both engines.
        tokens: the prompt's length, the same for both engines; 0: about a hundred. The decode engine says what it needs
            (`About.audit_tokens`).
    """
    copies = math.ceil(tokens * _MOST_CHARACTERS / len(_WORDS)) or 1
    return {
        "model": model,
        "prompt": " ".join([_WORDS] * copies),
        **({"truncate_prompt_tokens": tokens} if tokens else {}),
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": salt,
        "kv_transfer_params": dict(params),
    }


def fresh_salt() -> str:
    """A new salt. No engine has a prompt with it in its prefix cache, so the whole prompt is computed and compared."""
    return uuid.uuid4().hex
