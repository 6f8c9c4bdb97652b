# SPDX-License-Identifier: Apache-2.0
"""Tensors and caches a codec does not take are refused by name, before a byte is written."""

import pytest
import torch

from pd_connector.codec import CODECS, Elements, Part

BF16, FP8 = Elements("bfloat16"), Elements("fp8_e4m3")
SHAPE = (1, 3, 32)


def test_int8_refuses_an_fp8_cache():
    x = torch.zeros(SHAPE, dtype=torch.float8_e4m3fn)
    out = torch.zeros(CODECS["int8"].coding.coded_bytes(Part.KEY, SHAPE, FP8), dtype=torch.uint8)
    with pytest.raises(ValueError, match="use raw"):
        CODECS["int8"].encode(Part.KEY, x, FP8, BF16, out)


@pytest.mark.parametrize("name", CODECS)
def test_tensors_that_do_not_fit_are_refused(name: str):
    codec, x = CODECS[name], torch.ones(SHAPE, dtype=torch.bfloat16)
    size = codec.coding.coded_bytes(Part.KEY, SHAPE, BF16)
    out = torch.zeros(size, dtype=torch.uint8)
    short, sparse = out[1:], torch.zeros(2 * size, dtype=torch.uint8)[::2]
    for bad in (short, sparse, out.view(torch.int8)):
        with pytest.raises(ValueError, match=f"must be {size} dense bytes"):
            codec.encode(Part.KEY, x, BF16, BF16, bad)
        with pytest.raises(ValueError, match=f"must be {size} dense bytes"):
            codec.decode(Part.KEY, bad, SHAPE, BF16, BF16)
    for bad in (x.half(), x[0]):
        with pytest.raises(ValueError, match=r"must be \[head, token, dim\] of torch.bfloat16"):
            codec.encode(Part.KEY, bad, BF16, BF16, out)
    with pytest.raises(ValueError, match="cache dtype 'int4'"):
        codec.encode(Part.KEY, x, Elements("int4"), BF16, out)
    assert not out.any()
