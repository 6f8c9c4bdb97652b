# SPDX-License-Identifier: Apache-2.0
"""Attention with keys and values: `paged_decode` computes decodes, the stock backend computes the
rest.

`PagedImpl`, and `PagedBuilder` of `paged_builder.py`, are base classes before the stock backend's
classes. The stock backend writes KV in its own layout.
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.v1.attention.backend import AttentionImpl

from pd_kernels.attention import Mod, alibi, mixed_attention, paged_decode, soft_cap
from pd_kernels.vllm.mixed_steps import PlanKey
from pd_kernels.vllm.paged_builder import PagedMetadata
from pd_kernels.vllm.refusals import LayerOptions, refusals, refuse

FP8 = torch.float8_e4m3fn


class Supported(NamedTuple):
    """The head sizes and dtypes that the kernels and the stock backend both support."""

    head_sizes: Sequence[int]
    dtypes: Sequence[torch.dtype]


class PagedImpl(AttentionImpl):
    """A layer that decodes with our kernels. Subclasses define what is supported (`allowed`) and
    how the cache is read (`pages`)."""

    where: ClassVar[str]
    """The beginning of a refusal's message."""

    scales_by_head: ClassVar[bool]
    """Whether the stock backend writes an FP8 cache with a scale of each KV head, if the checkpoint has such scales."""

    can_return_lse_for_decode = False
    supports_dcp = False

    window: int
    """Tokens that a query sees, its own included; 0 for all."""

    value_size: int
    """Elements of a value; of a key and of a query, `head_size`."""

    sinks: torch.Tensor | None
    """A score of each query head without a value, set by the stock backend."""

    _views_of: torch.Tensor | None = None
    """The cache that `_views` are of."""

    _views: tuple[torch.Tensor, torch.Tensor]

    stored_dtype: torch.dtype | None
    """The dtype of an FP8 cache; None if the cache has the model's dtype."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """The arguments are those of vLLM's `AttentionImpl`.

        Raises:
            NotImplementedError: the kernels do not support the layer; the message says why.
        """
        layer = LayerOptions(
            head_size,
            self.model_dtype(),
            kv_cache_dtype,
            str(getattr(attn_type, "value", attn_type)),
            alibi_slopes is not None,
            bool(logits_soft_cap),
        )
        refuse(self.where, refusals(layer, *self.allowed()))
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
        )
        self.value_size = head_size
        self.decodes_with(sliding_window, alibi_slopes, logits_soft_cap, kv_cache_dtype)

    @classmethod
    def allowed(cls) -> Supported:
        """Head sizes and dtypes that both the kernels and the stock backend support."""
        raise NotImplementedError

    @staticmethod
    def model_dtype() -> torch.dtype:
        """The dtype of the model that is being loaded."""
        raise NotImplementedError

    def decodes_with(
        self,
        sliding_window: int | None,
        slopes: list[float] | None,
        cap: float | None,
        cache_dtype: str,
    ) -> None:
        """Store the arguments of vLLM's constructor that decodes need."""
        self.window = sliding_window or 0
        self.stored_dtype = FP8 if cache_dtype.startswith("fp8") else None
        if cap:
            self._mod: Mod | None = soft_cap(cap)
        elif (
            slopes is not None
        ):  # on the default device, which is the model's device while the model is loaded
            self._mod = alibi(torch.tensor(slopes, dtype=torch.float32))
        else:
            self._mod = None

    @functools.cached_property
    def plan_key(self) -> PlanKey:
        return self.window, int(self.num_heads)

    def pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V in a layer's cache of `stored_dtype`: `[page, token, kv head, dim]`
        each."""
        raise NotImplementedError

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the layer's result into `output`, and return it. Arguments are vLLM's.

        `key` and `value`, the new tokens' KV, are None in a layer that reads another layer's cache.
        """
        decodes = None if attn_metadata is None else attn_metadata.decodes
        rest = None if attn_metadata is None else attn_metadata.rest
        if decodes is None:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                rest,
                output,
                output_scale=output_scale,
                output_block_scale=output_block_scale,
            )
            return output
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization is not supported by paged_decode")
        if attn_metadata.mixed:
            self._together(layer, query, kv_cache, attn_metadata, output)
            return output
        tokens = decodes.tokens
        if query.shape[0] != tokens:  # a slice takes the host a microsecond
            self._decode(layer, query[:tokens], kv_cache, attn_metadata, output[:tokens])
        else:
            self._decode(layer, query, kv_cache, attn_metadata, output)
        if rest is not None:
            new = (None if x is None else x[tokens:] for x in (key, value))
            super().forward(layer, query[tokens:], *new, kv_cache, rest, output[tokens:])
        return output

    def _decode(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: PagedMetadata,
        output: torch.Tensor,
    ) -> None:
        decodes = metadata.decodes
        assert decodes is not None
        scales = self._scales(layer, query)
        query, keys, values = self._read(query, kv_cache, output.dtype)
        if decodes.queries > 1:
            rows = decodes.requests, decodes.queries
            query, output = (x.view(*rows, *x.shape[1:]) for x in (query, output))
        paged_decode(
            query,
            keys,
            values,
            decodes.block_table,
            decodes.lengths,
            scale=self.scale,
            window=self.window,
            score_mod=self._mod,
            sinks=self.sinks,
            **scales,
            out=output,
            plan=metadata.plans.get(self.plan_key),
        )

    def _together(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: PagedMetadata,
        output: torch.Tensor,
    ) -> None:
        """Attend with prefill chunks and decodes in one launch."""
        tokens = metadata.num_actual_tokens
        scales = self._scales(layer, query)
        query, keys, values = self._read(query[:tokens], kv_cache, output.dtype)
        out = output[:tokens]
        plan = metadata.mixed[self.plan_key]
        mixed_attention(
            query,
            keys,
            values,
            plan,
            scale=self.scale,
            score_mod=self._mod,
            sinks=self.sinks,
            out=out,
            **scales,
        )

    def _read(
        self, query: torch.Tensor, kv_cache: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries in `dtype`, without their scale, and views of K and V."""
        if query.dtype != dtype:
            query = query.to(dtype)
        if self._views_of is not kv_cache:  # one object, for as long as the engine has this cache
            stored = kv_cache.view(self.stored_dtype) if self.stored_dtype else kv_cache
            self._views_of, self._views = kv_cache, self.pages(stored)
        return query, *self._views

    def _scales(self, layer: Any, query: torch.Tensor) -> dict[str, Any]:
        """Scales of an FP8 cache, as `paged_decode` takes them. That of queries, which vLLM rounds to FP8 beside such a
        cache, is a factor of the scores like K's."""
        if not self.stored_dtype:
            return {}
        coded = query.dtype == FP8
        if self.scales_by_head and layer._k_scale.numel() > 1:
            keys = layer._k_scale * layer._q_scale if coded else layer._k_scale
            return {"k_scale": keys, "v_scale": layer._v_scale}
        own = layer._q_scale_float if coded else 1.0
        return {"k_scale": layer._k_scale_float * own, "v_scale": layer._v_scale_float}
