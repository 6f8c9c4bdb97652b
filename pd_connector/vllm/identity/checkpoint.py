# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's checkpoint and its config lie on this disk. A model is named by a folder, a file, a repository, a
repository and a quantisation (GGUF), or an address in an object store."""

import hashlib
import logging
import os
from collections.abc import Hashable, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pd_connector.kv.checkpoint import ConfigText
from pd_connector.kv.checkpoint import read_config as read_folder
from pd_connector.kv.checkpoint_files import CheckpointFiles, weight_files
from pd_connector.vllm.identity.config_files import folder_of, folder_text, in_cache, places

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig

logger = logging.getLogger("pd_connector.vllm")

_MISTRALS_WEIGHTS = "consolidated*.safetensors"
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_READ_FROM_DISK = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache"),
        *("pt", "runai_streamer", "runai_streamer_sharded", "sharded_state", "gguf"),
        "bitsandbytes",
    }
)
"""Load formats with which vLLM reads files in the model's folder. Others are left out: Tensorizer's files lie
elsewhere, a weight cache may be older than its files, and a plugin's loader is unknown."""


def weights_path(
    model: str,
    revision: str | None,
    weights: str = "",
    download_dir: str | None = None,
    subfolder: str = "",
) -> Path | None:
    """Where the weights of a model are: a folder or a file; None if they are not on this disk.

    Args:
        model: the name that vLLM was given.
        revision: revision of the repository.
        weights: another place from which vLLM loads weights, if there is one.
        download_dir: vLLM's folder for repositories, if not Hugging Face's cache.
        subfolder: subfolder of the model's folder.
    """
    name = weights or model
    if "://" in name:
        return None
    path = Path(name) / subfolder
    if path.is_file() or weight_files(path):
        return path
    repository, _, quantisation = name.partition(":")
    folder = in_cache(repository, revision, download_dir)
    if folder is None:
        return None
    if not quantisation:
        folder /= subfolder
        return folder if weight_files(folder) else None
    files = sorted(folder.rglob(f"*{quantisation}*.gguf"))
    return files[0] if len(files) == 1 else files[0].parent if files else None


def read_config(model: "ModelConfig") -> dict[str, Any]:
    """The config that vLLM serves: `config.json` as it was on disk when vLLM read it, with the operator's overrides.
    If that file is not known, the config is vLLM's own object, which also has vLLM's additions. If vLLM reads
    `params.json` instead, its content is added under the key `params.json`."""
    overrides = model.hf_overrides
    if isinstance(overrides, Mapping | None):
        try:
            text = folder_text(model, places(model)[0])
            if text is not None and text.config is not None:
                config = dict(text.config)
                if text.params and _mistrals(text, str(getattr(model, "config_format", "auto"))):
                    config["params.json"] = text.params
                return _overridden(config, overrides or {}, model.hf_config)
        except (OSError, ValueError) as error:
            logger.warning("the config of %s cannot be read: %s", model.model, error)
    served: dict[str, Any] = model.hf_config.to_dict()
    return served


def read_processor_files(model: "ModelConfig") -> dict[str, str]:
    """Text, by name, of the checkpoint's files about the processing of images and other inputs."""
    folder = folder_of(model.model, model.revision)
    files = () if folder is None else (folder / name for name in _PROCESSOR_FILES)
    return {file.name: file.read_text(errors="replace") for file in files if file.is_file()}


def remote_code(model: "ModelConfig", served: Mapping[str, Any]) -> str | None:
    """Fingerprint of the code that comes with a checkpoint, if vLLM runs that code (`--trust-remote-code`);
    None if not.

    Args:
        served: the model's config.
    """
    by_transformers = getattr(model, "using_transformers_backend", lambda: True)
    named = served.get("auto_map") or {}
    if not named or not model.trust_remote_code or not by_transformers():
        return None
    references = [str(each) for each in named.values()]
    elsewhere = {name.partition("--")[0] for name in references if "--" in name}
    try:
        own = folder_text(model, model.model)
    except (OSError, ValueError):
        return os.urandom(16).hex()  # equal to no other
    codes = {model.model: None if own is None else own.code}
    for name in sorted(elsewhere):
        folder = in_cache(name, model.code_revision)
        codes[name] = None if folder is None else read_folder(folder).code
    digest = hashlib.blake2b(digest_size=16)
    for name, code in codes.items():
        digest.update(repr((name, model.code_revision) if code is None else code).encode())
    return digest.hexdigest()


class Place(NamedTuple):
    """A checkpoint's place, as vLLM's loader is given it."""

    name: str
    revision: str | None
    subfolder: str = ""


def model_files(
    model: "ModelConfig",
    load: "LoadConfig",
    others: Iterable[Any] = (),
    loaded: Mapping[Hashable, CheckpointFiles] = MappingProxyType({}),
) -> tuple[CheckpointFiles, ...] | None:
    """The files from which a model is loaded, the checkpoints in order. None if some are not on this disk, or are
    not the files that were loaded.

    Args:
        others: other sources of the model, such as another model that is a part of it: `Source`s of vLLM's
            loader.
        loaded: checkpoints that were opened when vLLM loaded them. Others are opened now.
    """
    load_format = str(load.load_format)
    if load_format not in _READ_FROM_DISK:
        logger.info("--load-format %s: files on this disk do not describe the weights", load_format)
        return None
    places = [Place(getattr(model, "model_weights", "") or model.model, model.revision)]
    places += [Place(each.model_or_path, each.revision, each.subfolder or "") for each in others]
    checkpoints: list[CheckpointFiles] = []
    for place in places:
        files = loaded.get(place)
        if files is None:
            path = weights_path(*place[:2], "", load.download_dir, place.subfolder)
            files = None if path is None else open_files(path, load)
        if files is None or files.problem:
            if files is not None:
                logger.warning("weights of %s are not known: %s", place.name, files.problem)
            return None
        checkpoints.append(files)
    return tuple(checkpoints)


def open_files(path: Path, load: "LoadConfig") -> CheckpointFiles | None:
    """Open the weight files that vLLM loads from a folder, or a single file; None if it loads none there."""
    load_format = str(load.load_format)
    if load_format not in _READ_FROM_DISK:
        return None
    try:
        if load_format == "auto" and any(path.glob(_MISTRALS_WEIGHTS)):
            load_format = "mistral"  # as vLLM decides
        return CheckpointFiles.open(path, load_format)
    except OSError as error:
        logger.warning("weights in %s cannot be read: %s", path, error)
        return None


def _mistrals(text: ConfigText, config_format: str) -> bool:
    """Whether vLLM takes the config from `params.json`."""
    if config_format != "auto":
        return config_format == "mistral"
    return any(fnmatch(name, _MISTRALS_WEIGHTS) for name in text.names)


def _overridden(
    config: dict[str, Any], overrides: Mapping[str, Any], served: object
) -> dict[str, Any]:
    """A config with overrides, merged as vLLM merges them. An override of a nested config goes into that config;
    any other value replaces the old value.

    Args:
        served: vLLM's own object of this config.
    """
    merged = dict(config)
    for name, value in overrides.items():
        below, inner = merged.get(name), getattr(served, name, None)
        if isinstance(value, Mapping) and isinstance(below, dict) and hasattr(inner, "to_dict"):
            merged[name] = _overridden(below, value, inner)
        else:
            merged[name] = value
    return merged
