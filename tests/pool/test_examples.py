# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings are true."""

import pytest
from support.examples import check_examples


@pytest.mark.parametrize(("module", "least"), [("keys", 1), ("part_names", 1), ("codecs", 1)])
def test_examples(module, least):
    check_examples(f"pd_connector.pool.{module}", least)
