# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of a model's parameters as they are in memory."""

import hashlib
import weakref
from typing import NamedTuple

import torch

from pd_connector.memory.parameter_hash import full_hash

_SAMPLE_BYTES = 8
_PRIMES = (127, 251, 509, 1021, 2039)
"""Numbers of samples. A prime: they do not all fall on the same place of a row."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Loaded(NamedTuple):
    """Fingerprints of parameters in memory, 16 bytes each; empty if not known.

    Attributes:
        sampled: fingerprint of samples, which also cover parts of fused parameters: K of a `qkv_proj`, single experts.
        kernels: the kernels of weights that are no longer parameters, so that they cannot be sampled: vLLM on a CPU
            packs such weights into a kernel. A new load of the weights makes a new kernel.
    """

    sampled: bytes = b""
    kernels: "tuple[weakref.ref[object], ...]" = ()


def loaded_fingerprint(model: torch.nn.Module) -> Loaded:
    """Fingerprints of the name, dtype, shape, strides and samples of every parameter. Waits for the device;
    milliseconds for a large model.

    Ranks with the same part of the same model have equal fingerprints, if their engines have the same version.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"pd-loaded")
    samples: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters(), key=lambda pair: pair[0]):
            form = parameter.dtype, tuple(parameter.shape), tuple(parameter.stride())
            digest.update(f"{name}\0{form}\0".encode())
            if parameter.numel() and parameter.device.type != "meta":
                samples.setdefault(parameter.device, []).append(_samples(parameter.detach()))
        for device in sorted(samples, key=str):
            digest.update(torch.cat(samples[device]).cpu().numpy().tobytes())
    return Loaded(digest.digest(), _kernels(model))


def loaded_full_fingerprint(model: torch.nn.Module) -> bytes:
    """Fingerprint of all bytes of every parameter. Waits for the device, which reads all of them: seconds for
    80 GB on a GPU, and for each GB on a CPU. Empty where a kernel keeps weights elsewhere: they cannot be seen."""
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


def _samples(parameter: torch.Tensor) -> torch.Tensor:
    """Bytes `[n]` of a parameter, from enough places that each of its experts is seen, and all of it where
    it is small."""
    if parameter.element_size() in _BITS:  # not every dtype can be indexed
        parameter = parameter.view(_BITS[parameter.element_size()])
    order = sorted(range(parameter.dim()), key=lambda dim: -parameter.stride(dim))
    dense = parameter.permute(order)
    if not dense.is_contiguous():  # some of its rows
        rows = torch.linspace(0, len(parameter) - 1, min(len(parameter), _PRIMES[0])).long()
        dense = parameter[rows.to(parameter.device)].contiguous()
    flat = dense.reshape(-1).view(torch.uint8)
    experts = parameter.shape[0] if parameter.dim() > 2 else 0
    samples = next((prime for prime in _PRIMES if prime > experts), _PRIMES[-1])
    if len(flat) <= samples * _SAMPLE_BYTES:
        return flat
    step = (len(flat) - _SAMPLE_BYTES) // (samples - 1)
    return flat.as_strided((samples, _SAMPLE_BYTES), (step, 1)).reshape(-1)
