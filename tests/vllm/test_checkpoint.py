# SPDX-License-Identifier: Apache-2.0
"""Wherever a model is said to be, its files are found or it is known that they are not."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("huggingface_hub")

from kv.test_weights import print_of

from pd_connector.vllm.identity import checkpoint


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


class Config:
    """vLLM's own object of a config."""

    def to_dict(self):
        return {"from": "vLLM"}


def model(place, overrides=None, **changes):
    object_ = Config()
    object_.text_config = Config()
    object_.rope_scaling = {}
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


def test_an_override_that_is_no_config_takes_the_place_of_the_old_value(tmp_path):
    """As vLLM has it: what the override does not name is gone."""
    config = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = checkpoint.read_config(model(tmp_path, {"rope_scaling": {"factor": 2.0}}))
    assert found == {"rope_scaling": {"factor": 2.0}}


def test_what_vllm_reads_in_the_configs_place_counts(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "params.json").write_text('{"dim": 8}')
    assert checkpoint.read_config(model(tmp_path)) == {"hidden_size": 8}
    both = {"hidden_size": 8, "params.json": {"dim": 8}}
    assert checkpoint.read_config(model(tmp_path, config_format="mistral")) == both
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    assert checkpoint.read_config(model(tmp_path)) == both
    assert checkpoint.read_config(model(tmp_path, config_format="hf")) == {"hidden_size": 8}


def load(load_format="auto", download_dir=None):
    return SimpleNamespace(load_format=load_format, download_dir=download_dir)


def save(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    head = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + content)


@pytest.mark.parametrize(
    "load_format", ["dummy", "tensorizer", "ipc_cache", "modelexpress", "of a plugin"]
)
def test_files_that_are_not_what_is_loaded_are_not_believed(tmp_path, load_format):
    save(tmp_path, b"1234")
    assert checkpoint.model_files(model(tmp_path), load()) is not None
    assert checkpoint.model_files(model(tmp_path), load(load_format)) is None
    assert checkpoint.open_files(tmp_path, load(load_format)) is None, "nor read for nothing"


def test_all_that_a_model_is_loaded_from_counts(tmp_path):
    """As Ultravox's language model, which is a repository of its own."""
    save(tmp_path / "model", b"1234")
    source = SimpleNamespace(model_or_path=str(tmp_path), revision=None, subfolder="text")

    def read(others=(source,)):
        made = model(tmp_path / "model")
        files = checkpoint.model_files(made, load(), others)
        return None if files is None else print_of(files)

    assert read() is None, "a part of it is not on this disk"
    save(tmp_path / "text", b"1234")
    before = read()
    assert before is not None
    assert before != read(())
    save(tmp_path / "text", b"1235")
    assert read() != before


def test_a_repository_is_found_where_vllm_is_told_to_keep_them(hub, tmp_path, monkeypatch):
    save(hub, b"1234")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    assert checkpoint.weights_path("org/name", None) is None
    assert checkpoint.weights_path("org/name", None, download_dir=str(tmp_path)) == hub


def test_without_a_file_the_config_is_vllms_own(tmp_path):
    assert checkpoint.read_config(model(tmp_path)) == {"from": "vLLM"}
    (tmp_path / "config.json").write_text("not JSON")
    assert checkpoint.read_config(model(tmp_path)) == {"from": "vLLM"}
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint.read_config(model(tmp_path, lambda config: config)) == {"from": "vLLM"}


def test_code_that_comes_with_a_checkpoint_counts_where_the_model_is_run_by_it(hub, tmp_path):
    own = tmp_path / "model"
    own.mkdir()
    (own / "modeling_new.py").write_text("scale = 1")
    served = {"auto_map": {"AutoModel": "org/name--modeling.New"}}

    def told(trusts=True, by_transformers=True, revision=None):
        made = model(
            own,
            trust_remote_code=trusts,
            code_revision=revision,
            using_transformers_backend=lambda: by_transformers,
        )
        return checkpoint.remote_code(made, served)

    assert told(trusts=False) is None
    assert told(by_transformers=False) is None, "vLLM has code of its own"
    found = [told(), told(revision="not here"), told(revision="nor here")]
    (own / "modeling_new.py").write_text("scale = 2")
    found.append(told())
    (hub / "modeling.py").write_text("scale = 3")
    found.append(told())
    assert len(set(found)) == 5
