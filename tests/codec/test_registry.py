# SPDX-License-Identifier: Apache-2.0
"""Codecs by name, and those that other packages add."""

import subprocess
import sys

import pytest
from support.distributions import add_distribution

from pd_connector.codec import CODECS, DTYPES, load_codec
from pd_connector.errors import ConfigError
from pd_connector.kv.coding import CODINGS, ELEMENT_BYTES


def test_every_coding_has_a_codec_that_says_so():
    assert {name: codec.coding for name, codec in CODECS.items()} == CODINGS
    assert load_codec("int8") is CODECS["int8"]


def test_torch_knows_every_dtype_at_its_size():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ELEMENT_BYTES


def test_an_unknown_name_is_refused_by_the_config_key():
    with pytest.raises(ConfigError, match="codec 'zip' is not known"):
        load_codec("zip")


# Four bits an element, which no codec of this package has: the sign and a power of two.
TOY = """
import math
import torch
from pd_connector.kv.coding import Coding

CODING = Coding("toy4", 0.5, 4, lambda part, shape, source: -(-math.prod(shape) // 2), "toy:CODEC")

class Codec:
    coding = CODING
    def encode(self, part, x, source, destination, out):
        out.fill_(7)
    def decode(self, part, data, shape, source, destination):
        return torch.zeros(shape, dtype=torch.bfloat16)

CODEC = Codec()
"""

USED = """
from pd_connector.codec import load_codec
from pd_connector.kv.coding import Elements, negotiate, permitted
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.plan.chunks import plan
from pd_connector.plan.route import routes

half = Elements("bfloat16")
assert permitted("toy4", 0.0) == ("toy4", "raw")
assert "toy4" not in permitted("auto", 1.0)
assert negotiate(("int8", "toy4"), ("int8", "toy4"), half, half).name == "toy4"
assert negotiate(("toy4", "raw"), ("int8", "raw"), half, half).name == "raw"
group = Group("attention", (0,), 2, 64, 64, 16, 0, "bfloat16", "x", True)
cache = Geometry(Shard(0, 1, 0, 1), (group,))
[route] = routes(cache, cache, permitted("toy4", 0.0), permitted("toy4", 0.0))
assert (route.codec, route.verbatim) == ("toy4", False)
[chunk] = plan([route], 0, 128, 1 << 20)
assert chunk.nbytes(route) == 2 * 128 * 64
print(load_codec("toy4").coding.name)
"""


def used(folder):
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(folder)!r})\n{USED}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_another_packages_codec_is_negotiated_planned_and_loaded(tmp_path):
    points = {"pd_connector.codecs": {"toy4": "toy:CODING"}}
    add_distribution(tmp_path, "toy", modules={"toy": TOY}, entry_points=points)
    ended = used(tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "toy4\n"), ended.stderr


def test_a_codec_that_is_no_coding_is_refused_with_its_package(tmp_path):
    points = {"pd_connector.codecs": {"toy4": "toy:CODEC"}}
    add_distribution(tmp_path, "toy", modules={"toy": TOY}, entry_points=points)
    ended = used(tmp_path)
    assert "codec 'toy4', which package 'toy' (toy:CODEC) adds, is" in ended.stderr
