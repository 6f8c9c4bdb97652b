# SPDX-License-Identifier: Apache-2.0
"""Perplexity after a handoff in each codec: `python examples/byte_model/codec_perplexity.py`.

The KV of the first part of held-out text goes over the wire and back, as in a handoff; the rest
is then scored with it, byte by byte, as a decode engine would read it.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch
from damage import Layers, cache_of
from quality import held_out_bytes, prefill
from train import MODEL_DIR
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from pd_connector.codec import CODECS, Elements, Part

PREFIX_TOKENS, SCORED_TOKENS, WINDOWS = 2048, 256, 16
PLANE_TOKENS = 512
BF16 = Elements("bfloat16")


class Pair(NamedTuple):
    codec: str
    destination: Elements


PAIRS = {name: Pair(name, BF16) for name in ("raw", "int8", "fp8_e4m3")}
PAIRS["fp8_e4m3 into an FP8 cache, scale 1"] = Pair("fp8_e4m3", Elements("fp8_e4m3"))


def carried(x: torch.Tensor, part: Part, pair: Pair) -> torch.Tensor:
    """K or V [1, head, token, dim] after the wire and the destination's cache, bfloat16."""
    codec, planes = CODECS[pair.codec], []
    for plane in x[0].split(PLANE_TOKENS, 1):
        shape = tuple(plane.shape)
        data = torch.empty(codec.coding.coded_bytes(part, shape, BF16), dtype=torch.uint8)
        codec.encode(part, plane, BF16, pair.destination, data)
        stored = codec.decode(part, data, shape, BF16, pair.destination)
        planes.append((stored.float() * pair.destination.scale).bfloat16())
    return torch.cat(planes, 1)[None]


def nats(model: LlamaForCausalLM, layers: Layers, scored: torch.Tensor) -> torch.Tensor:
    """What each of `scored[0, 1:]` costs after the prefix in `layers`."""
    logits = model(input_ids=scored[:, :-1], past_key_values=cache_of(layers)).logits
    return torch.nn.functional.cross_entropy(logits[0].float(), scored[0, 1:], reduction="none")


def windows(text: bytes) -> list[torch.Tensor]:
    """WINDOWS windows [1, prefix and scored] spread evenly over the text."""
    size = PREFIX_TOKENS + SCORED_TOKENS + 1
    starts = [(len(text) - size) * index // (WINDOWS - 1) for index in range(WINDOWS)]
    return [torch.tensor([list(text[start : start + size])]) for start in starts]


def report(model: LlamaForCausalLM, kind: str) -> None:
    """Print perplexities of one kind of text, and how far single bytes move from raw."""
    costs: dict[str, list[torch.Tensor]] = {name: [] for name in PAIRS}
    for ids in windows(held_out_bytes(kind)):
        layers, _ = prefill(model, ids[:, :PREFIX_TOKENS])
        for name, pair in PAIRS.items():
            arrived = [
                (carried(k, Part.KEY, pair), carried(v, Part.VALUE, pair)) for k, v in layers
            ]
            costs[name].append(nats(model, arrived, ids[:, PREFIX_TOKENS:]))
    exact = torch.cat(costs["raw"])
    for name, parts in costs.items():
        found = torch.cat(parts)
        perplexity = math.exp(found.mean().item())
        change = math.exp((found - exact).mean().item()) - 1
        moved = (found - exact).abs().mean().item()
        print(f"{kind:<7} {name:<36} {perplexity:.4f}  {change:+.3%}  {moved:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    print(f"{WINDOWS} windows: a prefix of {PREFIX_TOKENS} bytes, then {SCORED_TOKENS} scored")
    print("text    codec                                perplexity  of raw  mean |nats| moved")
    with torch.inference_mode():
        for kind in ("prose", "source"):
            report(model, kind)


if __name__ == "__main__":
    main()
