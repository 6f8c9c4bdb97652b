# SPDX-License-Identifier: Apache-2.0
"""The cost model finds what an engine's steps cost, says how well it knows, and else counts."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.cost.nnls import Floats, nnls
from scheduler_plugins.cost.online import OnlineFit
from scheduler_plugins.cost.profile import Measurement, ProfileError, fit, load, loads, save

TRUE = CostModel(a=6e-5, b=6e-10, c=2e-2, d0=1.5e-2, d1=1e-4, d2=3e-7)


def noisy(load: StepLoad, random: Random, noise: float = 0.05) -> float:
    return TRUE.step_s(load) * random.gauss(1.0, noise)


def step(random: Random) -> StepLoad:
    contexts = [random.randint(10, 3000) for _ in range(random.randint(1, 20))]
    if random.random() < 0.3:
        tokens = random.randint(30, 8000)
        return StepLoad.of([(tokens // 3, tokens)], contexts)
    return StepLoad.of([], contexts)


def best_of_all_supports(matrix: Floats, wanted: Floats) -> float:
    """The smallest squared error, by trying every set of coefficients that are not 0."""
    best = float(wanted @ wanted)
    columns = range(matrix.shape[1])
    for size in range(1, matrix.shape[1] + 1):
        for chosen in combinations(columns, size):
            part = matrix[:, list(chosen)]
            x = np.linalg.lstsq(part, wanted, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(((part @ x - wanted) ** 2).sum()))
    return best


@given(seed=st.integers(0, 10_000), rows=st.integers(3, 12), columns=st.integers(1, 4))
def test_nnls_finds_the_best_coefficients_that_are_not_negative(
    seed: int, rows: int, columns: int
) -> None:
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(rows, columns))
    wanted = random.normal(size=rows)
    x = nnls(matrix.T @ matrix, matrix.T @ wanted)
    assert (x >= 0).all()
    error = float(((matrix @ x - wanted) ** 2).sum())
    assert error == pytest.approx(best_of_all_supports(matrix, wanted), rel=1e-6, abs=1e-9)


def test_a_step_is_the_sum_of_what_is_in_it() -> None:
    mixed = StepLoad.of([(100, 300), (0, 50)], [7, 9])
    assert mixed == StepLoad(250, 300**2 - 100**2 + 50**2, 2, 16)
    expected = TRUE.prefill_s(300, 100) + TRUE.prefill_s(50) - TRUE.c + 2 * TRUE.d1 + 16 * TRUE.d2
    assert TRUE.step_s(mixed) == pytest.approx(expected)
    assert TRUE.step_s(StepLoad.of([], [7, 9])) == TRUE.decode_step_s(2, 16)


def test_a_prefill_in_chunks_costs_its_steps() -> None:
    whole = CostModel(a=1e-4, b=1e-8, c=0.01, chunk_tokens=512)
    chunks = [(64, 576), (576, 1088), (1088, 1100)]
    steps_s = sum(whole.step_s(StepLoad.of([chunk])) for chunk in chunks)
    assert whole.prefill_s(1100, 64) == pytest.approx(steps_s)


@pytest.mark.parametrize(("overhead", "tokens"), [(0.1, 1000), (0.5, 200), (0.3, 334)])
def test_a_step_of_so_many_tokens_has_little_overhead(overhead: float, tokens: int) -> None:
    model = CostModel(a=1e-4, b=1e-9, c=0.01)
    assert model.step_tokens(overhead, 2048) == tokens
    assert model.step_tokens(overhead, 150) == 150
    assert CostModel(a=1e-4).step_tokens(overhead, 2048) == 0


def test_where_tokens_cost_nothing_a_step_is_as_long_as_it_may_be() -> None:
    """A GPU that is not full computes 16 tokens as fast as 256: the fit finds no cost of a token."""
    fit = OnlineFit()
    for n in range(200):
        fit.note(StepLoad.of([(0, 16 << n % 5)]), 0.01)
        fit.catch_up()
    assert fit.model.known
    assert fit.model.step_tokens(0.1, 512) == 512


def test_a_profile_gives_the_coefficients_and_the_error_of_what_was_held_out() -> None:
    random = Random(1)
    asked = loads(longest_tokens=32_768, page_size=16, most_batch=128)
    assert sum(one.tokens > 0 for one in asked) >= 30
    assert sum(one.batch > 0 for one in asked) >= 40
    model = fit([Measurement(one, noisy(one, random)) for one in asked])
    assert model.error == pytest.approx(0.04, abs=0.03)
    for tokens, cached in ((500, 0), (4000, 2000), (30_000, 0)):
        assert model.prefill_s(tokens, cached) == pytest.approx(
            TRUE.prefill_s(tokens, cached), rel=0.1
        )
    assert model.decode_step_s(64, 64_000) == pytest.approx(TRUE.decode_step_s(64, 64_000), rel=0.1)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([], "0 measurements: at least 20"),
        ([Measurement(StepLoad(0, 0, 1, 1), 0.1)] * 20, "no measurement contains a prefill"),
        ([Measurement(StepLoad(1, 1, 0, 0), 0.0)] * 20, "duration must be"),
    ],
)
def test_measurements_that_give_no_model_are_refused(
    measured: list[Measurement], said: str
) -> None:
    with pytest.raises(ProfileError, match=said):
        fit(measured)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    save(tmp_path / "p.json", TRUE)
    assert load(tmp_path / "p.json") == TRUE


@pytest.mark.parametrize("text", ["", "{}", '{"a": -1.0}', '{"a": "much"}', '{"a":' * 100_000])
def test_a_file_without_a_model_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"p\.json.*profile` measures a new one"):
        load(path)


def observe(online: OnlineFit, load: StepLoad, duration_s: float) -> None:
    online.note(load, duration_s)
    online.catch_up()


def test_while_nothing_is_known_costs_are_token_counts() -> None:
    model = OnlineFit().model
    assert not model.known
    assert model.prefill_s(300, 100) == pytest.approx(2 * model.prefill_s(100))


def test_it_learns_from_the_engines_own_steps() -> None:
    random, online = Random(2), OnlineFit()
    for _ in range(1500):
        load = step(random)
        observe(online, load, noisy(load, random))
    assert online.model.known
    assert online.error == pytest.approx(0.04, abs=0.02)
    assert online.model.prefill_s(6000, 1000) == pytest.approx(TRUE.prefill_s(6000, 1000), rel=0.1)
    assert online.model.decode_step_s(10, 9000) == pytest.approx(
        TRUE.decode_step_s(10, 9000), rel=0.1
    )


def test_steps_of_one_size_are_not_believed_to_tell_the_others() -> None:
    online = OnlineFit()
    load = StepLoad.of([(0, 512)])
    for _ in range(500):
        observe(online, load, 0.1)
    assert not online.model.known
    assert online.model.prefill_s(512) == pytest.approx(0.1)


def test_noise_without_a_law_leaves_it_with_token_counts() -> None:
    random, online = Random(3), OnlineFit()
    for _ in range(1000):
        observe(online, StepLoad.of([(0, random.randint(1, 8000))]), 10 ** random.uniform(-3, 1))
    assert online.error is not None
    assert online.error > 0.3
    assert not online.model.known


def test_it_follows_an_engine_that_becomes_slower() -> None:
    random, online = Random(4), OnlineFit()
    for n in range(3000):
        load = step(random)
        observe(online, load, noisy(load, random) * (1 if n < 1000 else 2))
    assert online.model.prefill_s(4000) == pytest.approx(2 * TRUE.prefill_s(4000), rel=0.1)


def test_a_stray_step_moves_nothing() -> None:
    random, online = Random(5), OnlineFit()
    for n in range(1000):
        load = step(random)
        observe(online, load, 30.0 if n % 100 == 50 else noisy(load, random))
    assert online.model.prefill_s(4000) == pytest.approx(TRUE.prefill_s(4000), rel=0.15)


def test_hours_of_decoding_do_not_wipe_out_what_prefill_costs() -> None:
    random, online = Random(6), OnlineFit()
    for _ in range(1000):
        load = step(random)
        observe(online, load, noisy(load, random))
    for _ in range(5000):
        load = StepLoad.of([], [100] * random.randint(1, 20))
        observe(online, load, noisy(load, random))
    assert online.model.known
    assert online.model.prefill_s(4000) == pytest.approx(TRUE.prefill_s(4000), rel=0.15)


def test_an_engine_that_only_decodes_learns_what_decoding_costs() -> None:
    random, online = Random(9), OnlineFit()
    for _ in range(500):
        load = StepLoad.of([], [random.randint(10, 3000) for _ in range(random.randint(1, 20))])
        observe(online, load, noisy(load, random))
    assert not online.model.known
    assert online.model.decode_step_s(10, 9000) == pytest.approx(
        TRUE.decode_step_s(10, 9000), rel=0.1
    )


def test_a_model_is_published_only_when_costs_have_moved() -> None:
    random, online, published = Random(7), OnlineFit(), set()
    for _ in range(2000):
        load = step(random)
        observe(online, load, noisy(load, random))
        published.add(id(online.model))
    assert len(published) < 15


def test_a_profile_is_used_until_enough_steps_are_seen() -> None:
    random, online = Random(8), OnlineFit(start=TRUE)
    for _ in range(20):
        load = step(random)
        observe(online, load, noisy(load, random))
    assert online.model is TRUE


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan")])
def test_a_step_without_a_duration_teaches_nothing(duration_s: float) -> None:
    online = OnlineFit()
    for _ in range(100):
        observe(online, StepLoad(100, 10_000, 0, 0), duration_s)
        observe(online, StepLoad(0, 0, 0, 0), 1.0)
    assert online.model == CostModel.token_count()
