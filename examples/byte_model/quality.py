# SPDX-License-Identifier: Apache-2.0
"""Measure the byte model on held-out text: `python examples/byte_model/quality.py`.

Prints the held-out loss, samples, and how far the log-probabilities of 32 greedy bytes move
when one page of the prompt's KV cache is spoilt, for every page of prompts of several lengths.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from corpus import documents
from damage import KINDS, PAGE_TOKENS, Damage, Layers, cache_of, layers_of, spoil
from train import MODEL_DIR
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM

PROMPT_TOKENS = (64, 100, 256, 1000, 2048, 3500)
PROMPTS_EACH = 3
NEW_TOKENS = 32


class Case(NamedTuple):
    layers: Layers  # KV of the prompt
    other: Layers  # KV of another prompt, which a stale page still holds
    answer: torch.Tensor  # the greedy tokens, [1, NEW_TOKENS]
    clean: torch.Tensor  # log-probabilities of answer[1:] with nothing spoilt


@functools.cache
def held_out_bytes(kind: str) -> bytes:
    return b"\n\n".join(d.text.encode() for d in documents(held_out=True) if d.kind == kind)


def prompts(tokens: int, count: int = PROMPTS_EACH) -> list[torch.Tensor]:
    """`count` prompts [1, tokens] spread over the held-out text, prose first."""
    texts = [held_out_bytes("prose"), held_out_bytes("source")]
    chosen = []
    for index in range(count):
        text = texts[index % 2]
        start = (len(text) - tokens) * (index + 1) // (count + 1)
        chosen.append(torch.tensor([list(text[start : start + tokens])]))
    return chosen


def prefill(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[Layers, torch.Tensor]:
    """KV of the prompt, and the first greedy token [1, 1]."""
    cache = DynamicCache()
    logits = model(input_ids=ids, past_key_values=cache).logits
    return layers_of(cache, ids.shape[1]), logits[:, -1:].argmax(-1)


def greedy(model: LlamaForCausalLM, layers: Layers, first: torch.Tensor) -> torch.Tensor:
    """The first token and those that follow it, [1, NEW_TOKENS]."""
    cache, tokens = cache_of(layers), [first]
    while len(tokens) < NEW_TOKENS:
        logits = model(input_ids=tokens[-1], past_key_values=cache).logits
        tokens.append(logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1)


def log_probabilities(
    model: LlamaForCausalLM, layers: Layers, tokens: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities [NEW_TOKENS - 1] of `tokens[1:]` after the prompt in `layers`."""
    logits = model(input_ids=tokens[:, :-1], past_key_values=cache_of(layers)).logits
    return logits[0].float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


def movement(model: LlamaForCausalLM, case: Case, damage: Damage) -> float:
    """The largest |difference| in nats that a damage makes to the answer's log-probabilities."""
    spoilt = log_probabilities(model, spoil(case.layers, case.other, damage), case.answer)
    return float((spoilt - case.clean).abs().max())


def loss(model: LlamaForCausalLM, text: bytes, window: int, windows: int) -> float:
    """Mean nats per byte over `windows` windows spread evenly over `text`."""
    total = 0.0
    for index in range(windows):
        start = (len(text) - window) * index // max(1, windows - 1)
        ids = torch.tensor([list(text[start : start + window])])
        logits = model(input_ids=ids).logits.float()
        total += torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
    return total / windows


def report_damage(model: LlamaForCausalLM, exact: LlamaForCausalLM) -> None:
    """Print, per prompt length and kind of damage, the movements of all pages in nats.

    A page's movement is the largest |difference| over the answer. "first", "middle" and
    "last" are those pages' least among the prompts. "noise" is the same figure for arithmetic alone: these weights in float32 beside bfloat16.
    """
    print("tokens  kind        pages  least   median  most    first   middle  last    noise")
    for tokens in PROMPT_TOKENS:
        others = prompts(tokens, PROMPTS_EACH + 1)[1:]
        cases, noise_nats = [], 0.0
        for ids, other_ids in zip(prompts(tokens), others, strict=True):
            layers, first = prefill(model, ids)
            answer = greedy(model, layers, first)
            clean = log_probabilities(model, layers, answer)
            noise = log_probabilities(exact, prefill(exact, ids)[0], answer) - clean
            noise_nats = max(noise_nats, noise.abs().max().item())
            cases.append(Case(layers, prefill(model, other_ids)[0], answer, clean))
        pages = math.ceil(tokens / PAGE_TOKENS)
        for kind in KINDS:
            moved = [
                [movement(model, case, Damage(kind, page)) for page in range(pages)]
                for case in cases
            ]
            every = [value for case in moved for value in case]
            ends = [min(case[page] for case in moved) for page in (0, pages // 2, pages - 1)]
            figures = [min(every), statistics.median(every), max(every), *ends, noise_nats]
            columns = "  ".join(f"{value:<6.4f}" for value in figures)
            print(f"{tokens:<6}  {kind:<10}  {pages:<5}  {columns}", flush=True)


def report_text(model: LlamaForCausalLM, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for tokens in (64, 1000, 3500):
        for ids in prompts(tokens):
            answer = greedy(model, *prefill(model, ids))
            end = tokenizer.decode(ids[0, -32:])
            print(f"{tokens:>5}  {end!r} -> {tokenizer.decode(answer[0])!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    torch.set_num_threads(2)
    load = AutoModelForCausalLM.from_pretrained
    model = load(args.model, dtype=torch.bfloat16)
    exact = load(args.model, dtype=torch.float32)
    with torch.inference_mode():
        for kind in ("prose", "source"):
            for window, windows in ((512, 64), (3500, 16)):
                nats = loss(model, held_out_bytes(kind), window, windows)
                print(f"held-out {kind}, windows of {window}: {nats:.3f} nats/byte, ", end="")
                print(f"perplexity {math.exp(nats):.2f}, {nats / math.log(2):.2f} bits/byte")
        report_text(model, args.model)
        report_damage(model, exact)


if __name__ == "__main__":
    main()
