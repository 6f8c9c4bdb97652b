# SPDX-License-Identifier: Apache-2.0
"""The files of an adapter (LoRA) as they were read, and whether they are untouched."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from pd_connector.kv.checkpoint_files import FileState, links
from pd_connector.kv.identity import adapter_files, adapter_fingerprint
from pd_connector.vllm.identity.config_files import in_cache


class AdapterFiles(NamedTuple):
    """An adapter's files as they were read."""

    fingerprint: str
    folder: Path
    states: dict[Path, FileState]  # and of the links that lead to them


class LoadedAdapter(NamedTuple):
    """An adapter that vLLM was told to load."""

    path: str
    files: AdapterFiles | None  # None where they could not be read
    problem: str = ""  # why its content is not known
    reading: int = 0  # a new number whenever its files may have changed


def number_and_path(lora: Any) -> tuple[int, str]:
    """vLLM's number of an adapter, and the folder or repository that vLLM reads it from."""
    return int(lora.lora_int_id), str(lora.lora_path)


def loads_in_place(lora: Any) -> bool:
    """Whether vLLM rereads an adapter's files for every step that needs it."""
    return bool(getattr(lora, "load_inplace", False))


def read_adapter(path: str) -> LoadedAdapter:
    """An adapter as its files are now; with `problem` if they cannot be read."""
    try:
        return LoadedAdapter(path, read_files(path))
    except OSError as error:
        return LoadedAdapter(path, None, str(error))


def read_files(path: str) -> AdapterFiles:
    """Raises OSError: there are no weights of an adapter, or they cannot be read."""
    folder = _folder(path)
    states = _states(folder)
    files = AdapterFiles(adapter_fingerprint(folder), folder, states)
    if _states(folder) != states:
        raise OSError(f"{path} has changed while it was read; load the adapter again")
    return files


def _folder(path: str) -> Path:
    """The folder from which vLLM would read an adapter now."""
    local = Path(os.path.expanduser(path))  # Path's own raises if the user does not exist
    return local if local.is_dir() else in_cache(path, None) or local


def _states(folder: Path) -> dict[Path, FileState]:
    """States of an adapter's files, and of the links that lead to them: a link may be switched to another adapter and
    back while vLLM reads. Raises OSError if there are no weights of an adapter."""
    states: dict[Path, FileState] = {}
    for file in adapter_files(folder):
        states |= links(file)
        states[file] = FileState.of(file.stat())
    return states


def untouched(loaded: LoadedAdapter) -> bool:
    """Whether vLLM would reread the same content. Files that are gone cannot be reread."""
    if loaded.files is None or _folder(loaded.path) != loaded.files.folder:
        return False
    try:
        return _states(loaded.files.folder) == loaded.files.states
    except OSError:
        return True
