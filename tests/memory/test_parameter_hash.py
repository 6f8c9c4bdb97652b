# SPDX-License-Identifier: Apache-2.0
"""The hash of parameters sees every byte, and is what its description says."""

import numpy as np
import pytest
import torch

from pd_connector.memory import parameters
from pd_connector.memory.parameters import full_hash

CPU_AND_GPU = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def found(tensor):
    return full_hash([("w", tensor)])


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_any_byte_that_changes_changes_the_hash(device, dtype, monkeypatch):
    monkeypatch.setattr(parameters, "_PIECE_WORDS", 16)
    data = torch.arange(403, dtype=torch.int64).to(torch.uint8)
    data = data[: 403 // dtype.itemsize * dtype.itemsize].to(device)
    before = found(data.view(dtype))
    for place in range(len(data)):
        data[place] ^= 1
        assert found(data.view(dtype)) != before, place
        data[place] ^= 1
    assert found(data.view(dtype)) == before


def test_words_that_change_places_change_the_hash():
    words = torch.arange(4096, dtype=torch.int64)
    before = found(words)
    for step in (1, 64, 2048):
        assert found(words.roll(step)) != before


def test_rows_columns_and_padding_are_seen_in_any_layout():
    wide = torch.rand(33, 40)
    for seen in (wide, wide.t(), wide[:, :37], wide[:, ::2], wide.t()[:, 3:30], wide[1:, 1:]):
        before = found(seen)
        for place in ((0, 0), (-1, -1), (5, 7), (-1, 0)):
            kept = seen[place].item()
            seen[place] = kept + 1
            assert found(seen) != before
            seen[place] = kept
        assert found(seen) == before


def test_a_parameter_that_torch_cannot_index_is_seen():
    """For example quantised weights with padded rows."""
    codes = torch.zeros(300, 64, dtype=torch.uint8)
    seen = codes.view(torch.float4_e2m1fn_x2)[:, :32]
    before = found(seen)
    codes[17, 3] = 7
    assert found(seen) != before
    codes[17, 3] = 0
    codes[17, 40] = 7
    assert found(seen) == before, "padding is none of its bytes"


def test_names_forms_and_lengths_count():
    data = torch.zeros(64)
    assert (
        len({found(data), found(data[:63]), found(data.view(8, 8)), full_hash([("v", data)])}) == 4
    )
    assert full_hash([]) == full_hash([])
    assert found(torch.empty(0)) != found(torch.empty(0, 3))


def test_the_sums_are_those_of_splitmix64():
    """Written down a second time, in NumPy's unsigned words."""
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 8 * 100, np.uint8))
    words = data.numpy().view(np.uint64)
    for lane, factors in enumerate(parameters._LANES):
        of_word, of_place, first, second = (np.uint64(factor) for factor in factors)
        mixed = words * of_word + np.arange(100, dtype=np.uint64) * of_place
        mixed += np.uint64(800 * factors[2] % (1 << 64))
        mixed = (mixed ^ (mixed >> np.uint64(30))) * first
        mixed = (mixed ^ (mixed >> np.uint64(27))) * second
        mixed ^= mixed >> np.uint64(31)
        told = int(parameters._piece(data)[lane]) % (1 << 64)
        assert told == int(mixed.sum(dtype=np.uint64))


def test_small_differences_never_cancel_each_other_out():
    """Sums of words alone would: one word more, another one less."""
    words = torch.zeros(1 << 14, dtype=torch.int64)
    seen = {found(words)}
    chance = np.random.default_rng(1)
    for _ in range(200):
        one, other = chance.choice(len(words), 2, replace=False)
        bit = 1 << int(chance.integers(0, 62))
        words[one], words[other] = bit, -bit
        seen.add(found(words))
        words[one], words[other] = 0, 0
    assert len(seen) == 201
