# SPDX-License-Identifier: Apache-2.0
"""The KV that two engines hold of a prompt, in one form whatever their ranks, pages and dtypes.

The workers' probe reads it without any code of the connector's; here the ranks are put together.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import (
    Prompt,
    fresh_salt,
    prefill_step,
    wait_until,
)
from pairs import (
    Pair,
)
from tools import leaving_client, probe_all

from pd_connector.tools.launch import VllmEngine

DECODED = 900
"""Tokens that a decode engine is busy with while we look into its cache."""
SOON = 16
"""Decoded tokens after which no window has passed a page of the prompt's last tokens."""


@dataclass(frozen=True)
class LayerKV:
    """One layer's KV of a prompt's first tokens.

    Attributes:
        key, value: `[token][head][dim]` in the cache's own dtype; an MLA latent has no value.
        kept: which tokens the cache keeps, `[token]`, bool.
    """

    key: torch.Tensor
    value: torch.Tensor | None
    kept: torch.Tensor

    @property
    def halves(self) -> dict[str, torch.Tensor]:
        return {"key": self.key} | ({} if self.value is None else {"value": self.value})


Cached = dict[int, LayerKV]
"""By layer, in model numbering."""


class TooLateError(Exception):
    """The decoded tokens may have moved a window past pages of the prompt. Other requests have these pages now."""


def cached(engine: VllmEngine, tables: list[list[int]], tokens: int) -> Cached:
    """What all ranks of an engine hold of the first `tokens` tokens on these pages."""
    with TemporaryDirectory() as folder:
        probe_all(engine, "kv_save", tables, tokens, str(Path(folder) / "rank"))
        return _saved(folder)


def _saved(folder: str) -> Cached:
    ranks = sorted((torch.load(path) for path in Path(folder).iterdir()), key=lambda rank: rank[0])
    layers: dict[int, list[dict[str, torch.Tensor]]] = {}
    for _, found in ranks:
        for number, parts in found.items():
            layers.setdefault(number, []).append(parts)
    return {number: _together(parts) for number, parts in sorted(layers.items())}


def _together(parts: list[dict[str, torch.Tensor]]) -> LayerKV:
    """One layer from its tensor-parallel ranks, which hold its heads in order; MLA's all hold all."""
    kept = parts[0]["kept"]
    if "value" not in parts[0]:
        assert all(torch.equal(part["key"], parts[0]["key"]) for part in parts)
        return LayerKV(parts[0]["key"], None, kept)
    key, value = (torch.cat([part[name] for part in parts], 1) for name in ("key", "value"))
    return LayerKV(key, value, kept)


def while_decoding(engine: VllmEngine, prompt: Prompt, soon: int = DECODED, **extra: Any) -> Cached:
    """What an engine that decodes after this prompt holds of it, all but the last token, which it
    computes itself in any case.

    Raises TooLateError if it has decoded more than `soon` tokens.
    """
    tokens = len(prompt) - 1
    with leaving_client(engine, prompt, DECODED, **extra), TemporaryDirectory() as folder:
        path = str(Path(folder) / "rank")
        (computed,) = wait_until(
            lambda: probe_all(engine, "kv_save_running", tokens, path)[0],
            f"{engine.name} decodes",
            every_s=0.01,
        )
        if computed > len(prompt) + soon:
            raise TooLateError
        return _saved(folder)


def both_sides(pair: Pair, prompt: Prompt) -> tuple[Cached, Cached]:
    """The prompt's KV where it was computed, and where it has been moved to."""
    for _ in range(5):
        salt = fresh_salt()
        params = prefill_step(pair.p, prompt, cache_salt=salt)
        there = cached(pair.p, params["remote_block_ids"], len(prompt) - 1)
        with contextlib.suppress(TooLateError):
            extra = {"cache_salt": salt, "kv_transfer_params": params}
            return there, while_decoding(pair.d, prompt, SOON, **extra)
        pair.assert_idle()
    raise AssertionError("the machine is too busy to look in time")


def unlike(found: Cached, wanted: Cached, window: int = 0) -> list[str]:
    """Where two caches differ, bit by bit; empty when nowhere.

    Args:
        window: tokens at the end that are compared in layers that keep no more; 0 for all.
    """
    assert found.keys() == wanted.keys()
    differences = []
    for number, here in found.items():
        there = wanted[number]
        assert here.halves.keys() == there.halves.keys()
        for name, half in here.halves.items():
            other = there.halves[name]
            assert half.dtype == other.dtype
            assert half.shape == other.shape
            full = bool(here.kept.all() and there.kept.all())
            first = 0 if full or not window else len(half) - window
            assert here.kept[first:].all(), f"layer {number} lacks tokens here"
            assert there.kept[first:].all(), f"layer {number} lacks tokens there"
            same = half[first:].view(torch.uint8) == other[first:].view(torch.uint8)
            tokens = (~same).flatten(1).any(1).nonzero().flatten() + first
            if len(tokens):
                differences.append(f"layer {number}, {name}, tokens {tokens.tolist()[:8]}")
    return differences
