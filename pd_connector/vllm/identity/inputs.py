# SPDX-License-Identifier: Apache-2.0
"""Everything beside its tokens that the KV of a prompt depends on: images and other inputs by content, and the
engine's settings for them and for adapters (`adapters`)."""

import hashlib
import json
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pd_connector.kv.identity import token_fingerprint
from pd_connector.pool.keys import Input
from pd_connector.vllm.identity.adapters import Adapters
from pd_connector.vllm.identity.checkpoint import read_processor_files
from pd_connector.vllm.pages.status import PageRule, Use

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_MOST_INPUTS = 1 << 16
"""Number of inputs (images and others) whose hashes are remembered."""
LEAST_ELEMENTS = 256
"""Fewest elements in the largest tensor of an input. With fewer, the input has only sizes: its content is on an
encode engine."""


def adapter_settings(vllm_config: "VllmConfig") -> str:
    """Fingerprint of the engine's settings for adapters that their KV depends on; empty if the settings change
    nothing."""
    settings = vllm_config.lora_config
    if settings is None:
        return ""
    plain = ("auto", str(vllm_config.model_config.dtype))
    named = {
        "target_modules": sorted(settings.target_modules or ()),
        "lora_dtype": "" if str(settings.lora_dtype) in plain else str(settings.lora_dtype),
        "enable_tower_connector_lora": getattr(settings, "enable_tower_connector_lora", False),
        "enable_moe_shared_loras": getattr(settings, "enable_moe_shared_loras", False),
    }
    named = {name: value for name, value in named.items() if value}
    return _under(named) if named else ""


def processor_settings(vllm_config: "VllmConfig") -> str:
    """Fingerprint of how the engine processes images and other inputs; empty if it processes none."""
    settings = vllm_config.model_config.multimodal_config
    if settings is None:
        return ""
    return _under(
        {
            "mm_processor_kwargs": settings.mm_processor_kwargs,
            "media_io_kwargs": settings.media_io_kwargs,
            "files": read_processor_files(vllm_config.model_config),
        }
    )


def _under(settings: Mapping[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True, default=str).encode()
    return "under " + hashlib.blake2b(text, digest_size=8).hexdigest()


class _Input(NamedTuple):
    """An input that has come."""

    content: str
    data: Callable[[], object]  # the processed data, as long as vLLM has it


def _reference(data: object) -> Callable[[], object]:
    try:
        return weakref.ref(data)
    except TypeError:
        return lambda: None


def _remember(inputs: OrderedDict[str, Any], identifier: str, value: object) -> None:
    inputs[identifier] = value
    inputs.move_to_end(identifier)
    if len(inputs) > _MOST_INPUTS:
        inputs.popitem(last=False)


class RequestIdentity:
    """Fingerprints of requests' prompts. Used by one thread.

    Attributes:
        adapters: what is known of the engine's adapters.

    Args:
        settings: the engine's settings for adapters (`adapter_settings`).
        processor: how it processes images and other inputs (`processor_settings`).
    """

    def __init__(self, settings: str = "", processor: str = "") -> None:
        self.adapters = Adapters(settings)
        self._processor = processor
        self._inputs: OrderedDict[str, _Input] = OrderedDict()  # by vLLM's identifier
        self._ambiguous: OrderedDict[str, None] = OrderedDict()  # identifiers of several inputs

    def note(self, request: "Request") -> None:
        """A request has come: remember its images and other inputs."""
        for feature in request.mm_features or ():
            self._input(feature)

    def exact(self, request: "Request") -> bool:
        """Whether no identifier of the request's images and other inputs was also used for a different input.

        A client may choose an identifier (`uuid`), also the one that vLLM gives another client's image. vLLM then takes its
        encoder's output, or pages of its prefix cache, for either image. KV of such a request is not handed over or saved.
        """
        return all(
            str(feature.identifier) not in self._ambiguous for feature in request.mm_features or ()
        )

    def of(self, request: "Request", tokens: int | None = None) -> bytes:
        """Fingerprint of everything that the KV of a request's prompt depends on.

        Args:
            tokens: length of the prompt's beginning to hash; all of it by default.

        Raises:
            OSError: the content of its adapter is not known.
        """
        assert request.prompt_token_ids is not None
        token_ids = request.prompt_token_ids
        if tokens is not None and tokens < len(token_ids):
            token_ids = token_ids[:tokens]
        # An input can begin behind the end: at the last token of a prompt that was left to the decode engine.
        features = [
            feature
            for feature in request.mm_features or ()
            if feature.mm_position.offset < len(token_ids)
        ]
        return token_fingerprint(
            token_ids,
            salt=request.cache_salt or "",
            adapter=self.adapters.name(request),
            inputs=[f"{self._input(feature)}@{feature.mm_position.offset}" for feature in features],
        )

    def inputs(self, request: "Request") -> tuple[Input, ...]:
        """A request's images and other inputs by content and identifier, each with its first token.

        A client can choose an identifier (`uuid`), and use it again for another image. vLLM may then reuse its result
        for the first image. So KV of such an image is only found under that identifier, never by content alone.
        """
        return tuple(
            Input(f"{self._input(feature)} as {feature.identifier}", feature.mm_position.offset)
            for feature in request.mm_features or ()
        )

    def _input(self, feature: Any) -> str:
        """Hash of an image or other input after the engine's processor, as the model gets it. So the processor's
        settings count. The model's path, a part of vLLM's own identifier, does not."""
        identifier, data = str(feature.identifier), feature.data
        before = self._inputs.get(identifier)
        if before is not None and (is_elsewhere(data) or before.data() is data):
            self._inputs.move_to_end(identifier)
            return before.content
        if is_elsewhere(data):
            # Processed elsewhere, or in shared memory: there is only vLLM's identifier. It does not include
            # the engine's own settings.
            return f"{feature.modality} {identifier} {self._processor}".rstrip()
        content = f"{feature.modality} {_content(data)}"
        if elements(data) < LEAST_ELEMENTS:
            content = f"{content} {identifier}"
        if before is not None and before.content != content:
            _remember(self._ambiguous, identifier, None)
        _remember(self._inputs, identifier, _Input(content, _reference(data)))
        return content


class AmbiguousInputs(PageRule):
    """Keeps KV with its request if the identifier of an image or other input was also used for a different input.

    Args:
        identity: remembers all inputs.
    """

    cause = "ambiguous"
    forbids = (Use.OFFER, Use.COMPARE, Use.SAVE)

    def __init__(self, identity: RequestIdentity) -> None:
        self._identity = identity

    def queued(self, request: "Request") -> None:
        self._identity.note(request)

    def holds(self, request: "Request") -> bool:
        return not self._identity.exact(request)


def is_elsewhere(data: Mapping[str, Any] | None) -> bool:
    """Whether the processed data of an input is in another process, or in shared memory."""
    return data is None or "address" in data


def elements(value: object) -> int:
    """Elements of the largest tensor or array within a value."""
    return max((math.prod(array.shape) for array in _arrays(value)), default=0)


def has_fractions(value: object) -> bool:
    """Whether a value contains a tensor or an array of numbers with fractions."""
    return any(
        array.is_floating_point()
        if isinstance(array, torch.Tensor)
        else np.issubdtype(array.dtype, np.floating)
        for array in _arrays(value)
    )


def _arrays(value: object) -> "Iterator[torch.Tensor | np.ndarray]":
    """All tensors and arrays within a value."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _arrays(each)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for each in value:
            yield from _arrays(each)
    elif hasattr(value, "data"):
        yield from _arrays(value.data)


def _content(data: Mapping[str, Any]) -> str:
    """Hash of processed data, as hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16, person=b"pd-inputs")
    for name in sorted(data):
        element = data[name]
        digest.update(f"\0{name}\0".encode())
        _add(digest, getattr(element, "data", element))
    return digest.hexdigest()


def _add(digest: "hashlib.blake2b", value: object) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}\0".encode())
        whole = value.detach().cpu().contiguous()
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype} {value.shape}\0".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\0".encode())
        for name in sorted(value, key=str):
            digest.update(f"{name}\0".encode())
            _add(digest, value[name])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        digest.update(f"list {len(value)}\0".encode())
        for each in value:
            _add(digest, each)
    else:
        digest.update(f"{type(value).__name__} {value!r}\0".encode())
