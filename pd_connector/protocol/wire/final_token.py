# SPDX-License-Identifier: Apache-2.0
"""The token after a prompt, which the prefill engine sends besides the KV.

Some decode engines continue from a token that the prefill engine has chosen. They say so in `Hello` (`needs`). Other decode
engines compute the last prompt token again, and choose the next token themselves.
"""

from collections.abc import Collection
from typing import Annotated

import msgspec

from pd_connector.errors import Cause
from pd_connector.protocol.wire.fields import Count, Fingerprint, Name

FIRST_TOKEN = "first_token"
"""The one value of `Hello.needs` so far: the token that follows the prompt."""

MAX_ALTERNATIVES = 1024

Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class FinalToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sent with the end of a transfer, and valid only for this transfer.

    Attributes:
        transfer: the transfer.
        identity: fingerprint of the prompt.
        first_token: the token that follows the prompt.
        logprob: its log probability, if the request asks for it.
        top_logprobs: the likeliest tokens in its place with their log probabilities, the likeliest first.
        counts: counts of the prefill engine for the request, such as cached tokens.
    """

    transfer: Name
    identity: Fingerprint
    first_token: Token
    logprob: float | None = None
    top_logprobs: Annotated[
        list[tuple[Token, float]], msgspec.Meta(max_length=MAX_ALTERNATIVES)
    ] = []
    counts: Annotated[dict[Name, Count], msgspec.Meta(max_length=32)] = {}

    def problem(self, transfer: str, identity: bytes) -> tuple[Cause, str] | None:
        """Why this is not the final token of this transfer, as (cause, detail), or None."""
        if (self.transfer, self.identity) != (transfer, identity):
            return Cause.WORDS, f"final token of transfer {self.transfer} came with {transfer}"
        return None


def unsent(needs: Collection[str], sends: Collection[str]) -> str:
    """The values that a consumer needs and a producer does not send, such as `first_token`; empty if it sends all."""
    return ", ".join(sorted(set(needs) - set(sends)))
