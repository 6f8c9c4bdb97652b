# SPDX-License-Identifier: Apache-2.0
"""vLLM's own loaders are watched: what they read is what is told, and a change of weights is told at once."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from kv.test_checkpoint_files import link, switch
from kv.test_weights import print_of, tensors
from vllm.config.load import LoadConfig
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader import get_model_loader
from vllm.v1.worker.worker_base import WorkerBase

from pd_connector.vllm.identity import checkpoint, weight_loads
from pd_connector.vllm.identity.weight_loads import LOADS

__all__ = ["link"]


@pytest.fixture(autouse=True)
def _watched():
    assert model_loader is sys.modules[weight_loads._LOADERS]
    weight_loads.watch()
    nn.Sequential(nn.Linear(1, 1))  # a model is built
    LOADS.files.clear()


class Model(nn.Module):
    """Takes what it is given."""

    def __init__(self, meanwhile=lambda: None):
        super().__init__()
        self.loaded = {}
        self._meanwhile = meanwhile

    def load_weights(self, weights):
        for name, tensor in weights:
            self.loaded[name] = tensor.clone()
            self._meanwhile()


def config_of(link):
    return SimpleNamespace(
        model=str(link),
        revision=None,
        model_weights="",
        quantization=None,
        is_moe=False,
        multimodal_config=None,
    )


def load(link, model, monkeypatch):
    """vLLM loads a model from a folder; returns the weights that are told of it."""
    load_config = LoadConfig(use_tqdm_on_load=False)
    loader = get_model_loader(load_config)
    monkeypatch.setattr(loader, "_init_ep_weight_filter", lambda *_: None)
    loader.load_weights(model, config_of(link))
    return lambda: checkpoint.model_files(config_of(link), load_config, (), LOADS.files)


def test_what_is_told_is_what_was_loaded_although_the_link_was_switched_since(link, monkeypatch):
    model = Model()
    told = load(link, model, monkeypatch)
    switch(link)
    assert np.array_equal(model.loaded["embed"], tensors()["embed"]), (
        "so that the test tests what it says"
    )
    files = told()
    assert print_of(files) == print_of(
        checkpoint.model_files(config_of(link.parent / "one"), LoadConfig())
    )


def test_without_the_watch_the_other_checkpoint_would_be_told(link, monkeypatch):
    told = load(link, Model(), monkeypatch)
    right = print_of(told())
    LOADS.files.clear()
    switch(link)
    assert print_of(told()) != right


def test_a_link_that_is_switched_while_the_loader_reads_leaves_nothing_to_tell(link, monkeypatch):
    done = []

    def once():
        if not done:
            done.append(switch(link))

    assert load(link, Model(once), monkeypatch)() is None


class Listener:
    def __init__(self):
        self.told = []

    def loading(self):
        self.told.append("loading")

    def loaded(self, *, over, whole):
        self.told.append(("loaded", over, whole))


@pytest.fixture
def listener():
    made = Listener()
    LOADS.listen(made)
    yield made
    LOADS.forget(made)


def test_a_load_into_the_model_is_told_when_it_begins_and_when_it_has_ended(listener):
    seen = []
    model = Model(lambda: seen.append(list(listener.told)))
    weight_loads.watch_model(model)
    weight_loads.watch_model(model)
    model.load_weights([("w", torch.zeros(1))])
    assert seen == [["loading"]]
    assert listener.told == ["loading", ("loaded", False, False)]


class Worker(WorkerBase):
    """A worker with the methods that change weights, as vLLM's for GPUs has them."""

    def __init__(self, model):
        self.model = model

    def reload_weights(self, fails=False):
        self.model.load_weights([("w", torch.zeros(1))])
        if fails:
            raise RuntimeError("no such file")

    def reset_weights(self):
        pass

    def start_weight_update(self):
        pass

    def update_weights(self):
        pass

    def finish_weight_update(self):
        pass


@pytest.fixture
def worker():
    model = Model()
    weight_loads.watch_model(model)
    return Worker(model)


def test_weights_that_are_reloaded_are_whole_when_that_has_ended(listener, worker):
    worker.reload_weights()
    assert listener.told[0] == "loading"
    assert listener.told[-1] == ("loaded", True, True)
    assert sum(each != "loading" for each in listener.told) == 1


def test_weights_that_a_trainer_zeroes_are_others_at_once(listener, worker):
    worker.reset_weights()
    assert listener.told == ["loading", ("loaded", False, False)]


def test_a_reload_that_failed_leaves_a_part_of_each(listener, worker):
    with pytest.raises(RuntimeError):
        worker.reload_weights(fails=True)
    assert listener.told[-1] == ("loaded", False, False)


def test_between_the_beginning_and_the_end_of_an_update_weights_are_neither(listener, worker):
    worker.start_weight_update()
    worker.update_weights()
    worker.update_weights()
    assert set(listener.told) == {"loading"}
    worker.finish_weight_update()
    assert listener.told[-1] == ("loaded", True, False)


@contextmanager
def core(monkeypatch):
    """vLLM's engine, whose calls of workers end at an executor that notes them."""
    from vllm.v1.engine.core import EngineCore

    made = object.__new__(EngineCore)
    called = []
    made.model_executor = SimpleNamespace(collective_rpc=lambda method, *_: called.append(method))
    yield made, called


def test_any_call_of_workers_but_our_own_is_told(monkeypatch):
    told = []

    class Side:
        def workers_called(self):
            told.append(len(called))

    side = Side()
    weight_loads.watch_calls(side)
    with core(monkeypatch) as (engine, called):
        engine.collective_rpc("outgoing_transfers")
        assert told == []
        engine.collective_rpc("scale_weights", None, (1.5,))
    assert told == [2], "when it has returned"
