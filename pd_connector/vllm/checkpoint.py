# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's checkpoint and its config lie on this disk. A model may be named by a folder, a file, a
repository, a repository and a quantisation (GGUF), or an address of an object store."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_connector.kv.checkpoint import read_config as read_checkpoint_config
from pd_connector.kv.weights import Weights, read_weights, weight_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger("pd_connector.vllm")

_CACHE = "pd-connector/weights.json"


def weights_path(model: str, revision: str | None, weights: str = "") -> Path | None:
    """Where the weights of a model are: a folder or a file; None where they are not on this disk.

    Args:
        model: as vLLM was told.
        revision: of the repository.
        weights: where vLLM loads weights from, if it is another place.
    """
    name = weights or model
    if "://" in name:
        return None
    path = Path(name)
    if path.is_file() or (path.is_dir() and weight_files(path)):
        return path
    repository, _, quantisation = name.partition(":")
    folder = in_cache(repository, revision)
    if folder is None:
        return None
    if not quantisation:
        return folder if weight_files(folder) else None
    found = sorted(folder.rglob(f"*{quantisation}*.gguf"))
    return found[0] if len(found) == 1 else found[0].parent if found else None


def read_config(model: "ModelConfig") -> dict[str, Any]:
    """The config that vLLM serves: `config.json` as it is on disk, with the operator's overrides, or
    vLLM's own object where there is no such file."""
    overrides = model.hf_overrides
    place = getattr(model, "hf_config_path", None) or model.model
    folder = Path(place) if Path(place).is_dir() else in_cache(place, model.revision)
    if folder is not None and isinstance(overrides, Mapping | None):
        try:
            if (known := read_checkpoint_config(folder)) is not None:
                return _overridden(known, overrides or {})
        except (OSError, ValueError) as error:
            logger.warning("the config in %s cannot be read: %s", folder, error)
    found: dict[str, Any] = model.hf_config.to_dict()
    return found


def read_model_weights(
    model: "ModelConfig", *, full: bool, load_format: str = "auto"
) -> Weights | None:
    """Fingerprints of the weights on disk; None where they are not there, or cannot be read."""
    path = weights_path(model.model, model.revision, getattr(model, "model_weights", "") or "")
    if path is None:
        return None
    try:
        if load_format == "auto" and any(path.glob("consolidated*.safetensors")):
            load_format = "mistral"  # as vLLM decides
        return read_weights(path, full=full, cache=_cache_home() / _CACHE, load_format=load_format)
    except (OSError, ValueError) as error:
        logger.warning("weights in %s cannot be hashed: %s", path, error)
        return None


def in_cache(repository: str, revision: str | None) -> Path | None:
    """The folder of a repository in Hugging Face's cache."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except Exception as error:  # no such repository, or no name of one: whatever it is called
        logger.debug("%s is not in the cache: %s", repository, error)
        return None


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _overridden(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config with overrides, at any depth."""
    merged = dict(config)
    for name, value in overrides.items():
        below = merged.get(name)
        if isinstance(value, Mapping) and isinstance(below, dict):
            merged[name] = _overridden(below, value)
        else:
            merged[name] = value
    return merged
