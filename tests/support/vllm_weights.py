# SPDX-License-Identifier: Apache-2.0
"""A worker's side whose model has real weights, over an agent that notes what it is told."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pd_connector.config import Config
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.vllm import worker_side
from pd_connector.vllm.identity import owners
from pd_connector.vllm.identity.model import loaded_weights
from pd_connector.vllm.identity.model_watch import ModelWatch


class Attention(nn.Module):
    def get_kv_cache_spec(self):
        raise NotImplementedError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.projection = nn.Linear(8, 8)


class Recorder:
    pool_model = b""
    pool_draft = ""
    facts = None

    def __init__(self):
        self.commands = []

    def submit(self, command):
        self.commands.append(command)

    def engine_steps(self):
        pass

    def close(self):
        pass


@pytest.fixture
def model():
    owners.watch()
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def config(model):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            rank=0, world_size=1, data_parallel_size=1, enable_eplb=False
        ),
        model_config=SimpleNamespace(model="/nowhere", revision=None),
        load_config=SimpleNamespace(load_format="tensorizer"),
        compilation_config=SimpleNamespace(static_forward_context={"layers.0.attn": model.attn}),
    )


@pytest.fixture
def agent():
    return Recorder()


@pytest.fixture
def worker(config, agent):
    made = worker_side.WorkerSide(config, SimpleNamespace(kv_cache_groups=()), Config())
    made._agent = agent
    start(made, config, agent)
    return made


def start(worker, config, agent, files=None, **facts):
    """The worker has told these facts of its model."""
    loaded = loaded_weights(config)
    told = ModelFacts(b"config", **facts)
    worker._model = ModelWatch(config, told, loaded, files, agent.submit)


def offer(request, final=True):
    return Offer("t", request, ((1, 2),), b"identity", 32, 32, final=final)
