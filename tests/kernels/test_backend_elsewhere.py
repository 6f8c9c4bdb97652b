# SPDX-License-Identifier: Apache-2.0
"""An engine with our backends says at its start which layers use another. The layers are vLLM's own, MiMo-V2's
included, which choose their backend themselves."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm")

from backend_layers import MODEL
from latent_layers import LatentShape
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.mimo_v2 import MiMoV2Attention
from vllm.model_executor.models.openpangu import OpenPanguSinkAttention
from vllm.platforms import current_platform
from vllm.v1.attention.backends import flash_attn, registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.worker_base import WorkerWrapperBase

from pd_kernels.vllm import other_backends, plugin

pytestmark = [
    pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build is wanted"),
    pytest.mark.usefixtures("registered_backends"),
]

NAMES = [f"model.layers.{layer}.self_attn" for layer in range(3)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank of one, which linear layers want."""
    rendezvous: Path = tmp_path_factory.mktemp("ranks") / "rendezvous"
    with set_current_vllm_config(engine(None)):
        parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def engine(backend: str | None, **options: Any) -> Any:
    return EngineArgs(
        model=str(MODEL),
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        attention_backend=backend,
        **options,
    ).create_engine_config()


def started(config: Any, v_dim: int | None) -> list[str]:
    """The warnings of a worker that has three layers: the first is vLLM's plain one, the others MiMo-V2's with values
    of `v_dim` elements."""
    with set_current_vllm_config(config):
        plain = Attention(4, 64, 0.125, 2, cache_config=config.cache_config, prefix=NAMES[0])
        mimo = [
            MiMoV2Attention(*(256, 4, 2, 192, v_dim), cache_config=config.cache_config, prefix=name)
            for name in NAMES[1:]
        ]
    assert len(config.compilation_config.static_forward_context) == len([plain, *mimo])
    return warnings(config)


def warnings(config: Any) -> list[str]:
    """What is said when a worker that has loaded its layers gets its KV cache."""
    worker = WorkerWrapperBase()
    worker.vllm_config = config
    caches: list[Any] = []
    worker.worker = SimpleNamespace(initialize_from_config=caches.append)
    with mock.patch.object(other_backends.logger, "warning_once") as log:
        worker.initialize_from_config(["the cache"])
    assert caches == ["the cache"]
    return [call.args[0] % call.args[1:] for call in log.call_args_list]


@pytest.mark.usefixtures("alone")
def test_layers_of_a_model_that_chooses_its_backend_are_named() -> None:
    (said,) = started(engine("CUSTOM"), 128)
    assert said == (
        "CUSTOM was selected, but layers use TRITON_ATTN_DIFFKV (TritonAttentionDiffKVBackend): "
        "model.layers.N.self_attn.attn (N = 1, 2). pd_kernels does not decode them, because LlamaForCausalLM chooses "
        "their backend itself, and ours is in the place of FLASH_ATTN_DIFFKV, which needs FlashAttention 3 or 4."
    )


@pytest.mark.usefixtures("alone")
def test_layers_of_a_model_that_names_vllm_s_class_are_named() -> None:
    """openPangu's, whose sequences begin with sink tokens. Its class of vLLM needs FlashAttention, which a CPU does not have."""
    config = engine("CUSTOM")
    own = {"qk_nope_dim": 128, "qk_rope_dim": 64, "v_channels": 128, "param_sink_number": 16}
    told = SimpleNamespace(**own, rms_norm_eps=1e-6, torch_dtype=torch.float32)
    with (
        set_current_vllm_config(config),
        mock.patch.object(OpenPanguSinkAttention, "_init_rotary_emb"),
        mock.patch.object(flash_attn, "get_flash_attn_version", return_value=3),
    ):
        layer = OpenPanguSinkAttention(
            told, 256, 4, 2, cache_config=config.cache_config, prefix=NAMES[0]
        )
    (said,) = warnings(config)
    used = layer.attn.attn_backend
    assert said == (
        f"CUSTOM was selected, but layers use FLASH_ATTN_DIFFKV ({used.__name__}): "
        "model.layers.N.self_attn.attn (N = 0). pd_kernels does not decode them, because LlamaForCausalLM chooses "
        "their backend itself."
    )


@pytest.mark.usefixtures("alone")
def test_nothing_is_said_where_all_layers_use_ours() -> None:
    assert started(engine("CUSTOM"), None) == []


@pytest.mark.parametrize("backend", [None, "TRITON_ATTN", "TORCH_SDPA"])
@pytest.mark.usefixtures("alone")
def test_nothing_is_said_where_custom_was_not_selected(backend: str | None) -> None:
    assert started(engine(backend), 128) == []


@pytest.mark.usefixtures("alone")
def test_nothing_is_said_of_layers_for_which_another_backend_was_selected() -> None:
    config = engine("CUSTOM")
    theirs = AttentionBackendEnum.TRITON_ATTN_DIFFKV
    config.attention_config.backend_per_kind = {"full_attention": theirs}
    assert started(config, 128) == []


def test_mla_layers_that_vllm_gives_another_backend_than_custom_are_named(tmp_path: Path) -> None:
    _, builder = LatentShape().layer(LatentShape().save(tmp_path), "CUSTOM")
    (said,) = warnings(builder.vllm_config)
    assert "but layers use CPU_MLA" in said
    assert said.endswith("because CUSTOM is not for MLA, which has PD_KERNELS_MLA.")


def test_nothing_is_said_of_mla_layers_that_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.MLA_VARIABLE, "CPU_MLA")
    with mock.patch.dict(registry._ATTN_OVERRIDES):
        plugin.register()
        _, builder = LatentShape().layer(LatentShape().save(tmp_path), "CPU_MLA")
        assert warnings(builder.vllm_config) == []
