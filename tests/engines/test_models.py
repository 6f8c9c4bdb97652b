# SPDX-License-Identifier: Apache-2.0
"""Models whose caches are not those of a plain Llama: sliding windows, hybrids, MLA latents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from caches import both_sides, unlike
from harness import (
    Answer,
    assert_same_logprobs,
    completion,
    fresh_salt,
    largest_difference,
    prefill_step,
    two_step,
    wait_until,
)
from pairs import (
    Pair,
    Setup,
    Side,
)
from recipes import Recipe, frozen
from test_handoff import PAGE, SHORT_LEASE, prompt_of
from tiny_models import WINDOW, build
from told import told_at_once
from tools import TOLERANCE, delta, probe_all

MLA_PAGE = 16
# With AMX, vLLM would take a backend that serves DeepSeek's own head sizes in bfloat16 only.
MLA_ARGS = ["--block-size", str(MLA_PAGE), "--attention-backend", "CPU_MLA"]
OURS = "Decoding with pd_kernels.mla_decode"


@dataclass(frozen=True)
class DecodesWithOurs(Setup):
    """The decode engine's MLA backend is that of pd_kernels."""

    def recipe(self, side: Side) -> Recipe:
        recipe = super().recipe(side)
        if side == "prefill":
            return recipe
        return recipe._replace(env=frozen(dict(recipe.env), {"PD_KERNELS_MLA": "CPU_MLA"}))


# Pairs of one model run one after the other, in the order of the tests that ask for them first, and
# hand on what they have in common.
EXTRA = {
    "window": {},
    "hybrid": {"decode_args": ["--block-size", str(2 * PAGE)], "prefill_extra": SHORT_LEASE},
    "hybrid on one side": {"decode_args": ["--disable-hybrid-kv-cache-manager"]},
    "heads": {"decode_args": ["--tensor-parallel-size", "2"]},
    "latent": {"args": MLA_ARGS, "reference_args": MLA_ARGS},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def setup(request: pytest.FixtureRequest, folder: Path) -> Setup:
    """A pair that serves the model of this name."""
    name: str = request.param
    kind = name.split()[0]
    path = folder / kind
    if not path.exists():
        build(kind, path)
    kind_of_pair = DecodesWithOurs if kind == "latent" else Setup
    return kind_of_pair.of(model=path, both=name != "window", **EXTRA[name])


def only(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("setup", names, indirect=True)


def sizes(pair: Pair, tokens: int) -> dict[str, float]:
    """Bytes of KV for `tokens` tokens, in all layers or in the layers with a window."""
    widths = {"window": (0, 3 * 2 * 2 * 32), "hybrid": (2 * 2 * 2 * 32,) * 2}
    full, window = widths[Path(pair.setup.model).name]
    return {"full": full * tokens * 4, "window": window * tokens * 4}


@only("window", "hybrid")
@pytest.mark.parametrize("tokens", [20, 20 * PAGE + 7, 3000])
def test_the_answer_is_that_of_one_engine(pair: Pair, reference, tokens: int) -> None:
    prompt = prompt_of(tokens, start=30)
    for ask in (lambda: two_step(pair.p, pair.d, prompt), lambda: told_at_once(pair, prompt)):
        with delta(pair.d, "pd_connector:received_transfers_total") as received:
            answer = ask()
        assert received.amount == 1
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)


@only("heads")
def test_layers_with_unlike_numbers_of_heads_pass_to_more_ranks_and_back(
    pair: Pair, reference
) -> None:
    """Two ranks hold the one KV head of a full layer, and one each of a window's two."""
    prompt = prompt_of(20 * PAGE + 7, start=30)
    for first, second, ranks in ((pair.p, pair.d, 2), (pair.d, pair.p, 1)):
        with delta(second, "pd_connector:received_transfers_total") as received:
            answer = two_step(first, second, prompt)
        assert received.amount == ranks
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)
        prompt = prompt_of(20 * PAGE + 9, start=40)


@only("hybrid on one side")
def test_a_window_kept_on_one_side_only_is_refused_by_name(pair: Pair, reference) -> None:
    prompt = prompt_of(20 * PAGE + 7, start=30)
    with (
        delta(pair.d, "pd_connector:failed_transfers_total", cause="geometry") as refused,
        delta(pair.p, "pd_connector:releases_total", cause="geometry") as released,
    ):
        answer = two_step(pair.p, pair.d, prompt)
        wait_until(lambda: released.so_far() == 1, "the prefill engine keeps nothing for it")
    assert refused.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)
    log = "".join(engine.log_path.read_text() for engine in pair.engines)
    assert f"producer keeps a window of {WINDOW} tokens, consumer wants all" in log
    assert "start both engines with the hybrid KV cache manager, or both without it" in log


@only("hybrid on one side")
def test_who_keeps_everything_serves_who_keeps_a_window(pair: Pair, reference) -> None:
    prompt = prompt_of(20 * PAGE + 7, start=30)
    with delta(pair.p, "pd_connector:received_transfers_total") as received:
        answer = two_step(pair.d, pair.p, prompt)
    assert received.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


@only("latent")
def test_a_long_prompt_is_decoded_as_one_engine_decodes_it(pair: Pair, reference) -> None:
    """What the decode side does with a prompt's last token, one engine does with the first token of
    its answer. In a long prompt, that there is one token more in the prefill is not seen."""
    prompt = prompt_of(3000, start=30)
    whole = reference(prompt, 33)
    longer = [*prompt, int(whole.tokens[0].removeprefix("token_id:"))]
    rest = Answer(whole.tokens[1:], whole.logprobs[1:], whole.top[1:], "", {})
    assert_same_logprobs(two_step(pair.p, pair.d, longer), rest, TOLERANCE)


@only("latent")
def test_the_decode_engine_has_our_backend_and_the_others_have_not(pair: Pair, reference) -> None:
    """So that what its answers are held to is vLLM's own."""
    assert OURS in pair.d.log_path.read_text()
    assert OURS not in pair.p.log_path.read_text()


@only("latent")
@pytest.mark.parametrize("tokens", [20, 20 * PAGE + 7])
def test_every_way_of_handing_over_gives_the_same_answer(pair: Pair, tokens: int) -> None:
    """Pd_kernels' decoding and, turned round, vLLM's own. On a CPU, vLLM's own MLA prefill looks at
    later tokens, too (`prompt_logprobs` of a prompt change with its end), and decoding does not: no
    engine that does both has an answer to compare with."""
    prompt, turned = prompt_of(tokens, start=30), pair.turned()
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        answers = [two_step(pair.p, pair.d, prompt), told_at_once(pair, prompt)]
    assert received.amount == 2
    answers += [two_step(turned.p, turned.d, prompt), told_at_once(turned, prompt)]
    for answer in answers[1:]:
        assert_same_logprobs(answer, answers[0], TOLERANCE)


@only("window", "hybrid", "latent")
def test_both_caches_hold_the_same_bits(pair: Pair) -> None:
    there, here = both_sides(pair, prompt_of(20 * PAGE + 7, start=500))
    assert here[0].key.any()
    assert unlike(here, there, window=WINDOW - 1) == []


@only("window", "hybrid", "latent")
def test_damaged_pages_move_the_logprobs(pair: Pair) -> None:
    """The negative control: what these models answer depends on their caches."""
    prompt, salt = prompt_of(20 * PAGE + 7, start=30), fresh_salt()
    undamaged = two_step(pair.p, pair.d, prompt)
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    for table in params["remote_block_ids"]:
        for page in table[-3:]:
            probe_all(pair.p, "damage_page", page)
    answer = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=params)
    assert largest_difference(answer, undamaged) > 2 * TOLERANCE


@only("window", "hybrid")
def test_of_a_window_only_its_pages_travel(pair: Pair) -> None:
    prompt = prompt_of(3000, start=100)
    with delta(pair.d, "pd_connector:received_bytes_total") as received:
        two_step(pair.p, pair.d, prompt)
    full = sizes(pair, len(prompt) - 1)["full"]
    least = sizes(pair, WINDOW - 1)["window"]
    most = sizes(pair, WINDOW + 2 * PAGE)["window"]
    assert full + least <= received.amount <= full + most + sizes(pair, PAGE)["full"]


@only("window", "hybrid")  # with MLA, vLLM on a CPU has no prefix cache
def test_a_part_of_the_prompt_is_cached_already(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(20 * PAGE + 7, start=900), fresh_salt()
    completion(pair.d, [*prompt[: 8 * PAGE], 0], 1, cache_salt=salt)
    answer = two_step(pair.p, pair.d, prompt, cache_salt=salt)
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)
