# SPDX-License-Identifier: Apache-2.0
"""A cache is known by part of the model, index and kind, whatever else the engine caches."""

import pytest
from support.examples import check_examples

from pd_connector.kv.geometry import DRAFT_LAYERS
from pd_connector.vllm.identity.layers import CacheId, draft_names, identify

MODEL = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
EAGLE = ["model.layers.4.self_attn.attn"]
DRAFT = [f"draft_model.model.layers.{i}.self_attn.attn" for i in range(4)]
MTP = ["mtp.layers.0.self_attn.attn"]


def drafts_of(names, models=None):
    return draft_names(names, 4, models or dict.fromkeys(names))


def test_a_draft_model_moves_no_layer_of_the_model_to_another_number():
    alone = identify(MODEL)
    assert [alone[name] for name in MODEL] == [CacheId(i, "model/attention") for i in range(4)]
    for draft in (DRAFT, EAGLE):
        names = [*MODEL, *draft]
        both = identify(names, drafts_of(names))
        assert {name: both[name] for name in MODEL} == alone
        assert [both[name].number for name in draft] == [
            DRAFT_LAYERS + i for i in range(len(draft))
        ]
        assert {both[name].label for name in draft} == {"draft/attention"}


def test_without_that_all_layers_of_the_model_would_be_other_ones():
    """Counted through, as caches of several kinds in one layer are."""
    names = [*MODEL, *DRAFT]
    assert [identify(names)[name].number for name in MODEL] == [1, 3, 5, 7]


def test_a_draft_whose_names_do_not_tell_is_told_by_the_model_it_is_of():
    names = [*MODEL, *MTP]
    models = dict.fromkeys(MODEL, 1) | dict.fromkeys(MTP, 2)
    assert drafts_of(names, models) == set(MTP)
    assert identify(names, drafts_of(names, models))[MTP[0]] == CacheId(
        DRAFT_LAYERS, "draft/attention"
    )


def test_kinds_of_caches_in_one_layer_are_told_apart_by_their_labels():
    names = [
        name for i in range(2) for name in (f"m.layers.{i}.self_attn.attn", f"m.layers.{i}.indexer")
    ]
    found = identify(names)
    assert len({cache.number for cache in found.values()}) == 4
    assert {cache.label for cache in found.values()} == {
        "model/m.layers.self_attn.attn",
        "model/m.layers.indexer",
    }


def test_a_layer_without_an_index_is_an_error():
    with pytest.raises(ValueError, match=r"'lm\.attn' has no index"):
        identify(["lm.attn"])


def test_examples():
    check_examples("pd_connector.vllm.identity.layers", 1)
