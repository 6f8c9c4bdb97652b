# SPDX-License-Identifier: Apache-2.0
"""Tokenizes prompts, where that is possible.

KV events and KV pools name blocks by tokens, so prompts for engines with either are tokenized here. The model's own
tokenizer does it in worker processes, otherwise an engine's `/tokenize`. If neither can, the index knows prompts by
their text. `tokenize_body` says which prompts are tokenized.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from scheduler_plugins.router.engines.connections import EngineConnections
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.index.hashes import token_bytes
from scheduler_plugins.router.prompt.body import encode
from scheduler_plugins.router.tokens.agreement import TOKENIZE, difference, tokens_in
from scheduler_plugins.router.tokens.token_worker import TokenizerError
from scheduler_plugins.router.tokens.worker_pool import LIMIT_S, WorkerPool

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""Pause before engines are asked again about their model, or for tokens that they could not give."""
AGAIN_S = 1.0
"""Shorter pause if an engine has come up meanwhile."""
PROBE_S = 10.0
"""Longest wait for an engine to tokenize one probe. The engine is starting, and may be busy."""
_JSON = {"Content-Type": "application/json"}
_ABSENT = (404, 405, 501)
"""Statuses that mean that an engine lacks the endpoint. Any other error concerns one prompt only."""
_OWN_TEMPLATE = ("chat_template", "continue_final_message", "documents", "reasoning_effort")
"""Fields that change the prompt in a way that only the engine knows."""
_SAMPLE = {"prompt": "Hello, 3 times!"}


_NO_BLOCKS = (
    "no engine publishes KV events (vLLM: --kv-events-config) or reports a KV pool (vLLM: --middleware "
    "scheduler_plugins.vllm.PoolMiddleware), so prompts are not tokenized here"
)


class Tokenized(NamedTuple):
    """A prompt's tokens."""

    tokens: bytes | None
    """In the form of `index.hashes.token_bytes`; None: the prompt could not be tokenized."""
    adapter: str = ""
    digest: str = ""
    """Digest of the tokenizer. `confirmed` engines can be sent these tokens instead of the text. Empty: none can."""


NOT_TOKENIZED = Tokenized(None)


class _Model(NamedTuple):
    name: str
    folder: str  # with the model's tokenizer
    digest: str  # of the files; empty: the files are not used
    adapters: frozenset[str]
    aliases: frozenset[str]  # further names of the same model at the engine


class PromptTokens:
    """Tokenizes prompts for the index. Nothing here ever fails a request."""

    def __init__(
        self,
        connections: EngineConnections,
        engines: Callable[[], list[BackendEngine]],
        tokenizer: str = "",
        api_key: str = "",
    ) -> None:
        """Ask and load nothing yet.

        Args:
            engines: returns the engines that are up.
            api_key: the engines' key; empty: they need none.
            tokenizer: folder with the model's tokenizer; empty: the model folder that the engines report.
        """
        self._connections = connections
        self._engines = engines
        self._tokenizer = tokenizer
        self._headers = {**_JSON, "Authorization": f"Bearer {api_key}"} if api_key else _JSON
        self._model: _Model | None = None
        self._learnt_of = frozenset[tuple[BackendEngine, int]]()
        """The engines that `_model` was learnt from, with their numbers of starts. A restarted engine may have
        another model of the same name."""
        self._verdicts: dict[tuple[BackendEngine, int, str], str] = {}
        """The difference in tokens, by engine, its number of starts, and the digest of the model's files; empty:
        none."""
        self._why_text: str | None = None  # None: the model is not known yet
        self._learning: asyncio.Task[None] | None = None
        self._learn_at_s = 0.0
        self._ask_at_s = 0.0
        self._engines_tokenize = False
        self._workers = WorkerPool()

    @property
    def source(self) -> str:
        """The source of tokens, for `/health`: `tokenizer`, `engine` or `text` (no tokens)."""
        if self._model is not None and self._model.digest:
            return "tokenizer"
        return "engine" if self._engines_tokenize else "text"

    @property
    def why_text(self) -> str:
        """Why engines get text instead of token ids, for `/health`; empty: they get ids."""
        if self._why_text is not None:
            return self._why_text
        engines = self._engines()
        if self._blocks_are_named(engines):
            return "the model's tokenizer is not known yet: it is looked up when prompts come"
        for engine in engines:
            if problem := engine.about.pool_problem:
                return f"{engine.url}: {problem}"
        return _NO_BLOCKS

    async def of(self, body: Mapping[str, Any]) -> Tokenized:
        """The tokens of a request's prompt."""
        engines = self._engines()
        if not self._blocks_are_named(engines):
            return NOT_TOKENIZED
        learnt = self._learnt_of.issuperset((engine, engine.starts) for engine in engines)
        self._learn_if_due(learnt=learnt)
        model = self._model
        question = tokenize_body(body)
        if model is None or question is None:
            return NOT_TOKENIZED
        named = body.get("model")
        adapter = named if isinstance(named, str) and named in model.adapters else ""
        if named and not adapter and named not in model.aliases:
            return NOT_TOKENIZED  # a model of other engines, with other tokens
        prompt = question.get("prompt")
        if isinstance(prompt, list):
            try:
                return Tokenized(token_bytes(prompt), adapter)
            except ValueError:
                return NOT_TOKENIZED
        own = not any(body.get(name) is not None for name in _OWN_TEMPLATE)
        if model.digest and own:
            tokens = await self._workers.tokens(model.folder, model.digest, question)
            if tokens is not None:
                return Tokenized(tokens, adapter, "" if adapter else model.digest)
        # Other engines may tokenize the prompt differently, so these ids are for the index only.
        return Tokenized(await self._by_engine({**question, "model": named or model.name}), adapter)

    def confirmed(self, digest: str, engine: BackendEngine) -> bool:
        """Whether the engine, since its start, was seen to tokenize as this tokenizer (`Tokenized.digest`)."""
        return self._verdicts.get((engine, engine.starts, digest)) == ""

    async def close(self) -> None:
        """End the worker processes."""
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)
        self._workers.close()

    @staticmethod
    def _blocks_are_named(engines: list[BackendEngine]) -> bool:
        """Whether an engine publishes KV events or reports a KV pool. Both name blocks by tokens."""
        return any(engine.follower is not None or engine.store for engine in engines)

    def _learn_if_due(self, *, learnt: bool) -> None:
        now = asyncio.get_running_loop().time()
        running = self._learning is not None and not self._learning.done()
        at_s = self._learn_at_s if learnt else self._learn_at_s - RETRY_S + AGAIN_S
        if now >= at_s and not running:
            self._learn_at_s = now + RETRY_S
            self._learning = asyncio.create_task(self._learn(), name="learn the model's tokenizer")

    async def _learn(self) -> None:
        """Ask an engine for its model. Compare the tokens of all its engines with those of the model's files."""
        starts = frozenset((engine, engine.starts) for engine in self._engines())
        answer = await self._ask("GET", "/v1/models", None)
        data = answer.get("data") if isinstance(answer, dict) else None
        listed = [entry for entry in data or () if isinstance(entry, dict)]
        base = next((entry for entry in listed if not entry.get("parent")), None)
        if base is None or not isinstance(base.get("id"), str):
            return
        names = [entry for entry in listed if isinstance(entry.get("id"), str)]
        adapters = frozenset(entry["id"] for entry in names if entry.get("parent"))
        root = base.get("root")
        aliases = frozenset(
            entry["id"] for entry in names if not entry.get("parent") and entry.get("root") == root
        )
        folder = self._tokenizer or str(root or "")
        digest, why = await self._difference(folder, base["id"])
        if not digest:
            sample = {**_SAMPLE, "model": base["id"]}
            self._engines_tokenize = (
                tokens_in(await self._ask("POST", TOKENIZE, sample)) is not None
            )
        self._note_why(why)
        self._model = _Model(base["id"], folder, digest, adapters, aliases)
        self._learnt_of = starts

    async def _difference(self, folder: str, model: str) -> tuple[str, str]:
        """The digest of the model's files if they make the engines' tokens, else empty; and why an engine gets
        text."""
        try:
            digest = await self._workers.digest(folder)
            serving = [
                engine for engine in self._engines() if not engine.models or model in engine.models
            ]
            keys = [(engine, engine.starts, digest) for engine in serving]
            self._verdicts = {key: self._verdicts[key] for key in keys if key in self._verdicts}
            if new := [key for key in keys if key not in self._verdicts]:
                examined = await self._workers.examined(folder)
                differences = await asyncio.gather(
                    *(difference(self._probe, key[0], examined, model) for key in new)
                )
                compared = zip(new, differences, strict=True)
                self._verdicts |= {
                    (engine, starts, examined.digest): verdict
                    for (engine, starts, _), verdict in compared
                    if verdict is not None
                }
                digest = examined.digest
        except TokenizerError as error:
            return "", str(error)
        for (engine, *_), differs in self._verdicts.items():
            if differs:
                return "", f"{engine.url}: {differs} ({folder})"
        silent = [engine for engine in serving if not self.confirmed(digest, engine)]
        why = f"{silent[0].url}: it does not answer {TOKENIZE}" if silent else ""
        return digest, why

    async def _probe(self, engine: BackendEngine, path: str, content: dict[str, Any]) -> object:
        return await self._ask("POST", path, content, engine, PROBE_S)

    def _note_why(self, why: str) -> None:
        """Note why engines get text, and log the reason once."""
        if why and why != self._why_text:
            logger.warning("engines get text instead of token ids: %s (setting tokenizer)", why)
        self._why_text = why

    async def _by_engine(self, question: Mapping[str, Any]) -> bytes | None:
        now = asyncio.get_running_loop().time()
        if now < self._ask_at_s:
            return None
        answer = await self._ask("POST", TOKENIZE, question)
        tokens = tokens_in(answer)
        self._engines_tokenize = tokens is not None
        if answer is None:
            self._ask_at_s = now + RETRY_S
        return tokens

    def _least_busy(self, model: object) -> BackendEngine | None:
        """The least busy engine that serves the model; None: there is none."""
        able = [
            candidate
            for candidate in self._engines()
            if not (model and candidate.models) or model in candidate.models
        ]
        return min(able, key=lambda engine: engine.open_requests, default=None)

    async def _ask(
        self,
        method: str,
        path: str,
        content: Mapping[str, Any] | None,
        engine: BackendEngine | None = None,
        limit_s: float = LIMIT_S,
    ) -> object:
        """The answer of `engine`, or of any engine (None). None if no engine could be asked, or lacks the
        endpoint."""
        engine = engine or self._least_busy(content.get("model") if content else None)
        if engine is None:
            return None
        url = engine.url + path
        try:
            async with asyncio.timeout(limit_s):
                body = None if content is None else encode(content)
                response = await self._connections.request(method, url, self._headers, body)
                try:
                    raw = await response.read_all()
                finally:
                    response.close()
        except OSError:
            return None
        if response.status in _ABSENT:
            return None
        try:
            return msgspec.json.decode(raw) if response.status == 200 else {}
        except (ValueError, RecursionError):
            return None


MOST_CHARACTERS = 1 << 20
"""A longer prompt is not tokenized, because it would block the workers for seconds."""


_BESIDE_TOKENS = ("prompt_embeds", "features", "content_parts")
_CHAT_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)


def tokenize_body(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The body for `/tokenize` of a request `as_completion`; None for several prompts, images, or too much text."""
    if "messages" in body:
        messages = body["messages"]
        if not all(_plain(message) for message in messages):
            return None
        if sum(len(message["content"]) for message in messages) > MOST_CHARACTERS:
            return None
        return {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
    prompt = body.get("prompt")
    if isinstance(prompt, list) and (not prompt or type(prompt[0]) is not int):
        return None
    if not isinstance(prompt, str | list) or any(body.get(name) for name in _BESIDE_TOKENS):
        return None
    if len(prompt) > MOST_CHARACTERS:
        return None
    return {"prompt": prompt, "add_special_tokens": body.get("add_special_tokens", True)}


def _plain(message: object) -> bool:
    """Whether a message has only text."""
    return isinstance(message, dict) and isinstance(message.get("content"), str)
