# SPDX-License-Identifier: Apache-2.0
"""Which KV this is, of a model: the fingerprint of a prompt, and of the adapter in use. `kv.model` says
which model it is.

KV may be used in place of a computation only if both agree. They are compared between engines, so
neither depends on paths, ranks, versions or the time.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FINGERPRINT_BYTES = 16
# Where an engine put the checkpoint, and what it wrote on reading it, say nothing of the KV.
_LOCAL_KEYS = frozenset({"_name_or_path", "name_or_path", "transformers_version", "torch_dtype"})
_SAMPLE_BYTES = 64 * 1024
_SAMPLES_PER_FILE = 16
_BLOCK_BYTES = 8 << 20
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_ADAPTER_KINDS = ("*.safetensors", "*.bin", "*.pt")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


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
    """Config and weights of an adapter, as engines choose among them: vLLM takes the first of three names, SGLang
    all files of the first kind. Raises OSError if there are no weights of one."""
    by_name = [file for name in _ADAPTER_WEIGHTS if (file := folder / name).is_file()]
    by_kind = [found for kind in _ADAPTER_KINDS if (found := sorted(folder.glob(kind)))]
    weights = {*by_name[:1], *(by_kind[0] if by_kind else ())}
    if not weights:
        raise FileNotFoundError(f"no adapter's weights in {folder}")
    config = folder / _ADAPTER_CONFIG
    return sorted({config, *weights} if config.is_file() else weights)


def adapter_fingerprint(folder: Path) -> str:
    """Fingerprint of an adapter's content, as hexadecimal digits: of its config and all its weights.

    Raises:
        OSError: there are no weights of an adapter, or they cannot be read.
    """
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"pd-adapter")
    for file in adapter_files(folder):
        content = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                content.update(block)
        digest.update(file.name.encode() + content.digest())
    return digest.hexdigest()


def schema2_fingerprint(
    config: Mapping[str, Any], weights: Path | None, *, seed: int | None = None
) -> bytes:
    """Fingerprint of a model as schema 2 has it, for peers that speak no later one. It does not see
    every tensor; `kv.model` has what replaced it.

    Args:
        config: the model's config as plain data.
        weights: folder of the checkpoint; None when weights are made up at random.
        seed: seed of made-up weights.
    """
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"pd-model")
    kept = {name: value for name, value in config.items() if name not in _LOCAL_KEYS}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    digest.update(f"seed {seed}".encode())
    for file in _weight_files(weights):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES_PER_FILE):
                last = max(0, size - _SAMPLE_BYTES)
                stream.seek(last * sample // (_SAMPLES_PER_FILE - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()


def _weight_files(folder: Path | None) -> list[Path]:
    if folder is None or not folder.is_dir():
        return []
    for pattern in _WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return found
    return []
