# SPDX-License-Identifier: Apache-2.0
"""What tests of the benchmarks share."""

from __future__ import annotations

import io

from rich.console import Console

from pd_bench.report import Comparison
from pd_bench.sample import Sample

ROW_KEYS = {"name", "params", "ours", "baseline", "unit", "ratio", "bar", "ok"}


def comparison(ours: float, baseline: float, bar: float | None = 1.0, **params: object):
    found = {"prompt_tokens": 3500, "transport": "shm", **params}
    return Comparison("handoff", found, Sample((ours,)), Sample((baseline,)), "ms", bar)


def text_of(rendered: object) -> str:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(rendered)
    return out.getvalue()


class FakeTokenizer:
    """A client whose engine's tokens are the characters' numbers."""

    base_url = "http://fake"

    def model(self) -> str:
        return "fake"

    def post(self, path, body):
        assert path == "/tokenize"
        return {"tokens": [ord(letter) for letter in body["prompt"]]}
