# SPDX-License-Identifier: Apache-2.0
"""Runs in worker processes: a model's tokenizer and chat template, loaded as engines load them.

Tokenizing takes about a millisecond of CPU per thousand tokens. In the router's own process it would delay every
stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from scheduler_plugins.router.index.hashes import token_bytes

PROBE_CHARACTERS = 1 << 16
"""Most characters of one probe. An engine tokenizes them in a few hundredths of a second."""
_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_DECLARING = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_LONGEST_DECLARED = 256
"""Longest text in the model's files that is tried as a token. The files also have long texts, such as chat
templates."""
_TEXTS = (
    "The 3 Émigrés paid 1,024 €\n\n  for \t<|x|> 日本語.",
    "x = [0] * 10_000  # 🙂\r\n\tif (a<=b): return '\\u00e9'",
    "",
)
_CHAT = {"messages": [{"role": "user", "content": "Hello, 3 times!"}]}


class TokenizerError(ValueError):
    """There is no usable tokenizer or template."""


class Examined(NamedTuple):
    """Facts about a model's tokenizer, and the probes that test whether an engine has the same.

    Attributes:
        digest: digest of the tokenizer's files, for `tokenize`.
        unknown_id: the first number above all token ids.
        probes: bodies for `/tokenize`, each with the right token ids (`index.hashes.token_bytes`).
    """

    digest: str
    unknown_id: int
    probes: tuple[tuple[dict[str, Any], bytes], ...]


def begin() -> None:
    """Initialize a worker process so that it ends with the router, however that ends, and so that torch is not imported.
    Tokenizers do not need torch, and it would take seconds and 200 MB a process."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    Thread(target=_end_with_the_router, name="end with the router", daemon=True).start()


def _end_with_the_router() -> None:
    router = parent_process()
    assert router is not None
    router.join()
    os._exit(1)


def examine(folder: str) -> Examined:
    """Load the tokenizer from the current files. Raises TokenizerError."""
    digest = files_digest(folder)
    tokenizer = _load(folder, digest)
    texts = [*_batches(_declared(folder, tokenizer)), *_TEXTS, *_batches(_vocabulary(tokenizer))]
    bodies: list[dict[str, Any]] = [{"prompt": text} for text in texts]
    bodies += [{"prompt": text, "add_special_tokens": False} for text in texts[:1]]
    probes = [(body, tokenize(folder, digest, body)) for body in bodies]
    with suppress(TokenizerError):  # the template may be missing, or refuse this chat
        probes.append((_CHAT, tokenize(folder, digest, _CHAT)))
    unknown_id = max(tokenizer.get_vocab().values(), default=-1) + 1
    return Examined(digest, unknown_id, tuple(probes))


def tokenize(folder: str, digest: str, body: Mapping[str, Any]) -> bytes:
    """Token ids of a prompt, in the form of `index.hashes.token_bytes`.

    Args:
        folder: folder of the model's files.
        digest: `Examined.digest`, so a process that starts later does not load changed files.
        body: a body for vLLM's `/tokenize`: `prompt`, or `messages` with the fields that the template reads.

    Raises:
        TokenizerError: the files cannot be used, or the template refuses the messages.
    """
    tokenizer = _load(folder, digest)
    if "messages" not in body:
        special = body.get("add_special_tokens", True)
        return token_bytes(tokenizer.encode(body["prompt"], add_special_tokens=special))
    try:
        text = tokenizer.apply_chat_template(
            body["messages"],
            tools=body.get("tools"),
            add_generation_prompt=body.get("add_generation_prompt", True),
            tokenize=False,
            **(body.get("chat_template_kwargs") or {}),
        )
    except Exception as error:
        # The template is a program of the model, so it can raise any error.
        raise TokenizerError(f"{folder}: the chat template failed: {error}") from None
    special = body.get("add_special_tokens", False)
    return token_bytes(tokenizer.encode(text, add_special_tokens=special))


@lru_cache(maxsize=2)
def _load(folder: str, digest: str) -> Any:
    """The tokenizer of these files, loaded as both kinds of engines do. Tokens are declared in several files, and the
    version of transformers decides which files count. So this code uses transformers and no parser of its own."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError(f"transformers cannot be imported ({error}): install it") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # The files can have any content, so the libraries can raise any error.
        raise TokenizerError(f"{folder}: no tokenizer can be loaded: {error}") from None
    if files_digest(folder) != digest:
        raise TokenizerError(f"{folder}: its files have changed")
    return tokenizer


def files_digest(folder: str) -> str:
    """A digest of all files that may define the tokenizer. Raises TokenizerError."""
    if not folder:
        raise TokenizerError("no engine reports the folder of its model")
    digest = hashlib.sha256()
    try:
        for path in sorted(Path(folder).iterdir()):
            if path.suffix in _SUFFIXES and not path.name.endswith(".index.json"):
                digest.update(
                    path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest()
                )
    except OSError as error:
        raise TokenizerError(f"{folder}: no tokenizer can be loaded: {error}") from None
    return digest.hexdigest()


def _declared(folder: str, tokenizer: Any) -> list[str]:
    """Special and added tokens: the loaded tokens, and further tokens in the files that another version may load."""
    tokens = dict.fromkeys(str(token) for token in tokenizer.added_tokens_decoder.values())
    tokens |= dict.fromkeys(map(str, tokenizer.all_special_tokens))
    for name in _DECLARING:
        tokens |= dict.fromkeys(_texts_in(_read(Path(folder) / name)))
    whole = _read(Path(folder) / "tokenizer.json")
    if isinstance(whole, dict):
        tokens |= dict.fromkeys(_texts_in(whole.get("added_tokens")))
    return [text for text in tokens if text]


def _vocabulary(tokenizer: Any) -> list[str]:
    """The text of every token. Between letters (`_batches`), a text shows whether an engine treats it as an added
    token."""
    ids = sorted(tokenizer.get_vocab().values())
    options = {"clean_up_tokenization_spaces": False}
    texts: list[str] = tokenizer.batch_decode([[token] for token in ids], **options)
    return texts


def _batches(pieces: list[str]) -> Iterator[str]:
    """Texts that contain all pieces, each once between spaces and once between letters."""
    held, characters = list[str](), 0
    for piece in pieces:
        held.append(f"{piece} a{piece}b ")
        characters += len(held[-1])
        if characters >= PROBE_CHARACTERS:
            yield "".join(held)
            held, characters = [], 0
    if held:
        yield "".join(held)


def _texts_in(value: Any) -> Iterator[str]:
    """All short texts in decoded JSON, including names of fields."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts_in(name)
            yield from _texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner)
    elif isinstance(value, str) and len(value) <= _LONGEST_DECLARED:
        yield value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
