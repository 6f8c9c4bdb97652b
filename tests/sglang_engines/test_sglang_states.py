# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent states between SGLang engines, from vLLM to SGLang, and the reverse: the log probabilities are those
of one engine. What SGLang computes on a GPU alone is in torch here (ci/sgl_kernel).

States stand after the whole prompt where SGLang decodes, and before its last token where vLLM does. It takes minutes, so it runs when asked for: `PD_STATES=all`, or `PD_STATES=sglang`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import COMPILE_NOTHING, PROBE_ARGS, PROBE_ENVIRONMENT
from sglang_engines.sglang_harness import (
    EnginePool,
    SglangEngine,
    assert_idle,
    body,
    fault,
    send,
    text,
)
from sglang_engines.sglang_recipes import (
    MATRIX_TURNED,
    ROWS_SHIFTED,
    SECTIONS_SWAPPED,
    STATE_OF_ANOTHER,
    STATE_ZEROED,
    Recipe,
)
from sglang_engines.test_sglang_cross import COMPLETIONS, Cross
from support.engine_nursery import fork_engine
from tiny_models import build

from pd_connector.tools.launch import Client, RouterProcess, VllmEngine, stop_services, wait_all

pytestmark = pytest.mark.skipif(
    os.environ.get("PD_STATES") not in ("all", "sglang"),
    reason="takes minutes: PD_STATES=all or PD_STATES=sglang runs it",
)

LENGTHS = (2, 65, 300)
"""Less than a convolution looks back on, more than a page, several chunks of the prefill."""
TOKENS = 8
TOP = 20
SPECIAL = 256
"""Tokens below it are bytes."""
TOLERANCE = 1e-4
"""How far apart log probabilities may be in float32. Each harm moves them by a hundred times as much."""
ORDERS = ("sglang:sglang", "vllm:sglang", "sglang:vllm")
EXACT = ("--worker-extension-cls", "exact_delta_nets.ExactDeltaNets")


@dataclass(frozen=True)
class Model:
    """A model, and how its engines are started.

    Attributes:
        kind: kind of tiny model.
        module: SGLang's module of it.
        vllm: arguments of vLLM's engine.
        swapped: first channel of two sections of a convolution that lie side by side, and channels of each.
        harms: what is done to its states on their way, each of which must be seen.
        orders: engine that computes prompts, and engine that decodes.
    """

    kind: str
    module: str
    dtype: str = "float32"
    vllm: Sequence[str] = PROBE_ARGS
    swapped: tuple[int, int] = (0, 0)
    harms: Sequence[str] = ()
    orders: Sequence[str] = ORDERS


HARMS = (STATE_ZEROED, STATE_OF_ANOTHER, ROWS_SHIFTED, SECTIONS_SWAPPED, MATRIX_TURNED)
MODELS: Mapping[str, Model] = {
    "delta net": Model("delta net of unlike dims", "qwen3_next", "float32", EXACT, (0, 128), HARMS),
    "delta net, bfloat16": Model(
        "delta net of experts", "qwen3_next", "bfloat16", harms=(STATE_ZEROED, MATRIX_TURNED)
    ),
    # vLLM's own answers on a CPU are others than the model's: its rotary kernel takes no `[token, head, dim]`.
    "short conv": Model("short conv", "lfm2", harms=HARMS[:3], orders=ORDERS[:1]),
    "mamba2": Model(
        "mamba2",
        "nemotron_h",
        vllm=("--no-enable-prefix-caching", *PROBE_ARGS),
        swapped=(256, 64),
        harms=HARMS,
    ),
}
Rows = list[tuple[int, dict[int, float]]]
"""The tokens of an answer, each with log probabilities of the likeliest ones in its place."""


class Engines:
    """Two engines of SGLang's, one that works alone, and one of vLLM's on either side."""

    def __init__(
        self,
        model: Model,
        alone: SglangEngine,
        p: SglangEngine,
        d: SglangEngine,
        vllm: VllmEngine,
    ):
        self.model, self.alone, self.p, self.d, self.vllm = model, alone, p, d, vllm
        pairs = {"vllm:sglang": (vllm, d), "sglang:vllm": (p, vllm)}
        self.routed = {
            order: Cross(
                RouterProcess(
                    [pair[0].base_url], [pair[1].base_url], args=["--policy", "round_robin"]
                ).start(),
                *pair,
                vllm,
                {},
            )
            for order, pair in pairs.items()
        }
        wait_all([cross.router for cross in self.routed.values()])

    def wanted(self, engine: str, length: int) -> Rows:
        """What one engine answers, vLLM's or SGLang's."""
        if engine == "vllm":
            return _completion(self.vllm.client, length, of_vllm=True)
        asked = body(text(length), TOKENS, top_logprobs_num=TOP)
        return _of_sglang(self.alone.client.post("/generate", asked))

    def found(self, order: str, length: int) -> Rows:
        """What a pair answers."""
        if order == "sglang:sglang":
            asked = send(self.p, self.d, text(length), TOKENS, top_logprobs_num=TOP)
            prefilled, decoded = (future.result() for future in asked)
            assert prefilled["output_ids"] == decoded["output_ids"][:1]
            return _of_sglang(decoded)
        cross = self.routed[order]
        before = cross.received()
        rows = _completion(cross.router.client, length, of_vllm=order.endswith("vllm"))
        assert cross.others() == {}, "the prompt was not handed over"
        cross.wait_received(before + 1)
        return rows

    def harmed(self, order: str, length: int, harm: str) -> Rows:
        """What a pair answers whose states are harmed on their way, where SGLang sends or receives them."""
        engine = self.p if order.endswith("vllm") else self.d
        if harm == STATE_OF_ANOTHER:
            self.found(order, length - 1)  # the beginning of the prompt: a state that lacks a token
        with fault(engine, harm, "{} {}".format(*self.model.swapped)):
            return self.found(order, length)


def _of_sglang(answer: dict[str, Any]) -> Rows:
    """An answer of SGLang's own API."""
    meta = answer["meta_info"]
    tops = [{token: logprob for logprob, token, _ in top} for top in meta["output_top_logprobs"]]
    return list(zip(answer["output_ids"], tops, strict=True))


def _completion(client: Client, length: int, *, of_vllm: bool) -> Rows:
    asked = {
        "model": client.model(),
        "prompt": bytes(text(length)).decode(),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": TOP,
        "cache_salt": uuid.uuid4().hex,
    }
    if of_vllm:  # it has no text for a byte that is not a character
        asked["return_tokens_as_token_ids"] = True
    logprobs = client.post(COMPLETIONS, asked)["choices"][0]["logprobs"]
    return [
        (_token(name), {_token(other): logprob for other, logprob in top.items()})
        for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    ]


def _token(name: str) -> int:
    """A token by its name. SGLang's are bytes, or special."""
    if name.startswith("token_id:"):
        return int(name.removeprefix("token_id:"))
    return ord(name) if len(name) == 1 else SPECIAL


def difference(here: Rows, there: Rows) -> float:
    """The largest of all log probabilities of tokens that are likely in both answers, up to the first token that differs. What
    follows it has another context."""
    largest = 0.0
    for (token, likely), (other, alike) in zip(here, there, strict=True):
        tokens = {name for name in likely.keys() & alike.keys() if name < SPECIAL}
        largest = max(largest, max((abs(likely[t] - alike[t]) for t in tokens), default=inf))
        if token != other:
            break
    return largest


class Truth:
    """What a model's log probabilities are, computed by transformers in float32 from weights that are rounded as engines
    round them."""

    def __init__(self, path: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for name, weight in self._model.named_parameters():
            if not name.endswith("A_log"):  # engines keep it in float32
                weight.data = weight.data.to(getattr(torch, dtype)).float()

    def error(self, rows: Rows, length: int) -> float:
        """How far an answer's log probabilities are from the model's, at most, each after the answer's own tokens before it."""
        tokens = [*text(length), *(token for token, _ in rows)]
        with torch.no_grad():
            logprobs = self._model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return max(
            abs(logprob - float(logprobs[length - 1 + place, token]))
            for place, (_, likely) in enumerate(rows)
            for token, logprob in likely.items()
            if token < SPECIAL
        )


def _of(dtype: str) -> pytest.MarkDecorator:
    """Each model of this dtype."""
    names = [name for name, model in MODELS.items() if model.dtype == dtype]
    return pytest.mark.parametrize("running", names, indirect=True)


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, engines: EnginePool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    model = MODELS[request.param]
    folder = tmp_path_factory.mktemp("states")
    with ExitStack() as stack:
        yield _start(model, build(model.kind, folder / "model"), engines, stack)


def _start(model: Model, path: Path, engines: EnginePool, stack: ExitStack) -> Engines:
    alone = Recipe(
        None,
        # What SGLang keeps beside a radix cache needs a GPU. By default it would fill half the memory with states.
        args=(
            "--disable-radix-cache",
            "--dtype",
            model.dtype,
            "--max-mamba-cache-size",
            "64",
            "--max-running-requests",
            "16",
        ),
        env=(("SGLANG_MAMBA_CONV_DTYPE", model.dtype),),
        model=str(path),
        module=model.module,
    )
    chunked = (*alone.args, "--chunked-prefill-size", "128")
    prefill = replace(alone, role="prefill", args=chunked)
    decode = replace(alone, role="decode", page_size=64)
    paths = [PROBE_ENVIRONMENT["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
    vllm = VllmEngine(
        path,
        "kv_both",
        extra_config={"audit": "off"},  # an audited prompt is computed where its KV goes
        args=["--dtype", model.dtype, "--mamba-ssm-cache-dtype", "float32", *model.vllm],
        env={
            **COMPILE_NOTHING,
            **PROBE_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        name="vllm",
        log_path=path.parent / "vllm.log",
    )
    vllm.popen = fork_engine
    vllm.start()
    stack.callback(stop_services, [vllm])
    engines.start_ahead(alone, prefill, decode)
    one = engines.start(alone)
    p, d = engines.pair(prefill, decode)
    stack.callback(stop_services, [one])
    wait_all([one, vllm])
    made = Engines(model, one, p, d, vllm)
    stack.callback(stop_services, [cross.router for cross in made.routed.values()])
    return made


@_of("float32")
def test_pairs_answer_as_one_engine(running: Engines) -> None:
    """In float32 one engine of vLLM's and one of SGLang's answer alike, and so does each pair."""
    engines, pairs = {}, {}
    for order, length in product(running.model.orders, LENGTHS):
        prefills, decodes = order.split(":")
        wanted = running.wanted(decodes, length)
        engines[order, length] = difference(running.wanted(prefills, length), wanted)
        pairs[order, length] = difference(running.found(order, length), wanted)
    print("engines", engines, "pairs", pairs)
    assert max(engines.values()) <= TOLERANCE, engines
    assert max(pairs.values()) <= TOLERANCE, pairs
    assert_idle(running.p, running.d)


@_of("float32")
def test_a_harmed_state_is_another_answer(running: Engines) -> None:
    length, seen = LENGTHS[-1], {}
    for order, harm in product(running.model.orders, running.model.harms):
        wanted = running.wanted(order.split(":")[1], length)
        seen[order, harm] = difference(running.harmed(order, length, harm), wanted)
    print(seen)
    assert min(seen.values()) > 100 * TOLERANCE, seen
    assert_idle(running.p, running.d)


@_of("bfloat16")
def test_a_pair_is_as_near_as_one_engine(running: Engines) -> None:
    """With vLLM's own kernels, which take bfloat16 alone. Every engine is off there, each in a way of its own, and a pair is about
    as far from what the model says as its engines."""
    truth = Truth(Path(running.vllm.model), running.model.dtype)
    alone = {
        (engine, length): truth.error(running.wanted(engine, length), length)
        for engine, length in product(("vllm", "sglang"), LENGTHS)
    }
    pairs = {
        (order, length): truth.error(running.found(order, length), length)
        for order, length in product(running.model.orders, LENGTHS)
    }
    harmed = {
        (order, harm): truth.error(running.harmed(order, LENGTHS[-1], harm), LENGTHS[-1])
        for order, harm in product(running.model.orders, running.model.harms)
    }
    print("alone", alone, "pairs", pairs, "harmed", harmed)
    farthest = max(alone.values())
    assert max(pairs.values()) <= 1.5 * farthest, (pairs, alone)
    assert min(harmed.values()) > 5 * farthest, (harmed, alone)
    assert_idle(running.p, running.d)
