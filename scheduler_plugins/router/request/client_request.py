# SPDX-License-Identifier: Apache-2.0
"""A client's request, as engines and policies see it."""

from __future__ import annotations

from math import inf
from typing import Any

from multidict import CIMultiDict

from scheduler_plugins.router.client.answers import REQUEST_ID
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.index.hashes import token_bytes, token_list
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.prompt.body import (
    COMPLETIONS,
    GENERATE,
    GENERATES_ALONE,
    ONE_ENGINE,
    as_completion,
    with_tokens,
)
from scheduler_plugins.router.prompt.describe import describe
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.routing.promises import promised
from scheduler_plugins.router.tokens.prompt_tokens import NOT_TOKENIZED, Tokenized


class ParsedRequest:
    """The request to engines. First it is the client's request; if a stream goes on at another engine, it asks for
    the rest.

    Attributes:
        headers: the headers that engines get.
        path, body: path and body of the request to an engine.
        fields: `body` as a completion, to read from (`as_completion`).
        request: the request as policies see it.
        ids: token ids of the prompt, as the decode engine reads it; None: not asked for.
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
        self.fields = as_completion(body, path)
        self.ids: list[int] | None = body["token_ids"] if path == GENERATE else None
        self._counted = False
        self._in_tokens: tuple[dict[str, Any], str] | None = None
        self.request = self._described()

    @property
    def one_engine(self) -> bool:
        """Whether one engine serves the request, because its endpoint has no transfers."""
        return self.path in ONE_ENGINE

    @property
    def generates(self) -> bool:
        """Whether the answer is generated token by token."""
        return not self.one_engine or self.path in GENERATES_ALONE

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens; 0 if only an estimate exists."""
        prompt = self.fields.get("prompt")
        if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
            return len(prompt)
        return self.request.tokens if self._counted else 0

    @property
    def streams(self) -> bool:
        """Whether the client wants a stream."""
        return bool(self.body.get("stream"))

    async def tokenize(self) -> None:
        """Tokenize the prompt, if the choice of engines depends on its tokens."""
        if self.one_engine:
            return
        tokenized = await self._shared.tokens.of(self.fields)
        if tokenized.tokens is not None:
            self.request, self._counted = self._described(tokenized), True
            if tokenized.digest:
                self._in_tokens = (
                    with_tokens(self.body, token_list(tokenized.tokens)),
                    tokenized.digest,
                )

    def body_for(self, *engines: BackendEngine) -> dict[str, Any]:
        """`body` with token ids in place of its text, if all these engines are known to make the same ids of it; else
        `body`."""
        if self._in_tokens is None:
            return self.body
        body, digest = self._in_tokens
        prompt_tokens = self._shared.tokens
        return (
            body
            if all(prompt_tokens.confirmed(digest, engine) for engine in engines)
            else self.body
        )

    def ask_for_rest(self, rest: dict[str, Any]) -> None:
        """From now on, send a record's `next_body`: the client's chat again, or the prompt's tokens followed by the
        tokens that the client has got."""
        if "messages" in rest:
            return
        if self.path != GENERATE:
            self.path = COMPLETIONS
        self.body, self.fields = rest, as_completion(rest, self.path)
        self.ids, self._in_tokens = self.fields["prompt"], None
        before = self.request.hashes
        salt = before.salt if isinstance(before, PromptKeys) else None
        self.request = self.request._replace(
            tokens=len(self.ids),
            hashes=PromptKeys((), token_bytes(self.ids), salt=salt),
            max_tokens=min(self.fields["max_tokens"], self.request.max_tokens),
        )

    def _described(self, tokenized: Tokenized = NOT_TOKENIZED) -> Request:
        """The request as policies see it, with the promises of its class."""
        request = describe(
            self.fields,
            self.headers,
            self.id,
            self.arrived,
            self._shared.lengths,
            tokenized.tokens,
            tokenized.adapter,
        )
        request = promised(request, self._shared.config, self.headers)
        return request if self.generates else request._replace(max_tokens=1, tpot_slo_s=inf)
