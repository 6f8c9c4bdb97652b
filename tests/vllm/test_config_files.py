# SPDX-License-Identifier: Apache-2.0
"""What is told of a model's config is what vLLM has read, whatever the folder's name leads to later."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import vllm.config.model
from engines.recipes import MODEL
from vllm.config import ModelConfig

from pd_connector.vllm.identity import checkpoint, config_files


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A name that leads to the first of two models, which differ in what they make of positions."""
    config_files.watch()
    for name, theta in (("one", 10_000.0), ("other", 20_000.0)):
        shutil.copytree(MODEL, tmp_path / name)
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": theta}))
        (tmp_path / name / "modeling.py").write_text(f"THETA = {theta}")
    (tmp_path / "current").symlink_to("one")
    return tmp_path / "current"


def switch(link: Path, to: str = "other") -> None:
    (link.parent / "next").symlink_to(to)
    (link.parent / "next").rename(link)


def on_disk(folder: Path) -> object:
    return json.loads((folder / "config.json").read_text())


def test_a_config_that_is_exchanged_after_vllm_has_read_it_is_told_as_it_was(link: Path) -> None:
    """Also by vLLM's other processes, to which the object is sent."""
    model = pickle.loads(pickle.dumps(ModelConfig(str(link))))
    switch(link)
    assert checkpoint.read_config(model) == on_disk(link.parent / "one")


def test_without_the_watch_the_other_config_would_be_told(link: Path) -> None:
    model = ModelConfig(str(link))
    switch(link)
    delattr(model, config_files._FOLDERS)
    assert checkpoint.read_config(model) == on_disk(link.parent / "other")


def test_code_that_is_exchanged_after_vllm_has_read_the_config_is_told_as_it_was(
    link: Path,
) -> None:
    model = ModelConfig(str(link), trust_remote_code=True)
    model.using_transformers_backend = lambda: True  # type: ignore[method-assign]
    served = {"auto_map": {"AutoModel": "modeling.Model"}}
    before = checkpoint.remote_code(model, served)
    switch(link)
    assert checkpoint.remote_code(model, served) == before
    delattr(model, config_files._FOLDERS)
    assert checkpoint.remote_code(model, served) != before


@pytest.mark.parametrize("back", [True, False])
def test_a_config_that_is_exchanged_while_vllm_reads_it_is_not_believed(
    link: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """vLLM's own object is told, which is equal to no file: it has what vLLM adds."""
    original = vllm.config.model.get_config

    def switched(*args: object, **options: object) -> object:
        switch(link)
        found = original(*args, **options)
        if back:
            switch(link, "one")
        return found

    monkeypatch.setattr(vllm.config.model, "get_config", switched)
    model = ModelConfig(str(link))
    told = checkpoint.read_config(model)
    assert told not in (on_disk(link.parent / "one"), on_disk(link.parent / "other"))
    assert told == model.hf_config.to_dict()
    model.trust_remote_code = True
    model.using_transformers_backend = lambda: True  # type: ignore[method-assign]
    served = {"auto_map": {"AutoModel": "modeling.Model"}}
    assert checkpoint.remote_code(model, served) != checkpoint.remote_code(model, served)


def test_a_file_that_appears_while_vllm_reads_the_config_is_not_overlooked(
    link: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = vllm.config.model.get_config

    def added(*args: object, **options: object) -> object:
        (link / "hf_quant_config.json").write_text("{}")
        return original(*args, **options)

    monkeypatch.setattr(vllm.config.model, "get_config", added)
    model = ModelConfig(str(link))
    assert checkpoint.read_config(model) == model.hf_config.to_dict()
