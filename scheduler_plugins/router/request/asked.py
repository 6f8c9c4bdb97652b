# SPDX-License-Identifier: Apache-2.0
"""What engines are asked for one client, and what policies know of it."""

from __future__ import annotations

from math import inf
from typing import Any

from multidict import CIMultiDict

from scheduler_plugins.router.client.answers import REQUEST_ID
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.index.hashes import token_bytes, token_list
from scheduler_plugins.router.index.prefixes import PromptKeys
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.prompt.body import (
    COMPLETIONS,
    GENERATES_ALONE,
    ONE_ENGINE,
    with_tokens,
)
from scheduler_plugins.router.prompt.describe import describe
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.routing.promises import promised
from scheduler_plugins.router.tokens.prompt_tokens import NOT_TOKENIZED, Tokenized


class Asked:
    """The client's request at first; the rest of its answer, once a stream goes on at another engine.

    Attributes:
        headers: as engines get them.
        path, body: of the request to an engine.
        request: the same, as policies see it.
        ids: of the prompt, as the engine that decodes reads it; None: it was not asked for them.
    """

    def __init__(
        self,
        shared: Shared,
        path: str,
        headers: CIMultiDict[str],
        body: dict[str, Any],
        arrived: float,
    ) -> None:
        """`arrived`: when the client's request came, on the event loop's clock."""
        self._shared = shared
        self.headers = headers
        self.id: str = headers[REQUEST_ID]
        self.arrived = arrived
        self.path = path
        self.body = body
        self.ids: list[int] | None = None
        self._counted = False
        self._in_tokens: tuple[dict[str, Any], str] | None = None
        self.request = self._described()

    @property
    def one_engine(self) -> bool:
        """Whether one engine serves it, because its endpoint knows no transfers."""
        return self.path in ONE_ENGINE

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length, where it is known and not only estimated; else 0."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
            return len(prompt)
        return self.request.tokens if self._counted else 0

    @property
    def streams(self) -> bool:
        """Whether the client wants a stream."""
        return bool(self.body.get("stream"))

    async def tokenize(self) -> None:
        """Learn the prompt's tokens, where engines are told apart by them."""
        if self.one_engine:
            return
        found = await self._shared.tokens.of(self.body)
        if found.tokens is not None:
            self.request, self._counted = self._described(found), True
            if found.digest:
                self._in_tokens = with_tokens(self.body, token_list(found.tokens)), found.digest

    def body_for(self, *engines: BackendEngine) -> dict[str, Any]:
        """`body` with its tokens for its text, if all these engines are known to make the same tokens of it; else `body`."""
        if self._in_tokens is None:
            return self.body
        body, digest = self._in_tokens
        known = self._shared.tokens
        return body if all(known.confirmed(digest, engine) for engine in engines) else self.body

    def ask_for_rest(self, rest: dict[str, Any]) -> None:
        """Ask for `StreamRecord.next_body` from now on: a completion, or the client's chat once more."""
        if "messages" in rest:
            return
        self.body, self.path, self.ids, self._in_tokens = rest, COMPLETIONS, None, None
        self.request = self.request._replace(
            tokens=len(rest["prompt"]),
            hashes=PromptKeys((), token_bytes(rest["prompt"])),
            max_tokens=min(rest["max_tokens"], self.request.max_tokens),
        )

    def _described(self, known: Tokenized = NOT_TOKENIZED) -> Request:
        """It as policies see it, with what its class is promised."""
        found = describe(
            self.body,
            self.headers,
            self.id,
            self.arrived,
            self._shared.lengths,
            known.tokens,
            known.adapter,
        )
        found = promised(found, self._shared.config, self.headers)
        generates = not self.one_engine or self.path in GENERATES_ALONE
        return found if generates else found._replace(max_tokens=1, tpot_slo_s=inf)
