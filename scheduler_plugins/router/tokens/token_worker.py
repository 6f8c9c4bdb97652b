# SPDX-License-Identifier: Apache-2.0
"""Runs in worker processes: a model's tokenizer and chat template, from the files beside its weights.

Tokenizing takes about a millisecond of CPU for a thousand tokens. In the router's own process it would hold up every stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from scheduler_plugins.router.index.hashes import token_bytes

TOKENIZER_FILE = "tokenizer.json"


class TokenizerError(ValueError):
    """There is no tokenizer or template that could be used."""


class _Loaded(NamedTuple):
    encode: Callable[[str, bool], list[int]]
    template: Callable[..., str] | None


def tokenize(folder: str, asked: Mapping[str, Any]) -> bytes:
    """Token ids of a prompt, as `index.hashes.token_bytes`.

    Args:
        folder: where the model's files lie.
        asked: what vLLM's `/tokenize` takes: `prompt`, or `messages` with what the template reads.

    Raises:
        TokenizerError: the files cannot be used, or the template refuses the messages.
    """
    loaded = _load(folder)
    if "messages" not in asked:
        return token_bytes(loaded.encode(asked["prompt"], asked.get("add_special_tokens", True)))
    if loaded.template is None:
        raise TokenizerError(f"{folder}: the model has no chat template")
    try:
        text = loaded.template(
            messages=asked["messages"],
            tools=asked.get("tools"),
            add_generation_prompt=asked.get("add_generation_prompt", True),
            **(asked.get("chat_template_kwargs") or {}),
        )
    except Exception as error:
        # The template is the model's own program: anything may come out of it.
        raise TokenizerError(f"{folder}: the chat template failed: {error}") from None
    return token_bytes(loaded.encode(text, asked.get("add_special_tokens", False)))


@cache
def _load(folder: str) -> _Loaded:
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(folder) / TOKENIZER_FILE))
    except Exception as error:
        # The library raises plain `Exception` for a file that it cannot read.
        raise TokenizerError(f"{folder}: no tokenizer can be loaded: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str, special: bool) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    return _Loaded(encode, _template(Path(folder)))


def _template(folder: Path) -> Callable[..., str] | None:
    """The chat template, as a function of what it reads; None if the model has none."""
    settings = _settings(folder / "tokenizer_config.json")
    source = settings.get("chat_template")
    alone = folder / "chat_template.jinja"
    if alone.exists():
        source = alone.read_text()
    if not isinstance(source, str):
        return None
    try:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    compiled = environment.from_string(source)
    return lambda **read: compiled.render(**special, **read)


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    """As chat templates expect it: without HTML's escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TokenizerError(message)
