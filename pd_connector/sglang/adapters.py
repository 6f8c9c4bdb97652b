# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) by their content. SGLang's own ids for them differ from process to process."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from pd_connector.errors import PDConnectorError
from pd_connector.kv.identity import AdapterFiles, adapter_fingerprint

logger = logging.getLogger("pd_connector.sglang")

_LOADED = "_pd_connector_loaded"
"""Attribute of SGLang's manager of adapters: what it has loaded, by SGLang's id."""


class _Loaded(NamedTuple):
    """An adapter that SGLang has loaded: the fingerprint of its content, or why it is not known."""

    fingerprint: str
    problem: str = ""


_UNSEEN = _Loaded("", "it was not loaded from files")


class Adapters:
    """The adapters that a rank of SGLang has loaded.

    Args:
        model_runner: SGLang's; it knows where each adapter came from.
    """

    def __init__(self, model_runner: Any) -> None:
        self._model_runner = model_runner

    def name(self, lora_id: str | None) -> str:
        """Name and content of the adapter with this SGLang id; empty for none. An adapter that is loaded again gets a
        new id.

        Raises:
            PDConnectorError: its content is not known, or the adapter is unknown.
        """
        if lora_id is None:
            return ""
        name, content = self._loaded(lora_id)
        return f"{name} {content}"

    def content(self, lora_id: str | None) -> str:
        """Fingerprint of the content of the adapter with this SGLang id; empty for none.

        Raises:
            PDConnectorError: see `name`.
        """
        return "" if lora_id is None else self._loaded(lora_id)[1]

    def _loaded(self, lora_id: str) -> tuple[str, str]:
        """Name and content."""
        manager = self._model_runner.lora_manager
        loaded = manager.lora_refs.get(lora_id) if manager is not None else None
        if loaded is None:
            raise PDConnectorError(f"adapter {lora_id} is not loaded")
        content = getattr(manager, _LOADED, {}).get(lora_id, _UNSEEN)
        if content.problem:
            raise PDConnectorError(
                f"adapter {loaded.lora_name} cannot be identified by its content: {content.problem}; load it from files"
            )
        return loaded.lora_name, content.fingerprint


def loads_adapter(original: Callable[..., Any], manager: Any, lora_ref: Any) -> Any:
    """SGLang loads an adapter. Its files are held open meanwhile, so that the fingerprint is that of what was loaded.
    SGLang keeps it in memory, whatever becomes of the files."""
    contents: dict[str, _Loaded] = vars(manager).setdefault(_LOADED, {})
    for unloaded in contents.keys() - set(manager.lora_refs):
        del contents[unloaded]
    with ExitStack() as held:
        files = None
        try:
            if (folder := _folder(lora_ref.lora_path)) is not None:
                files = held.enter_context(AdapterFiles(folder))
        except Exception as error:  # must not stop SGLang, which says why it cannot load it
            logger.debug("adapter %s cannot be read before it is loaded: %r", lora_ref, error)
        result = original(manager, lora_ref)
        try:
            contents[lora_ref.lora_id] = _Loaded(_content(lora_ref.lora_path, files))
        except Exception as error:  # requests for the adapter report it
            contents[lora_ref.lora_id] = _Loaded("", str(error) or repr(error))
    return result


def _content(path: str, files: AdapterFiles | None) -> str:
    """Fingerprint of an adapter that was loaded from this path.

    Args:
        files: that were there before the load. None: SGLang has downloaded them.
    """
    if files is not None:
        if files.exchanged:
            raise OSError(f"{path} has changed while SGLang loaded it")
        return files.fingerprint()
    if (folder := _folder(path)) is None:
        raise OSError(f"{path} is not a folder on this disk")
    return adapter_fingerprint(folder)


def _folder(path: str) -> Path | None:
    """The folder on this disk from which SGLang would read an adapter now; None if there is none."""
    folder = Path(os.path.expanduser(path))  # Path's own raises if the user does not exist
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:  # not there, or not a repository's name, whatever it raises
        logger.debug("%s is not in the cache: %s", path, error)
        return None
