# SPDX-License-Identifier: Apache-2.0
"""A Python that cannot run SGLang is named before an engine starts."""

import pytest

from pd_connector.errors import PDConnectorError
from pd_connector.tools.launch.sglang import sglang_on_cpu
from pd_connector.tools.launch.start_log import likely_cause


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/nowhere/python", "No such file or directory"),
        ("/tmp", "Permission denied"),
        ("/bin/false", "status 1"),
    ],
)
def test_what_is_not_a_python_is_named_with_the_variable(python: str, why: str) -> None:
    with pytest.raises(PDConnectorError, match=rf"{python}: .*{why}.*PD_CONNECTOR_SGLANG_PYTHON"):
        sglang_on_cpu(python)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ModuleNotFoundError: No module named 'sglang'", "PD_CONNECTOR_SGLANG_PYTHON"),
        ("OSError: We couldn't connect to 'https://huggingface.co' to load the files", "the model"),
        ("ValueError: Invalid repository ID or local directory specified: 'm'", "the model"),
    ],
)
def test_the_likely_cause_says_what_to_look_at(line: str, said: str) -> None:
    assert said in (likely_cause([line], 1) or "")
