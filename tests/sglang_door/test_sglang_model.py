# SPDX-License-Identifier: Apache-2.0
"""Which model an SGLang engine serves: what is loaded decides, not where it lies."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.layers.rotary_embedding import base, factory
from support.rotations import PARAMETERS

from pd_connector.agent.advertised_model import AdvertisedModel
from pd_connector.config import Config
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts, model_problem, spoken
from pd_connector.kv.rotation import rotation_of
from pd_connector.kv.rotation_table import rotation_text
from pd_connector.sglang.model import (
    CONFIGS,
    LOADS,
    _made_with,
    config_made,
    kv_heads,
    loaded_files,
    loaded_weights,
    loads,
    model_facts,
)
from pd_connector.tools.demo import MODEL_DIR

SHARD = Shard(0, 4, 0, 1)


class RadixAttention(torch.nn.Module):
    """SGLang's as far as the door looks at it."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.scaling = 0.125
        self.logit_cap = 0.0
        self.sliding_window_size = -1


class RotaryEmbedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.rotary_dim, self.is_neox_style = 50_000.0, 64, True
        self.max_position_embeddings = 8192


class YaRNScalingRotaryEmbedding(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", scale * torch.ones(40, 8), persistent=False)


class Block(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.attn = RadixAttention(number)
        self.weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.rotary_emb: torch.nn.Module = RotaryEmbedding()


def scheduler(folder: Path = MODEL_DIR, **changes: Any) -> Any:
    model = torch.nn.ModuleList(Block(number) for number in range(4))
    known = {
        "model_path": str(folder),
        "revision": None,
        "dtype": torch.bfloat16,
        "quantization": None,
        "hf_config": SimpleNamespace(to_dict=lambda: {"of": "SGLang"}),
    }
    args = {
        "json_model_override_args": "{}",
        "load_format": "auto",
        "startup_weight_load_mode": "serial",
    }
    runner = SimpleNamespace(
        model=model,
        load_config=SimpleNamespace(load_format=LoadFormat.AUTO),
        model_config=SimpleNamespace(**known | changes),
        server_args=SimpleNamespace(**args),
    )
    return SimpleNamespace(
        model_config=runner.model_config,
        server_args=runner.server_args,
        tp_worker=SimpleNamespace(model_runner=runner),
    )


def facts(made: Any, **settings: Any) -> ModelFacts:
    """As peers are told it once the files were read."""
    files, told = loaded_files(made), []
    found = model_facts(made, Config(**settings), SHARD, loaded_weights(made), files)
    if not found.reading:
        return found
    advertised = AdvertisedModel(found, [files], told.append)
    assert advertised._reading is not None
    assert advertised._reading.join(30)
    return advertised.facts


def blocks(made: Any) -> list[Block]:
    return list(made.tp_worker.model_runner.model)


def test_a_copy_of_a_model_is_that_model(tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(MODEL_DIR, copied)
    one, other = facts(scheduler()), facts(scheduler(copied))
    assert spoken(one) == spoken(other)
    assert model_problem(one, other) == ""
    assert one.weights
    assert [each.layers for each in one.layers] == [(0, 1, 2, 3)]


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    copied = tmp_path / "tuned"
    shutil.copytree(MODEL_DIR, copied)
    file = copied / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-64:] = bytes(64)
    file.write_bytes(data)
    assert "weights" in model_problem(facts(scheduler()), facts(scheduler(copied)))


@pytest.mark.parametrize("load_format", ["dummy", "remote_instance", "ipc_cache", "flash_rl"])
def test_files_that_are_not_what_is_loaded_are_not_believed(load_format: str) -> None:
    made = scheduler()
    made.server_args.load_format = load_format
    assert facts(scheduler()).weights
    assert not facts(made).weights


def test_files_beside_a_weight_cache_are_not_believed() -> None:
    """`--weight-cache-mode` changes the format of SGLang's loader only, not its argument."""
    made = scheduler()
    made.tp_worker.model_runner.load_config.load_format = LoadFormat.IPC_CACHE
    assert loaded_files(made) is None


def test_files_that_are_read_after_the_load_are_not_believed() -> None:
    made = scheduler()
    made.server_args.startup_weight_load_mode = "overlap"
    assert loaded_files(made) is None


def test_one_file_of_weights_is_believed(tmp_path: Path) -> None:
    file = tmp_path / "model-Q8_0.gguf"
    file.write_bytes(b"GGUF and so on")
    assert facts(scheduler(file)).weights


def test_another_dtype_or_override_is_another_model() -> None:
    other = scheduler(dtype=torch.float32)
    assert "config" in model_problem(facts(scheduler()), facts(other))
    other = scheduler()
    other.server_args.json_model_override_args = json.dumps({"rope_theta": 1.0})
    assert "config" in model_problem(facts(scheduler()), facts(other))


@pytest.mark.parametrize("what", ["scale", "base", "table", "none"])
def test_layers_that_do_something_else_are_told_apart(what: str) -> None:
    one, other = scheduler(), scheduler()
    for made, scale in ((one, 1.0), (other, 2.0)):
        block = blocks(made)[2]
        if what == "scale":
            block.attn.scaling = scale
        elif what == "base":
            assert isinstance(block.rotary_emb, RotaryEmbedding)
            block.rotary_emb.base *= scale
        elif what == "table":
            block.rotary_emb = YaRNScalingRotaryEmbedding(scale)
        elif made is one:
            del block.rotary_emb
    assert "layer 2" in model_problem(facts(one), facts(other))


def test_weights_that_are_not_on_disk_need_a_name_from_the_operator() -> None:
    dummies = [scheduler(), scheduler()]
    for made in dummies:
        made.server_args.load_format = "dummy"
    ours, theirs = (facts(made) for made in dummies)
    assert model_problem(ours, theirs) == "", "their parameters in memory are the same"
    with torch.no_grad():
        blocks(dummies[1])[0].weight.add_(1)
    assert "weights" in model_problem(ours, facts(dummies[1]))
    apart = msgspec.structs.replace(theirs, held="rank 0 of 2")
    assert "model_id" in model_problem(ours, apart)
    named = [facts(dummies[0], model_id="mine"), msgspec.structs.replace(apart, model_id="mine")]
    assert model_problem(*named) == ""
    assert model_problem(named[0], msgspec.structs.replace(named[0], model_id="yours"))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are made for the engine on CPUs, whatever was imported before."""
    monkeypatch.setattr(base, "_is_cpu", True)


def made(parameters: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A module as SGLang makes it."""
    factory._ROPE_DICT.clear()
    told = dict(parameters)
    theta = told.pop("rope_theta")
    scaling = None if told == {"rope_type": "default"} else told
    return factory.get_rope(64, 64, 2048, theta, True, scaling, dtype)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["default", "large theta", "linear", "llama3", "yarn", "multimodal"]
)
def test_a_rotation_is_told_as_other_engines_tell_it(name: str, dtype: torch.dtype) -> None:
    module = made(PARAMETERS[name], dtype)
    meant = rotation_of(PARAMETERS[name], dims=64, interleaved=False, max_positions=2048)
    assert len(meant.frequencies) == 32
    assert rotation_text(module, _made_with(module)) == meant.text
    table = module.cos_sin_cache
    assert isinstance(table, torch.Tensor)
    table[1:] *= 1.5
    assert rotation_text(module, _made_with(module)).startswith(type(module).__name__), (
        "told by its table"
    )


@pytest.mark.usefixtures("on_cpu")
def test_a_rotation_that_depends_on_the_batch_is_told_by_its_parameters() -> None:
    """The rotation equals that of no other engine."""
    one = PARAMETERS["longrope"]
    other = {**one, "long_factor": [factor + 1 for factor in one["long_factor"]]}
    texts = [rotation_text(module, _made_with(module)) for module in map(made, (one, other))]
    assert texts[0] != texts[1]
    for long in (False, True):
        meant = rotation_of(one, dims=64, interleaved=False, max_positions=2048, long=long)
        assert meant.text not in texts


@pytest.mark.usefixtures("on_cpu")
def test_a_rotation_that_sglang_has_not_registered_is_told_by_its_tables() -> None:
    texts = []
    for name in ("yarn", "llama3", "longrope"):
        module = made(PARAMETERS[name])
        factory._ROPE_DICT.clear()
        texts.append(rotation_text(module, _made_with(module)))
        for table in module.buffers():
            table[1:] *= 1.5
        texts.append(rotation_text(module, _made_with(module)))
    assert len(set(texts)) == 6


class ModelConfig:
    """SGLang's, as far as it reads a file by name."""

    def __init__(self, model_path: str, *, revision: str | None = None, meanwhile: Any) -> None:
        meanwhile()
        self.hf_config = json.loads((Path(model_path) / "config.json").read_text())
        meanwhile()


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A name that leads to the first of two models with other positions."""
    for name, theta in (("one", 10_000.0), ("other", 20_000.0)):
        shutil.copytree(MODEL_DIR, tmp_path / name)
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": theta}))
    (tmp_path / "current").symlink_to("one")
    return tmp_path / "current"


def read_by_sglang(link: Path, *targets: str) -> ModelConfig:
    """SGLang reads a config; the name is switched before and after it opens the file."""
    to = iter(targets)

    def switch() -> None:
        if target := next(to, ""):
            (link.parent / "next").symlink_to(target)
            (link.parent / "next").rename(link)

    made = object.__new__(ModelConfig)
    config_made(ModelConfig.__init__, made, str(link), meanwhile=switch)
    return made


def test_a_config_that_is_exchanged_after_sglang_has_read_it_is_told_as_it_was(link: Path) -> None:
    read_by_sglang(link)
    right = facts(scheduler(link.parent / "one")).config
    (link.parent / "next").symlink_to("other")
    (link.parent / "next").rename(link)
    assert facts(scheduler(link)).config == right
    CONFIGS.clear()
    assert facts(scheduler(link)).config != right, "which is what would be told"


@pytest.mark.parametrize("targets", [("other",), ("other", "one")])
def test_a_config_that_is_exchanged_while_sglang_reads_it_is_not_believed(
    link: Path, targets: tuple[str, ...]
) -> None:
    made = read_by_sglang(link, *targets)
    assert made.hf_config["rope_theta"] == 20_000.0, "so that the test tests what it says"
    told = facts(scheduler(link)).config
    for name in ("one", "other"):
        assert told != facts(scheduler(link.parent / name)).config


def test_each_layer_says_how_many_heads_it_has_in_the_whole_model() -> None:
    made = scheduler()
    blocks = list(made.tp_worker.model_runner.model)
    for number, heads in ((0, 4), (1, 8)):
        blocks[number].qkv_proj = torch.nn.Identity()
        blocks[number].qkv_proj.total_num_kv_heads = heads
    assert kv_heads(made.tp_worker.model_runner.model) == {
        0: {4},
        1: {8},
        2: frozenset(),
        3: frozenset(),
    }


@pytest.mark.parametrize(
    ("backend", "mode", "reads"),
    [("pd_connector", "decode", True), ("pd_connector", "null", False), ("nixl", "decode", False)],
)
def test_files_are_read_from_the_load_on_if_the_engine_uses_the_connector(
    backend: str, mode: str, reads: bool
) -> None:
    runner = loading(Path("/nowhere"), "auto", backend=backend, mode=mode)
    found = loads(lambda *told, **more: (told, more, LOADS.reads), runner, 1, again=True)
    assert found == ((runner, 1), {"again": True}, reads)


def loading(
    folder: Path, load_format: str, *, backend: str = "pd_connector", mode: str = "decode"
) -> Any:
    """SGLang's runner that loads a model."""
    args = SimpleNamespace(
        disaggregation_transfer_backend=backend,
        disaggregation_mode=mode,
        load_format=load_format,
        startup_weight_load_mode="serial",
    )
    config = SimpleNamespace(model_path=str(folder), revision=None)
    return SimpleNamespace(server_args=args, model_config=config)


@pytest.mark.parametrize("load_format", ["sharded_state", "gguf", "bitsandbytes"])
def test_files_that_are_replaced_while_a_loader_of_its_own_reads_them_are_not_believed(
    link: Path, load_format: str
) -> None:
    made = scheduler(link)
    made.server_args.load_format = load_format

    def load(_: Any) -> None:
        (link.parent / "next").symlink_to("other")
        (link.parent / "next").rename(link)

    loads(load, loading(link, load_format))
    assert loaded_files(made) is None
    LOADS.files.clear()
    assert loaded_files(made) is not None, "which would be told"


def test_files_that_are_not_loaded_are_not_read(tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(MODEL_DIR, copied)
    loads(lambda _: None, loading(copied, "dummy"))
    assert (str(copied), None) not in LOADS.files
