# SPDX-License-Identifier: Apache-2.0
"""What an engine says of itself in its answer to `describe`: for people and tools, before a session is tried."""

from typing import Any

import msgspec

from pd_connector import __version__
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.fields import Count, Name

FIELD = "about"
"""Where it is in `kv_transfer_params`."""


class About(msgspec.Struct, frozen=True):
    """An engine of before this struct says nothing, and speaks the first schema.

    Attributes:
        version: of pd-connector; empty: not said.
        newest, oldest: the wire schemas it speaks.
        model: what its first rank had loaded at its start; None: not said.
    """

    version: Name = ""
    newest: Count = 1
    oldest: Count = 1
    model: ModelFacts | None = None

    @property
    def schemas(self) -> str:
        return f"{self.oldest}-{self.newest}"


def own(model: ModelFacts | None = None) -> About:
    """What an engine of this installation says."""
    return About(__version__, messages.SCHEMA, messages.OLDEST_SCHEMA, model)


def written(model: ModelFacts | None) -> dict[str, Any]:
    """This engine's own, as a field of `kv_transfer_params`."""
    return {FIELD: msgspec.to_builtins(own(model))}


def read(params: object) -> About:
    """What an engine says in the `kv_transfer_params` of its answer, of any type as JSON gave it."""
    told = params.get(FIELD) if isinstance(params, dict) else None
    told = told if isinstance(told, dict) else {}
    for names in (About.__struct_fields__, ("version", "newest", "oldest")):
        try:
            return msgspec.convert({name: told[name] for name in names if name in told}, About)
        except msgspec.ValidationError:
            continue  # a later version may say its model in another way
    return About()


def apart(ours: About, theirs: About) -> bool | None:
    """Whether two engines speak no common schema: True if ours is the older one, False if theirs is. None: they speak
    one."""
    if ours.newest < theirs.oldest:
        return True
    return False if theirs.newest < ours.oldest else None
