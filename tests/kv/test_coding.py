# SPDX-License-Identifier: Apache-2.0
"""Names and sizes of codecs, and which one a pair uses; nothing of it needs torch."""

import itertools
import math

import pytest

from pd_connector.errors import ConfigError
from pd_connector.kv.coding import (
    CODINGS,
    ELEMENT_BYTES,
    Elements,
    Part,
    negotiate,
    permitted,
)

BF16, FP8 = Elements("bfloat16"), Elements("fp8_e4m3", 0.5)
ALL = tuple(CODINGS)


def test_a_setting_permits_its_codec_and_raw_and_auto_what_the_error_allows():
    assert permitted("raw", 1.0) == ("raw",)
    assert permitted("int8", 0.0) == ("int8", "raw")
    assert permitted("fp8_e4m3", 0.0) == ("fp8_e4m3", "raw")
    assert permitted("auto", 0.0) == ("raw",)
    assert permitted("auto", 0.02) == ("int8", "raw")
    assert set(permitted("auto", 0.1)) == set(ALL)
    with pytest.raises(
        ConfigError, match=r"codec 'zip' is not known: there are auto, .*config key"
    ):
        permitted("zip", 0.0)


def test_a_lossy_codec_needs_both_sides():
    assert negotiate(["int8", "raw"], ["int8", "raw"], BF16, BF16).name == "int8"
    assert negotiate(["int8", "raw"], ["raw"], BF16, BF16).name == "raw"
    assert negotiate(["raw"], ["int8", "raw"], BF16, BF16).name == "raw"
    assert negotiate(["int8", "raw"], ["fp8_e4m3", "raw"], BF16, BF16).name == "raw"


def test_of_two_codecs_of_one_byte_the_more_accurate_is_taken_in_any_order():
    for mine, theirs in itertools.product(itertools.permutations(ALL), repeat=2):
        assert negotiate(mine, theirs, BF16, BF16).name == "int8"


def test_names_this_version_does_not_know_are_passed_over_and_raw_is_always_there():
    assert negotiate(["int8", "raw"], ["zip", "int8"], BF16, BF16).name == "int8"
    assert negotiate(["zip"], ["zip"], BF16, BF16).name == "raw"
    assert negotiate([], [], BF16, BF16).name == "raw"


def test_an_fp8_source_is_sent_as_it_is_and_an_fp8_destination_gets_its_own_codes():
    for mine in (ALL, ("raw",)):
        assert negotiate(mine, mine, FP8, FP8).name == "raw"
        assert negotiate(mine, mine, FP8, BF16).name == "raw"
        assert negotiate(mine, mine, BF16, FP8).name == "fp8_e4m3"


def test_no_pair_sends_more_than_a_byte_an_element_where_both_permit_less():
    for source, destination in itertools.product(map(Elements, ELEMENT_BYTES), repeat=2):
        codec = negotiate(ALL, ALL, source, destination)
        nbytes = codec.coded_bytes(Part.KEY, (8, 512, 128), source)
        assert nbytes <= 1.04 * 8 * 512 * 128


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_cannot_be_one_is_refused(scale: float):
    for pair in ((Elements("fp8_e4m3", scale), BF16), (BF16, Elements("fp8_e4m3", scale))):
        with pytest.raises(ValueError, match="must be finite and above zero"):
            negotiate(ALL, ALL, *pair)


def test_a_dtype_no_codec_knows_is_refused():
    with pytest.raises(ValueError, match="cache dtype 'int4': must be one of bfloat16"):
        negotiate(ALL, ALL, Elements("int4"), BF16)
