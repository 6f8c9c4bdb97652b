# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM through our MLA backend on a GPU: the layer's projections are torch's, its decodes our kernels'."""

import functools
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from streams import Event, Stream
from torch_device import gpu
from transfer_cases import FP8, Case
from vllm_cases import DECODES
from vllm_door import Door, attended, few_processors, for_cuda

from pd_kernels.attention.mla_call import CODED_BYTES


class LatentDoor(Door):
    """A layer with latents. Above 32 heads its pages of 64 tokens are for the Gluon kernel."""

    bound = 2e-2
    """Absorbed queries, and results before they are projected, are rounded to 16 bits as well."""

    temporaries = 2
    """Queries whose two parts are one tensor, and results."""

    member, top_k = "TRITON_MLA", 0

    def __init__(self, heads: int = 16, page: int = 64, **engine: Any) -> None:
        for_cuda()
        layers: Any = importlib.import_module("latent_layers")
        batches: Any = importlib.import_module("backend_layers")
        self.name, dtype = layers.NAME, torch.bfloat16
        self.shape = layers.LatentShape(heads, 64, 128, page, dtype, "cuda:0", self.top_k)
        width = layers.LATENT + layers.ROPE
        tokens = batches.Shape(heads, 1, width, dtype, device="cuda:0", page=page)
        self.batch = functools.partial(batches.Batch, tokens)
        with mock.patch.dict("os.environ", PD_KERNELS_MLA=self.member):
            importlib.import_module("pd_kernels.vllm.plugin").register()
        with tempfile.TemporaryDirectory() as folder:
            made = self.shape.layer(self.shape.save(Path(folder)), self.member, **engine)
        super().__init__(*made, made[1].vllm_config)
        assert type(self.module.impl).__name__ == ("SparseMlaImpl" if self.top_k else "MlaImplCuda")
        self.weights = self.module.kv_b_proj.weight.detach().float()
        self.module.process_weights_after_loading(dtype)
        self.module.to("cuda:0")
        kind = self.module.kv_cache_dtype
        self.coded = kind != "auto"
        stored = torch.uint8 if self.coded else dtype
        if kind == "fp8_ds_mla":
            width = CODED_BYTES
        size = batches.PAGES, 1, page, width
        self.module.bind_kv_cache(torch.empty(size, dtype=stored, device="cuda:0"))
        self.forget()

    @property
    def backend(self) -> tuple[Any, str]:
        return self.module.impl, "forward_mqa"

    def write(self, batch: Any) -> None:
        for row, (count, tokens) in enumerate(zip(batch.queries, batch.tokens, strict=True)):
            past, slots = batch.kv[0, row, : tokens - count], batch.slots(row)[: tokens - count]
            told = *self._halves(past.to("cuda:0")), self.module.kv_cache, slots.to("cuda:0")
            kind = self.module.kv_cache_dtype
            self.module.impl.do_kv_cache_update(*told, kind, self.module._k_scale)

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
            first = sum(len(each) for each in rows)
            rows.append(self.attended(first, query, keys, values).flatten(1))
        return torch.cat(rows)

    def attended(self, first: int, query: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        """Attention of a request, whose queries begin with the step's `first`."""
        return attended(query, *kv, self.shape.scale)


class ScaledDoor(LatentDoor):
    """A cache in FP8 with one scale."""

    scale = 0.05

    def __init__(self, heads: int = 16, **engine: Any) -> None:
        super().__init__(heads, kv_cache_dtype="fp8", **engine)
        self.module._k_scale.fill_(self.scale)
        self.module._k_scale_float = self.scale

    def wanted(self, batch: Any) -> torch.Tensor:
        batch.kv = ((batch.kv / self.scale).to(FP8).float() * self.scale).to(batch.kv.dtype)
        return super().wanted(batch)


class CodedDoor(LatentDoor):
    """A cache in FlashMLA's FP8 layout, whose rounding the reference does not have."""

    bound = 6e-2

    def __init__(self, heads: int = 16) -> None:
        super().__init__(heads, kv_cache_dtype="fp8_ds_mla")


class SparseDoor(LatentDoor):
    """A layer whose indexer chooses up to 128 tokens for each query, which lie anywhere among entries of -1."""

    member, top_k = "FLASHMLA_SPARSE", 128
    temporaries = 4
    """Those of `LatentDoor`; chosen rows, and their numbers."""

    def new(self, batch: Any) -> list[torch.Tensor]:
        """The indexer chooses first, as it does before each layer."""
        chosen = torch.full((sum(batch.queries), self.top_k), -1, dtype=torch.int32)
        source, places = torch.Generator().manual_seed(3), []
        for count, tokens in zip(batch.queries, batch.tokens, strict=True):
            places += range(tokens - count, tokens)
        for row, place in zip(chosen, places, strict=True):
            count = min(place + 1, self.top_k)
            where = torch.randperm(self.top_k, generator=source)[:count]
            row[where] = torch.randperm(place + 1, generator=source)[:count].int()
        self.chosen = chosen
        self.module.impl.topk_indices_buffer[: len(chosen)] = chosen.to("cuda:0")
        return super().new(batch)

    def attended(self, first: int, query: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        chosen = self.chosen[first : first + len(query)]
        seen = torch.zeros(len(query), len(kv[0]) + 1, dtype=torch.bool)
        seen.scatter_(1, chosen.long() % seen.shape[1], True)  # -1: behind the last token
        told = (each.float().transpose(0, 1) for each in (query, *kv))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*told, seen[:, :-1], scale=self.shape.scale).transpose(0, 1)


class CodedSparseDoor(SparseDoor):
    """A cache in FlashMLA's FP8 layout, whose rounding the reference does not have."""

    bound = 6e-2

    def __init__(self, heads: int = 16) -> None:
        super().__init__(heads, kv_cache_dtype="fp8_ds_mla")
        assert self.coded


class _SideStream(Stream):
    """A stream that can be entered, as `torch.Stream`."""

    def __enter__(self) -> None:
        self.entered = torch.cuda.stream(self)  # type: ignore[arg-type]
        self.entered.__enter__()

    def __exit__(self, *told: Any) -> None:
        self.entered.__exit__(*told)


class SharingDoor(SparseDoor):
    """Two layers of which only the first has an indexer: the second takes what the first has made of its choice."""

    layers = 2
    temporaries = LatentDoor.temporaries

    def __init__(self, heads: int = 16, **engine: Any) -> None:
        super().__init__(heads, **engine)
        groups: Any = importlib.import_module("vllm.v1.attention.backends.mla.index_group")
        groups.current_stream = torch.cuda.current_stream
        self.group = self.module.impl.index_group
        self.group.num_layers, self.group.has_indexer = self.layers, True
        self.group.side_stream = _SideStream()
        self.group.logical_topk_ready, self.group.physical_topk_ready = Event(), Event()

    def call(self, *new: torch.Tensor) -> torch.Tensor:
        impl, found = self.module.impl, []
        for layer in range(2):
            impl.index_group_index = layer
            impl.record_logical_topk_ready()  # as an indexer does
            found.append(super().call(*new).clone())
            impl.topk_indices_buffer.fill_(-1)  # it is read no more
        if torch.cuda.is_current_stream_capturing():
            return found[1]
        # A dummy batch reads what nobody has written.
        assert torch.equal(*(each.nan_to_num() for each in found)), (
            "the second layer has another choice"
        )
        return found[1]


def step(
    heads: int = 16,
    requests: tuple[tuple[int, int], ...] = DECODES,
    verified: int = 1,
    kind: type[LatentDoor] = LatentDoor,
) -> None:
    """Run the last tokens of some requests through a layer, behind what the cache has of them."""
    with gpu(), few_processors():
        door = kind(heads)
        door.builder.reorder_batch_threshold = verified
        batch = door.batch(requests)
        door.write(batch)
        door.check(batch, door.step(batch))


def _in_pieces() -> None:
    """More queries than one call takes: several calls, the last with fewer."""
    sparse: Any = importlib.import_module("pd_kernels.vllm.mla_sparse")
    with mock.patch.object(sparse, "PIECE", 16):

        class Few(SparseDoor):
            def __init__(self, heads: int) -> None:
                super().__init__(heads, max_num_seqs=4)

        step(requests=((1, 200), (20, 150), (9, 140)), kind=Few)


def _another_choice() -> None:
    """The control: a choice that is not the one the layer has been given is seen."""

    class Another(SparseDoor):
        def wanted(self, batch: Any) -> torch.Tensor:
            self.chosen = torch.where(self.chosen > 0, self.chosen - 1, self.chosen)
            return super().wanted(batch)

    try:
        step(requests=((1, 300), (1, 70)), kind=Another)
    except AssertionError as error:
        assert "at most 0.02" in str(error)  # noqa: PT017
    else:
        raise AssertionError("another choice makes no difference")


def _unlike(changed: Callable[[LatentDoor], Any], **given: Any) -> None:
    """A control: a step is right, and not if something of its layer is changed."""
    kind = given.pop("kind", LatentDoor)

    class Changed(kind):  # type: ignore[misc, valid-type]
        def step(self, batch: Any) -> torch.Tensor:
            with changed(self):
                found: torch.Tensor = super().step(batch)
            return found

    step(kind=kind, **given)
    try:
        step(kind=Changed, **given)
    except AssertionError as error:
        assert "at most" in str(error)  # noqa: PT017
    else:
        raise AssertionError("the change makes no difference")


def _two_choices() -> None:
    """The control: a second layer that reads the choice for itself finds another one."""

    class Apart(SharingDoor):
        layers = 1

    try:
        step(requests=((1, 300), (1, 70)), kind=Apart)
    except AssertionError as error:
        assert str(error) == "the second layer has another choice"  # noqa: PT017
    else:
        raise AssertionError("the second layer needs no choice of the first")


def _other_tokens() -> None:
    """Tokens of a ragged batch as another request's queries."""
    mla: Any = importlib.import_module("pd_kernels.vllm.mla_backend")
    padded = mla._padded

    def moved(*told: Any) -> Any:
        tokens, own = padded(*told)
        return tokens.roll(1), own

    _unlike(lambda _: mock.patch.object(mla, "_padded", moved), requests=RAGGED[:2], verified=6)


def _another_scale() -> None:
    """A scale that decodes have and the cache's writes have not."""

    def scaled(door: LatentDoor) -> Any:
        return mock.patch.object(door.module, "_k_scale_float", 1.1 * ScaledDoor.scale)

    _unlike(scaled, kind=ScaledDoor, requests=DECODES[:2])


RAGGED = ((6, 70), (2, 40), (1, 1), (4, 5))
LATENTS: dict[str, Case] = {
    "vllm, mla": step,
    "vllm, mla, 40 heads": functools.partial(step, 40, DECODES[:2]),
    "vllm, mla, beside prompts": functools.partial(
        step, requests=((1, 70), (1, 33), (20, 20), (9, 9))
    ),
    "vllm, sparse mla": functools.partial(
        step, requests=((1, 300), (1, 70), (1, 1)), kind=SparseDoor
    ),
    "vllm, sparse mla, 40 heads, beside prompts": functools.partial(
        step, 40, requests=((1, 200), (1, 33), (20, 150), (9, 9)), kind=SparseDoor
    ),
    "vllm, sparse mla, fp8": functools.partial(
        step, requests=((1, 300), (1, 70), (1, 1)), kind=CodedSparseDoor
    ),
    "vllm, sparse mla, dense prompts": functools.partial(
        step, requests=((1, 300), (20, 20), (9, 9)), kind=SparseDoor
    ),
    "vllm, sparse mla, in pieces": _in_pieces,
    "vllm, sparse mla, verified": functools.partial(
        step, requests=((2, 200), (2, 33)), verified=2, kind=SparseDoor
    ),
    "vllm, sparse mla, another choice": _another_choice,
    "vllm, sparse mla, ragged": functools.partial(
        step, requests=((3, 200), (1, 33), (2, 64)), verified=3, kind=SparseDoor
    ),
    "vllm, sparse mla, one choice of two layers": functools.partial(
        step, requests=((1, 300), (1, 70), (1, 1)), kind=SharingDoor
    ),
    "vllm, sparse mla, two choices of two layers": _two_choices,
    "vllm, mla, verified": functools.partial(step, requests=((2, 70), (2, 2)), verified=2),
    "vllm, mla, 40 heads, 8 verified": functools.partial(step, 40, ((8, 70), (8, 9)), verified=8),
    "vllm, mla, ragged": functools.partial(step, requests=RAGGED, verified=6),
    "vllm, mla, 40 heads, ragged beside prompts": functools.partial(
        step, 40, requests=((5, 70), (1, 33), (9, 9)), verified=6
    ),
    "vllm, mla, ragged, other tokens": _other_tokens,
    "vllm, mla, fp8": functools.partial(step, 16, RAGGED, verified=6, kind=CodedDoor),
    "vllm, mla, one scale": functools.partial(step, kind=ScaledDoor),
    "vllm, mla, one scale, 40 heads, ragged": functools.partial(
        step, 40, RAGGED[:2], verified=6, kind=ScaledDoor
    ),
    "vllm, mla, one scale, another scale": _another_scale,
}
