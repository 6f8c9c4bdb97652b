# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings are true."""

import pytest
from support.examples import check_examples


@pytest.mark.parametrize(("module", "least"), [("route", 2), ("chunks", 3)])
def test_examples(module, least):
    check_examples(f"pd_connector.plan.{module}", least)
