# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's config is all that its folder says of it."""

import json
from pathlib import Path

import pytest

from pd_connector.kv.checkpoint import read_config
from pd_connector.kv.model_config import served_config


def test_a_folder_without_a_config_has_none(tmp_path: Path) -> None:
    assert read_config(tmp_path).config is None


@pytest.mark.parametrize("content", ["", "[]", "7"])
def test_what_is_no_config_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"Expecting value|no JSON object"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_a_quantisation_beside_the_config_is_part_of_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    found = [read_config(tmp_path).config]
    for algorithm in ("FP8", "W4A8_AWQ"):
        (tmp_path / name).write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        found.append(read_config(tmp_path).config)
    assert found[0] == {"hidden_size": 8}
    assert len({served_config(config or {}).fingerprint for config in found}) == 3
