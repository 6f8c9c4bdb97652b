# SPDX-License-Identifier: Apache-2.0
"""After a reset an engine uses no chunk from before, on whatever host it is, until it has computed it."""

import pytest

from pd_connector.vllm.pool.before_reset import BeforeReset

OLD, NEW, ELSEWHERE = b"old", b"new", b"elsewhere"


@pytest.mark.parametrize("other_hosts", [False, True])
def test_what_was_there_is_not_used_until_it_was_computed(other_hosts: bool) -> None:
    before = BeforeReset()
    assert not before
    assert OLD not in before
    before.begin([OLD], other_hosts=other_hosts)
    assert before
    assert OLD in before
    before.computed([OLD])
    assert OLD not in before
    before.begin([OLD], other_hosts=other_hosts)
    assert OLD in before
    before.end()
    assert OLD not in before
    assert not before


def test_what_other_hosts_may_have_is_not_used_either() -> None:
    before = BeforeReset()
    before.begin([], other_hosts=True)
    assert before
    assert ELSEWHERE in before
    before.computed([NEW])
    assert NEW not in before
    assert ELSEWHERE in before
    before.begin([], other_hosts=False)  # the control: with one host it is new
    assert ELSEWHERE not in before
