# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of a model's parameters as they are in memory.

The hash of all bytes is computed on the device that holds them. Each 64-bit word is mixed with its place, by
multiplications and shifts as in SplitMix64. The mixed words are added. Two rounds with different constants give
128 bits. Sums do not depend on the order of the additions, so a CPU and a GPU find the same hash for the same bytes.
The hash tells weights apart that differ by chance; a collision can be constructed.

Source of the mixing: https://prng.di.unimi.it/splitmix64.c
"""

import hashlib
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

_SAMPLE_BYTES = 8
_PRIMES = (127, 251, 509, 1021, 2039)
"""Numbers of samples. A prime: they do not all fall on the same place of a row."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_LANES = (
    (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB),
    (0xAEF17502108EF2D9, 0x8CB92BA72F3D8DD7, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53),
)
"""Odd factors: for the word, for its place, and for the two rounds."""
_SHIFTS = (30, 27, 31)
_WORD_BYTES = 8
_PIECE_WORDS = 1 << 20
"""Words at a time. The device needs three times their memory beside the weights."""


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


def full_hash(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Hash name, shape, dtype and all bytes of tensors, in this order: 16 bytes. Waits for their devices."""
    digest = hashlib.blake2b(digest_size=16, person=b"pd-loaded-full")
    pending: list[tuple[str, list[torch.Tensor]]] = []
    for name, tensor in tensors:
        form = tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
        pending.append((f"{name}\0{form}\0", list(_sums(tensor))))
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for _, sums in pending:
        for each in sums:
            by_device.setdefault(each.device, []).append(each)
    # One wait per device, not one per tensor.
    read = {device: iter(torch.stack(sums).tolist()) for device, sums in by_device.items()}
    for head, sums in pending:
        digest.update(head.encode())
        for each in sums:
            digest.update(str(next(read[each.device])).encode() + b"\0")
    return digest.digest()


def _sums(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The sums of a tensor's pieces, `[lanes]` each."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return
    for part in _dense(tensor.detach()):
        flat = part.reshape(-1).view(torch.uint8)
        for first in range(0, len(flat), _PIECE_WORDS * _WORD_BYTES):
            yield _piece(flat[first : first + _PIECE_WORDS * _WORD_BYTES])


def _dense(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous tensors with all bytes of this one, in memory order."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    laid = tensor.permute(order)
    if laid.is_contiguous():
        yield laid
        return
    raw = laid.view(torch.uint8) if laid.stride(-1) == 1 else laid
    rows = max(1, _PIECE_WORDS * _WORD_BYTES // max(1, raw[:1].numel() * raw.element_size()))
    for first in range(0, len(raw), rows):
        yield raw[first : first + rows].contiguous()


def _piece(data: torch.Tensor) -> torch.Tensor:
    """Both sums of bytes `[n]`."""
    rest = -len(data) % _WORD_BYTES
    if rest:
        data = torch.cat([data, data.new_zeros(rest)])
    elif data.storage_offset() * data.element_size() % _WORD_BYTES:
        data = data.clone()
    words = data.view(torch.int64)
    places = torch.arange(len(words), dtype=torch.int64, device=words.device)
    length = len(data) - rest
    return torch.stack([_lane(words, places, lane, length) for lane in _LANES])


def _lane(
    words: torch.Tensor, places: torch.Tensor, factors: tuple[int, ...], nbytes: int
) -> torch.Tensor:
    of_word, of_place, first, second = map(_signed, factors)
    mixed = words * of_word
    mixed.add_(places, alpha=of_place).add_(_signed(nbytes * factors[2] % (1 << 64)))
    for shift, factor in zip(_SHIFTS, (first, second, None), strict=True):
        # An arithmetic shift; the mask removes the copies of the sign.
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            mixed.mul_(factor)
    return mixed.sum()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
