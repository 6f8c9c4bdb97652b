# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM through our MLA backend on a GPU: the layer's projections are torch's, its decodes our kernels'."""

import functools
import importlib
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch_device import gpu
from transfer_cases import Case
from vllm_cases import DECODES
from vllm_door import Door, attended, few_processors, for_cuda


class LatentDoor(Door):
    """A layer with latents. Above 32 heads its pages of 64 tokens are for the Gluon kernel."""

    bound = 2e-2
    """Absorbed queries, and results before they are projected, are rounded to 16 bits as well."""

    temporaries = 2
    """Queries whose two parts are one tensor, and results."""

    def __init__(self, heads: int = 16, page: int = 64, **engine: Any) -> None:
        for_cuda()
        layers: Any = importlib.import_module("latent_layers")
        batches: Any = importlib.import_module("backend_layers")
        self.name, dtype = layers.NAME, torch.bfloat16
        self.shape = layers.LatentShape(heads, 64, 128, page, dtype, "cuda:0")
        width = layers.LATENT + layers.ROPE
        tokens = batches.Shape(heads, 1, width, dtype, device="cuda:0", page=page)
        self.batch = functools.partial(batches.Batch, tokens)
        with mock.patch.dict("os.environ", PD_KERNELS_MLA="TRITON_MLA"):
            importlib.import_module("pd_kernels.vllm.plugin").register()
        with tempfile.TemporaryDirectory() as folder:
            made = self.shape.layer(self.shape.save(Path(folder)), "TRITON_MLA", **engine)
        super().__init__(*made, made[1].vllm_config)
        assert type(self.module.impl).__name__ == "MlaImplCuda"
        self.weights = self.module.kv_b_proj.weight.detach().float()
        self.module.process_weights_after_loading(dtype)
        self.module.to("cuda:0")
        size = batches.PAGES, 1, page, width
        self.module.bind_kv_cache(torch.empty(size, dtype=dtype, device="cuda:0"))
        self.forget()

    @property
    def backend(self) -> tuple[Any, str]:
        return self.module.impl, "forward_mqa"

    def write(self, batch: Any) -> None:
        for row, (count, tokens) in enumerate(zip(batch.queries, batch.tokens, strict=True)):
            past, slots = batch.kv[0, row, : tokens - count], batch.slots(row)[: tokens - count]
            told = *self._halves(past.to("cuda:0")), self.module.kv_cache, slots.to("cuda:0")
            self.module.impl.do_kv_cache_update(*told, "auto", self.module._k_scale)

    def _halves(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[token, 512]` and `[token, 1, 64]` of `[token, 1, 576]`."""
        latent = self.module.kv_lora_rank
        return tokens[:, 0, :latent], tokens[..., latent:]

    def _query(self, batch: Any) -> torch.Tensor:
        query: torch.Tensor = batch.query[..., : self.module.qk_head_dim]
        return query

    def new(self, batch: Any) -> list[torch.Tensor]:
        new = self._query(batch), *self._halves(batch.new_kv()[0])
        return [each.contiguous().to("cuda:0") for each in new]

    def call(self, *new: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((len(new[0]), self.shape.heads * self.shape.value))
        found: torch.Tensor = self.module(*new, output_shape=shape)
        return found

    def wanted(self, batch: Any) -> torch.Tensor:
        """Without absorption: each head has its own keys and values."""
        rows, queries = [], self._query(batch).split(batch.queries)
        for row, (query, tokens) in enumerate(zip(queries, batch.tokens, strict=True)):
            latent, rope = (each.float() for each in self._halves(batch.kv[0, row, :tokens]))
            heads = (latent @ self.weights.T).unflatten(1, (self.shape.heads, -1))
            keys, values = heads.split((self.shape.nope, self.shape.value), -1)
            keys = torch.cat((keys, rope.expand(-1, self.shape.heads, -1)), -1)
            rows.append(attended(query, keys, values, self.shape.scale).flatten(1))
        return torch.cat(rows)


def step(
    heads: int = 16, requests: tuple[tuple[int, int], ...] = DECODES, verified: int = 1
) -> None:
    """Run the last tokens of some requests through a layer, behind what the cache has of them."""
    with gpu(), few_processors():
        door = LatentDoor(heads)
        door.builder.reorder_batch_threshold = verified
        batch = door.batch(requests)
        door.write(batch)
        door.check(batch, door.step(batch))


LATENTS: dict[str, Case] = {
    "vllm, mla": step,
    "vllm, mla, 40 heads": functools.partial(step, 40, DECODES[:2]),
    "vllm, mla, beside prompts": functools.partial(
        step, requests=((1, 70), (1, 33), (20, 20), (9, 9))
    ),
    "vllm, mla, verified": functools.partial(step, requests=((2, 70), (2, 2)), verified=2),
}
