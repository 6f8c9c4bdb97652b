# SPDX-License-Identifier: Apache-2.0
"""vLLM's dtypes of a cache by names that mean one thing on every engine."""

from types import SimpleNamespace

import pytest
import torch

kv = pytest.importorskip("vllm.v1.kv_cache_interface")

from vllm.platforms import current_platform  # noqa: E402

from pd_connector.errors import UnsupportedGeometryError  # noqa: E402
from pd_connector.kv.geometry import Geometry, Group, Shard  # noqa: E402
from pd_connector.plan.route import routes  # noqa: E402
from pd_connector.vllm import cache  # noqa: E402


def dtype_of(stored: str, mode: object, scales: int = 1) -> str:
    spec = SimpleNamespace(kv_quant_mode=mode, dtype=torch.uint8, cache_dtype_str=stored)
    module = SimpleNamespace(_k_scale=torch.ones(scales), _v_scale=torch.ones(scales))
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=stored),
        compilation_config=SimpleNamespace(static_forward_context={"layers.0.attn": module}),
    )
    return cache._dtype(SimpleNamespace(spec=spec, name="layers.0.attn"), config)


def test_codes_with_a_scale_for_each_head_are_not_read_by_one_scale() -> None:
    """vLLM tells the largest of them: it would do for one head only."""
    mode = kv.KVQuantMode.FP8_PER_TENSOR
    assert dtype_of("fp8", mode) in cache.DTYPES
    assert dtype_of("fp8", mode, scales=8) not in cache.DTYPES


def test_the_other_kind_of_fp8_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = kv.KVQuantMode.FP8_PER_TENSOR
    assert dtype_of("fp8", mode) == dtype_of("fp8_e4m3", mode) == "fp8_e4m3"
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))
    assert dtype_of("fp8", mode) == "fp8_e4m3fnuz"


def group(dtype: str, scale: float = 1.0) -> Geometry:
    scales = ((scale, scale),) if scale != 1.0 else ()
    made = Group("attention", (0,), 2, 64, 64, 16, 0, dtype, "x", True, scales=scales)
    return Geometry(Shard(0, 1, 0, 1), (made,))


def test_codes_of_one_kind_are_never_taken_for_codes_of_the_other() -> None:
    fnuz, ocp = group("fp8_e4m3fnuz"), group("fp8_e4m3")
    assert [route.verbatim for route in routes(fnuz, fnuz, ["raw"], ["raw"])] == [True]
    for pair in ((fnuz, ocp), (ocp, fnuz)):
        with pytest.raises(UnsupportedGeometryError, match="fp8_e4m3fnuz"):
            routes(*pair, ["raw"], ["raw"])


def test_codes_that_no_codec_knows_pass_between_equal_scales_only() -> None:
    with pytest.raises(UnsupportedGeometryError, match="cannot be taken apart"):
        routes(group("fp8_e4m3fnuz", 0.5), group("fp8_e4m3fnuz"), ["raw"], ["raw"])
