# SPDX-License-Identifier: Apache-2.0
"""The config of a checkpoint's folder, as it is on disk: engines add to what they read."""

import json
from pathlib import Path
from typing import Any

_QUANTISATION_FILES = (
    "hf_quant_config.json",
    "quant_config.json",
    "quant_model_description.json",
    "quantization_config.json",
    "quantize_config.json",
)
"""Files beside `config.json` from which engines take a quantisation that is not in it."""


def read_config(folder: Path) -> dict[str, Any] | None:
    """`config.json` of a folder, and under the key `quantisation_files` the text of the files beside it
    that say how weights are quantised, by name.

    Returns:
        None where there is no `config.json`.

    Raises:
        OSError: a file cannot be read.
        ValueError: `config.json` is no JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object")
    beside = {
        name: (folder / name).read_text(errors="replace")
        for name in _QUANTISATION_FILES
        if (folder / name).is_file()
    }
    return {**config, "quantisation_files": beside} if beside else config
