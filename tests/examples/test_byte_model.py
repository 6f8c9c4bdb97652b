# SPDX-License-Identifier: Apache-2.0
"""The shipped model tells right KV from wrong KV, and loads wherever a Llama does."""

from __future__ import annotations

import functools
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pd_connector.tools.demo import MODEL_DIR  # noqa: E402

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "byte_model"
sys.path.insert(0, str(RECIPE))
import corpus  # noqa: E402
import quality  # noqa: E402
from damage import KINDS, PAGE_TOKENS, Damage  # noqa: E402

sys.path.remove(str(RECIPE))

LENGTHS = (64, 1000, 3500)
# These prompts move by four times as much at the least (README.md beside train.py).
VISIBLE_NATS = 0.01


@functools.cache
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)


@functools.cache
def model(dtype=torch.bfloat16):
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODEL_DIR, dtype=dtype, local_files_only=True
    )


@functools.cache
@torch.inference_mode()
def answered(tokens: int, index: int = 0):
    """A held-out prompt: its KV, the greedy answer and the answer's log-probabilities."""
    ids = quality.prompts(tokens, count=3)[index]
    layers, first = quality.prefill(model(), ids)
    answer = quality.greedy(model(), layers, first)
    return layers, answer, quality.log_probabilities(model(), layers, answer)


@torch.inference_mode()
def movement(tokens: int, damage: Damage) -> float:
    layers, answer, clean = answered(tokens)
    case = quality.Case(layers, answered(tokens, 1)[0], answer, clean)
    return quality.movement(model(), case, damage)


def test_it_is_a_plain_llama_of_the_promised_shape():
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in config
    assert config["num_hidden_layers"] == 4
    assert config["num_attention_heads"] == 8
    assert config["num_key_value_heads"] == 4
    assert config["max_position_embeddings"] >= 8192
    assert model().num_parameters() == pytest.approx(3e6, rel=0.1)
    assert {p.dtype for p in model().parameters()} == {torch.bfloat16}


def test_the_weights_file_is_small_enough_to_ship():
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= 8_000_000


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_from_the_tokenizer_unchanged(text):
    assert tokenizer().decode(tokenizer()(text).input_ids) == text


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_a_token_is_a_byte_and_its_id_is_the_value_of_the_byte(text):
    assert tokenizer()(text).input_ids == list(text.encode())


def test_text_that_spells_a_special_token_stays_text():
    assert tokenizer()("<|end|>").input_ids == list(b"<|end|>")
    assert tokenizer().eos_token_id == 256


def test_every_id_the_model_can_produce_decodes():
    assert len(tokenizer()) == model().config.vocab_size
    assert all(tokenizer().convert_ids_to_tokens(list(range(len(tokenizer())))))


def test_a_chat_becomes_lines_that_name_who_speaks():
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    text = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "system: Be brief.\nuser: Hi there\nassistant: "


def test_held_out_text_is_the_same_in_every_process_and_apart_from_training():
    listed = subprocess.run(
        [sys.executable, RECIPE / "corpus.py"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    held_out = [line.split("\t")[2] for line in listed]
    assert held_out == [d.name for d in corpus.documents(held_out=True)]
    trained = [d.name for d in itertools.islice(corpus.documents(held_out=False), 100)]
    assert len(trained) == 100
    assert all(corpus.is_held_out(name) for name in held_out)
    assert not any(corpus.is_held_out(name) for name in trained)


def test_the_model_has_learnt_text_it_was_not_trained_on():
    with torch.inference_mode():
        nats = quality.loss(model(), quality.held_out_bytes("prose"), window=512, windows=8)
    assert nats < 0.5 * math.log(256)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_same_kv_gives_the_same_logprobs_to_the_bit(tokens):
    layers, answer, clean = answered(tokens)
    with torch.inference_mode():
        again = quality.log_probabilities(
            model(), [(k.clone(), v.clone()) for k, v in layers], answer
        )
    assert torch.equal(again, clean)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_one_spoilt_page_moves_the_logprobs(tokens, where, kind):
    pages = math.ceil(tokens / PAGE_TOKENS)
    page = {"first": 0, "middle": pages // 2, "last": pages - 1}[where]
    assert movement(tokens, Damage(kind, page)) > VISIBLE_NATS


def test_exchanging_whole_pages_is_no_damage_because_keys_carry_their_position():
    exact = model(torch.float32)  # another order of summing shows in bfloat16
    order = torch.arange(1000)
    order[0:32], order[320:352] = torch.arange(320, 352), torch.arange(0, 32)
    with torch.inference_mode():
        layers, first = quality.prefill(exact, quality.prompts(1000)[0])
        answer = quality.greedy(exact, layers, first)
        clean = quality.log_probabilities(exact, layers, answer)
        exchanged = [(k[:, :, order], v[:, :, order]) for k, v in layers]
        moved = quality.log_probabilities(exact, exchanged, answer) - clean
        case = quality.Case(layers, layers, answer, clean)
        doubled = quality.movement(exact, case, Damage("displaced", 10))
    assert moved.abs().max() < 1e-3
    assert doubled > VISIBLE_NATS


@pytest.mark.parametrize("tokens", LENGTHS)
def test_different_prompts_get_different_answers(tokens):
    answers = [answered(tokens, index)[1] for index in range(3)]
    assert len({tuple(answer[0].tolist()) for answer in answers}) == len(answers)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_an_answer_to_prose_is_no_single_letter_repeated(tokens):
    for index in (0, 2):  # the prompt between them is source, where a run of spaces is right
        assert len(answered(tokens, index)[1].unique()) >= 6
