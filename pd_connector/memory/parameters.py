# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of a model's parameters in memory."""

import hashlib
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch

from pd_connector.memory.parameter_hash import full_hash

_SAMPLES = 4
_SAMPLE_BYTES = 256
_FINE_SAMPLE_BYTES = 8
_PRIMES = (127, 251, 509, 1021, 2039)
"""Number of fine samples. A prime, so that they do not all fall on the same place of a row."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Loaded(NamedTuple):
    """Fingerprints of parameters in memory, 16 bytes each; empty if unknown.

    Attributes:
        sampled: of few samples, as in earlier releases.
        fine: of more samples, which see parts of fused parameters: the keys of a `qkv_proj`, single experts.
        kernels: objects that multiply by weights which are no longer parameters and have no samples. vLLM on a CPU
            packs weights for such a kernel. After a new load, the object is another one.
    """

    sampled: bytes = b""
    fine: bytes = b""
    kernels: "tuple[weakref.ref[object], ...]" = ()


def loaded_fingerprint(model: torch.nn.Module) -> Loaded:
    """Fingerprints of the name, dtype, shape, strides and samples of every parameter. Waits for the device;
    takes milliseconds for a large model.

    Ranks that hold the same part of one model, in engines of one version, have equal fingerprints.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"pd-loaded")
    coarse: dict[torch.device, list[torch.Tensor]] = {}
    fine: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters(), key=lambda pair: pair[0]):
            form = parameter.dtype, tuple(parameter.shape), tuple(parameter.stride())
            digest.update(f"{name}\0{form}\0".encode())
            if parameter.numel() and parameter.device.type != "meta":
                seen = parameter.detach()
                coarse.setdefault(parameter.device, []).extend(_samples(seen))
                fine.setdefault(parameter.device, []).extend(_fine_samples(seen))
        finer = digest.copy()
        _add(digest, coarse)
        _add(finer, fine)
    return Loaded(digest.digest(), finer.digest(), _kernels(model))


def loaded_full_fingerprint(model: torch.nn.Module) -> bytes:
    """Fingerprint of all bytes of every parameter. Waits for the device, which reads them all: seconds for 80 GB on a
    GPU, and for each GB on a CPU. Empty if a kernel keeps weights elsewhere, where they cannot be read."""
    if _kernels(model):
        return b""
    return full_hash(sorted(model.named_parameters(), key=lambda pair: pair[0]))


def _kernels(model: torch.nn.Module) -> "tuple[weakref.ref[object], ...]":
    return tuple(
        weakref.ref(module.cpu_linear)
        for module in model.modules()
        if hasattr(module, "cpu_linear")
        and isinstance(weight := getattr(module, "weight", None), torch.Tensor)
        and not weight.numel()
    )


def _add(digest: "hashlib.blake2b", samples: dict[torch.device, list[torch.Tensor]]) -> None:
    for device in sorted(samples, key=str):
        digest.update(torch.cat(samples[device]).cpu().numpy().tobytes())


def _samples(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Bytes `[n]` of a parameter: the first, the last, and some between."""
    dense = parameter
    if not dense.is_contiguous() and dense.dim() == 2 and dense.t().is_contiguous():
        dense = dense.t()
    if not dense.is_contiguous():  # a few of its rows
        rows = torch.linspace(0, dense.shape[0] - 1, _SAMPLES).long().tolist()
        return [row for at in rows for row in _samples(dense[at].contiguous())[:1]]
    flat = dense.reshape(-1).view(torch.uint8)
    room = max(0, len(flat) - _SAMPLE_BYTES)
    places = sorted({room * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)})
    return [flat[place : place + _SAMPLE_BYTES] for place in places]


def _fine_samples(parameter: torch.Tensor) -> Iterable[torch.Tensor]:
    """Bytes `[n]` of a parameter, from enough places to see each of its experts; all bytes of a small
    parameter."""
    if parameter.element_size() in _BITS:  # some dtypes cannot be indexed
        parameter = parameter.view(_BITS[parameter.element_size()])
    order = sorted(range(parameter.dim()), key=lambda dim: -parameter.stride(dim))
    dense = parameter.permute(order)
    if not dense.is_contiguous():  # some of its rows
        rows = torch.linspace(0, len(parameter) - 1, min(len(parameter), _PRIMES[0])).long()
        dense = parameter[rows.to(parameter.device)].contiguous()
    flat = dense.reshape(-1).view(torch.uint8)
    experts = parameter.shape[0] if parameter.dim() > 2 else 0
    samples = next((prime for prime in _PRIMES if prime > experts), _PRIMES[-1])
    if len(flat) <= samples * _FINE_SAMPLE_BYTES:
        return [flat]
    step = (len(flat) - _FINE_SAMPLE_BYTES) // (samples - 1)
    return [flat.as_strided((samples, _FINE_SAMPLE_BYTES), (step, 1)).reshape(-1)]
