# SPDX-License-Identifier: Apache-2.0
"""Contents of a model's folders at the time when vLLM read its config.

A connector is made seconds later, when a name can lead to another folder. So vLLM's `ModelConfig` is watched while it
is made, and the files are held open meanwhile. Their contents are stored in this object, which vLLM passes to its
processes.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_connector.kv.checkpoint import ConfigFiles, ConfigText, read_config
from pd_connector.vllm.wrap_once import wrap_once

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger("pd_connector.vllm")

_FOLDERS = "_pd_connector_folders"


def watch() -> None:
    """Watch each model's config that vLLM reads from now on. Harmless to repeat."""
    from vllm.config.model import ModelConfig

    wrap_once(ModelConfig, "__post_init__", _made)


def folder_text(model: "ModelConfig", place: str) -> ConfigText | None:
    """Contents of a model's folder or repository at the time when vLLM read its config.

    Args:
        place: its folder or repository (`places`).

    Returns:
        None where it is not on this disk.

    Raises:
        OSError: a file cannot be read.
        ValueError: a config is not a JSON object, or a file was replaced while vLLM read it.
    """
    folders: dict[str, ConfigText | str | None] = getattr(model, _FOLDERS, {})
    if place in folders:
        if isinstance(text := folders[place], str):
            raise ValueError(text)
        return text
    folder = folder_of(place, model.revision)  # made where vLLM was not watched
    return None if folder is None else read_config(folder)


def places(model: "ModelConfig") -> tuple[str, str]:
    """The places of a model's config and of the model itself, which are usually the same."""
    return getattr(model, "hf_config_path", None) or model.model, model.model


def folder_of(place: str, revision: str | None) -> Path | None:
    """The folder of a model's files; None if it is not on this disk."""
    return Path(place) if Path(place).is_dir() else in_cache(place, revision)


def in_cache(repository: str, revision: str | None, download_dir: str | None = None) -> Path | None:
    """A repository's folder in Hugging Face's cache, or in vLLM's download folder if that is set."""
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(
            repository, revision=revision, cache_dir=download_dir, local_files_only=True
        )
    except Exception as error:  # no such repository, or not a repository's name, whatever it raises
        logger.debug("%s is not in the cache: %s", repository, error)
        return None
    return Path(snapshot)


def _made(original: Callable[..., None], model: "ModelConfig", *args: Any, **options: Any) -> None:
    with ExitStack() as held:
        before = _opened(model, held)
        original(model, *args, **options)
        setattr(model, _FOLDERS, _read(model, before))


def _opened(model: "ModelConfig", held: ExitStack) -> dict[str, tuple[Path, ConfigFiles]]:
    opened = {}
    for place in set(places(model)):
        try:
            if (folder := folder_of(place, model.revision)) is not None:
                opened[place] = folder, held.enter_context(ConfigFiles(folder))
        except Exception as error:  # must not stop vLLM
            logger.warning("files of %s cannot be looked at: %r", place, error)
    return opened


def _read(
    model: "ModelConfig", before: dict[str, tuple[Path, ConfigFiles]]
) -> dict[str, ConfigText | str | None]:
    """What the folders say, or why it is not known what they said."""
    texts: dict[str, ConfigText | str | None] = {}
    for place in set(places(model)):
        try:
            texts[place] = _text(folder_of(place, model.revision), before.get(place))
        except Exception as error:  # must not stop vLLM
            texts[place] = str(error) or repr(error)
    return texts


def _text(folder: Path | None, before: tuple[Path, ConfigFiles] | None) -> ConfigText | None:
    if folder is None:
        return None
    if before is None:  # downloaded meanwhile
        return read_config(folder)
    opened_folder, files = before
    if problem := str(folder) if folder != opened_folder else files.exchanged:
        raise ValueError(f"{problem} was replaced while vLLM read it")
    return files.text()
