# SPDX-License-Identifier: Apache-2.0
"""A model with recurrent states (Qwen3-Next: gated delta nets) between SGLang engines: every token and log probability
as one engine computes it. SGLang's kernels of delta nets are in torch here (ci/sgl_kernel)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sglang_engines.sglang_harness import (
    EnginePool,
    ask,
    assert_close,
    assert_idle,
    assert_same,
    fault,
    handed_over,
    text,
)
from sglang_engines.sglang_recipes import STATE_OF_ANOTHER, STATE_ZEROED, Recipe
from tiny_models import build

LENGTHS = (1, 2, 63, 65, 150)
"""A token, less than a convolution looks back on, less and more than a page, two chunks of the prefill."""
ALONE = Recipe(
    None,
    args=("--disable-radix-cache",),  # what SGLang keeps beside it needs a GPU
    env=(("SGLANG_MAMBA_CONV_DTYPE", "float32"),),
    module="qwen3_next",
)
PREFILL = replace(
    ALONE, role="prefill", page_size=16, args=(*ALONE.args, "--chunked-prefill-size", "128")
)
DECODE = replace(ALONE, role="decode", page_size=64)
RANKS = {"alike": (1, 1), "two ranks to one": (2, 1), "one rank to two": (1, 2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("delta net of experts", tmp_path_factory.mktemp("models") / "delta_net"))


@pytest.fixture(scope="module", params=RANKS)
def recipes(request: pytest.FixtureRequest, model: str) -> list[Recipe]:
    made = [replace(recipe, model=model) for recipe in (ALONE, PREFILL, DECODE)]
    for place, ranks in enumerate(RANKS[request.param], 1):
        made[place] = replace(made[place], tp=ranks)
    return made


def test_every_token_is_as_one_engine_computes_it(
    engines: EnginePool, recipes: list[Recipe]
) -> None:
    """And without the state, or with that of the request before, it is not."""
    engines.start_ahead(*recipes)
    alone = engines.start(recipes[0]).wait_ready()
    wanted = [ask(alone, text(length)) for length in LENGTHS]
    p, d = engines.pair(*recipes[1:])
    for length, answer in zip(LENGTHS, wanted, strict=True):
        assert_same(handed_over(p, d, text(length)), answer)
    for harm in (STATE_ZEROED, STATE_OF_ANOTHER):
        handed_over(p, d, text(70, seed=2))
        with fault(d, harm):
            answer = handed_over(p, d, text(LENGTHS[-1]))
        with pytest.raises(AssertionError, match="wanted"):
            assert_close(answer, wanted[-1], 0.05)
    assert_idle(p, d)
