# SPDX-License-Identifier: Apache-2.0
"""Which model a rank of SGLang serves, as it was loaded, in the form that every engine uses."""

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pd_connector.agent.advertised_model import DraftFiles
from pd_connector.agent.weight_loads import WeightLoads
from pd_connector.config import Config
from pd_connector.kv.checkpoint import ConfigFiles, read_config
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.geometry import Shard
from pd_connector.kv.heads import named_heads
from pd_connector.kv.model import MOST_TEXT, LayerFacts, ModelFacts, layer_facts
from pd_connector.kv.model_config import printable, served_config
from pd_connector.kv.rotation_table import Made, rotation_text
from pd_connector.memory.parameters import Loaded, loaded_fingerprint, loaded_full_fingerprint
from pd_connector.sglang.pool_settings import uses_pool
from pd_connector.sglang.settings import BACKEND

logger = logging.getLogger("pd_connector.sglang")

_LABEL = "model/attention"
_STRETCHED = frozenset({"llama3", "yarn", "deepseek_yarn"})
"""Rotations whose factor and original length SGLang uses as they are if the config has none."""

_READ_FROM_DISK = frozenset(
    {
        *("auto", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt"),
        *("bitsandbytes", "gguf", "layered", "runai_streamer", "sharded_state"),
    }
)
"""Load formats with which SGLang reads the files in the model's folder."""


LOADS = WeightLoads()
"""Checkpoints that SGLang has loaded in this process, by path and revision."""

CONFIGS: dict[tuple[str, str | None], dict[str, Any] | str | None] = {}
"""Configs that SGLang has read in this process, or why they are not known, by path and revision; None where there is
no `config.json`."""


def model_facts(
    scheduler: Any,
    config: Config,
    shard: Shard,
    loaded: Loaded,
    files: CheckpointFiles | None,
    draft: DraftFiles | bytes = b"",
) -> ModelFacts:
    """Everything about this rank's model that peers compare, as far as it is known before files were read.

    Args:
        scheduler: SGLang's, with its model loaded.
        shard: the part of the model that this rank holds.
        loaded: samples of its parameters in memory (`loaded_weights`).
        files: the files that the model was loaded from (`loaded_files`).
        draft: the draft model (`drafts.draft_model`).
    """
    model = scheduler.model_config
    folder = checkpoint_folder(model.model_path, model.revision)
    if files is None:
        logger.warning(
            "weights of %s are not files on this disk: parameters in memory are compared between SGLang's "
            "ranks that hold the same part of the model; other sessions need the same model_id on both "
            "sides (config key model_id)",
            model.model_path,
        )
    served = _config(scheduler, folder)
    in_memory = bool(loaded.sampled and files is None)
    module = scheduler.tp_worker.model_runner.model
    compared = served_config(
        served,
        dtype=str(model.dtype),
        quantization=None if "quantization_config" in served else model.quantization,
    )
    return ModelFacts(
        config=compared.fingerprint,
        loaded=loaded_full_fingerprint(module) if in_memory else b"",
        held=f"SGLang's rank {shard.tp_rank} of {shard.tp_size}, layers {shard.first_layer}-{shard.stop_layer}",
        model_id=config.model_id,
        layers=_layer_facts(scheduler.tp_worker.model_runner.model, shard),
        source=printable(str(model.model_path)[-MOST_TEXT:]),
        fields=compared.fields,
        reading=files is not None or isinstance(draft, DraftFiles),
        draft=draft if isinstance(draft, bytes) else b"",
    )


def kv_scales(model: torch.nn.Module) -> dict[int, tuple[float, float]]:
    """Factors for K and V of an FP8 pool, by layer; 1 if the model has none."""
    return {
        number: (float(attention.k_scale_float or 1.0), float(attention.v_scale_float or 1.0))
        for number, attention, _ in _layers(model)
    }


def kv_heads(model: torch.nn.Module) -> dict[int, frozenset[int]]:
    """For each layer, by number: the numbers of KV heads in the whole model that its modules name."""
    modules = dict(model.named_modules())
    heads: dict[int, frozenset[int]] = {}
    for name, module in modules.items():
        if type(module).__name__ == "RadixAttention":
            number = int(module.layer_id)
            heads[number] = heads.get(number, frozenset()) | _named_around(modules, name)
    return heads


def _named_around(modules: Mapping[str, torch.nn.Module], name: str) -> frozenset[int]:
    """Numbers of heads in the nearest module around this module that names any, up to the list of layers."""
    while name := name.rpartition(".")[0]:
        if isinstance(modules[name], torch.nn.ModuleList):
            break
        if named := named_heads(modules[name].modules()):
            return named
    return frozenset()


def checkpoint_folder(model_path: str, revision: str | None) -> Path | None:
    """Where the checkpoint lies on this disk: a folder, or one file (GGUF)."""
    if Path(model_path).exists():
        return Path(model_path)
    try:
        from huggingface_hub import snapshot_download

        snapshot = snapshot_download(model_path, revision=revision, local_files_only=True)
    except Exception:  # no such repository, or not a repository's name, whatever it raises
        return None
    return Path(snapshot)


def _config(scheduler: Any, folder: Path | None) -> dict[str, Any]:
    """`config.json` as it was on disk when SGLang read it, with the operator's overrides. If that file is not known,
    the config is SGLang's own object, which also has SGLang's additions."""
    overrides = json.loads(scheduler.server_args.json_model_override_args or "{}")
    model = scheduler.model_config
    config = CONFIGS.get((model.model_path, model.revision))
    if config is None and folder is not None:
        config = read_config(folder).config
    if isinstance(config, dict):
        return {**config, **overrides}
    if config is not None:
        logger.warning("the config of %s is not known: %s", model.model_path, config)
    served: dict[str, Any] = model.hf_config.to_dict()
    return served


def config_made(
    original: Callable[..., Any], model: Any, model_path: str, *args: Any, **options: Any
) -> None:
    """SGLang reads a model's config. The files are held open meanwhile. SGLang reads the config of a place once in a
    process, so the first time counts."""
    arguments = inspect.signature(original).bind(model, model_path, *args, **options).arguments
    place = model_path, arguments.get("revision")
    with ExitStack() as held:
        files = None
        try:
            if place not in CONFIGS and (folder := checkpoint_folder(*place)) is not None:
                files = held.enter_context(ConfigFiles(folder))
        except Exception as error:  # must not stop SGLang
            logger.warning("the config of %s cannot be looked at: %r", model_path, error)
        original(model, model_path, *args, **options)
        if files is not None:
            CONFIGS[place] = _config_text(files)


def _config_text(files: ConfigFiles) -> dict[str, Any] | str | None:
    """What the files say, or why it is not known what they said."""
    if exchanged := files.exchanged:
        return f"{exchanged} was replaced while SGLang read it"
    try:
        return files.text().config
    except (OSError, ValueError) as error:
        return str(error)


def prepares(original: Callable[..., Any], loader: Any, *args: Any, **options: Any) -> Any:
    """SGLang's loader finds or downloads the files of a checkpoint, and reads them next. They are opened here, so that
    their fingerprint is that of the loaded files, even if the names later lead to other files."""
    prepared = original(loader, *args, **options)
    try:
        arguments = inspect.signature(original).bind(loader, *args, **options).arguments
        load_format = loader.load_config.load_format
        load_format = str(getattr(load_format, "value", load_format))
        place = arguments["model_name_or_path"], arguments["revision"]
        LOADS.begin(place, CheckpointFiles.open(Path(prepared[0]), load_format))
    except Exception as error:  # must not stop SGLang from loading
        logger.warning("the files that are loaded cannot be looked at: %r", error)
    return prepared


def loads(original: Callable[..., Any], runner: Any, *args: Any, **options: Any) -> Any:
    """SGLang loads a model."""
    settings = runner.server_args
    pools = uses_pool()
    ours = pools or settings.disaggregation_transfer_backend == BACKEND
    LOADS.reads = pools or (ours and settings.disaggregation_mode != "null")
    if ours:
        _loads_next(runner)
    try:
        return original(runner, *args, **options)
    finally:
        LOADS.end()


def _loads_next(runner: Any) -> None:
    """Open the files of a model on this disk before SGLang loads it. Loaders that have no `prepares` read them directly."""
    try:
        load_format = str(
            getattr(runner, "draft_load_format", None) or runner.server_args.load_format
        )
        model = runner.model_config
        if Path(model.model_path).exists() and _from_files(runner.server_args, load_format):
            files = CheckpointFiles.open(Path(model.model_path), load_format)
            LOADS.begin((model.model_path, model.revision), files)
    except Exception as error:  # must not stop SGLang from loading
        logger.warning("the files that are loaded cannot be looked at: %r", error)


def _from_files(server_args: Any, *load_formats: str) -> bool:
    """Whether SGLang loads weights from the files in the model's folder, and reads them before it reports the load's
    end."""
    if getattr(server_args, "startup_weight_load_mode", "serial") != "serial":
        logger.info(
            "--startup-weight-load-mode %s: files are read after the load, so they do not describe the weights",
            server_args.startup_weight_load_mode,
        )
        return False
    return _READ_FROM_DISK.issuperset(load_formats)


def loaded_files(scheduler: Any) -> CheckpointFiles | None:
    """The files from which the model was loaded last; None if they are unknown."""
    return checkpoint_files(scheduler.tp_worker.model_runner)


def checkpoint_files(runner: Any) -> CheckpointFiles | None:
    """The files that one of SGLang's model runners has loaded last. The model has a runner, and so has a draft
    model."""
    load_format = str(getattr(runner, "draft_load_format", None) or runner.server_args.load_format)
    used = runner.load_config.load_format  # a weight cache has its own
    if not _from_files(runner.server_args, load_format, str(getattr(used, "value", used))):
        return None
    model = runner.model_config  # an update from another path changes it, and not the scheduler's
    files = LOADS.files.get((model.model_path, model.revision))
    folder = checkpoint_folder(model.model_path, model.revision)
    try:
        if files is None and folder is not None:
            files = CheckpointFiles.open(folder, load_format)
    except OSError as error:
        logger.warning("weights in %s cannot be read: %s", folder, error)
    if files is not None and files.problem:
        logger.warning("weights of %s are not known: %s", model.model_path, files.problem)
        return None
    return files


def loaded_weights(scheduler: Any) -> Loaded:
    """Samples of the parameters in memory; empty if SGLang moves experts between ranks while it serves."""
    if getattr(scheduler.server_args, "enable_eplb", False):
        return Loaded()
    return loaded_fingerprint(scheduler.tp_worker.model_runner.model)


def _layer_facts(model: torch.nn.Module, shard: Shard) -> tuple[LayerFacts, ...]:
    """What this rank's layers do, as they were loaded."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for number, attention, rotary in _layers(model):
        if shard.first_layer <= number < shard.stop_layer:
            text = "; ".join(rotation_text(each, _made_with(each)) for each in rotary)
            alike.setdefault((_LABEL, _attention_text(attention), text), []).append(number)
    return layer_facts(alike)


def _layers(model: torch.nn.Module) -> Iterator[tuple[int, Any, list[torch.nn.Module]]]:
    """Number, attention and rotations of each layer; with MLA, two attentions share one number."""
    modules = dict(model.named_modules())
    seen: set[int] = set()
    for name, module in modules.items():
        if type(module).__name__ != "RadixAttention" or module.layer_id in seen:
            continue
        seen.add(int(module.layer_id))
        block = modules[name.rpartition(".")[0]]
        rotary = [part for part in block.children() if "RotaryEmbedding" in type(part).__name__]
        yield int(module.layer_id), module, rotary


def _attention_text(attention: Any) -> str:
    window = max(0, int(attention.sliding_window_size))
    return f"scale {attention.scaling:.6g}, soft cap {attention.logit_cap:.6g}, window {window}"


def _made_with(rotary: Any) -> Made | None:
    """The arguments with which SGLang made the module, from SGLang's own register."""
    from sglang.srt.layers.rotary_embedding import factory

    for key, made in factory._ROPE_DICT.items():
        if made is not rotary:
            continue
        _, rotary_dim, max_position, base, is_neox_style, scaling, *rest = key
        if len(rest) == 2 and rest[0] is not None:  # dual-chunk attention
            return None
        given = dict(scaling or ())
        kind = given.get("rope_type", given.get("type", "default"))
        if kind in _STRETCHED:
            given.setdefault("factor", 1.0)
            given.setdefault("original_max_position_embeddings", max_position)
        if kind == "longrope":  # SGLang's version indexes its table by all positions of a batch
            kind = "longrope of a batch"
        parameters = {**given, "rope_type": kind, "rope_theta": base}
        return Made(parameters, int(rotary_dim), not is_neox_style, int(max_position))
    if type(rotary).__name__ != "RotaryEmbedding":
        return None
    plain = {"rope_type": "default", "rope_theta": rotary.base}
    longest = int(rotary.max_position_embeddings)
    return Made(plain, int(rotary.rotary_dim), not rotary.is_neox_style, longest)
