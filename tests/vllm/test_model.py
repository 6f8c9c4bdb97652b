# SPDX-License-Identifier: Apache-2.0
"""What is told of vLLM's layers: what their kernels and blocks do, and nothing that the engine's limits say."""

from types import SimpleNamespace

import pytest
from torch import nn

pytest.importorskip("vllm")

from pd_connector.vllm import owners
from pd_connector.vllm.layers import CacheId
from pd_connector.vllm.model import _layer_facts

ROTARY = {"rope_theta": 10000.0}
"""What the config says of rotation."""


class Attention(nn.Module):
    """A layer as vLLM tells a connector of it."""

    def __init__(self):
        super().__init__()
        self.impl = SimpleNamespace(scale=0.125)

    def get_kv_cache_spec(self):
        raise NotImplementedError


class WithoutRotation(nn.Module):
    """A block as Llama 4 has one in four layers."""

    def __init__(self, tuned):
        super().__init__()
        self.rotary_emb = None
        self.attn_temperature_tuning = tuned
        self.attn = Attention()


class OfUnknownRotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()


def facts(block, longest=4096):
    context = {"model.layers.0.attn": block.attn}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        model_config=SimpleNamespace(max_model_len=longest),
    )
    caches = {"model.layers.0.attn": CacheId(0, "model/attention")}
    return _layer_facts(config, caches, ROTARY)[0]


@pytest.fixture(autouse=True)
def _watched():
    owners.watch()


def test_a_layer_that_rotates_nothing_does_not_depend_on_the_longest_sequence():
    found = [facts(WithoutRotation(False), longest) for longest in (4096, 8192)]
    assert found[0] == found[1]
    assert found[0].rotation == b""


def test_a_layer_of_unknown_rotation_is_compared_by_the_config_and_the_longest_sequence():
    assert facts(OfUnknownRotation()) != facts(OfUnknownRotation(), longest=8192)
    assert facts(OfUnknownRotation()).rotation


def test_queries_that_grow_with_the_position_are_another_attention():
    plain, tuned = facts(WithoutRotation(False)), facts(WithoutRotation(True))
    assert tuned.attention == f"{plain.attention}, temperature tuning"
