# SPDX-License-Identifier: Apache-2.0
"""A process with one agent that saves and loads prompts until it is killed, and compares every byte that it was told is loaded.

It says a word for each prompt: `saved`, `right`, `missed`, `wrong` (a load ended well with other bytes) or `lost` (nothing came
back in time).
"""

from __future__ import annotations

import contextlib
import random
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from support.agents import MODEL, SHORT, Rank, geometry_of

from pd_connector.kv.geometry import Shard, page_span
from pd_connector.pool import loader
from pd_connector.pool.jobs import Fill, PromptChunk, Save
from pd_connector.pool.keys import CHUNK_TOKENS, extend, model_root, root, salt_digest, token_bytes
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.protocol.consuming.incoming import Finished

FACTS = msgspec.structs.replace(MODEL, weights=b"all bytes")
ROOT = model_root(FACTS) or b""
PROMPTS, CHUNKS, PAGES = 12, 2, 40
TOKENS = CHUNKS * CHUNK_TOKENS
KEYS, VALUES, HEADS = 6, 4, 4
ANSWER_S = 60.0


def main(say: Connection, memory: str, disk: str, nbytes: int, seed: int, blind: bool) -> None:
    """`blind`: sums of layers are not compared. The test must notice that."""
    if blind:
        loader.payload_problem = lambda *_: None  # type: ignore[assignment]
    store = LocalStore(Space(Path(memory), nbytes), Space(Path(disk), 2 * nbytes))
    worker = Worker(store, seed)
    say.send("ready")
    while True:
        say.send(worker.step())


class Worker:
    """One rank, with pages of 16 or 32 tokens by its seed. Every second pair of workers keeps chunks in INT8."""

    def __init__(self, store: LocalStore, seed: int) -> None:
        self._dice = random.Random(seed)
        self._page = (16, 32)[seed % 2]
        geometry = geometry_of(Shard(0, 2, 0, 1), page_size=self._page)
        told: dict[str, Any] = {"facts": FACTS, "engine_id": f"engine {seed}", "store": store}
        config = SHORT | {"codec": "int8", "pool": {"codec": ("raw", "int8")[seed // 2 % 2]}}
        self._rank = Rank(config, geometry=geometry, pages=PAGES, seed=seed, **told)
        self._steps = 0

    def step(self) -> str:
        """Save or load a prompt, in pages that held something else before."""
        self._steps += 1
        prompt = self._dice.randrange(PROMPTS)
        pages = self._dice.sample(range(PAGES), TOKENS // self._page)
        try:
            return (self._load if self._dice.random() < 0.6 else self._save)(prompt, pages)
        except (TimeoutError, AssertionError):
            return "lost"
        finally:
            self._fill_with_other_bytes(pages)

    def _save(self, prompt: int, pages: list[int]) -> str:
        self._write(prompt, pages)
        names = []
        for chunk in chunks(prompt):
            span = page_span(chunk.first_token, chunk.stop_token, self._page)
            names.append(f"save {self._steps} {chunk.number}")
            self._rank.agent.submit(
                Save(names[-1], ROOT, chunk, (pages[span.start : span.stop],), f"t{prompt % 3}")
            )
        for name in names:
            self._rank.end_of(name, ANSWER_S)
        return "saved"

    def _load(self, prompt: int, pages: list[int]) -> str:
        name = f"load {self._steps}"
        self._rank.agent.submit(Fill(name, ROOT, tuple(chunks(prompt)), 0, TOKENS, (pages,)))
        found = self._rank.end_of(name, ANSWER_S)
        assert isinstance(found, Finished)
        if found.cause is not None:
            return "missed"
        return "right" if self._holds(prompt, pages) else "wrong"

    def _write(self, prompt: int, pages: list[int]) -> None:
        for layer, wanted in in_pages(prompt, self._page).items():
            self._rank.layers[layer].view(torch.int16)[pages] = wanted

    def _holds(self, prompt: int, pages: list[int]) -> bool:
        return all(
            torch.equal(self._rank.layers[layer].view(torch.int16)[pages], wanted)
            for layer, wanted in in_pages(prompt, self._page).items()
        )

    def _fill_with_other_bytes(self, pages: list[int]) -> None:
        for layer in self._rank.layers.values():
            layer.view(torch.int16)[pages] = self._dice.randrange(1 << 15)


def in_pages(prompt: int, page: int) -> dict[int, torch.Tensor]:
    """A prompt's KV by layer: `[page, head, K and V of its tokens]`. INT8 loses nothing of it: each scale is 1."""
    found = {}
    for layer in range(2):
        dice = torch.Generator().manual_seed(1000 * prompt + layer)
        shape = (TOKENS, HEADS, KEYS + VALUES)
        numbers = torch.randint(-127, 128, shape, generator=dice)
        numbers[::CHUNK_TOKENS] = numbers[..., KEYS] = 127
        whole = numbers.to(torch.bfloat16).view(torch.int16)
        rows = whole.unflatten(0, (TOKENS // page, page)).transpose(1, 2)
        parts = rows[..., :KEYS].flatten(2), rows[..., KEYS:].flatten(2)
        found[layer] = torch.cat(parts, 2)
    return found


def chunks(prompt: int) -> list[PromptChunk]:
    """The chunks of a prompt. Prompts share nothing."""
    tokens = [1000 * prompt + place for place in range(TOKENS)]
    first = root(ROOT)
    keys = [first, *extend(first, tokens)]
    return [
        PromptChunk(
            number,
            keys[number + 1],
            keys[number],
            token_bytes(tokens[number * CHUNK_TOKENS : (number + 1) * CHUNK_TOKENS]),
            b"",
            "",
            salt_digest(""),
        )
        for number in range(CHUNKS)
    ]


def start(say: Connection, *arguments: Any) -> None:
    """What a forked process runs."""
    with contextlib.suppress(BrokenPipeError):
        main(say, *arguments)
