# SPDX-License-Identifier: Apache-2.0
"""vLLM's own MLA layers, with their builders."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DeepseekV2Config
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import MLAAttention

LATENT, ROPE = 512, 64
NAME = "model.layers.0.self_attn.attn"


class _Projection(torch.nn.Linear):
    """`kv_b_proj` as vLLM's linear layers are called."""

    quant_method = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class LatentShape(NamedTuple):
    """The shape of an MLA layer. A head has `nope` elements without RoPE, and `value` of a value."""

    heads: int = 4
    nope: int = 32
    value: int = 32
    page: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    top_k: int = 0
    """Tokens that an indexer chooses for each query; 0 without one."""

    def save(self, folder: Path) -> Path:
        """The configuration of a model with such layers."""
        DeepseekV2Config(
            vocab_size=259,
            hidden_size=32 * self.heads,
            num_hidden_layers=2,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            kv_lora_rank=LATENT,
            q_lora_rank=None,
            qk_rope_head_dim=ROPE,
            qk_nope_head_dim=self.nope,
            v_head_dim=self.value,
            architectures=["DeepseekV2ForCausalLM"],
            **({"index_topk": self.top_k} if self.top_k else {}),
        ).save_pretrained(folder)
        return folder

    @property
    def scale(self) -> float:
        return (self.nope + ROPE) ** -0.5

    def layer(self, model: Path, backend: str, **engine: Any) -> tuple[Any, Any]:
        """A layer as vLLM makes it for `--attention-backend`, and its builder."""
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype=str(self.dtype).removeprefix("torch."),
            block_size=self.page,
            max_model_len=512,
            attention_backend=backend,
            **{"enforce_eager": True, **engine},
        ).create_engine_config()
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with set_current_vllm_config(config):
                project = _Projection(LATENT, self.heads * (self.nope + self.value), bias=False)
                sparse: dict[str, Any] = {}
                if self.top_k:
                    most = config.scheduler_config.max_num_batched_tokens
                    chosen = torch.full((most, self.top_k), -1, dtype=torch.int32)
                    sparse = {"use_sparse": True, "topk_indices_buffer": chosen.to(self.device)}
                layer = MLAAttention(
                    *(self.heads, self.scale, self.nope, ROPE, self.value, None, LATENT, project),
                    cache_config=config.cache_config,
                    prefix=NAME,
                    **sparse,
                )
                spec = layer.get_kv_cache_spec(config)
                made = layer.attn_backend.get_builder_cls()
                return layer, made(spec, [NAME], config, torch.device(self.device))
        finally:
            torch.set_default_dtype(before)
