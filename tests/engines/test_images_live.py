# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: handed over, and kept in a pool, by content and place, and never another image's KV."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness import (
    TWO_STEP_PARAMS,
    Answer,
    assert_same_logprobs,
    fresh_salt,
    largest_difference,
    request_body,
    wait_until,
)
from PIL import Image
from pools import PooledEngines, forget, hits, sharing_a_pool
from tiny_models import IMAGE_SIDE, IMAGE_TOKENS, build
from tools import TOLERANCE, delta

from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.tools.launch import Client, VllmEngine

TORCHVISION = sorted(
    Path(__file__).parents[2].glob(".venv-sglang/lib/python3*/site-packages/torchvision*")
)
"""vLLM's LLaVA imports it, and its build for CUDA breaks a CPU's torch unless it is patched, as SGLang's is."""
pytestmark = pytest.mark.skipif(not TORCHVISION, reason="no torchvision: run ci/setup-sglang")

NO_POOL = {"pool": {"read": False, "write": False}}
READS_ONLY = {"pool": {"write": False}}
SECOND = CHUNK_TOKENS + 100
"""Place of an image that begins in the second chunk, and ends in the third."""


class Served(NamedTuple):
    pool: PooledEngines
    p: VllmEngine
    d: VllmEngine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, packages = (tmp_path_factory.mktemp(name) for name in ("model", "packages"))
    build("images", model)
    for package in TORCHVISION:
        (packages / package.name).symlink_to(package)
    with sharing_a_pool(tmp_path_factory.mktemp("logs")) as pool:
        p, d = (pool.start(page, model=model, packages=packages) for page in (32, 64))
        yield Served(pool, p, d)


def image(color: int, uuid: str | None = None) -> dict[str, Any]:
    """An image whose upper half has this shade of gray."""
    picture = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "red")
    picture.paste((color,) * 3, (0, 0, IMAGE_SIDE, IMAGE_SIDE // 2))
    data = io.BytesIO()
    picture.save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}} | ({"uuid": uuid} if uuid else {})


def prompt(*parts: int | dict[str, Any]) -> list[dict[str, Any]]:
    """Images, and a text for each number: of its tokens."""
    return [
        {"type": "text", "text": ("plain words. " * part)[:part]} if isinstance(part, int) else part
        for part in parts
    ]


def ask(engine: VllmEngine, parts: list[dict[str, Any]], tokens: int = 16, **extra: Any) -> Answer:
    extra.setdefault("cache_salt", fresh_salt())
    body = request_body(engine, "", tokens, logprobs=True, top_logprobs=5, **extra)
    del body["prompt"]
    body["messages"] = [{"role": "user", "content": parts}]
    raw = Client(engine.base_url).post("/v1/chat/completions", body)
    found = raw["choices"][0]["logprobs"]["content"]
    return Answer(
        tuple(entry["token"] for entry in found),
        tuple(entry["logprob"] for entry in found),
        tuple({top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in found),
        raw["choices"][0]["message"]["content"],
        raw,
    )


def alone(engine: VllmEngine, parts: list[dict[str, Any]]) -> Answer:
    return ask(engine, parts, kv_transfer_params=NO_POOL)


def handed_over(
    served: Served, parts: list[dict[str, Any]], there: list[dict[str, Any]] | None = None
) -> Answer:
    """`there`: what the prefill engine was given instead."""
    salt, asked = fresh_salt(), {**TWO_STEP_PARAMS, **NO_POOL}
    first = ask(served.p, there or parts, 1, cache_salt=salt, kv_transfer_params=asked)
    params = {**first.kv_transfer_params, **NO_POOL}
    return ask(served.d, parts, cache_salt=salt, kv_transfer_params=params)


def test_an_image_is_handed_over(served: Served) -> None:
    one, other = prompt(100, image(0), 200), prompt(100, image(200), 200)
    wanted = alone(served.p, one)
    assert largest_difference(wanted, alone(served.p, other)) > 100 * TOLERANCE
    with delta(served.d, "pd_connector:received_transfers_total") as received:
        assert_same_logprobs(handed_over(served, one), wanted, TOLERANCE)
    assert received.amount == 1
    with delta(served.d, "pd_connector:failed_transfers_total", cause="tokens") as refused:
        assert_same_logprobs(handed_over(served, one, there=other), wanted, TOLERANCE)
    assert refused.amount == 1


def test_in_a_pool_images_count_from_where_they_begin(served: Served) -> None:
    """Same text, other images: the chunks before the first of them are shared, and nothing else."""
    salt = fresh_salt()
    saved = prompt(SECOND, image(0), 30, image(200), 150)
    asked = {  # and how many chunks of that are shared
        "another second image": (prompt(SECOND, image(0), 30, image(100), 150), 2),
        "turned": (prompt(SECOND, image(200), 30, image(0), 150), 1),
        "one place later": (prompt(SECOND + 1, image(0), 29, image(200), 150), 1),
        "the same": (saved, 4),
    }
    assert SECOND + IMAGE_TOKENS + 30 in range(2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS)
    wanted = {name: alone(served.p, parts) for name, (parts, _) in asked.items()}
    before = len(served.pool.files())
    ask(served.p, saved, cache_salt=salt)
    wait_until(lambda: len(served.pool.files()) >= before + 4, "the chunks in the pool")
    found = {}
    for name, (parts, shared) in asked.items():
        assert forget(served.d)
        had = hits(served.d)
        answer = ask(served.d, parts, cache_salt=salt, kv_transfer_params=READS_ONLY)
        assert_same_logprobs(answer, wanted[name], TOLERANCE)
        found[name] = hits(served.d) - had
        assert found[name] <= shared, name  # fewer where the first load was slow
    assert found["another second image"] == 2
