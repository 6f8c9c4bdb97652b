# SPDX-License-Identifier: Apache-2.0
"""What is told of vLLM's layers: what their kernels and blocks do, and nothing that the engine's limits say."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

pytest.importorskip("vllm")

from pd_connector import tools
from pd_connector.agent.advertised_model import DraftFiles
from pd_connector.config import Config
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.geometry import DRAFT_LAYERS
from pd_connector.vllm.identity import model, owners
from pd_connector.vllm.identity.layers import CacheId
from pd_connector.vllm.identity.model import _encoder, _layer_facts, _may_draft, draft_model

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


def facts(block, longest=4096, config_of_model=ROTARY):
    context = {"model.layers.0.attn": block.attn}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        model_config=SimpleNamespace(max_model_len=longest),
    )
    caches = {"model.layers.0.attn": CacheId(0, "model/attention")}
    return _layer_facts(config, caches, config_of_model)[0]


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
    within = {"text_config": ROTARY, "hidden_size": 8}
    assert facts(OfUnknownRotation(), config_of_model=within).rotation
    assert not facts(OfUnknownRotation(), config_of_model={"hidden_size": 8}).rotation


def test_queries_that_grow_with_the_position_are_another_attention():
    plain, tuned = facts(WithoutRotation(False)), facts(WithoutRotation(True))
    assert tuned.attention == f"{plain.attention}, temperature tuning"


def test_what_an_encoder_makes_of_images_is_part_of_the_config():
    def told(**settings):
        known = {"mm_encoder_attn_dtype": None, "video_pruning_rate": None} | settings
        return _encoder(SimpleNamespace(multimodal_config=SimpleNamespace(**known)))

    nothing = {"encoder_attention": None, "video_pruning": None}
    assert _encoder(SimpleNamespace(multimodal_config=None)) == told() == nothing
    assert told(mm_encoder_attn_dtype="fp8") != nothing
    pruned = [
        told(video_pruning_rate=0.5, video_pruning_method=each) for each in ("evs", "vidcom2")
    ]
    assert pruned[0] != pruned[1]


def drafting(load_format: str, seed: int = 0) -> SimpleNamespace:
    """The config of an engine that drafts."""
    told = SimpleNamespace(method="mtp", draft_model_config=SimpleNamespace(dtype="bfloat16"))
    return SimpleNamespace(
        speculative_config=told,
        load_config=SimpleNamespace(load_format=load_format),
        model_config=SimpleNamespace(seed=seed),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )


DRAFT_CACHE = {"draft": CacheId(DRAFT_LAYERS, "")}


def test_a_draft_is_known_by_its_files_once_they_were_read(monkeypatch):
    """Layers for several tokens (MTP) come from the model's own files."""
    own = CheckpointFiles.open(Path(tools.__file__).parent / "demo" / "model", "auto")
    monkeypatch.setattr(model, "model_files", lambda *_, **__: (own,))
    monkeypatch.setattr(model, "read_config", lambda _: {})
    found = draft_model(drafting("auto"), Config(), DRAFT_CACHE)
    assert isinstance(found, DraftFiles)
    assert found.files == (own,)
    assert draft_model(drafting("auto"), Config(), {"own": CacheId(0, "")}) == b""
    own.close()


@pytest.mark.parametrize(
    ("load_format", "model_id", "known"),
    [("dummy", "", True), ("runai_streamer", "a model", True), ("runai_streamer", "", False)],
)
def test_a_draft_whose_files_are_not_here_is_known_by_its_seed_or_by_the_operators_name(
    monkeypatch, load_format, model_id, known
):
    monkeypatch.setattr(model, "model_files", lambda *_, **__: None)
    monkeypatch.setattr(model, "read_config", lambda _: {})

    def drafted(seed: int) -> bytes:
        return draft_model(drafting(load_format, seed), Config(model_id=model_id), DRAFT_CACHE)

    assert bool(drafted(0)) is known
    assert (drafted(0) == drafted(1)) is (load_format != "dummy")


def test_a_draft_counts_only_where_an_engine_may_have_its_layers():
    def counts(numbers: list[int], stages: int) -> bool:
        config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=stages))
        return _may_draft(config, {str(n): CacheId(n, "") for n in numbers})

    assert counts([0, 1, DRAFT_LAYERS], 1)
    assert not counts([0, 1], 1), "Medusa, for example: nothing of the draft is kept"
    assert counts([0, 1], 2), "another rank may have them"
