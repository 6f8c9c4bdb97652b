# SPDX-License-Identifier: Apache-2.0
"""Rotations are told apart by what they do to keys, and not by how they are written."""

import math

import pytest

from pd_connector.kv.rotation import rotation_of

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 4.0, 16.0, 60.0],
    "original_max_position_embeddings": 4096,
}


def text(parameters, dims=8, interleaved=False, max_positions=32768, long=False):
    return rotation_of(
        parameters, dims=dims, interleaved=interleaved, max_positions=max_positions, long=long
    ).text


def test_how_parameters_are_written_does_not_count():
    assert text({**PLAIN, "rope_theta": 10000}) == text(PLAIN)
    assert text({"rope_theta": 10000.0}) == text(PLAIN)
    assert text({**LLAMA3, "type": "llama3"}) == text(LLAMA3), "which SGLang adds"
    assert text({**LLAMA3, "factor": 8}) == text(LLAMA3)


def test_what_a_rotation_does_counts():
    base = text(PLAIN)
    others = [
        text({**PLAIN, "rope_theta": 10001.0}),
        text(PLAIN, dims=4),
        text(PLAIN, interleaved=True),
        text({**PLAIN, "rope_type": "linear", "factor": 2.0}),
        text({**PLAIN, "rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 4096}),
        text({**PLAIN, "mrope_section": [1, 1, 2]}),
        text(LLAMA3),
        text(YARN),
        text({**YARN, "attention_factor": 1.5}),
        text(YARN, dims=64),
        text({**YARN, "beta_fast": 16}, dims=64),
        text(LONG),
        text(LONG, long=True),
        text({**LONG, "short_mscale": 2.0}),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_the_longest_sequence_counts_where_the_rotation_depends_on_it_only():
    for parameters in (PLAIN, LLAMA3, YARN):
        assert text(parameters, max_positions=4096) == text(parameters, max_positions=8192)
    assert text(LONG, max_positions=4096) != text(LONG, max_positions=131072)
    assert text(LONG) != text(LONG, long=True), "as --max-model-len decides"


def test_a_rotation_of_an_unknown_type_counts_in_all_that_is_said_of_it():
    unknown = {"rope_type": "spiral", "turns": 3}
    assert text(unknown) == text({**unknown, "turns": 3.0})
    assert text(unknown) != text({**unknown, "turns": 4})
    assert text(unknown) != text(unknown, max_positions=4096)


def test_frequencies_are_those_of_the_papers():
    plain = rotation_of(PLAIN, dims=8, interleaved=False, max_positions=4096)
    assert plain.frequencies == pytest.approx([1.0, 0.1, 0.01, 0.001])
    linear = {**PLAIN, "rope_type": "linear", "factor": 2.0}
    halved = rotation_of(linear, dims=8, interleaved=False, max_positions=4096)
    assert halved.frequencies == pytest.approx([0.5, 0.05, 0.005, 0.0005])
    yarn = rotation_of(YARN, dims=128, interleaved=False, max_positions=4096)
    assert yarn.frequencies[0] == 1.0, "the fastest pairs stay"
    assert yarn.frequencies[-1] == pytest.approx(10000 ** (-126 / 128) / 4), (
        "the slowest are stretched"
    )
    assert yarn.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    long = rotation_of(LONG, dims=8, interleaved=False, max_positions=131072, long=True)
    assert long.frequencies[3] == pytest.approx(0.001 / 60)
    assert long.magnitude == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
