# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) by their content. SGLang's own ids for them differ from process to process."""

import logging
import os
from pathlib import Path
from typing import Any

from pd_connector.errors import PDConnectorError
from pd_connector.kv.identity import adapter_fingerprint

logger = logging.getLogger("pd_connector.sglang")


class Adapters:
    """The adapters that a rank of SGLang has loaded.

    Args:
        model_runner: SGLang's; it knows where each adapter came from.
    """

    def __init__(self, model_runner: Any) -> None:
        self._model_runner = model_runner
        self._known: dict[str, str] = {}
        self._looked_at: set[str] = set()

    def look(self) -> None:
        """Read adapters that SGLang has loaded since the last call. Their files may be replaced before the first
        request for them, while SGLang continues with the loaded content."""
        manager = self._model_runner.lora_manager
        loaded = set() if manager is None else set(manager.lora_refs)
        for lora_id in loaded - self._looked_at:
            try:
                self.name(lora_id)
            except PDConnectorError as error:  # requests for the adapter will report it
                logger.debug("%s", error)
        self._looked_at = loaded

    def name(self, lora_id: str | None) -> str:
        """Name and content of the adapter with this SGLang id; empty for none. Files are read once, after the load
        (`look`): an adapter that is loaded again gets a new id.

        Raises:
            PDConnectorError: its files cannot be read, or the adapter is unknown.
        """
        if lora_id is None:
            return ""
        if lora_id not in self._known:
            self._known[lora_id] = self._read(lora_id)
        return self._known[lora_id]

    def _read(self, lora_id: str) -> str:
        manager = self._model_runner.lora_manager
        loaded = manager.lora_refs.get(lora_id) if manager is not None else None
        if loaded is None:
            raise PDConnectorError(f"adapter {lora_id} is not loaded")
        try:
            content = adapter_fingerprint(_folder(loaded.lora_path))
        except (OSError, ValueError) as error:  # Hugging Face's ValueError: not a repository's name
            problem = f"adapter {loaded.lora_name} cannot be told by content: {error}"
            raise PDConnectorError(problem) from error
        return f"{loaded.lora_name} {content}"


def _folder(path: str) -> Path:
    """The folder of an adapter's files on this disk, from which SGLang has read them."""
    folder = Path(os.path.expanduser(path))  # Path's own raises if the user does not exist
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))
