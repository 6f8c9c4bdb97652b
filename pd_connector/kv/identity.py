# SPDX-License-Identifier: Apache-2.0
"""The identity of KV within a model: the fingerprint of the prompt, and of the adapter in use. `kv.model` identifies
the model.

KV may be used in place of a computation only if both agree. They are compared between engines, so
neither depends on paths, ranks, versions or the time.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from pd_connector.kv.checkpoint_files import OpenFile

FINGERPRINT_BYTES = 16
_READ_BYTES = 8 << 20
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_ADAPTER_KINDS = ("*.safetensors", "*.bin", "*.pt")


def token_fingerprint(
    tokens: Sequence[int], *, salt: str = "", adapter: str = "", inputs: Iterable[str] = ()
) -> bytes:
    """Fingerprint of everything in a request that its prompt's KV depends on.

    Args:
        tokens: prompt token ids, each in 32 bits.
        salt: the request's cache salt; unlike salts never share KV.
        adapter: name and content (`adapter_fingerprint`) of the adapter (LoRA) in use, empty for
            none.
        inputs: content hashes of images and other inputs that stand behind placeholder tokens, each
            with its place in the prompt.
    """
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"pd-tokens")
    for part in (salt, adapter, *inputs):
        encoded = part.encode("utf-8", "surrogatepass")  # JSON may carry lone surrogates
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    digest.update(b"tokens")
    digest.update(array("i", tokens).tobytes())
    return digest.digest()


def adapter_files(folder: Path) -> list[Path]:
    """The config and weight files of an adapter that engines load: vLLM takes the first of three names, SGLang all
    files of the first kind. Raises OSError if there are no weights."""
    by_name = [file for name in _ADAPTER_WEIGHTS if (file := folder / name).is_file()]
    by_kind = [files for kind in _ADAPTER_KINDS if (files := sorted(folder.glob(kind)))]
    weights = {*by_name[:1], *(by_kind[0] if by_kind else ())}
    if not weights:
        raise FileNotFoundError(f"no adapter's weights in {folder}")
    config = folder / _ADAPTER_CONFIG
    return sorted({config, *weights} if config.is_file() else weights)


class AdapterFiles:
    """The files of an adapter, held open while an engine loads them by name. Closed at the end of the `with` block.

    Raises:
        OSError: there are no weights of an adapter, or they cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = [OpenFile(path) for path in adapter_files(folder)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()

    @property
    def exchanged(self) -> bool:
        """Whether the folder has, or has had, other files than the opened files."""
        now = [path.name for path in adapter_files(self._folder)]
        before = [file.name for file in self._files]
        return now != before or any(file.renamed or file.changed for file in self._files)

    def fingerprint(self) -> str:
        """Fingerprint of their content, as hexadecimal digits. Raises OSError where they cannot be read."""
        digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"pd-adapter")
        for file in self._files:
            content = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
            with file.stream() as stream:
                while data := stream.read(_READ_BYTES):
                    content.update(data)
            digest.update(file.name.encode() + content.digest())
        return digest.hexdigest()


def adapter_fingerprint(folder: Path) -> str:
    """Fingerprint of an adapter's content, as hexadecimal digits: of its config and all its weights.

    Raises:
        OSError: there are no weights of an adapter, or they cannot be read.
    """
    with AdapterFiles(folder) as files:
        return files.fingerprint()
