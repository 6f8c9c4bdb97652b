# SPDX-License-Identifier: Apache-2.0
"""Dynamo's workers find PDConnector in their table of connectors."""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pd_connector.vllm import dynamo

TABLE = """
class Nixl: pass
KV_CONNECTOR_PROTOCOLS = {"NixlConnector": Nixl}
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Puts a package in Dynamo's place whose table has this source; returns a function that reads it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "dynamo"]:
        monkeypatch.delitem(sys.modules, name)

    def install(source: str) -> Any:
        folder = tmp_path / "dynamo" / "vllm"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "kv_connector_protocols.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return lambda: importlib.import_module(dynamo.MODULE).KV_CONNECTOR_PROTOCOLS

    yield install
    for name in [name for name in sys.modules if name.split(".")[0] == "dynamo"]:
        del sys.modules[name]


def test_pdconnector_is_asked_as_nixlconnector_is(
    installed: Callable[[str], Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamo, "_installed", lambda: "9.9")
    table = installed(TABLE)
    with caplog.at_level(logging.INFO, "pd_connector.vllm"):
        dynamo.join()
        dynamo.join()
    assert table()["PDConnector"] is table()["NixlConnector"]
    (told,) = caplog.records
    assert "PDConnector is known to Dynamo 9.9, which is untested" in told.getMessage()


def test_an_entry_that_dynamo_has_itself_stays(installed: Callable[[str], Any]) -> None:
    table = installed(TABLE + "KV_CONNECTOR_PROTOCOLS['PDConnector'] = 'its own'")
    dynamo.join()
    assert table()["PDConnector"] == "its own"


@pytest.mark.parametrize(
    "source", ["", "KV_CONNECTOR_PROTOCOLS = {}", "raise RuntimeError('x')", "import not_there"]
)
def test_a_dynamo_without_that_table_stops_no_engine_and_is_told(
    installed: Callable[[str], Any], caplog: pytest.LogCaptureFixture, source: str
) -> None:
    installed(source)
    with caplog.at_level(logging.WARNING, "pd_connector.vllm"):
        dynamo.join()
    assert "cannot be made known to Dynamo" in caplog.text


def test_without_dynamo_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dynamo").mkdir()  # another package of that name, without workers of vLLM's
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", _only_in(tmp_path))
    with caplog.at_level(logging.DEBUG, "pd_connector.vllm"):
        dynamo.join()
    assert not caplog.records


def _only_in(folder: Path) -> Callable[[str], None]:
    def find(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="dynamo.vllm")

    return find


FILTER = """
import re
def _compile_include_pattern(prefixes):
    return re.compile("|".join(map(re.escape, prefixes)))
"""


def shown_by(prefixes: tuple[str, ...]) -> list[str]:
    """Names of metrics that Dynamo passes on with this filter."""
    wanted = sys.modules[dynamo.METRICS]._compile_include_pattern(prefixes)
    names = ("vllm:prompt_tokens_total", "pd_connector:handoffs_total", "python_gc_total")
    return [name for name in names if wanted.match(name)]


def test_our_metrics_are_shown_where_vllms_are(
    installed: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(TABLE)
    module = ModuleType(dynamo.METRICS)
    exec(FILTER, module.__dict__)
    module._compile_include_pattern.__module__ = dynamo.METRICS
    monkeypatch.setitem(sys.modules, dynamo.METRICS, module)
    assert shown_by(("vllm:", "lmcache:")) == ["vllm:prompt_tokens_total"]
    dynamo.join()
    once = module._compile_include_pattern
    dynamo.join()
    assert module._compile_include_pattern is once
    assert shown_by(("vllm:", "lmcache:")) == [
        "vllm:prompt_tokens_total",
        "pd_connector:handoffs_total",
    ]
    assert shown_by(("lmcache:",)) == []


def test_a_dynamo_that_filters_in_another_way_is_told_of(
    installed: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = installed(TABLE)
    monkeypatch.setitem(sys.modules, dynamo.METRICS, ModuleType(dynamo.METRICS))
    dynamo.join()
    assert "PDConnector" in table()
    assert "will lack pd_connector:*" in caplog.text


def test_dynamos_own_resolver_takes_it_alone_and_among_others() -> None:
    """With the wheel `ai-dynamo` on the path; its runtime is not needed."""
    try:
        resolver = importlib.import_module(dynamo.MODULE)
    except ImportError:
        pytest.skip("ai-dynamo is not installed")
    config = SimpleNamespace(kv_connector="PDConnector", kv_connector_extra_config={})
    parts = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "PDConnector"}]
    several = SimpleNamespace(
        kv_connector="MultiConnector", kv_connector_extra_config={"connectors": parts}
    )
    resolver.KV_CONNECTOR_PROTOCOLS.pop("PDConnector", None)
    for transfer in (config, several):
        with pytest.raises(ValueError, match="PD"):
            resolver.make_kv_connector_protocol(SimpleNamespace(kv_transfer_config=transfer))
    dynamo.join()
    for transfer in (config, several):
        made = resolver.make_kv_connector_protocol(SimpleNamespace(kv_transfer_config=transfer))
        asked = made.prefill_request_kv_transfer_params()
        assert asked["do_remote_decode"]
        answer = SimpleNamespace(kv_transfer_params={"remote_engine_id": "e"})
        assert made.decode_request_kv_transfer_params(answer) == answer.kv_transfer_params
