# SPDX-License-Identifier: Apache-2.0
"""Train the byte model: `python examples/byte_model/train.py`, under ten minutes on two cores.

Two objectives share each step. One is the next byte of the standard library's text, with
passages repeated far from where they first stood. The other spoils one page of the KV cache
and asks that the bytes after the prompt become differently likely: without it a small model
reads its last few hundred bytes, and a page lost in a transfer would go unseen.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
from corpus import documents
from damage import KINDS, PAGE_TOKENS, Damage, Layers, cache_of, layers_of, spoil
from tokenizer import END, PAD, START, VOCABULARY, save_tokenizer
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM

MODEL_DIR = Path(__file__).resolve().parents[2] / "pd_connector" / "tools" / "demo" / "model"
MAX_TOKENS = 8192
TAIL_TOKENS = 32  # bytes after the prompt on which a spoilt page must show
STEPS = 900
LONG_EVERY = 8  # every n-th step trains on one long row instead of several short ones


class Text(NamedTuple):
    source: torch.Tensor
    prose: torch.Tensor


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,  # what GPU attention kernels support; 32 is often refused
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=True,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=PAD,
    )


def load_text() -> Text:
    pieces: dict[str, list[int]] = {"source": [], "prose": []}
    for document in documents(held_out=False):
        pieces[document.kind].extend(document.text.encode())
        pieces[document.kind].append(END)
    return Text(**{kind: torch.tensor(ids, dtype=torch.int16) for kind, ids in pieces.items()})


def pick(low: int, high: int) -> int:
    """A random integer, low <= n < high."""
    return int(torch.randint(low, high, ()))


def row(text: Text, tokens: int, repeat: float) -> torch.Tensor:
    """One training row [tokens]; with probability `repeat` a passage stands in it twice."""
    stream = text.prose if pick(0, 2) else text.source
    start = pick(0, len(stream) - tokens)
    ids = stream[start : start + tokens].long()
    if torch.rand(()) < repeat:
        length = pick(24, max(25, min(256, tokens // 4)))
        first = pick(0, tokens - 2 * length)
        second = pick(first + length, tokens - length + 1)
        if pick(0, 4) == 0:  # letters that only the context can predict
            ids[first : first + length] = torch.randint(97, 123, (length,))
        ids[second : second + length] = ids[first : first + length].clone()
    return ids


def batch(text: Text, step: int) -> torch.Tensor:
    if step % LONG_EVERY == LONG_EVERY - 1:
        tokens = (3584, 2048, 4096, 1536)[step // LONG_EVERY % 4]
        return torch.stack([row(text, tokens, repeat=0.6)])
    rows, tokens = ((4, 512), (8, 256), (2, 1024), (6, 320))[step % 4]
    return torch.stack([row(text, tokens, repeat=0.3) for _ in range(rows)])


def pick_damage(pages: int) -> Damage:
    kind = KINDS[pick(0, len(KINDS) if pages > 1 else 2)]
    scope = float(torch.rand(()))
    layer = pick(0, 4) if scope < 0.25 else None
    head = pick(0, 4) if 0.25 <= scope < 0.4 else None
    return Damage(kind, pick(0, pages), layer, head)


def movement(
    model: LlamaForCausalLM, ids: torch.Tensor, clean: torch.Tensor, layers: Layers, old: Layers
) -> torch.Tensor:
    """How far one spoilt page moves the tail's log-probabilities, per row, in nats.

    `ids` [row, token], `clean` the logits of the tail, `layers` the prompt's KV, `old` KV of
    other text. The mean over the tail of the expected |difference| under the clean model.
    """
    prompt = layers[0][0].shape[2]
    damage = pick_damage(math.ceil(prompt / PAGE_TOKENS))
    cache = cache_of(spoil(layers, old, damage))
    spoilt = model(input_ids=ids[:, prompt:], past_key_values=cache).logits
    before, after = clean.float().log_softmax(-1), spoilt.float().log_softmax(-1)
    return ((before - after).abs() * before.exp().detach()).sum(-1).mean(-1)


class Optimiser:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""

    def __init__(self, model: LlamaForCausalLM, steps: int) -> None:
        inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        outer = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.model = model
        self.parts = (
            torch.optim.Muon(inner, lr=0.02, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(outer, lr=4e-3, betas=(0.9, 0.97), weight_decay=0.0),
        )
        warmup = max(1, steps // 25)
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(
                part, lambda n: min((n + 1) / warmup, (steps - n) / (steps - warmup))
            )
            for part in self.parts
        ]

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for part, schedule in zip(self.parts, self.schedules, strict=True):
            part.step()
            schedule.step()
            part.zero_grad(set_to_none=True)


def train(steps: int, weight: float, margin: float) -> LlamaForCausalLM:
    """Train from scratch and return the model; prints its progress."""
    text = load_text()
    print(f"text: {len(text.source):,} bytes of source, {len(text.prose):,} of prose", flush=True)
    model = LlamaForCausalLM(llama_config())
    print(f"model: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimiser = Optimiser(model, steps)
    old: Layers = []
    began = reported = time.monotonic()
    seen = 0
    losses: list[float] = []
    moves: dict[bool, list[float]] = {True: [], False: []}
    for step in range(steps):
        ids = batch(text, step)
        rows, tokens = ids.shape
        # A cut at any token: the last page of a prompt is rarely full.
        prompt = tokens - TAIL_TOKENS - pick(0, PAGE_TOKENS)
        tail = slice(prompt, prompt + TAIL_TOKENS)
        with torch.autocast("cpu", torch.bfloat16):
            cache = DynamicCache()
            logits = model(input_ids=ids, past_key_values=cache).logits
            next_byte = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()
            )
            few = slice(0, max(1, rows // 2))
            whole = layers_of(cache, tokens)
            layers = [(k[few, :, :prompt], v[few, :, :prompt]) for k, v in whole]
            stale = other_text(whole, old, few, prompt)
            moved = movement(model, ids[few, : tail.stop], logits[few, tail], layers, stale)
        unseen = (math.log(margin) - (moved + 1e-5).log()).relu().mean()
        (next_byte + weight * unseen).backward()
        optimiser.step()
        if rows == 1:
            old = [(k.detach(), v.detach()) for k, v in whole]
        seen += ids.numel()
        losses.append(next_byte.item())
        moves[rows == 1].append(moved.mean().item())
        if time.monotonic() - reported > 5 or step == steps - 1:
            reported = time.monotonic()
            spent = reported - began
            left = spent / (step + 1) * (steps - step - 1)
            print(
                f"step {step + 1}/{steps}  {spent:4.0f} s, {left:4.0f} s left  "
                f"{seen / spent:,.0f} bytes/s  loss {mean(losses[-20:]):.3f} nats/byte  "
                f"a spoilt page moves short prompts {mean(moves[False][-20:]):.4f}, "
                f"long {mean(moves[True][-10:]):.4f} nats",
                flush=True,
            )
    return model


def other_text(whole: Layers, old: Layers, few: slice, prompt: int) -> Layers:
    """KV that does not belong to the rows in `few`: other rows', or an earlier long row's."""
    if whole[0][0].shape[0] > 1:
        return [(k.roll(1, 0)[few, :, :prompt], v.roll(1, 0)[few, :, :prompt]) for k, v in whole]
    if old and old[0][0].shape[2] >= prompt:
        return [(k[:, :, :prompt], v[:, :, :prompt]) for k, v in old]
    half = prompt // 2
    return [(k[:, :, :prompt].roll(half, 2), v[:, :, :prompt].roll(half, 2)) for k, v in whole]


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights (bfloat16), configuration and tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=START, eos_token_id=END, pad_token_id=PAD, do_sample=False
    )
    model.save_pretrained(folder)
    save_tokenizer(folder, MAX_TOKENS)
    # Readers older than transformers 5 look for these under their former names.
    rewrite(folder / "config.json", rope_theta=model.config.rope_parameters["rope_theta"])
    rewrite(folder / "config.json", torch_dtype="bfloat16")
    rewrite(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    print(f"wrote {folder}: {weights.stat().st_size / 1e6:.1f} MB of weights")


def rewrite(path: Path, **values: object) -> None:
    """Set keys of a JSON file."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | values, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="model folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weight", type=float, default=0.05, help="of the spoilt-page objective")
    parser.add_argument("--margin", type=float, default=0.15, help="nats a spoilt page must move")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(2)
    save(train(args.steps, args.weight, args.margin), args.out)


if __name__ == "__main__":
    main()
