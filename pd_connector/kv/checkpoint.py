# SPDX-License-Identifier: Apache-2.0
"""The config of a checkpoint's folder, as it is on disk. It is read from the files, because engines add to the config
that they read."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple, Self

from pd_connector.kv.checkpoint_files import OpenFile

CONFIG = "config.json"
PARAMS = "params.json"
_QUANTISATION_FILES = (
    "hf_quant_config.json",
    "quant_config.json",
    "quant_model_description.json",
    "quantization_config.json",
    "quantize_config.json",
)
"""Files beside `config.json` from which engines take a quantisation that is not in it."""
_CODE = ".py"


class ConfigText(NamedTuple):
    """The content of a checkpoint's folder beside the weights.

    Attributes:
        config: `config.json`, and under the key `quantisation_files` the text of the files beside it that say how
            weights are quantised, by name; None where there is no `config.json`.
        params: `params.json`, which some engines read instead of `config.json`.
        code: hash of each file of code, by name.
        names: names of all files.
    """

    config: dict[str, Any] | None
    params: dict[str, Any] | None = None
    code: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()


class ConfigFiles:
    """The files of a folder that `ConfigText` describes, held open while an engine reads them by name. Closed at the end of
    the `with` block.

    Raises:
        OSError: a file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, OpenFile] = {}
        for name in filter(_is_config, _names(folder)):
            self._files[name] = OpenFile(folder / name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    @property
    def exchanged(self) -> str:
        """Name of a file that was replaced or written to since it was opened; empty if there is none."""
        for name, file in self._files.items():
            if file.renamed or file.changed:
                return name
        return next(
            (name for name in _names(self._folder) if _is_config(name) and name not in self._files),
            "",
        )

    def text(self) -> ConfigText:
        """What the files say.

        Raises:
            OSError: a file cannot be read.
            ValueError: `config.json` or `params.json` is not a JSON object.
        """
        config = self._object(CONFIG)
        beside = {
            name: self._read(name).decode(errors="replace")
            for name in _QUANTISATION_FILES
            if name in self._files
        }
        if config is not None and beside:
            config = {**config, "quantisation_files": beside}
        code = tuple(
            (name, hashlib.blake2b(self._read(name), digest_size=16).hexdigest())
            for name in sorted(self._files)
            if name.endswith(_CODE)
        )
        return ConfigText(config, self._object(PARAMS), code, tuple(_names(self._folder)))

    def _read(self, name: str) -> bytes:
        with self._files[name].stream() as stream:
            return stream.read()

    def _object(self, name: str) -> dict[str, Any] | None:
        if name not in self._files:
            return None
        content = json.loads(self._read(name))
        if not isinstance(content, dict):
            raise ValueError(f"{self._folder / name} holds no JSON object")
        return content


def _names(folder: Path) -> list[str]:
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(file.name for file in entries if file.is_file())


def _is_config(name: str) -> bool:
    """Whether a file of this name says what an engine computes."""
    return name in (CONFIG, PARAMS, *_QUANTISATION_FILES) or name.endswith(_CODE)


def read_config(folder: Path) -> ConfigText:
    """What a folder says now. It raises what `ConfigFiles` raises."""
    with ConfigFiles(folder) as files:
        return files.text()
