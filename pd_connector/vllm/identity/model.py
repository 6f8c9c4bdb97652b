# SPDX-License-Identifier: Apache-2.0
"""Which model a rank of vLLM serves, as it is loaded."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pd_connector.agent.advertised_model import DraftFiles
from pd_connector.config import Config
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.geometry import DRAFT_LAYERS, Shard
from pd_connector.kv.model import (
    MOST_TEXT,
    LayerFacts,
    ModelFacts,
    draft_fingerprint,
    layer_facts,
)
from pd_connector.kv.model_config import printable, served_config
from pd_connector.memory.parameters import Loaded, loaded_fingerprint, loaded_full_fingerprint
from pd_connector.vllm.identity.checkpoint import model_files, read_config, remote_code
from pd_connector.vllm.identity.layers import CacheId, draft_names, identify
from pd_connector.vllm.identity.owners import model_of, owners
from pd_connector.vllm.identity.rotary import rotation_text
from pd_connector.vllm.identity.weight_loads import LOADS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger("pd_connector.vllm")

_ROTARY_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def identify_caches(vllm_config: "VllmConfig", names: list[str]) -> dict[str, CacheId]:
    """Number and label of each cache of this rank. Caches of a draft model have numbers of their own."""
    if vllm_config.speculative_config is None:
        return identify(names)
    modules = _modules(vllm_config)
    ordered = [name for name in modules if name in set(names)]
    models = {name: _model_number(modules[name]) for name in ordered}
    layers = int(vllm_config.model_config.get_total_num_hidden_layers())
    rest = [name for name in names if name not in models]
    return identify(names, draft_names([*ordered, *rest], layers, models))


def model_facts(
    vllm_config: "VllmConfig",
    config: Config,
    caches: Mapping[str, CacheId],
    shard: Shard,
    loaded: Loaded,
    files: Sequence[CheckpointFiles] | None,
    draft: DraftFiles | bytes = b"",
) -> ModelFacts:
    """The facts about this rank's model that peers compare, as far as they are available before files are read.

    Args:
        caches: the caches of this rank.
        shard: the part of the model that it holds.
        loaded: its parameters in memory (`loaded_weights`).
        files: the files that they were loaded from (`loaded_files`).
        draft: the draft model (`draft_model`).
    """
    model = vllm_config.model_config
    served = read_config(model)
    dummy = vllm_config.load_config.load_format == "dummy"
    module = None
    if files is None and not dummy:
        logger.warning(
            "weights of %s are not files on this disk: %s", model.model, _what_then(loaded, config)
        )
        module = loaded_model(vllm_config) if loaded.sampled else None
    compared = served_config(
        served,
        dtype=str(model.dtype),
        quantization=None if "quantization_config" in served else _plain(model.quantization),
        quantised_online=_setting(getattr(model, "quantization_config", None)),
        code=remote_code(model, served),
        **_encoder(model),
    )
    return ModelFacts(
        config=compared.fingerprint,
        weights=_made_up(model.seed) if dummy else b"",
        loaded=b"" if module is None else loaded_full_fingerprint(module),
        held=f"rank {shard.tp_rank} of {shard.tp_size}, layers {shard.first_layer}-{shard.stop_layer}",
        model_id=config.model_id,
        draft=draft if isinstance(draft, bytes) else b"",
        layers=_layer_facts(vllm_config, caches, served),
        source=printable(str(model.model)[-MOST_TEXT:]),
        fields=compared.fields,
        reading=files is not None or isinstance(draft, DraftFiles),
    )


def loaded_files(vllm_config: "VllmConfig") -> tuple[CheckpointFiles, ...] | None:
    """The files of the model's last load; None if they are unknown."""
    load = vllm_config.load_config
    if load.load_format == "dummy":
        return None
    others = getattr(loaded_model(vllm_config), "secondary_weights", ())
    return model_files(vllm_config.model_config, load, others, LOADS.files)


def loaded_weights(vllm_config: "VllmConfig") -> Loaded:
    """Samples of the parameters in memory; empty if the model cannot be reached, or if the engine moves experts between
    ranks while it serves."""
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        return Loaded()
    model = loaded_model(vllm_config)
    return Loaded() if model is None else loaded_fingerprint(model)


def _what_then(loaded: Loaded, config: Config) -> str:
    if config.model_id:
        return f"engines with model_id {config.model_id!r} are taken for the same"
    if loaded.sampled:
        return (
            "parameters in memory are compared instead, which needs the same parallelism on both "
            "sides, or the same model_id (config key model_id)"
        )
    return "no session is opened unless both engines have the same model_id (config key model_id)"


def _modules(vllm_config: "VllmConfig") -> dict[str, torch.nn.Module]:
    """Attention layers by name, in the order in which vLLM made them: the model's own first."""
    context = vllm_config.compilation_config.static_forward_context
    return {
        name: module for name, module in context.items() if hasattr(module, "get_kv_cache_spec")
    }


def loaded_model(vllm_config: "VllmConfig") -> torch.nn.Module | None:
    """The model itself, if it can be reached."""
    first = next(iter(_modules(vllm_config).values()), None)
    return None if first is None else model_of(first)


def _model_number(module: torch.nn.Module) -> int | None:
    model = model_of(module)
    return None if model is None else id(model)


def _made_up(seed: int | None) -> bytes:
    return hashlib.blake2b(f"dummy weights of seed {seed}".encode(), digest_size=16).digest()


def _plain(quantization: str | None) -> str | None:
    """A quantisation method without the name of the kernel that a device has for it."""
    return None if quantization is None else str(quantization).removesuffix("_marlin")


def _setting(setting: object) -> str | None:
    """An operator's setting as text; None if it is not set."""
    return None if setting is None else str(setting)


def _encoder(model: "ModelConfig") -> dict[str, str | None]:
    """The operator's settings of the encoder (of images and other inputs) that change its output."""
    settings = getattr(model, "multimodal_config", None)
    rate = getattr(settings, "video_pruning_rate", None)
    method = getattr(settings, "video_pruning_method", "evs")
    return {
        "encoder_attention": _setting(getattr(settings, "mm_encoder_attn_dtype", None)),
        "video_pruning": f"{rate:g} by {method}" if rate else None,
    }


def _may_draft(vllm_config: "VllmConfig", caches: Mapping[str, CacheId]) -> bool:
    """Whether some rank of this engine may have layers of a draft model. Some drafts keep no KV (Medusa), or read the
    main model's KV (Gemma 4). With a pipeline, another rank may have the layers."""
    staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    return staged or any(cache.number >= DRAFT_LAYERS for cache in caches.values())


def draft_model(
    vllm_config: "VllmConfig", settings: Config, caches: Mapping[str, CacheId]
) -> DraftFiles | bytes:
    """The draft model whose layers are among these caches: its files, still to be read, or its fingerprint if it has no
    files. Empty if there is no draft model, or its weights are unknown. Drafts that are layers of the model (MTP) have
    the model's files."""
    if not _may_draft(vllm_config, caches):
        return b""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or speculative is None:
        return b""
    try:
        load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        files = model_files(draft, load, loaded=LOADS.files)
        serving = {"method": str(speculative.method), "dtype": str(draft.dtype)}
        config = served_config(read_config(draft), **serving).fingerprint
    except Exception as error:  # a draft model is optional: no error of it stops the engine
        logger.warning("the draft model is not known, so this engine takes no KV: %r", error)
        return b""
    if vllm_config.load_config.load_format == "dummy":
        return draft_fingerprint(config, _made_up(vllm_config.model_config.seed))
    if files is not None:
        return DraftFiles(config, files)
    if settings.model_id:
        return draft_fingerprint(config, settings.model_id.encode())
    logger.warning(
        "weights of the draft model are not files on this disk: this engine takes no KV from others, whose drafts may be "
        "other ones; set model_id (config key) on all engines that serve both models"
    )
    return b""


def _layer_facts(
    vllm_config: "VllmConfig", caches: Mapping[str, CacheId], served: Mapping[str, Any]
) -> tuple[LayerFacts, ...]:
    modules = _modules(vllm_config)
    alike: dict[tuple[str, str, str], list[int]] = {}
    for name, (number, label) in caches.items():
        module = modules.get(name)
        attention = "" if module is None else _attention_text(module)
        rotation = None if module is None else rotation_text(module)
        if module is not None and (kind := getattr(module, "mamba_type", None)):
            attention, rotation = f"state of {kind.name}", ""
        elif rotation is None:
            rotation = _configured_rotation(vllm_config, served)
        alike.setdefault((label, attention, rotation), []).append(number)
    return layer_facts(alike)


def _attention_text(module: torch.nn.Module) -> str:
    """A layer's scale, soft cap, window and the like, as its attention kernel gets them."""
    impl = getattr(module, "impl", module)
    scale = float(getattr(impl, "scale", getattr(module, "scale", 0.0)) or 0.0)
    cap = float(getattr(impl, "logits_soft_cap", 0.0) or 0.0)
    window = getattr(module, "sliding_window", None) or 0
    parts = [f"scale {scale:.6g}", f"soft cap {cap:.6g}", f"window {window}"]
    if getattr(impl, "alibi_slopes", None) is not None:
        parts.append("ALiBi")
    if getattr(module, "has_sink", False) or getattr(impl, "sinks", None) is not None:
        parts.append("sinks")
    # Llama 4's queries grow with the position if --max-model-len is above 32,768, or if the generation
    # config says so.
    if getattr(next(owners(module), None), "attn_temperature_tuning", False):
        parts.append("temperature tuning")
    return ", ".join(parts)


def _configured_rotation(vllm_config: "VllmConfig", served: Mapping[str, Any]) -> str:
    """The config's settings of rotation, for a layer without a known module; empty if there are none."""
    fields = _of_rotation(served)
    if not fields:
        return ""
    longest = vllm_config.model_config.max_model_len
    return json.dumps({**fields, "max_model_len": longest}, sort_keys=True, default=str)


def _of_rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says of rotation, also in configs within it."""
    fields = {name: config[name] for name in _ROTARY_KEYS if config.get(name) is not None}
    for name, value in config.items():
        if (
            name.endswith("_config")
            and isinstance(value, Mapping)
            and (inner := _of_rotation(value))
        ):
            fields[name] = inner
    return fields
