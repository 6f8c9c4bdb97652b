# SPDX-License-Identifier: Apache-2.0
"""Which model a rank of SGLang serves, as it is loaded, told as every engine tells it."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pd_connector.config import Config
from pd_connector.kv.checkpoint import read_config
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import (
    LayerFacts,
    ModelFacts,
    config_fingerprint,
    rotation_fingerprint,
)
from pd_connector.kv.rotation import rotation_of
from pd_connector.kv.weights import Weights, read_weights

logger = logging.getLogger("pd_connector.sglang")

_LABEL = "model/attention"
_MOST_TEXT = 200
_TABLE_POSITIONS = 32


def model_facts(scheduler: Any, config: Config, shard: Shard) -> ModelFacts:
    """Everything that peers compare of the model of this rank.

    Args:
        scheduler: SGLang's, whose model is loaded.
        shard: what this rank holds of the model.
    """
    model = scheduler.model_config
    folder = _folder(model)
    weights = _weights(scheduler, folder, full=config.weights == "full")
    if weights is None:
        logger.warning(
            "weights of %s are not files on this disk: no session is opened unless both engines have "
            "the same model_id (config key model_id)",
            model.model_path,
        )
        weights = Weights(b"")
    served = _config(scheduler, folder)
    return ModelFacts(
        config=config_fingerprint(
            served,
            dtype=str(model.dtype),
            quantization=None if "quantization_config" in served else model.quantization,
        ),
        weights=weights.sampled,
        weights_full=weights.full,
        model_id=config.model_id,
        layers=_layer_facts(scheduler.tp_worker.model_runner.model, shard),
    )


def kv_scales(scheduler: Any) -> dict[int, tuple[float, float]]:
    """What K and V of an FP8 pool are to be multiplied with, by layer; 1 where a model has none."""
    return {
        number: (float(attention.k_scale_float or 1.0), float(attention.v_scale_float or 1.0))
        for number, attention, _ in _layers(scheduler.tp_worker.model_runner.model)
    }


def _folder(model: Any) -> Path | None:
    """Where the checkpoint lies on this disk."""
    if Path(model.model_path).is_dir():
        return Path(model.model_path)
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(model.model_path, revision=model.revision, local_files_only=True)
    except Exception:  # no such repository, or no name of one: whatever it is called
        return None
    return Path(found)


def _config(scheduler: Any, folder: Path | None) -> dict[str, Any]:
    """`config.json` as it is on disk, with the operator's overrides; SGLang's own object where there is
    none. (That object has what SGLang adds to it.)"""
    overrides = json.loads(scheduler.server_args.json_model_override_args or "{}")
    known = None if folder is None else read_config(folder)
    if known is not None:
        return {**known, **overrides}
    found: dict[str, Any] = scheduler.model_config.hf_config.to_dict()
    return found


def _weights(scheduler: Any, folder: Path | None, *, full: bool) -> Weights | None:
    if folder is None or scheduler.server_args.load_format == "dummy":
        return None
    try:
        return read_weights(folder, full=full, load_format=scheduler.server_args.load_format)
    except (OSError, ValueError) as error:
        logger.warning("weights in %s cannot be hashed: %s", folder, error)
        return None


def _layer_facts(model: torch.nn.Module, shard: Shard) -> tuple[LayerFacts, ...]:
    """What this rank's layers do, as they are loaded."""
    alike: dict[tuple[str, str], list[int]] = {}
    for number, attention, rotary in _layers(model):
        if shard.first_layer <= number < shard.stop_layer:
            text = "" if rotary is None else _rotation_text(rotary)
            alike.setdefault((_attention_text(attention), text), []).append(number)
    return tuple(
        LayerFacts(
            layers=tuple(sorted(numbers)),
            label=_LABEL,
            attention=attention,
            rotation=rotation_fingerprint(rotation) if rotation else b"",
            rotated=rotation[:_MOST_TEXT],
        )
        for (attention, rotation), numbers in alike.items()
    )


def _layers(model: torch.nn.Module) -> Iterator[tuple[int, Any, torch.nn.Module | None]]:
    """Number, attention and rotation of each layer; MLA has two attentions of one number."""
    modules = dict(model.named_modules())
    seen: set[int] = set()
    for name, module in modules.items():
        if type(module).__name__ != "RadixAttention" or module.layer_id in seen:
            continue
        seen.add(int(module.layer_id))
        block = modules[name.rpartition(".")[0]]
        rotary = [part for part in block.children() if "RotaryEmbedding" in type(part).__name__]
        yield int(module.layer_id), module, rotary[0] if rotary else None


def _attention_text(attention: Any) -> str:
    window = max(0, int(attention.sliding_window_size))
    return f"scale {attention.scaling:.6g}, soft cap {attention.logit_cap:.6g}, window {window}"


def _rotation_text(rotary: Any) -> str:
    """The plain rotation by its values, any other by the table that is in use."""
    if type(rotary).__name__ == "RotaryEmbedding":
        return rotation_of(
            {"rope_type": "default", "rope_theta": rotary.base},
            dims=int(rotary.rotary_dim),
            interleaved=not rotary.is_neox_style,
            max_positions=int(rotary.max_position_embeddings),
        ).text
    tables = {
        name: [f"{number:.3f}" for number in table[:_TABLE_POSITIONS].double().flatten().tolist()]
        for name, table in rotary.named_buffers(recurse=False)
        if table.is_floating_point()
    }
    return f"{type(rotary).__name__} {json.dumps(tables, sort_keys=True)}"
