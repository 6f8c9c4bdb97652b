# SPDX-License-Identifier: Apache-2.0
"""An engine that has started writes its address where it was told to."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from pd_connector.config import Config
from pd_connector.control.seal import trusted_peers
from pd_connector.errors import ConfigError
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.wire.params import decode_params, parse, parse_address
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.vllm.engine_facts import EngineFacts
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.scheduler_side import SchedulerSide

KEY = "0123456789abcdef" * 4
PEER = Peer(Source("10.0.0.1", 7000, "e"), Shard(0, 4, 0, 1))


def introduce(config: Config) -> None:
    side = SchedulerSide(
        config,
        EngineFacts(
            engine_id="e", windows=Windows([(16, 0)]), ranks=1, produces=True, consumes=False
        ),
    )
    side.set_peers((PEER,))


def test_what_it_writes_is_all_that_a_decode_request_needs(tmp_path: Path) -> None:
    file = tmp_path / "address"
    config = Config(host="10.0.0.1", key=KEY, address_file=str(file))
    introduce(config)
    address = parse_address(json.loads(file.read_text()))
    assert address is not None
    parsed = parse(decode_params(address, "t"))
    assert parsed is not None
    assert trusted_peers(parsed, config) == (PEER,)  # its seal is that of the key


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    introduce(Config())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["none/address", "."])
def test_a_file_that_cannot_be_written_is_named_with_its_key(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match=r"address_file .*config key address_file"):
        introduce(Config(address_file=str(tmp_path / place)))
