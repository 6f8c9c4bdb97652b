# SPDX-License-Identifier: Apache-2.0
"""Samples of a model's parameters as they are in memory."""

import hashlib

import torch

_SAMPLES = 4
_SAMPLE_BYTES = 256


def loaded_fingerprint(model: torch.nn.Module) -> bytes:
    """Fingerprint of the name, dtype, shape, strides and samples of every parameter, 16 bytes. Waits for the
    device; milliseconds for a large model.

    Ranks of engines of one version that hold the same part of one model have the same.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"pd-loaded")
    samples: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters(), key=lambda pair: pair[0]):
            form = parameter.dtype, tuple(parameter.shape), tuple(parameter.stride())
            digest.update(f"{name}\0{form}\0".encode())
            if parameter.numel() and parameter.device.type != "meta":
                samples.setdefault(parameter.device, []).extend(_samples(parameter.detach()))
        for device in sorted(samples, key=str):
            digest.update(torch.cat(samples[device]).cpu().numpy().tobytes())
    return digest.digest()


def _samples(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Bytes `[n]` of a parameter: its first, its last, and some between."""
    dense = parameter
    if not dense.is_contiguous() and dense.dim() == 2 and dense.t().is_contiguous():
        dense = dense.t()
    if not dense.is_contiguous():  # a few rows of it
        rows = torch.linspace(0, dense.shape[0] - 1, _SAMPLES).long().tolist()
        return [row for at in rows for row in _samples(dense[at].contiguous())[:1]]
    flat = dense.reshape(-1).view(torch.uint8)
    room = max(0, len(flat) - _SAMPLE_BYTES)
    places = sorted({room * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)})
    return [flat[place : place + _SAMPLE_BYTES] for place in places]
