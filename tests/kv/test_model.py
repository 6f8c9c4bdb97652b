# SPDX-License-Identifier: Apache-2.0
"""Two engines serve one model only if everything that was hashed says so, and enough was."""

import re
from typing import Any

import msgspec
import pytest

from pd_connector.kv.geometry import DRAFT_LAYERS
from pd_connector.kv.model import (
    LayerFacts,
    ModelFacts,
    described,
    draft_problem,
    drafts_alike,
    knowing,
    model_digest,
    model_problem,
    unread_problem,
)
from pd_connector.kv.model_config import MOST_FIELDS, served_config

LAYERS = (LayerFacts((0, 1, 2, 3), "model/attention", "scale 0.125", b"plain", "plain"),)
DISK = ModelFacts(b"config", b"weights", b"loaded", "rank 0 of 1", layers=LAYERS)
BARE = msgspec.structs.replace(DISK, weights=b"", loaded=b"")


def other(facts: ModelFacts = DISK, **changes: Any) -> ModelFacts:
    return msgspec.structs.replace(facts, **changes)


def layers(**changes: Any) -> tuple[LayerFacts, ...]:
    return (msgspec.structs.replace(LAYERS[0], **changes),)


def test_engines_that_say_the_same_serve_the_same():
    assert model_problem(DISK, DISK) == ""


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": b"other"}, "configs .*fingerprint 636f6e666967 at the producer"),
        ({"weights": b"other"}, r"weights differ.*fingerprint of all bytes"),
        ({"layers": layers(label="model/indexer")}, "layer 0 is 'model/attention' at the producer"),
        ({"layers": layers(attention="scale 1")}, "layer 0 attends with scale 0.125"),
        (
            {"layers": layers(rotation=b"x", rotated="long")},
            "layer 0 rotates keys by plain .* by long",
        ),
        ({"version": "step 2"}, "version '' at the producer, 'step 2' at the consumer"),
    ],
)
def test_any_difference_is_named(changes: dict[str, Any], named: str):
    assert re.search(named, model_problem(DISK, other(**changes)))
    assert model_problem(other(**changes), DISK)


@pytest.mark.parametrize("model_id", ["", "llama"])
def test_nothing_is_known_before_all_bytes_were_read(model_id: str):
    reading = other(BARE, reading=True, model_id=model_id)
    named = other(model_id=model_id)
    assert "the consumer has not read all bytes" in unread_problem(named, reading)
    assert "the producer has not read all bytes" in unread_problem(reading, named)
    assert unread_problem(named, named) == ""
    known = knowing(reading, b"weights", b"draft")
    assert unread_problem(named, known) == model_problem(named, known) == ""
    assert known.draft == b"draft"


def test_samples_of_an_older_version_are_never_believed():
    """It tells them from its start on, and all bytes once it has read them."""
    older = {
        "config": b"config",
        "weights": b"samples",
        "loaded": b"samples",
        "held": "rank 0 of 1",
    }
    decode = msgspec.msgpack.Decoder(ModelFacts).decode
    starts = decode(msgspec.msgpack.encode(older))
    assert starts.samples
    assert not starts.weights
    assert not starts.loaded
    assert "has not read all bytes" in unread_problem(starts, DISK)
    read = decode(msgspec.msgpack.encode({**older, "weights_full": b"weights"}))
    plain = other(layers=())
    assert unread_problem(read, plain) == model_problem(read, plain) == ""
    problem = model_problem(read, other(plain, weights=b"else"))
    assert "the producer's pd-connector is older" in problem
    assert "upgrade it" in draft_problem(other(read, draft=b"a"), other(plain, draft=b"b"))
    assert "older" not in model_problem(DISK, other(weights=b"else"))


def test_an_older_version_finds_all_bytes_where_it_looks_for_them():
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(DISK))
    assert told["weights_full"] == b"weights"
    assert told["loaded_full"] == b"loaded"
    assert told["weights"] == b"", "samples, of which there are none"
    assert "loaded" not in told


def test_without_files_parameters_in_memory_decide_if_the_ranks_hold_the_same():
    memory = other(weights=b"")
    assert model_problem(memory, memory) == ""
    assert model_problem(memory, DISK) == ""
    assert "weights differ" in model_problem(memory, other(memory, loaded=b"else"))
    assert "model_id" in model_problem(memory, other(memory, held="rank 0 of 2"))


def test_what_was_not_hashed_is_not_believed():
    for ours, theirs in ((BARE, BARE), (BARE, DISK), (DISK, BARE)):
        assert "give both engines the same name of the model" in model_problem(ours, theirs)
        named = [other(facts, model_id="llama") for facts in (ours, theirs)]
        assert model_problem(*named) == ""
        assert model_problem(named[0], theirs), "one name alone proves nothing"


def test_a_name_never_outweighs_a_difference():
    named = other(model_id="llama")
    assert "model_id 'llama' at the producer" in model_problem(named, other(model_id="qwen"))
    assert "weights" in model_problem(named, other(model_id="llama", weights=b"other"))


def test_weights_that_changed_are_told_by_their_version():
    changed = other(updates=1, loaded=b"new")
    assert "weights have changed" in model_problem(changed, DISK)
    assert "weights have changed" in model_problem(DISK, changed)
    assert model_problem(changed, changed) == "", "both hold the same part, with the same content"
    apart = other(changed, held="rank 0 of 2")
    assert "tell both engines the version" in model_problem(changed, apart)
    ours, theirs = (other(facts, version="step 7") for facts in (changed, apart))
    assert model_problem(ours, theirs) == ""
    assert "version 'step 7'" in model_problem(ours, other(theirs, version="step 8"))


def test_draft_layers_are_never_a_reason_to_refuse():
    draft = LayerFacts((DRAFT_LAYERS,), "draft/attention", "scale 1", b"x")
    plain = other(layers=(*LAYERS, draft), draft=b"eagle")
    elsewhere = other(
        layers=(*LAYERS, msgspec.structs.replace(draft, rotation=b"y")), draft=b"eagle"
    )
    assert model_problem(plain, elsewhere) == ""
    assert drafts_alike(plain, elsewhere)
    assert not drafts_alike(plain, other(plain, draft=b"medusa"))
    assert not drafts_alike(DISK, DISK), "a draft that was not hashed is not believed"


def config_fingerprint(config: dict[str, Any], **served: Any) -> bytes:
    return served_config(config, **served).fingerprint


def served(source: str, config: dict[str, Any], **told: Any) -> ModelFacts:
    found = served_config(config, **told)
    return other(config=found.fingerprint, fields=found.fields, source=source)


LLAMA = {"hidden_size": 2048, "rope": {"theta": 1e4}, "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("theirs", "told", "named"),
    [
        (
            LLAMA,
            {"dtype": "torch.float32"},
            "dtype is torch.bfloat16 at the producer, torch.float32",
        ),
        (
            {**LLAMA, "rope": {"theta": 1e6}},
            {},
            "rope.theta is 10000.0 at the producer, 1000000.0 at",
        ),
        (
            {**LLAMA, "sliding_window": 64},
            {},
            "sliding_window is not set at the producer, 64 at the",
        ),
        (LLAMA, {"quantization": "fp8"}, "quantization is not set at the producer, fp8 at the"),
    ],
)
def test_the_field_of_a_config_that_differs_is_named_with_both_values(
    theirs: dict[str, Any], told: dict[str, Any], named: str
) -> None:
    ours = served("/models/a", LLAMA, dtype="torch.bfloat16")
    problem = model_problem(
        ours, served("/models/a", theirs, **{"dtype": "torch.bfloat16", **told})
    )
    assert named in problem
    assert problem.count(" is ") == 1
    assert "--dtype" in problem
    assert ours.config.hex() not in problem


def test_two_models_are_named_by_where_they_come_from():
    ours, theirs = served("/models/a", LLAMA), served("org/b", {**LLAMA, "hidden_size": 4096})
    assert "(the producer serves /models/a, the consumer org/b)" in model_problem(ours, theirs)
    same = served("org/b", LLAMA)
    retrained = other(same, weights=b"else")
    assert "(the producer serves /models/a, the consumer org/b)" in model_problem(ours, retrained)
    assert "org/b config" in described(same)


def test_what_is_there_for_messages_decides_nothing():
    ours = served("/models/a", LLAMA)
    theirs = other(ours, source="/elsewhere", fields=())
    assert model_problem(ours, theirs) == ""
    assert model_digest(ours) == model_digest(theirs)


def test_what_a_message_says_of_a_config_is_short_and_can_be_sent():
    layers = {f"layer {n}": {"bits": n} for n in range(2 * MOST_FIELDS)}
    long = {"quantization_config": {"layers": layers}, **layers, "name": "\ud800\n" * 999}
    facts = served("/m", long)
    assert len(facts.fields) <= MOST_FIELDS
    assert len(msgspec.msgpack.encode(facts)) < 1 << 15
    assert msgspec.convert(msgspec.to_builtins(facts), ModelFacts) == facts
    changed = served("/m", {**long, "layer 511": {"bits": 0}})
    assert "other fields is " in model_problem(facts, changed)
    assert "\n" not in model_problem(facts, other(changed, source="a\nb"))


def test_a_config_counts_in_all_but_where_it_lies():
    base = config_fingerprint({"hidden_size": 8, "text_config": {"rope_theta": 1e4}}, dtype="bf16")
    same = {
        "_name_or_path": "/models/x",
        "transformers_version": "9",
        "torch_dtype": "bfloat16",
        "text_config": {"rope_theta": 1e4, "torch_dtype": "bfloat16"},
        "hidden_size": 8,
        "sliding_window": None,
    }
    assert config_fingerprint(same, dtype="bf16", quantization=None) == base
    assert config_fingerprint({**same, "hidden_size": 9}, dtype="bf16") != base
    assert config_fingerprint({**same, "text_config": {"rope_theta": 1e6}}, dtype="bf16") != base
    assert config_fingerprint(same, dtype="float32") != base
    assert config_fingerprint(same, dtype="bf16", quantization="fp8") != base


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("part", ["", "text_config"])
def test_the_dtype_of_quantised_numbers_is_part_of_a_config(key: str, part: str) -> None:
    def quantised(dtype: str, **more: object) -> bytes:
        inputs = {"global_quant_config": {"input_tensors": {"dtype": dtype, **more}}}
        return config_fingerprint({part: {key: inputs}} if part else {key: inputs})

    assert quantised("int8") != quantised("fp8_e4m3")
    assert quantised("int8", observer=None) == quantised("int8"), "engines write nulls"


def test_why_an_engine_that_drafts_takes_no_kv_says_what_to_set():
    drafting, plain = other(draft=b"eagle"), other()
    assert draft_problem(drafting, drafting) == ""
    assert "no draft model" in draft_problem(plain, drafting)
    assert "another draft model" in draft_problem(other(draft=b"medusa"), drafting)
    assert "--speculative-config" in draft_problem(plain, drafting)
    assert "model_id" in draft_problem(drafting, plain), "its own draft is not known"
