# SPDX-License-Identifier: Apache-2.0
"""Wherever a model is said to be, its files are found or it is known that they are not."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("huggingface_hub")

from pd_connector.vllm import checkpoint


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of Hugging Face's with one repository."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text('{"hidden_size": 8}')
    return snapshot


@pytest.mark.parametrize(
    "name",
    [
        "s3://bucket/model",
        "gs://bucket/model",
        "az://container/model",
        "/nowhere/model.gguf",
        "org/other",
        "org/other:Q4_K_M",
        "not a name of anything: at all",
        "",
    ],
)
def test_what_is_not_on_this_disk_is_none_and_no_error(hub, name):
    assert checkpoint.weights_path(name, None) is None


def test_a_folder_and_a_file_are_found(tmp_path):
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    assert checkpoint.weights_path(str(tmp_path), None) == tmp_path
    assert checkpoint.weights_path(str(file), None) == file


def test_a_folder_without_weights_is_none(tmp_path):
    """As vLLM makes it for a model of an object store: only config and tokenizer."""
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint.weights_path(str(tmp_path), None) is None
    assert checkpoint.weights_path(str(tmp_path), None, "s3://bucket/model") is None


def test_a_repository_is_found_in_the_cache(hub):
    (hub / "model.safetensors").write_bytes(b"x")
    assert checkpoint.weights_path("org/name", None) == hub


def test_a_repository_with_a_quantisation_is_found_in_the_cache(hub):
    (hub / "name-Q4_K_M.gguf").write_bytes(b"x")
    (hub / "name-Q8_0.gguf").write_bytes(b"y")
    assert checkpoint.weights_path("org/name:Q8_0", None) == hub / "name-Q8_0.gguf"


def model(place, overrides=None, **changes):
    object_ = SimpleNamespace(to_dict=lambda: {"from": "vLLM"})
    told = {"model": str(place), "revision": None, "hf_overrides": overrides or {}}
    return SimpleNamespace(**told, hf_config=object_, hf_config_path=None, **changes)


def test_the_config_is_that_on_disk_with_what_the_operator_overrides(tmp_path):
    config = {"hidden_size": 8, "text_config": {"rope_theta": 1.0, "layers": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint.read_config(model(tmp_path)) == config
    overrides = {"text_config": {"rope_theta": 2.0}, "extra": 1}
    assert checkpoint.read_config(model(tmp_path, overrides)) == {
        "hidden_size": 8,
        "text_config": {"rope_theta": 2.0, "layers": 2},
        "extra": 1,
    }


def test_without_a_file_the_config_is_vllms_own(tmp_path):
    assert checkpoint.read_config(model(tmp_path)) == {"from": "vLLM"}
    (tmp_path / "config.json").write_text("not JSON")
    assert checkpoint.read_config(model(tmp_path)) == {"from": "vLLM"}
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint.read_config(model(tmp_path, lambda config: config)) == {"from": "vLLM"}
