# SPDX-License-Identifier: Apache-2.0
"""Watches vLLM's loads of weights at the moment they happen.

vLLM does not report loads to a connector. So its loaders are watched: each file that they read is also opened here, and
read later through that descriptor. The worker's methods that change weights in place are watched, too, and the model's
own `load_weights`, which trainers call.
"""

import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from pd_connector.agent.weight_loads import WeightLoads
from pd_connector.vllm.extension import WorkerExtension
from pd_connector.vllm.identity.checkpoint import Place, open_files
from pd_connector.vllm.support import connector_parts
from pd_connector.vllm.wrap_once import with_subclasses, wrap_once

logger = logging.getLogger("pd_connector.vllm")

_LOADERS = "vllm.model_executor.model_loader"
_WORKER = "vllm.v1.worker.worker_base"
_CHANGES: tuple[tuple[str, dict[str, bool]], ...] = (
    ("reload_weights", {"whole": True}),
    ("reset_weights", {}),
    ("load_model", {"whole": True}),
    ("start_weight_update", {"begins": True}),
    ("start_draft_weight_update", {"begins": True}),
    ("update_weights", {}),
    ("finish_weight_update", {"ends": True}),
)
"""Methods of vLLM's worker that change its weights, each with its arguments of `WeightLoads.change`. Between beginning and
end, weights are neither old nor new."""


_LOSES_WEIGHTS = 2
"""Level of sleep from which on vLLM does not keep the weights: they are loaded again after it."""


class Caller(Protocol):
    """Receives an event for each call of a worker method."""

    def workers_called(self) -> None:
        """A call has returned."""


LOADS = WeightLoads()
"""The loads of this process; checkpoints are known by their `Place`."""
_callers: "weakref.WeakSet[Caller]" = weakref.WeakSet()
_watching: list[Any] = []


def watch() -> None:
    """Watch vLLM's loaders. Watching begins with the first model that this process, or a fork of it, builds. The
    loaders are not imported earlier: that takes a second, and most processes do not need it. Harmless to repeat."""
    if not _watching:
        _watching.append(register_module_module_registration_hook(_building))


def watch_model(model: torch.nn.Module) -> None:
    """Watch all methods that load weights into this model, which is loaded already."""
    _watch_workers()
    if hasattr(model, "load_weights"):
        wrap_once(model, "load_weights", _changes())


def watch_calls(side: Caller) -> None:
    """Report each call of a worker method to `side`: an operator can change weights by any method."""
    from vllm.v1.engine.core import EngineCore

    _callers.add(side)
    wrap_once(EngineCore, "collective_rpc", _calls)


def _calls(original: Callable[..., Any], core: Any, method: Any, *args: Any, **options: Any) -> Any:
    try:
        return original(core, method, *args, **options)
    finally:
        if method != WorkerExtension.outgoing_transfers.__name__:  # it changes nothing
            for caller in list(_callers):
                caller.workers_called()


def _building(_owner: torch.nn.Module, _name: str, _part: torch.nn.Module | None) -> None:
    if len(_watching) == 1 and (module := sys.modules.get(_LOADERS)) is not None:
        _watching.append(module)
        for loader in set(getattr(module, "_LOAD_FORMAT_TO_MODEL_LOADER", {}).values()):
            _watch_loader(loader)


def _watch_loader(loader: type) -> None:
    for name, around in (("load_weights", _loads), ("_prepare_weights", _prepares)):
        if hasattr(loader, name):
            wrap_once(loader, name, around)


def _loads(
    original: Callable[..., Any],
    loader: Any,
    model: Any,
    model_config: Any,
    *args: Any,
    **options: Any,
) -> Any:
    with _quiet("the files that are loaded"):
        LOADS.reads = _used()
        name = getattr(model_config, "model_weights", "") or model_config.model
        if Path(name).exists():  # a loader may read it directly
            place = Place(name, model_config.revision)
            LOADS.begin(place, open_files(Path(name), loader.load_config))
    try:
        return original(loader, model, model_config, *args, **options)
    finally:
        LOADS.end()


def _prepares(original: Callable[..., Any], loader: Any, *args: Any, **options: Any) -> Any:
    """The loader finds or downloads the files, and reads them next."""
    prepared = original(loader, *args, **options)
    with _quiet("the files that are loaded"):
        arguments = inspect.signature(original).bind(loader, *args, **options).arguments
        place = Place(
            arguments["model_name_or_path"],
            arguments.get("revision"),
            arguments.get("subfolder") or "",
        )
        if (folder := _folder(prepared)) is not None:
            LOADS.begin(place, open_files(folder, loader.load_config))
    return prepared


def _used() -> bool:
    """Whether the engine that loads now uses PDConnector."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and bool(connector_parts(config.kv_transfer_config))


def _folder(prepared: Any) -> Path | None:
    """The folder of the files that a loader has prepared. It returns the folder, a tuple with it, or the files."""
    first = prepared[0] if isinstance(prepared, tuple | list) and prepared else prepared
    if not isinstance(first, str) or "://" in first:
        return None
    path = Path(first)
    return path.parent if isinstance(prepared, list) else path


def _watch_workers() -> None:
    module = sys.modules.get(_WORKER)
    for worker in with_subclasses(module.WorkerBase) if module is not None else ():
        for name, facts in _CHANGES:
            if hasattr(worker, name):
                wrap_once(worker, name, _changes(**facts))
        for name, around in (("sleep", _sleeps), ("wake_up", _wakes)):
            if hasattr(worker, name):
                wrap_once(worker, name, around)


def _sleeps(original: Callable[..., Any], worker: Any, level: int = 1, **options: Any) -> Any:
    LOADS.sleep(kept=level < _LOSES_WEIGHTS)
    return original(worker, level, **options)


def _wakes(
    original: Callable[..., Any], worker: Any, tags: list[str] | None = None, **options: Any
) -> Any:
    woken = original(worker, tags, **options)
    if tags is None or "weights" in tags:
        LOADS.wake()
    return woken


def _changes(**facts: bool) -> Callable[..., Any]:
    def changes(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with LOADS.change(**facts):
            return original(*args, **options)

    return changes


@contextmanager
def _quiet(what: str) -> Iterator[None]:
    """A context whose errors are only logged: they must not stop the engine's load. The weights stay unidentified
    then."""
    try:
        yield
    except Exception as error:
        logger.warning("%s cannot be looked at: %r", what, error)
