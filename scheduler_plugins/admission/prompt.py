# SPDX-License-Identifier: Apache-2.0
"""Estimates a prompt's length and its cached part without tokenizing.

The engine tokenizes every prompt anyway, and tokenizing twice would cost the API server more than the
prediction is worth. So the length of a text is its bytes times a ratio of tokens to bytes, learnt from
the `usage` of answers. Its cached prefix is found by hashes of the text of earlier prompts.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

CHUNK_BYTES = 256
"""Size of the hashed pieces of text. A hash stands for the prompt up to the end of its piece."""
KEPT_BYTES = 2 << 20
"""Only the beginning of a prompt is hashed, about 500,000 tokens of text, because hashing may block other requests only
for milliseconds."""
_MOST_TEXTS = 4096
"""The number of texts of a batch that are measured. The others count as the average of these."""
_ID_BYTES = 8
_KEPT = 0.98
_FIRST_GUESS = (128.0, 512.0)
"""Tokens and bytes with which a ratio starts: four bytes a token. One real prompt outweighs them."""


class Prompt(NamedTuple):
    """The prompt of a request body."""

    kind: str  # prompts of one kind share a ratio of tokens to bytes
    data: bytes  # the beginning of the first sequence: UTF-8 text, or token ids of 8 bytes each
    size_bytes: int  # of all whole sequences
    ids: bool  # whether `data` are token ids
    salt: bytes  # other fields that must agree for KV to be shared
    ready: bool  # KV comes from another engine: nothing but the last token is computed

    def chunks(self) -> Iterator[bytes]:
        """One hash for each whole chunk of the first sequence. Each hash also covers everything before its chunk."""
        digest = self.salt
        for end in range(CHUNK_BYTES, len(self.data) + 1, CHUNK_BYTES):
            part = self.data[end - CHUNK_BYTES : end]
            digest = blake2b(part, digest_size=16, key=digest).digest()
            yield digest


def prompt_of(body: Mapping[str, Any]) -> Prompt:
    """The text and the token ids of all prompts in a request body.

    They are those of a completion (`prompt`, or `token_ids`), a chat (`messages`), an embedding (`input`, `texts`), or of scored pairs
    (a query and documents). Images and other media count nothing, because the learnt ratio includes their average. Malformed parts count nothing
    either, because the engine will refuse them.
    """
    if "messages" in body:
        kind, sequences = "chat", _text(_chat(body))
    elif pairs := _pairs(body):
        kind, sequences = "pair", _sequences(pairs)
    elif (given := body.get("input", body.get("texts"))) is not None:
        kind, sequences = "text", _sequences(given)
    else:
        kind, sequences = "text", _sequences(body.get("prompt", body.get("token_ids")))
    data, size_bytes, ids = sequences
    shared = [body.get(name) for name in ("model", "cache_salt")]
    salt = blake2b(json.dumps([kind, ids, *shared]).encode(), digest_size=16).digest()
    transfer = body.get("kv_transfer_params")
    ready = isinstance(transfer, dict) and transfer.get("do_remote_prefill") is True
    return Prompt(kind, data, size_bytes, ids, salt, ready)


_Sequences = tuple[bytes, int, bool]
"""As in `Prompt`: the beginning of the first sequence, the bytes of all, and whether they are ids."""
_NOTHING: _Sequences = (b"", 0, False)


def _sequences(prompt: object) -> _Sequences:
    if isinstance(prompt, str):
        return _text([prompt])
    if not isinstance(prompt, list) or not prompt:
        return _NOTHING
    if isinstance(prompt[0], str):
        measured = prompt[:_MOST_TEXTS]
        if not all(isinstance(text, str) for text in measured):
            return _NOTHING
        data, size_bytes, _ = _text(prompt[:1])
        size_bytes += sum(_text([text])[1] for text in measured[1:])
        return data, size_bytes * len(prompt) // len(measured), False
    several = prompt if isinstance(prompt[0], list) else [prompt]
    try:
        data = array("q", several[0][: KEPT_BYTES // _ID_BYTES]).tobytes()
        return data, _ID_BYTES * sum(map(len, several)), True
    except (TypeError, OverflowError):
        return _NOTHING


def _text(parts: Sequence[str]) -> _Sequences:
    """One text from parts, with a zero byte between them."""
    beginning, characters = list[str](), -1
    for part in parts:
        if characters < KEPT_BYTES:
            beginning.append(part[:KEPT_BYTES])
        characters += 1 + len(part)
    if characters < 0:
        return _NOTHING
    text = "\0".join(beginning)[:KEPT_BYTES]
    kept = text.encode(errors="surrogatepass")
    # The unread part is assumed to have the same bytes per character as the read part.
    size_bytes = len(kept) * characters // len(text) if text else 0
    return kept[:KEPT_BYTES], size_bytes, False


_PAIRS = (
    ("query", "documents"),
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)
"""Field names of pairs in vLLM's scoring endpoints."""


def _pairs(body: Mapping[str, Any]) -> list[str]:
    """The text of each pair. One query can have several documents."""
    for names in _PAIRS:
        firsts, seconds = (_listed(body.get(name)) for name in names)
        if firsts and seconds:
            firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
            return ["\0".join(pair) for pair in zip(firsts, seconds, strict=False)]
    return []


def _listed(given: object) -> list[str]:
    several = given if isinstance(given, list) else [given]
    return [text for text in several if isinstance(text, str)]


def _chat(body: Mapping[str, Any]) -> list[str]:
    """The texts a chat template shows: tools first, as templates do, then every message."""
    parts = _dumped(body.get("tools"))
    messages = body["messages"]
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            parts += [str(message.get("role")), *_texts(message.get("content"))]
            parts += _dumped(message.get("tool_calls"))
    return parts


def _dumped(value: object) -> list[str]:
    """The JSON of a value. For a large field that a router has read, it is the original JSON."""
    raw = getattr(value, "raw", None)
    if raw is not None:
        return [bytes(raw).decode(errors="replace")]
    return [json.dumps(value)] if value else []


def _texts(content: object) -> Iterable[str]:
    if isinstance(content, str):
        return (content,)
    items = content if isinstance(content, list) else ()
    texts = (item.get("text") for item in items if isinstance(item, dict))
    return [text for text in texts if isinstance(text, str)]


class _Ratio:
    """Tokens per byte, over the last hundred prompts or so."""

    def __init__(self) -> None:
        self._tokens, self._bytes = _FIRST_GUESS

    @property
    def value(self) -> float:
        return self._tokens / self._bytes

    def learn(self, tokens: int, size_bytes: int) -> None:
        self._tokens = _KEPT * self._tokens + tokens
        self._bytes = _KEPT * self._bytes + size_bytes


class PromptMemory:
    """Estimates for the next prompt from earlier prompts: its length in tokens, and its cached part.

    The memory of prefixes forgets like the engine's cache: the least recently used prompt first, and its end before its
    beginning.
    """

    def __init__(self, cache_tokens: int) -> None:
        """`cache_tokens`: tokens that fit into the engine's cache; 0: it caches nothing."""
        self._cache_tokens = cache_tokens
        self._ratios: dict[str, _Ratio] = {}
        self._chunks: OrderedDict[bytes, float] = OrderedDict()
        self._held_tokens = 0.0
        self._confirmed = 1.0

    def tokens(self, prompt: Prompt) -> int:
        """Expected length of all sequences together; exact if the prompt is token ids."""
        if prompt.ids:
            return max(1, prompt.size_bytes // _ID_BYTES)
        return max(1, round(prompt.size_bytes * self._per_byte(prompt)))

    def cached(self, prompt: Prompt, tokens: int) -> int:
        """Expected tokens of `tokens` that need no computing. At least one token always needs it."""
        if prompt.ready:
            return tokens - 1
        return min(tokens - 1, int(self._confirmed * self._cached_by_chunks(prompt)))

    def prefilled(self, prompt: Prompt) -> None:
        """Note that the engine has computed this prompt and has it in its cache."""
        if not self._cache_tokens:
            return
        weight = CHUNK_BYTES * self._per_byte(prompt)
        room = max(1, int(self._cache_tokens / weight))
        kept = [chunk for chunk, _ in zip(prompt.chunks(), range(room), strict=False)]
        for chunk in reversed(kept):
            self._held_tokens += weight - self._chunks.pop(chunk, 0.0)
            self._chunks[chunk] = weight
        while self._held_tokens > self._cache_tokens and self._chunks:
            self._held_tokens -= self._chunks.popitem(last=False)[1]

    def answered(self, prompt: Prompt, prompt_tokens: int, cached: tuple[int, int] | None) -> None:
        """Learn from an answer.

        Args:
            prompt_tokens: the real number, all sequences together.
            cached: expected and actual number of tokens from the cache; None if the engine does not report it (vLLM
                does with `--enable-prompt-tokens-details`).
        """
        if not prompt.ids and prompt.size_bytes:
            ratio = self._ratios.setdefault(prompt.kind, _Ratio())
            ratio.learn(prompt_tokens, prompt.size_bytes)
        if cached is not None and cached[0] > 0 and not prompt.ready:
            real = min(2.0, cached[1] / cached[0] * self._confirmed)
            self._confirmed = min(1.0, _KEPT * self._confirmed + (1 - _KEPT) * real)

    def _cached_by_chunks(self, prompt: Prompt) -> float:
        tokens = 0.0
        for chunk in prompt.chunks():
            weight = self._chunks.get(chunk)
            if weight is None:
                break
            tokens += weight
        return tokens

    def _per_byte(self, prompt: Prompt) -> float:
        if prompt.ids:
            return 1 / _ID_BYTES
        return self._ratios.get(prompt.kind, _UNLEARNT).value


_UNLEARNT = _Ratio()
