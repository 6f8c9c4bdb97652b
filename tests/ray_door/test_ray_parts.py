# SPDX-License-Identifier: Apache-2.0
"""The door's parts, without a cluster."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    CompletionRequest,
)

from pd_connector.config import Config
from pd_connector.control.seal import sealed
from pd_connector.errors import ConfigError
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.wire.params import ProducerAddress, parse
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.ray.app import build_pd_app
from pd_connector.ray.backend import NoAddressError, PDConnectorBackend, PublishedAddress
from pd_connector.ray.carried import why_alone
from pd_connector.ray.servers import BindingPatience
from scheduler_plugins.vllm.request_queue import qos_of

KEY = "0123456789abcdef" * 4
ADDRESS = sealed(
    ProducerAddress("prefill-1", (Peer(Source("10.0.0.1", 7000, "prefill-1"), Shard(0, 4, 0, 1)),)),
    KEY,
)


def backend(config=None, node="node-2"):
    made = PDConnectorBackend(SimpleNamespace(engine_kwargs={}))
    made._engine_id, made._node_id = "decode-1", node
    made.config = config or Config(key=KEY, host="10.0.0.2")
    return made


def peer(address=ADDRESS, node="node-1"):
    return {**address.fields(), "ray_node_id": node}


def request(**fields):
    return CompletionRequest(**{"model": "m", "prompt": "hello", "max_tokens": 9, **fields})


def test_an_address_written_by_another_process_is_read():
    published = PublishedAddress()
    text = json.dumps(ADDRESS.fields())
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    subprocess.run([sys.executable, "-c", write, published.path, text], check=True)
    assert published.read() == ADDRESS


def test_an_engine_that_wrote_nothing_is_named():
    with pytest.raises(NoAddressError, match="wanted its address"):
        PublishedAddress().read()


def test_both_requests_name_the_same_transfer():
    asked = request(request_id="r1", stream=True)
    prefill = backend().prepare_prefill_request(request=asked, peer=peer())
    decode = backend().prepare_decode_request(request=asked, peer=peer(), prefill_response=None)
    wanted, offered = parse(decode.kv_transfer_params), parse(prefill.kv_transfer_params)
    assert wanted.remote_request_id == offered.transfer_id
    assert wanted.wait  # the prefill has not begun
    assert wanted.peers() == ADDRESS.peers
    assert (prefill.max_tokens, prefill.stream) == (1, False)
    assert (decode.max_tokens, decode.stream) == (9, True)


def test_two_requests_do_not():
    made = backend()
    names = {
        made.prepare_prefill_request(request=request(), peer=peer()).kv_transfer_params[
            "transfer_id"
        ]
        for _ in range(8)
    }
    assert len(names) == 8


def test_what_a_client_says_of_transfers_is_dropped():
    asked = request(kv_transfer_params={"do_remote_prefill": True, "remote_host": "evil"})
    decode = backend().prepare_decode_request(request=asked, peer=None, prefill_response=None)
    assert decode.kv_transfer_params is None


@pytest.mark.parametrize("fields", [{"prompt": ["a", "b"]}, {"n": 2}, {"echo": True}])
def test_what_one_transfer_cannot_carry_gets_none(fields):
    """Ray's own decode server asks for such requests, too. Two prompts under one name would be refused."""
    asked = request(**fields)
    prefill = backend().prepare_prefill_request(request=asked, peer=peer())
    decode = backend().prepare_decode_request(request=asked, peer=peer(), prefill_response=None)
    assert prefill.kv_transfer_params is None
    assert decode.kv_transfer_params is None


def test_a_prefill_request_asks_for_one_token_and_nothing_else():
    asked = request(min_tokens=5, logprobs=3, n=1)
    prefill = backend().prepare_prefill_request(request=asked, peer=peer())
    assert (prefill.max_tokens, prefill.min_tokens, prefill.logprobs) == (1, 0, None)
    assert asked.min_tokens == 5


OTHER_KEY = "fedcba9876543210" * 4
TRUSTED = Config(insecure=True, host="10.0.0.2", peers=("10.0.0.0/8",))
LOOPBACK = ProducerAddress(
    "prefill-1", (Peer(Source("127.0.0.1", 7000, "prefill-1"), Shard(0, 4, 0, 1)),)
)


@pytest.mark.parametrize(
    ("config", "address", "node", "reached"),
    [
        (Config(key=KEY, host="10.0.0.2"), ADDRESS, "node-1", True),
        (Config(), ADDRESS, "node-1", False),  # no key here
        (Config(), LOOPBACK, "node-1", False),  # no key there: its loopback is not ours
        (Config(), LOOPBACK, "node-2", True),
        (TRUSTED, ADDRESS, "node-1", True),
        (Config(insecure=True, host="10.0.0.2"), ADDRESS, "node-1", False),
        (Config(key=OTHER_KEY, host="10.0.0.2"), ADDRESS, "node-1", False),
        (Config(key=KEY, host="10.0.0.2"), ADDRESS._replace(seal=""), "node-1", False),
    ],
)
def test_what_the_engine_would_not_dial_is_not_asked(config, address, node, reached, caplog):
    found = backend(config).address_of(peer(address, node))
    assert (found == address) == reached
    assert reached or "PD_CONNECTOR_KEY" in caplog.text


def test_a_replica_without_an_address_is_refused():
    assert backend().address_of({}) is None
    assert backend().address_of({"remote_host": 3}) is None


def test_one_request_at_a_time_looks_whether_a_prefill_replica_is_back():
    now = [0.0]
    patience = BindingPatience(5.0, lambda: now[0])
    assert patience.take_s() == patience.take_s() == 5.0
    patience.failed()
    assert patience.take_s() == 0.0
    now[0] = 5.0
    assert patience.take_s() == 5.0
    assert patience.take_s() == 0.0  # another one is looking
    patience.bound()
    assert patience.take_s() == 5.0


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({}, None),
        ({"prompt": [1, 2, 3]}, None),
        ({"prompt": [[1, 2], [3]]}, "batch"),
        ({"prompt": ["a", "b"]}, "batch"),
        ({"n": 2}, "several_answers"),
        ({"echo": True}, "prompt_logprobs"),
    ],
)
def test_what_one_transfer_cannot_carry(fields, cause):
    assert why_alone(request(**fields)) == cause


def test_a_chat_can_be_carried():
    chat = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hello"}])
    assert why_alone(chat) is None


def config(**engine_kwargs):
    return {"model_loading_config": {"model_id": "m"}, "engine_kwargs": engine_kwargs}


def test_another_connector_is_refused_by_name():
    other = config(kv_transfer_config={"kv_connector": "NixlConnector"})
    with pytest.raises(ConfigError, match="decode_config: kv_connector 'NixlConnector'"):
        build_pd_app({"prefill_config": config(), "decode_config": other})


def test_middleware_is_refused_by_name():
    """Ray's ingress would never call it."""
    with_middleware = config(middleware=["scheduler_plugins.vllm.AdmissionMiddleware"])
    with pytest.raises(ConfigError, match="prefill_config: middleware"):
        build_pd_app({"prefill_config": with_middleware, "decode_config": config()})


@pytest.mark.parametrize("chat", [False, True])
def test_a_request_names_its_class_to_the_schedulers_of_both_sides(chat):
    """`scheduler_cls` works inside Serve: what it reads is in both requests."""
    asked = (
        ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "x"}], vllm_xargs={"qos": "premium"}
        )
        if chat
        else request(vllm_xargs={"qos": "premium"})
    )
    made = backend()
    for shaped in (
        made.prepare_prefill_request(request=asked, peer=peer()),
        made.prepare_decode_request(request=asked, peer=peer(), prefill_response=None),
    ):
        sampling = shaped.to_sampling_params(shaped.max_tokens or 9, {})
        assert qos_of(SimpleNamespace(sampling_params=sampling)) == "premium"
