# SPDX-License-Identifier: Apache-2.0
"""Public functions on tensors of a GPU: they choose the kernel, not the reference, and give what they give on a CPU."""

import functools
from collections.abc import Callable

import torch
from torch_device import gpu

from pd_kernels.attention import MixedPlan, merge_partials, mixed_attention
from pd_kernels.attention.decode_call import on_hopper
from pd_kernels.transfer import PayloadShape, Resharding, finish, new_sums, payload_sums, reshard


def _merge(device: str) -> list[torch.Tensor]:
    outs, lses = torch.randn(3, 5, 2, 80).to(device), torch.randn(3, 5, 2).to(device)
    return list(merge_partials(outs, lses))


def _mixed(device: str) -> list[torch.Tensor]:
    """A decode and a chunk of six tokens."""
    q, cache = torch.randn(7, 4, 64).bfloat16(), torch.randn(2, 3, 16, 2, 64).bfloat16()
    table, lengths = torch.tensor([[2, 0], [1, 0]]).int(), torch.tensor([20, 9]).int()
    q, cache, table, lengths = (each.to(device) for each in (q, cache, table, lengths))
    plan = MixedPlan.of(q, cache[0], table, lengths, [0, 1, 7], decodes=1)
    return [mixed_attention(q, cache[0], cache[1], plan)]


def _reshard(device: str) -> list[torch.Tensor]:
    payload = PayloadShape("int8", 4, 2, 40, 128, 128, 2)
    sources = [torch.randint(0, 256, (payload.nbytes(2),)).byte().to(device) for _ in range(2)]
    found = torch.zeros(payload.nbytes(1), dtype=torch.uint8).to(device)
    reshard(Resharding.of(sources, [found], payload))
    return [found]


def _sums(device: str) -> list[torch.Tensor]:
    payload = torch.randint(0, 256, (100_000,)).byte().to(device)
    sums = new_sums(len(payload), payload.device)
    payload_sums(payload, sums)
    return [torch.frombuffer(bytearray(finish(sums.cpu(), len(payload))), dtype=torch.uint8)]


def _strides(device: str) -> list[torch.Tensor]:
    """A copy to the device keeps the order in memory: caches of several layouts are tried so."""
    moved = torch.zeros(2, 3, 4).transpose(0, 2).to(device)
    return [torch.tensor(moved.stride())]


def alike(call: Callable[[str], list[torch.Tensor]]) -> None:
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(11)
        with gpu():
            found.append([each.cpu().float() for each in call(device)])
            assert on_hopper(torch.device("cuda", 0)), "what only Hopper has would not be chosen"
    for wanted, each in zip(*found, strict=True):
        assert torch.allclose(each, wanted, atol=2e-2, rtol=2e-2), "differs from a CPU's"


PUBLIC = {
    "public, merge": functools.partial(alike, _merge),
    "public, mixed": functools.partial(alike, _mixed),
    "public, reshard": functools.partial(alike, _reshard),
    "public, strides": functools.partial(alike, _strides),
    "public, payload sums": functools.partial(alike, _sums),
}
