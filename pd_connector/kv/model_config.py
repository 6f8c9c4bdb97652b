# SPDX-License-Identifier: Apache-2.0
"""A model's config as engines compare it: its fingerprint, and its fields in words for messages."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

FINGERPRINT_BYTES = 16
MOST_FIELDS = 256
_MOST_LEAVES = 64
"""A part of a config with more values than this is shown as one value, such as a list of quantised layers."""
_SHOWN = 40
"""Characters of a value that are shown."""
_NAMED = 4
"""Fields that a message names; it counts the others."""

# Where an engine put the checkpoint, and what it wrote on reading it, say nothing of the KV.
_LOCAL_KEYS = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"}
)
# In them `dtype` says how numbers are quantised, and not what an engine computes in.
_QUANTISATION_KEYS = frozenset({"quantization_config", "compression_config"})

_Text = Annotated[str, msgspec.Meta(max_length=128)]
Fields = Annotated[tuple[tuple[_Text, _Text], ...], msgspec.Meta(max_length=MOST_FIELDS)]
"""Names and values, shortened. They are for messages, and decide nothing."""


class ServedConfig(NamedTuple):
    """A model's config with the engine's settings that belong to it."""

    fingerprint: bytes
    fields: tuple[tuple[str, str], ...]


def served_config(config: Mapping[str, Any], **served: str | int | None) -> ServedConfig:
    """What engines compare of a config.

    Args:
        config: `config.json` as plain data, with what the operator overrides.
        served: how the engine serves it, such as `dtype="bfloat16"`.
    """
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"pd-config")
    kept = _kept(config)
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    settings = {name: value for name, value in served.items() if value is not None}
    digest.update(json.dumps(settings, sort_keys=True).encode())
    values = [*settings.items(), *_leaves(kept)]
    if len(values) > MOST_FIELDS:
        rest = dict(values[MOST_FIELDS - 1 :])
        values[MOST_FIELDS - 1 :] = [("other fields", rest)]
    fields = tuple((printable(name[-128:]), _shown(value)) for name, value in values)
    return ServedConfig(digest.digest(), fields)


def fields_unlike(producer: Fields, consumer: Fields) -> str:
    """The fields that differ, with both values; empty if all are equal or one side does not send its fields."""
    if not producer or not consumer:
        return ""
    first, second = dict(producer), dict(consumer)
    unlike = [
        f"{name} is {first.get(name, 'not set')} at the producer, {second.get(name, 'not set')} at the consumer"
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    ]
    more = f"; {len(unlike) - _NAMED} more fields differ" if len(unlike) > _NAMED else ""
    return printable("; ".join(unlike[:_NAMED]) + more)


def printable(text: str) -> str:
    """A text without characters that would break a line of a log or cannot be encoded."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a config with their names, such as `text_config.hidden_size`."""
    for name, value in config.items():
        if isinstance(value, Mapping) and (not path or len(value) <= _MOST_LEAVES):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    text = printable(text)
    if len(text) <= _SHOWN:
        return text
    mark = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[:_SHOWN]}... ({len(text)} characters, checksum {mark})"


def _kept(config: Mapping[str, Any], dropped: frozenset[str] = _LOCAL_KEYS) -> dict[str, Any]:
    """A config without fields that do not affect KV, at any depth, and without nulls, which engines write for missing
    fields."""

    def below(name: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return _kept(value, frozenset() if name in _QUANTISATION_KEYS else dropped)

    return {
        name: below(name, value)
        for name, value in config.items()
        if name not in dropped and value is not None
    }
