# SPDX-License-Identifier: Apache-2.0
"""The attention kernels as they are compiled for sm_90a, executed without a GPU."""

from executed import executed

SMALL = (
    *("swapped", "swapped, 32 lines"),
    *("paged, fp8", "paged, documents", "paged, 8 queries", "paged, jagged", "mla, 16 heads, fp8"),
    *("mla, chosen", "mla, chosen, fp8"),
    *(
        "mla, tree, fp8",
        "mla, tree, one scale, page 16",
        "gluon, tree",
        "mixed, soft cap, documents",
    ),
    *("mla, one scale, split", "mla, one scale, 40 heads, 2 queries"),
    *(
        "mla, 128 heads",
        "gluon, 128 heads",
        "mixed, split",
        "public, merge",
        "public, strides",
        "plan, window",
        "tile mask",
    ),
    *("direct launch", "direct launch, mla"),
    *("paged, sinks, window, split", "paged, 192 and 128", "paged, dim 512"),
)
"""`python -m tests.emulator` executes all."""


PEERS = (
    *("peers, page 5", "peers, page 1056", "peers, 7 heads, 1 of KV, dim 128"),
    *("peers, lengths", "peers, lengths, fp8", "peers, one long", "peers, ragged"),
    *("peers, mla, page 24", "peers, mla, 5 heads", "peers, mla, lengths, fp8"),
)


EDGES = (
    *("edges, sinks", "edges, scores of -inf, sinks, fp8", "edges, NaN in a key, fp8"),
    *("edges, lengths of 64 bits, 7 heads, dim 120", "edges, nothing", "edges, chosen"),
    *(
        "edges, mixed, mod, sinks, page 1",
        "edges, ragged, none, sinks, fp8, page 1",
        "edges, merge",
    ),
    *("edges, tree, page 1", "edges, tree, gluon"),
    *("mixed, dim 512", "edges, chosen, fp8", "edges, a million tokens, window", "edges, controls"),
)


DRAWN = "drawn, controls", *(f"drawn, {kind} 1" for kind in ("paged", "mixed", "mla", "chosen"))


def test_everything_at_once_is_right() -> None:
    """`python -m tests.emulator "drawn, "` executes all."""
    assert executed(*DRAWN) == dict.fromkeys(DRAWN, "")


def test_what_engines_rarely_pass_is_right() -> None:
    """`python -m tests.emulator "edges, "` executes all."""
    assert executed(*EDGES) == dict.fromkeys(EDGES, "")


def test_shapes_of_other_kernels_tests_are_right() -> None:
    """`python -m tests.emulator peers` executes all."""
    assert executed(*PEERS) == dict.fromkeys(PEERS, "")


def test_results_are_those_of_the_reference() -> None:
    """In turns by chance, with the TMA's loads in any order. The other tests execute in lockstep."""
    assert executed(*SMALL, seed=11) == dict.fromkeys(SMALL, "")


def test_a_public_function_launches_its_kernel_for_tensors_of_a_gpu() -> None:
    assert executed("public, mixed") == {"public, mixed": ""}
