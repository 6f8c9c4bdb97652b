# SPDX-License-Identifier: Apache-2.0
"""Parameters in memory are told apart by each of them, and by parts of those that engines fuse."""

import pytest
import torch
from torch import nn

from pd_connector.memory.parameters import loaded_fingerprint


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(8, 8)


class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Attention() for _ in range(layers)])


def test_parameters_in_memory_are_seen_each():
    torch.manual_seed(0)
    model = Model()
    before = loaded_fingerprint(model)
    assert loaded_fingerprint(model) == before
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kept = parameter.clone()
            parameter.mul_(1.5)
            assert loaded_fingerprint(model) != before, name
            parameter.copy_(kept)
    assert loaded_fingerprint(model) == before
    model.layers[0].projection.weight.data = model.layers[0].projection.weight.data.t()
    assert loaded_fingerprint(model) != before


def test_parameters_of_any_layout_are_sampled():
    model = nn.Module()
    model.strided = nn.Parameter(torch.arange(64.0).view(8, 8)[:, ::2], requires_grad=False)
    model.empty = nn.Parameter(torch.empty(0))
    model.codes = nn.Parameter(torch.arange(32, dtype=torch.uint8).view(4, 8).t(), False)
    before = loaded_fingerprint(model)
    model.codes.data[3, 2] += 1
    assert loaded_fingerprint(model) != before


def changed(model, part):
    """Whether the fingerprint sees a part of a parameter scaled."""
    before = loaded_fingerprint(model)
    kept = part.clone()
    part.mul_(1.5)
    after = loaded_fingerprint(model)
    part.copy_(kept)
    assert loaded_fingerprint(model) == before
    return after.sampled != before.sampled


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (32, 2), (71, 1), (48, 8)])
def test_keys_of_a_fused_projection_are_seen(heads, kv_heads, transposed):
    width = heads + 2 * kv_heads
    model = nn.Module()
    weight = torch.rand(width * 64, 256)
    model.qkv = nn.Parameter(weight.t().contiguous().t() if transposed else weight, False)
    keys = model.qkv.data[heads * 64 : (heads + kv_heads) * 64]
    assert changed(model, keys)


def test_a_single_expert_is_seen():
    model = nn.Module()
    model.experts = nn.Parameter(torch.rand(128, 64, 32), False)
    assert all(changed(model, model.experts.data[expert]) for expert in range(128))


def test_parameters_that_torch_cannot_index_are_sampled():
    """For example quantised weights with padded rows."""
    model = nn.Module()
    codes = torch.zeros(300, 64, dtype=torch.uint8)
    model.padded = nn.Parameter(codes.view(torch.float4_e2m1fn_x2)[:, :32], False)
    before = loaded_fingerprint(model)
    codes[:, 3] = 7
    assert loaded_fingerprint(model) != before
