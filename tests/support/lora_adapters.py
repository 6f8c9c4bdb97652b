# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) in folders, and a vLLM engine core that is told to load and remove them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.v1.engine import core


def adapter(folder: Path, scale: float = 1.0, rank: int = 8) -> Path:
    """A LoRA adapter as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    weights = {f"layers.{i}.lora_{side}": torch.randn(8, 16) for i in range(2) for side in "AB"}
    weights["layers.1.lora_B"] *= scale
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    return folder


def changed(folder: Path, scale: float) -> None:
    """Other content under the same names, some time later."""
    adapter(folder, scale)
    for file in folder.iterdir():
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))


def lora(folder: Path | str, number: int = 1, name: str = "sql", **options: Any) -> LoRARequest:
    return LoRARequest(name, number, str(folder), **options)


def load(asked: LoRARequest, meanwhile: Callable[[], object] = lambda: None) -> None:
    """vLLM is told to load an adapter."""
    engine = SimpleNamespace(
        model_executor=SimpleNamespace(add_lora=lambda lora: (meanwhile(), True)[1])
    )
    assert core.EngineCore.add_lora(engine, asked)


def remove(number: int) -> None:
    """vLLM is told to remove an adapter."""
    executor = SimpleNamespace(remove_lora=lambda number: True)
    assert core.EngineCore.remove_lora(SimpleNamespace(model_executor=executor), number)
