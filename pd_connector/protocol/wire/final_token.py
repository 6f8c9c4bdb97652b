# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine decided at the end of a prompt, besides its KV: the first token, above all.

Some decode engines continue from a token that the prefill engine has chosen; others compute the
last prompt token again and choose it themselves. The first kind says in `Hello` what it needs.
"""

from collections.abc import Collection
from typing import Annotated

import msgspec

from pd_connector.errors import Cause
from pd_connector.protocol.wire.fields import Count, Fingerprint, Name

FIRST_TOKEN = "first_token"
"""The one kind of words so far: the token that follows the prompt."""

MAX_ALTERNATIVES = 1024

Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class FinalToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sent with the end of a transfer, and good for no other.

    Attributes:
        transfer: the transfer they end.
        identity: fingerprint of the prompt they follow.
        first_token: the token that follows the prompt.
        logprob: its log probability, if it was asked for.
        top_logprobs: the likeliest tokens in its place and their log probabilities, best first.
        counts: what the prefill engine has counted for the request, such as tokens it had cached.
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
        """Why these are not the words of this transfer, or None."""
        if (self.transfer, self.identity) != (transfer, identity):
            return Cause.WORDS, f"final token of transfer {self.transfer} came with {transfer}"
        return None


def untold(needs: Collection[str], told: Collection[str]) -> str:
    """What a consumer needs to be told and this producer does not tell, such as `first_token`; empty
    where it tells everything."""
    return ", ".join(sorted(set(needs) - set(told)))
