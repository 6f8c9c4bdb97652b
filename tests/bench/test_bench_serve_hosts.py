# SPDX-License-Identifier: Apache-2.0
"""`bench serve --far`: when an engine counts as one that looks into the far store again after a fault."""

from types import SimpleNamespace

import pytest

from pd_bench.serve.hosts import _Run
from pd_connector.pool.carrier.messages import Status


@pytest.mark.parametrize(
    ("look_ups", "looks"),
    [
        ([1, 1], True),
        ([0, 1], None),  # it leaves the store alone
        ([1, 0], None),  # the one look-up while it does
    ],
)
def test_an_engine_looks_into_the_far_store_again_if_two_prompts_in_a_row_do(look_ups, looks):
    counts, left = {"finds_none": 5, "finds_found": 2}, iter(look_ups)

    def post(path, body, timeout_s):
        assert body["kv_transfer_params"] == {"pool": {"write": False}}
        assert len(body["prompt"]) >= 256, "a chunk has 128 tokens"
        counts["finds_none"] += next(left)
        return {"choices": [{"text": "x"}]}

    engine = SimpleNamespace(client=SimpleNamespace(model=lambda: "m", post=post))
    host = SimpleNamespace(
        engines=[engine], status=lambda: Status(far="redis://h", sealed=True, counts=dict(counts))
    )
    run = _Run([host], None, None, [], print)
    assert run._looks_far(host, engine) is looks


def test_without_a_carrier_an_engine_does_not_look_into_the_far_store():
    answer = {"choices": [{"text": "x"}]}
    client = SimpleNamespace(model=lambda: "m", post=lambda *_, **__: answer)
    host = SimpleNamespace(engines=[SimpleNamespace(client=client)], status=lambda: None)
    assert _Run([host], None, None, [], print)._looks_far(host, host.engines[0]) is None
