# SPDX-License-Identifier: Apache-2.0
"""What is told of a rotation is what vLLM's own module does to keys."""

import pytest
import torch
from torch import nn

rotary_embedding = pytest.importorskip("vllm.model_executor.layers.rotary_embedding")

from support.rotations import PARAMETERS  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402

from pd_connector.kv.rotation import rotation_of  # noqa: E402
from pd_connector.kv.rotation_table import agrees, table_row  # noqa: E402
from pd_connector.vllm.identity import owners, rotary  # noqa: E402


def made(parameters, dtype=torch.float32, longest=1024):
    """A module as vLLM makes it for an engine whose longest sequence has `longest` tokens."""
    rotary_embedding._ROPE_DICT.clear()
    config = VllmConfig()
    config.model_config = type("Model", (), {"max_model_len": longest})()
    with set_current_vllm_config(config):
        return rotary_embedding.get_rope(64, 2048, True, dict(parameters), dtype)


class Block(nn.Module):
    """An attention block: a rotation, and the layer that vLLM tells a connector of."""

    def __init__(self, rotation):
        super().__init__()
        self.rotary_emb = rotation
        self.attn = nn.Identity()


def told(rotation):
    owners.watch()
    block = Block(rotation)
    return rotary.rotation_text(block.attn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_defining_values_are_those_of_vllms_table(name, dtype):
    module = made(PARAMETERS[name], dtype)
    found = rotary._made_with(module).rotation
    row = rotary._row(module) or table_row(module.cos_sin_cache)
    assert len(found.frequencies) == 32
    assert agrees(found, row)
    other = found._replace(frequencies=tuple(f * 1.5 for f in found.frequencies))
    assert not agrees(other, row), "the check bites"
    assert told(module) == found.text


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_dtype_of_the_table_does_not_count(name):
    texts = [told(made(PARAMETERS[name], dtype)) for dtype in (torch.float32, torch.bfloat16)]
    assert texts[0] == texts[1]


def test_long_rope_differs_with_the_longest_sequence_of_the_engine():
    short, long = (told(made(PARAMETERS["longrope"], longest=n)) for n in (256, 1024))
    assert short != long
    llama = [told(made(PARAMETERS["llama3"], longest=n)) for n in (256, 1024)]
    assert llama[0] == llama[1]


def test_a_table_that_was_changed_after_it_was_made_is_another_rotation():
    module = made(PARAMETERS["default"])
    before = told(module)
    module.cos_sin_cache[1:] *= 1.5
    assert told(module) != before


def test_a_layer_without_rotation_has_none():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.Identity()

    owners.watch()
    block = Bare()
    assert rotary.rotation_text(block.attn) is None


def test_a_module_that_vllm_has_not_registered_is_told_by_its_table():
    module = made(PARAMETERS["default"])
    rotary_embedding._ROPE_DICT.clear()
    assert told(module).startswith("RotaryEmbedding {")


@pytest.mark.parametrize("name", ["multimodal", "multimodal yarn"])
def test_sections_count_whether_or_not_the_table_is_what_the_parameters_say(name):
    def texts(change):
        found = []
        for sections in ([8, 12, 12], [12, 10, 10]):
            module = made({**PARAMETERS[name], "mrope_section": sections})
            module.cos_sin_cache[1:] *= change
            found.append(told(module))
        return found

    known, by_table = texts(1.0), texts(1.5)
    assert not known[0].startswith("MRotaryEmbedding")
    assert by_table[0].startswith("MRotaryEmbedding"), "so that the test tests what it says"
    assert known[0] != known[1]
    assert by_table[0] != by_table[1]


def test_a_small_difference_of_frequencies_shows_at_far_positions():
    module = made(PARAMETERS["default"])
    assert len(module.cos_sin_cache) > 1024
    found = rotation_of(PARAMETERS["default"], dims=64, interleaved=False, max_positions=2048)
    other = found._replace(frequencies=tuple(f * 1.0001 for f in found.frequencies))
    assert agrees(found, table_row(module.cos_sin_cache))
    assert not agrees(other, table_row(module.cos_sin_cache))


def test_a_table_that_lacks_the_first_positions_is_not_what_its_parameters_say():
    table = made(PARAMETERS["default"]).cos_sin_cache
    found = rotation_of(PARAMETERS["default"], dims=64, interleaved=False, max_positions=2048)
    assert agrees(found, table_row(None))
    assert agrees(found, table_row(table[:18]))
    assert not agrees(found, table_row(table[:17]))
    assert not agrees(found, table_row(table[:, :32]))


def of_transformers(parameters):
    """A rotation as vLLM's backend of transformers has it."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        head_dim=64, max_position_embeddings=2048, rope_parameters=dict(parameters)
    )
    return llama.LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn"])
def test_a_rotation_of_transformers_is_that_of_vllms_own_module(name):
    parameters = PARAMETERS[name]
    found = told(of_transformers(parameters))
    assert found == told(made(parameters))
    assert found != told(of_transformers({**parameters, "rope_theta": 10001.0}))


def test_a_rotation_of_transformers_that_is_not_what_its_config_says_is_told_by_its_table():
    module = of_transformers(PARAMETERS["default"])
    before = told(module)
    module.inv_freq[5:] *= 1.5
    assert told(module).startswith("LlamaRotaryEmbedding {")
    assert told(module) != before


def test_a_rotation_of_transformers_that_depends_on_a_batch_is_none_of_vllms():
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert told(of_transformers(parameters)).startswith("LlamaRotaryEmbedding {")
