# SPDX-License-Identifier: Apache-2.0
"""Two SGLang engines with one rank and one page size."""

from sglang_engines.sglang_handoffs import Handoffs
from sglang_engines.sglang_recipes import DECODE, PREFILL


class TestPages16To16(Handoffs):
    prefill, decode = PREFILL, DECODE
