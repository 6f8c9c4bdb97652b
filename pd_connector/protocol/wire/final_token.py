# SPDX-License-Identifier: Apache-2.0
"""The token after a prompt, which the prefill engine sends besides the KV.

Some decode engines continue from a token that the prefill engine has chosen. They say so in `Hello` (`needs`). Other decode
engines compute the last prompt token again, and choose the next token themselves. A decode engine that also drafts goes on
from the first draft of the prefill engine (`FirstDraft`). It names the form that it needs (`draft_form`).
"""

from collections.abc import Collection
from typing import Annotated

import msgspec

from pd_connector.errors import Cause
from pd_connector.protocol.wire.fields import Count, Fingerprint, Name

FIRST_TOKEN = "first_token"
"""In `Hello.needs`: the token that follows the prompt."""

_DRAFT = "first_draft"
"""Beginning of a value of `Hello.needs`: the first draft after that token."""

MAX_HIDDEN_BYTES = 1 << 18
MAX_DRAFTED = 1024

MAX_ALTERNATIVES = 1024

Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class FirstDraft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A draft model's results for the prompt and the first token, from which another engine continues drafting.

    Attributes:
        hidden: the draft model's hidden state of the prompt's last token, its bytes.
        tokens: the likeliest tokens after the first one, as the draft model numbers them.
        probabilities: the probabilities of these tokens.
    """

    hidden: Annotated[bytes, msgspec.Meta(max_length=MAX_HIDDEN_BYTES)]
    tokens: Annotated[list[Token], msgspec.Meta(max_length=MAX_DRAFTED)]
    probabilities: Annotated[list[float], msgspec.Meta(max_length=MAX_DRAFTED)]


class FinalToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sent with the end of a transfer, and valid only for this transfer.

    Attributes:
        transfer: the transfer.
        identity: fingerprint of the prompt.
        first_token: the token that follows the prompt.
        logprob: its log probability, if the request asks for it.
        top_logprobs: the likeliest tokens in its place with their log probabilities, the likeliest first.
        counts: counts of the prefill engine for the request, such as cached tokens.
        draft: the first draft. It is sent to consumers that need it; the others may not know this field.

    Fields with their default are not sent. No default is `msgspec.UNSET`: engines pickle this struct between processes,
    and pickle searches all modules for `UNSET`, because it is in none.
    """

    transfer: Name
    identity: Fingerprint
    first_token: Token
    logprob: float | None = None
    top_logprobs: Annotated[
        list[tuple[Token, float]], msgspec.Meta(max_length=MAX_ALTERNATIVES)
    ] = []
    counts: Annotated[dict[Name, Count], msgspec.Meta(max_length=32)] = {}
    draft: FirstDraft | None = None

    def problem(self, transfer: str, identity: bytes) -> tuple[Cause, str] | None:
        """Why this is not the final token of this transfer, as (cause, detail), or None."""
        if (self.transfer, self.identity) != (transfer, identity):
            return Cause.WORDS, f"final token of transfer {self.transfer} came with {transfer}"
        return None


def draft_form(tokens: int, elements: int, dtype: str, token_map: str = "none") -> str:
    """Name of a form of first drafts, in `Hello.needs`: both sides must have the same one.

    Args:
        tokens: number of its tokens (SGLang: `--speculative-eagle-topk`).
        elements: number of elements of its hidden state.
        dtype: dtype of these elements.
        token_map: digest of the map from the draft model's token ids to the model's; "none" if the ids are the same.
    """
    return f"{_DRAFT} of {tokens} tokens with {elements} elements of {dtype}, token map {token_map}"


def needs_drafts(needs: Collection[str]) -> bool:
    """Whether a consumer needs first drafts, of whatever form."""
    return any(need.startswith(_DRAFT) for need in needs)


def unsent(needs: Collection[str], sends: Collection[str]) -> str:
    """The values that a consumer needs and a producer does not send, such as `first_token`; empty if it sends all."""
    return ", ".join(sorted(set(needs) - set(sends)))
