# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM through `--attention-backend CUSTOM` on a GPU."""

import functools
import importlib
from typing import Any

import torch
from torch_device import gpu
from transfer_cases import FP8, Case
from vllm_door import Door, Rounded, attended, for_cuda

from pd_kernels.tuning import tuned

DECODES = ((1, 70), (1, 1), (1, 33))
BESIDE_PROMPTS = ((1, 70), (1, 33), (20, 20), (9, 40))
VERIFIED = ((4, 70), (4, 4), (4, 33))
SCALES = {"q": [0.5], "k": [0.25], "v": [2.0]}
"""Scales of an FP8 cache, and of queries beside it."""

BY_HEAD = {"q": [0.5, 0.125], "k": [0.25, 2.0], "v": [2.0, 0.5]}
"""Those of each KV head, as of checkpoints with the strategy `attn_head`."""


class PagedDoor(Door):
    """A layer with keys and values."""

    bound = 1e-2
    dim, width = 128, 128
    """Elements of a key, and of a value."""

    ours = "PagedFlashImpl"
    sinks: torch.Tensor | None = None

    def __init__(
        self,
        cache_dtype: str = "auto",
        window: int | None = None,
        scales: dict[str, list[float]] = SCALES,
        **engine: Any,
    ) -> None:
        for_cuda()
        layers: Any = importlib.import_module("backend_layers")
        self.name, self.coded, self.window = layers.NAME, cache_dtype != "auto", window
        given = {"heads": 8, "dim": self.dim, "dtype": torch.bfloat16, "device": "cuda:0"}
        self.shape = self.shaped(**given, cache_dtype=cache_dtype, window=window)
        self.batch = functools.partial(layers.Batch, self.shape)
        layer = self.shape.layer("CUSTOM", **engine)
        super().__init__(layer.module, layer.builder, layer.config)
        assert type(self.module.impl).__name__ == self.ours
        if self.coded:
            self.temporaries = (
                1 if scales is SCALES else 2
            )  # queries in 16 bits; their scales and K's
            self.module.query_quant = Rounded()
            self.scales = {name: torch.tensor(each) for name, each in scales.items()}
            for name, scale in self.scales.items():  # as vLLM's CompressedTensorsKVCacheMethod does
                self.module.register_buffer(f"_{name}_scale", scale)
                setattr(self.module, f"_{name}_scale_float", float(scale.max()))
        self.module.to("cuda:0")
        size = layers.PAGES, self.shape.kv_heads, self.shape.page, self.dim + self.width
        stored = torch.uint8 if self.coded else self.shape.dtype
        self.module.kv_cache = torch.empty(size, dtype=stored, device="cuda:0")
        self.forget()

    def shaped(self, **given: Any) -> Any:
        return importlib.import_module("backend_layers").Shape(**given)

    def halves(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, `[token, heads, dim]` each, of a request's in a batch."""
        return kv[0], kv[1, ..., : self.width]

    def write(self, batch: Any) -> None:
        for row, (count, tokens) in enumerate(zip(batch.queries, batch.tokens, strict=True)):
            kv, slots = batch.kv[:, row, : tokens - count], batch.slots(row)[: tokens - count]
            update = self.module.impl.do_kv_cache_update
            new = (each.to("cuda:0") for each in self.halves(kv))
            update(self.module, *new, self.module.kv_cache, slots.to("cuda:0"))

    def new(self, batch: Any) -> list[torch.Tensor]:
        new = batch.query, *self.halves(torch.stack(batch.new_kv()))
        return [x.flatten(1).to("cuda:0") for x in new]

    def call(self, *new: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.module(*new)
        return found

    def wanted(self, batch: Any) -> torch.Tensor:
        rows, queries = [], batch.query.split(batch.queries)
        for row, (query, tokens) in enumerate(zip(queries, batch.tokens, strict=True)):
            kv = self.halves(batch.kv[:, row, :tokens])
            keys, values = (self._stored(kv[n], "kv"[n]) for n in (0, 1))
            told = self._stored(query, "q"), keys, values, self.module.impl.scale, self.window
            rows.append(attended(*told, self.sinks).flatten(1))
        return torch.cat(rows)

    def _stored(self, values: torch.Tensor, name: str) -> torch.Tensor:
        if not self.coded:
            return values
        scales = self.scales[name]
        scale = scales.repeat_interleave(values.shape[-2] // len(scales))[:, None]
        return (values / scale).to(FP8).float() * scale


def step(
    requests: tuple[tuple[int, int], ...] = DECODES,
    verified: int = 1,
    steps: int = 1,
    switches: dict[str, bool] | None = None,
    make: type[PagedDoor] = PagedDoor,
    **layer: Any,
) -> None:
    """Run the last tokens of some requests through a layer, behind what the cache has of them."""
    with gpu(), tuned(**(switches or {})):
        door = make(**layer)
        door.builder.reorder_batch_threshold = verified
        batch = door.batch(requests)
        door.write(batch)
        for _ in range(steps):
            door.check(batch, door.step(batch))


MIXED = {"requests": BESIDE_PROMPTS, "switches": {"mixed_steps": True}}
STEPS: dict[str, Case] = {
    f"vllm, {name}": functools.partial(step, **given)
    for name, given in {
        "decodes": {"steps": 2},
        "decodes, direct_launch off": {"switches": {"direct_launch": False}},
        "fp8": {"cache_dtype": "fp8"},
        "fp8 by head": {"cache_dtype": "fp8", "scales": BY_HEAD, "steps": 2},
        "verified": {"requests": VERIFIED, "verified": 4},
        "window": {"window": 40},
        "beside prompts": {"requests": BESIDE_PROMPTS},
        "beside prompts, fp8": {"requests": BESIDE_PROMPTS, "cache_dtype": "fp8"},
        "beside prompts, fp8 by head": {
            "requests": BESIDE_PROMPTS,
            "cache_dtype": "fp8",
            "scales": BY_HEAD,
        },
        "beside prompts, window": {"requests": BESIDE_PROMPTS, "window": 24},
        "beside prompts, verified": {"requests": (*VERIFIED, (1, 50), (9, 40)), "verified": 4},
        "prompts": {"requests": BESIDE_PROMPTS[2:]},
        "mixed steps": MIXED,
        "mixed steps, fp8": {**MIXED, "cache_dtype": "fp8"},
        "mixed steps, fp8 by head": {**MIXED, "cache_dtype": "fp8", "scales": BY_HEAD},
    }.items()
}
