# SPDX-License-Identifier: Apache-2.0
"""Routers whose operator changes roles while users ask, and what the users got."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness import (
    Answer,
    assert_same_logprobs,
    completion,
    fresh_salt,
    request_body,
    wait_until,
)
from pairs import Pair
from test_handoff import prompt_of
from tools import TOLERANCE

from pd_connector.tools.launch import HttpError, RouterProcess

KEY = "0123456789abcdef-operator-of-a-test"
LENGTHS = (40, 131, 700, 1500)
PROMPTS = 8
TOKENS = 24
LEADS = "moves its engines"
"""What the router that decides on roles logs when it begins to."""


class Steered(RouterProcess):
    """A router that its operator steers."""

    def __init__(self, pair: Pair, log_path: Path, *args: str) -> None:
        super().__init__([pair.p.base_url], [pair.d.base_url], log_path=log_path, args=args)
        self.admin_port = self.reserve()
        self.args += ["--admin-port", str(self.admin_port)]

    def environment(self) -> dict[str, str]:
        return {"PD_ROUTER_ADMIN_KEY": KEY}

    def ask(self, path: str, body: object = None) -> dict[str, Any]:
        """One call of the admin API."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as told:
            found: dict[str, Any] = json.loads(told.read())
        return found

    def swap(self, prefill: str, decode: str) -> None:
        """Make these URLs the prefill and the decode engine."""
        changes = [{"url": prefill, "role": "prefill"}, {"url": decode, "role": "decode"}]
        self.ask("/engines/role", changes)

    def roles(self) -> dict[str, str]:
        """The role of each engine, by URL."""
        return {one["url"]: one["role"] for one in self.ask("/engines")["engines"]}

    @property
    def leads(self) -> bool:
        """Whether it has begun to decide on roles since its last start."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_from_bytes)
            return LEADS.encode() in log.read()


@dataclass(frozen=True)
class Asked:
    """One request of a user. `found`: an answer, the text of a stream, or the error."""

    router: Steered
    prompt: Sequence[int]
    found: Answer | str | Exception


class Users:
    """Two users, one of whom streams, each with one request after the other at a router of `reach` that listens."""

    def __init__(self, *reach: Steered) -> None:
        self.reach: tuple[Steered, ...] = reach
        self.asked: list[Asked] = []
        self._numbers = itertools.count()
        self._ended = threading.Event()

    @contextmanager
    def asking(self) -> Iterator[Users]:
        """They ask until the block ends."""
        with ThreadPoolExecutor(2) as threads:
            users = [threads.submit(self._ask, call) for call in (completion, _streamed)]
            try:
                yield self
            finally:
                self._ended.set()
                for user in users:
                    user.result()

    def wait_for(self, more: int) -> None:
        """Wait until this number of further requests has ended."""
        wanted = len(self.asked) + more
        wait_until(lambda: len(self.asked) >= wanted, f"{more} further requests", every_s=0.02)

    def lost(self) -> list[Asked]:
        """Requests without an answer."""
        return [one for one in self.asked if isinstance(one.found, Exception)]

    def assert_answers(self, reference: Callable[..., Answer]) -> None:
        """Every answer is that of one engine."""
        for one in self.asked:
            if isinstance(one.found, Answer):
                assert_same_logprobs(one.found, reference(one.prompt, TOKENS), TOLERANCE)
            elif isinstance(one.found, str):
                assert one.found == reference(one.prompt, TOKENS).text

    def _ask(self, call: Any) -> None:
        while not self._ended.is_set():
            n = next(self._numbers)
            router = self.reach[n % len(self.reach)]
            if not _listens(router):
                time.sleep(0.05)
                continue
            prompt = prompt_of(LENGTHS[n % len(LENGTHS)], start=37 * (n % PROMPTS))
            found: Answer | str | Exception
            try:
                found = call(router, prompt, TOKENS)
            except (OSError, HTTPException, HttpError) as error:
                found = error
                time.sleep(0.05)
            self.asked.append(Asked(router, prompt, found))


def _listens(router: Steered) -> bool:
    """Whether there is a router to ask. What it answers is part of the test."""
    try:
        socket.create_connection((router.host, router.port), timeout=5).close()
    except OSError:
        return False
    return True


def _streamed(router: Steered, prompt: Sequence[int], tokens: int) -> str:
    """The text of a stream. Raises HTTPException if it does not end as it should."""
    body = request_body(router, prompt, tokens, cache_salt=fresh_salt()) | {"stream": True}
    for key in ("logprobs", "return_tokens_as_token_ids"):
        del body[key]
    connection = HTTPConnection(urlsplit(router.base_url).netloc, timeout=120)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        lines = answer.read().decode().splitlines()
    finally:
        connection.close()
    if answer.status != 200 or "data: [DONE]" not in lines[-2:]:
        raise HTTPException(f"{answer.status}: {lines[-2:]}")
    events: list[Mapping[str, Any]] = [
        json.loads(line[6:]) for line in lines if line.startswith("data: {")
    ]
    if failed := [one for one in events if "error" in one]:
        raise HTTPException(str(failed[0]))
    return "".join(one["choices"][0]["text"] for one in events)
