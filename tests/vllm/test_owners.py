# SPDX-License-Identifier: Apache-2.0
"""From a layer, the module that it is a part of and the whole model are found."""

import gc

import torch
from torch import nn

from pd_connector.vllm import owners
from pd_connector.vllm.loaded import loaded_fingerprint


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(8, 8)
        self.attn = nn.Identity()


class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Attention() for _ in range(layers)])


def test_a_layers_owners_lead_to_the_model():
    owners.watch()
    model = Model()
    layer = model.layers[1].attn
    assert next(owners.owners(layer)) is model.layers[1]
    assert owners.model_of(layer) is model
    assert owners.model_of(nn.Identity()) is None


def test_two_models_in_one_process_are_told_apart_and_neither_is_kept_alive():
    owners.watch()
    one, other = Model(), Model()
    assert owners.model_of(one.layers[0].attn) is one
    layer = other.layers[0].attn
    assert owners.model_of(layer) is other
    del other
    gc.collect()
    assert owners.model_of(layer) is None


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
