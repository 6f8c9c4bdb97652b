# SPDX-License-Identifier: Apache-2.0
"""The way of KV from pages to pages on a GPU, without one: agents' caches with their streams, events, stagings and
slots, and the kernels that are compiled for sm_90a."""

import pytest
from executed import executed

SMALL = ("handoff, raw, prepared, device slots", "handoff, int8", "handoff, whole pages")
COVERED = (
    "staging._next < staging.empty",
    "staging._next < staging.load",
    "staging._wait < staging._copying < staging.load",
    "staging._wait < staging._next",
    "staging._wait < staging.empty",
    "staging.settle",
)
"""Waits that order stagings in any turn of calls. They are redundant here, because each call waits for its end
before the next but one begins; tests/pages/test_staging.py calls stagings without that."""


@pytest.mark.parametrize(("seed", "names"), [(0, SMALL[:2]), (7, SMALL[2:])])
def test_payloads_sums_and_pages_are_those_of_the_host(seed: int, names: tuple[str, ...]) -> None:
    """As late as waits allow; and with a stream ahead of the others, by chance."""
    assert executed(*names, seed=seed) == dict.fromkeys(names, "")


def test_each_wait_that_a_handoff_needs_is_found_if_it_is_missing() -> None:
    name = "handoff, one request"
    found = executed(name, arguments=["--damage=event"])[name]
    unfound = {site for site, problem in found.items() if not problem}
    assert all(site.startswith(COVERED) for site in unfound), unfound
    assert len(found) - len(unfound) >= 7
