# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) and a KV pool behind a vLLM and an SGLang engine. An adapter is known by its content: what one engine computed
with it, the other loads, whatever it calls its own copy, and nobody loads it for another adapter or for none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import wait_until
from pools import CHUNKS, counted
from sglang_engines.sglang_harness import assert_idle
from sglang_engines.sglang_pools import MEMORY, Host, ask, hosting
from sglang_engines.sglang_recipes import Recipe
from test_adapters_live import adapter, tell

from pd_connector.pool.keys import CHUNK_TOKENS

CONFIG = f'{{"pool": {{"memory": "{MEMORY}"}}}}'
SGLANG = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8"),
    *("--lora-target-modules", "q_proj", "k_proj", "v_proj"),
)
VLLM = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
NAMES = {"vllm": "sql", "sglang": "a copy of it"}
OTHER = "other bytes"
LOADED = CHUNKS * CHUNK_TOKENS


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("adapters")
    sglang = {"sglang": Recipe(None, 64, args=SGLANG, config=CONFIG)}
    with hosting(folder, sglang, {"vllm": {"args": VLLM}}) as made:
        _load(made, folder)
        yield made


def _load(host: Host, folder: Path) -> None:
    tell(host.engines["vllm"], "load", lora_path=str(adapter(folder / "sql", 1)))  # type: ignore[arg-type]
    for name, path in (
        (NAMES["sglang"], adapter(folder / "copied", 1)),
        (OTHER, adapter(folder / "other", 2)),
    ):
        told = host.engines["sglang"].client.post(
            "/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}
        )
        assert told["success"]


@pytest.mark.parametrize(("writer", "reader"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_what_was_computed_with_an_adapter_is_loaded_with_its_copy_alone(
    host: Host, writer: str, reader: str
) -> None:
    engine = host.engines[reader]
    before = counted(engine, "audits")  # type: ignore[arg-type]
    salt, wanted = host.computed(writer, adapter=NAMES[writer])
    found = ask(engine, salt, adapter=NAMES[reader])
    found.assert_same(wanted)
    assert found.loaded == 0, "it is compared first"
    wait_until(lambda: counted(engine, "audits") > before, "the comparison")  # type: ignore[arg-type]
    salt, wanted = host.computed(writer, adapter=NAMES[writer])
    for name in {"sglang": (OTHER, ""), "vllm": ("",)}[reader]:
        other = ask(engine, salt, adapter=name)
        assert other.loaded == 0
        with pytest.raises(AssertionError):
            other.assert_same(wanted)  # control: it answers otherwise
    found = ask(engine, salt, adapter=NAMES[reader])
    found.assert_same(wanted)
    assert found.loaded == LOADED
    assert_idle(host.engines["sglang"])
    host.assert_nothing_held("sglang")
