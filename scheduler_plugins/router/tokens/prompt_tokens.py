# SPDX-License-Identifier: Apache-2.0
"""The tokens of prompts, where somebody can tell them.

Engines whose KV events are followed name blocks by tokens, so prompts for them are tokenized here: by the model's own
tokenizer in worker processes, else by an engine's `/tokenize`. If neither can, prompts are known by their text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from scheduler_plugins.router.engines.connections import EngineConnections
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.index.hashes import token_bytes
from scheduler_plugins.router.prompt.body import encode
from scheduler_plugins.router.tokens.token_worker import TOKENIZER_FILE, TokenizerError, tokenize

logger = logging.getLogger(__name__)

LIMIT_S = 2.0
"""Longest wait for the tokens of one prompt; it is sent without after that."""
RETRY_S = 30.0
"""Pause after which engines are asked again about their model, or for tokens that they could not give."""
AGAIN_S = 1.0
"""Least pause after which they are, where one has come up meanwhile."""
LOADING_S = 20.0
"""Longest wait for the first tokens of a tokenizer, which has to be loaded."""
WORKERS = 2
MOST_CHARACTERS = 1 << 20
"""A longer prompt is not tokenized: it would take the workers away from all others for seconds."""
_JSON = {"Content-Type": "application/json"}
_ABSENT = (404, 405, 501)
"""Statuses that mean that an engine has no such endpoint. Any other error is this one prompt's."""
_CHAT_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
_OWN_TEMPLATE = ("chat_template", "continue_final_message", "documents", "reasoning_effort")
"""Fields that change the prompt in ways that only the engine knows."""
_PROBES: tuple[dict[str, Any], ...] = (
    {"prompt": "The 3 Émigrés paid 1,024 €\n\n  for \t<|x|> 日本語."},
    {"messages": [{"role": "user", "content": "Hello, 3 times!"}]},
)


class Tokenized(NamedTuple):
    """A prompt's tokens."""

    tokens: bytes | None
    """As `index.hashes.token_bytes`; None: nobody could tell."""
    adapter: str = ""
    certain: bool = False
    """Whether an engine would have the same, so that they may be sent to it instead of the text."""


NOT_TOKENIZED = Tokenized(None)


class _Model(NamedTuple):
    name: str
    folder: str  # of a tokenizer that may be used; empty: none
    agrees: bool  # whether the engines' own tokens were the same
    alike: bool  # whether all engines that serve it are known to make the same tokens of a text
    adapters: frozenset[str]
    aliases: frozenset[str]  # names under which the engine serves the same model


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
            engines: those that are up.
            api_key: what engines ask for; empty: nothing.
            tokenizer: folder with the model's tokenizer; empty: where the engines say that their model lies.
        """
        self._connections = connections
        self._engines = engines
        self._tokenizer = tokenizer
        self._headers = {**_JSON, "Authorization": f"Bearer {api_key}"} if api_key else _JSON
        self._model: _Model | None = None
        self._learnt_of = frozenset[tuple[BackendEngine, int]]()
        """The engines of which `_model` was learnt, with how often they had come up: one that starts anew may have another
        model of the same name."""
        self._learning: asyncio.Task[None] | None = None
        self._learn_at_s = 0.0
        self._ask_at_s = 0.0
        self._engines_tell = False
        self._workers: ProcessPoolExecutor | None = None

    @property
    def source(self) -> str:
        """Who tokenizes, for `/health`: `tokenizer`, `engine` or `text` (nobody)."""
        if self._model is not None and self._model.folder:
            return "tokenizer"
        return "engine" if self._engines_tell else "text"

    async def of(self, body: Mapping[str, Any]) -> Tokenized:
        """The tokens of a request's prompt."""
        engines = self._engines()
        if not any(engine.follower is not None for engine in engines):
            return NOT_TOKENIZED
        known = self._learnt_of.issuperset((one, one.starts) for one in engines)
        self._learn_if_due(known=known)
        model = self._model
        asked = _asked(body)
        if model is None or asked is None:
            return NOT_TOKENIZED
        named = body.get("model")
        adapter = named if isinstance(named, str) and named in model.adapters else ""
        if named and not adapter and named not in model.aliases:
            return NOT_TOKENIZED  # another engine's: its tokens are not ours
        prompt = asked.get("prompt")
        if isinstance(prompt, list):
            try:
                return Tokenized(token_bytes(prompt), adapter)
            except ValueError:
                return NOT_TOKENIZED
        own = not any(body.get(name) is not None for name in _OWN_TEMPLATE)
        if model.folder and own:
            tokens = await self._by_worker(model.folder, asked)
            if tokens is not None:
                return Tokenized(tokens, adapter, known and model.agrees and not adapter)
        tokens = await self._by_engine({**asked, "model": named or model.name})
        return Tokenized(tokens, adapter, known and model.alike and tokens is not None)

    async def close(self) -> None:
        """End the worker processes."""
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)

    def _learn_if_due(self, *, known: bool) -> None:
        now = asyncio.get_running_loop().time()
        running = self._learning is not None and not self._learning.done()
        at_s = self._learn_at_s if known else self._learn_at_s - RETRY_S + AGAIN_S
        if now >= at_s and not running:
            self._learn_at_s = now + RETRY_S
            self._learning = asyncio.create_task(self._learn(), name="learn the model's tokenizer")

    async def _learn(self) -> None:
        """Ask an engine for its model, and compare the tokens of all that serve it with those of the model's files."""
        starts = frozenset((one, one.starts) for one in self._engines())
        answer = await self._ask("GET", "/v1/models", None)
        data = answer.get("data") if isinstance(answer, dict) else None
        listed = [one for one in data or () if isinstance(one, dict)]
        base = next((one for one in listed if not one.get("parent")), None)
        if base is None or not isinstance(base.get("id"), str):
            return
        names = [one for one in listed if isinstance(one.get("id"), str)]
        adapters = frozenset(one["id"] for one in names if one.get("parent"))
        root = base.get("root")
        aliases = frozenset(
            one["id"] for one in names if not one.get("parent") and one.get("root") == root
        )
        known = self._model
        if known and known.name == base["id"] and known.alike and starts <= self._learnt_of:
            self._model = known._replace(adapters=adapters, aliases=aliases)
            return
        folder = self._tokenizer or str(base.get("root") or "")
        if not (Path(folder) / TOKENIZER_FILE).is_file():
            folder = ""
        folder, agrees, alike = await self._compared(folder, base["id"])
        self._model = _Model(base["id"], folder, agrees, alike, adapters, aliases)
        self._learnt_of = starts

    async def _compared(self, folder: str, model: str) -> tuple[str, bool, bool]:
        """The folder, empty if an engine's tokens differ; whether all engines' are the same; whether theirs are alike."""
        agrees, alike = bool(folder), True
        engines = [one for one in self._engines() if not one.models or model in one.models]
        for probe in _PROBES:
            asked = {**probe, "model": model}
            answers = [self._ask("POST", "/tokenize", asked, engine) for engine in engines]
            theirs = set(map(_tokens_in, await asyncio.gather(*answers)))
            told = theirs - {None}
            self._engines_tell = bool(told) or ("prompt" not in probe and self._engines_tell)
            # A model may have no chat template.
            alike = alike and len(theirs) == 1 and (bool(told) or "prompt" not in probe)
            if not folder:
                continue
            ours = await self._by_worker(folder, probe, LOADING_S)
            agrees = agrees and ours is not None and theirs == {ours}
            differs = ours is not None and bool(told - {ours})
            if differs and (self._model is None or self._model.folder):
                said = "%s: its tokens are not those of the engines: engines tokenize (setting tokenizer)"
                logger.warning(said, folder)
            if differs or (ours is None and "prompt" in probe):
                folder, agrees = "", False
        return folder, agrees, alike

    async def _by_worker(
        self, folder: str, asked: Mapping[str, Any], limit_s: float = LIMIT_S
    ) -> bytes | None:
        if self._workers is None:
            self._workers = ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"))
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                return await loop.run_in_executor(self._workers, tokenize, folder, dict(asked))
        except TokenizerError as error:
            logger.info("%s", error)
        except BrokenExecutor as error:
            logger.warning("a worker process that tokenizes has ended: %s", error)
            self._workers = None
        except TimeoutError:
            logger.warning("a prompt was not tokenized within %g s", limit_s)
        except Exception as error:
            # Whatever a client can write into a body has come to the tokenizer: it may say anything.
            logger.info("a prompt cannot be tokenized here: %s", error)
        return None

    async def _by_engine(self, asked: Mapping[str, Any]) -> bytes | None:
        now = asyncio.get_running_loop().time()
        if now < self._ask_at_s:
            return None
        answer = await self._ask("POST", "/tokenize", asked)
        tokens = _tokens_in(answer)
        self._engines_tell = tokens is not None
        if answer is None:
            self._ask_at_s = now + RETRY_S
        return tokens

    def _least_busy(self, model: object) -> BackendEngine | None:
        """An engine that serves the model; None: there is none."""
        able = [one for one in self._engines() if not (model and one.models) or model in one.models]
        return min(able, key=lambda engine: engine.open_requests, default=None)

    async def _ask(
        self,
        method: str,
        path: str,
        content: Mapping[str, Any] | None,
        engine: BackendEngine | None = None,
    ) -> object:
        """The engine's answer, or that of any; None if none could be asked or it has no such endpoint."""
        engine = engine or self._least_busy(content.get("model") if content else None)
        if engine is None:
            return None
        url = engine.url + path
        try:
            async with asyncio.timeout(LIMIT_S):
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


def _tokens_in(answer: object) -> bytes | None:
    """The tokens in an answer of `/tokenize`; None: there are none."""
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    try:
        return token_bytes(tokens) if isinstance(tokens, list) else None
    except ValueError:
        return None


def _asked(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is to be tokenized, as `/tokenize` takes it; None: several prompts, images, or too much text."""
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
    if not isinstance(prompt, str | list) or body.get("prompt_embeds") is not None:
        return None
    if len(prompt) > MOST_CHARACTERS:
        return None
    return {"prompt": prompt, "add_special_tokens": body.get("add_special_tokens", True)}


def _plain(message: object) -> bool:
    """Whether a message is of text alone."""
    return isinstance(message, dict) and isinstance(message.get("content"), str)
