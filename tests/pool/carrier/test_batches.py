# SPDX-License-Identifier: Apache-2.0
"""Objects that pass together are bounded, whatever sizes a stranger gives them."""

from hypothesis import given
from hypothesis import strategies as st

from pd_connector.pool.carrier.carrier import _GET_BYTES, _batches


@given(st.lists(st.integers(1, 512 << 20), max_size=40))
def test_each_object_passes_once_and_few_bytes_at_a_time(sizes: list[int]) -> None:
    runs = list(_batches(sizes))
    assert [place for first, stop in runs for place in range(first, stop)] == list(
        range(len(sizes))
    )
    for first, stop in runs:
        assert stop == first + 1 or sum(sizes[first:stop]) <= _GET_BYTES
