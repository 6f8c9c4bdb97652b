# SPDX-License-Identifier: Apache-2.0
"""An engine's description of itself, in its answer to `describe`: for people and tools, before a session is tried."""

from typing import Any

import msgspec

from pd_connector import __version__
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.fields import Count, Name

FIELD = "about"
"""The field of `kv_transfer_params` that has it."""


class About(msgspec.Struct, frozen=True):
    """The defaults are those of an engine older than this struct: it speaks the first schema.

    Attributes:
        version: version of pd-connector; empty if the engine does not say.
        newest, oldest: the wire schemas that it speaks.
        model: the model that its first rank had loaded at its start; None if the engine does not say.
        audit_tokens: tokens of the shortest prompt whose recurrent states it can compare; 0: its model keeps none.
    """

    version: Name = ""
    newest: Count = 1
    oldest: Count = 1
    model: ModelFacts | None = None
    audit_tokens: Count = 0

    @property
    def schemas(self) -> str:
        return f"{self.oldest}-{self.newest}"


def own(model: ModelFacts | None = None, audit_tokens: int = 0) -> About:
    """The description of an engine of this installation."""
    return About(__version__, messages.SCHEMA, messages.OLDEST_SCHEMA, model, audit_tokens)


def written(model: ModelFacts | None, audit_tokens: int = 0) -> dict[str, Any]:
    """The description of this engine, as a field of `kv_transfer_params`."""
    return {FIELD: msgspec.to_builtins(own(model, audit_tokens))}


def read(params: object) -> About:
    """The description in the `kv_transfer_params` of an engine's answer. They can be of any type that JSON has."""
    field = params.get(FIELD) if isinstance(params, dict) else None
    fields = field if isinstance(field, dict) else {}
    for names in (About.__struct_fields__, ("version", "newest", "oldest", "audit_tokens")):
        try:
            return msgspec.convert({name: fields[name] for name in names if name in fields}, About)
        except msgspec.ValidationError:
            continue  # a later version may describe its model differently
    return About()


def apart(ours: About, theirs: About) -> bool | None:
    """None if two engines have a common schema. Otherwise True if ours is older, False if theirs is older."""
    if ours.newest < theirs.oldest:
        return True
    return False if theirs.newest < ours.oldest else None
