# SPDX-License-Identifier: Apache-2.0
"""A version of vLLM that the connector is not written for says so in the engine's own log."""

import logging

import pytest

pytest.importorskip("vllm")

import vllm
from support.vllm_steps import SteppedEngine

from pd_connector.versions import advice
from pd_connector.vllm import early_check, plugin


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("0.30.2", "upgrade vllm"),
        ("0.34.0", "look for a newer pd-connector"),
        ("dev", "this version number is unreadable"),
    ],
)
def test_an_engine_of_an_unsupported_version_warns_when_it_starts(
    version: str, wanted: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("pd_connector.vllm")
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(vllm, "__version__", version)
    SteppedEngine()
    logger.removeHandler(caplog.handler)
    (said,) = {record.getMessage() for record in caplog.records if wanted in record.getMessage()}
    assert version in said
    assert "0.31 to 0.33 are supported" in said


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1.dev3", "0.33.0+cpu", vllm.__version__])
def test_a_supported_version_says_nothing(version: str) -> None:
    assert advice(version) == ""


def test_an_engine_whose_hooks_are_others_says_so_with_advice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM itself would only call the connector unsupported."""

    def missing() -> None:
        raise ImportError("no module named vllm.engine.arg_utils")

    logger = logging.getLogger("pd_connector.vllm")
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(vllm, "__version__", "0.30.2")
    monkeypatch.setattr(early_check, "watch", missing)
    with pytest.raises(ImportError):
        plugin.register()
    logger.removeHandler(caplog.handler)
    (said,) = {record.getMessage() for record in caplog.records}
    assert "PDConnector cannot be registered with vLLM 0.30.2" in said
    assert "0.31 to 0.33 are supported: upgrade vllm" in said
