# SPDX-License-Identifier: Apache-2.0
"""From a layer, the module that it is a part of and the whole model are found."""

import gc

from torch import nn

from pd_connector.vllm.identity import owners


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
