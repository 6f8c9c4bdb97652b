# SPDX-License-Identifier: Apache-2.0
"""A key that is there twice is named: YAML's decoder takes the last one without a word."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_plugins.qos.yaml_text import YamlText


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: key 'a' is there twice"),
        ("a:\n- {b: 1, c: 2}\n- {b: 1,\n   b: 2}\n", "f.yaml:4: key 'b' is there twice"),
        ("a: {b: 1}\n'a': 2\n", "f.yaml:2: key 'a' is there twice"),
    ],
)
def test_a_key_that_is_there_twice_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        YamlText(text.encode(), "f.yaml").decode(dict[str, Any])


@pytest.mark.parametrize(
    "text",
    [
        "a: a\nb: a\nc: [a, a, {a: 1}]\n",
        "a: &one {b: 1}\nc: &two {d: 2}\ne:\n  <<: *one\n  <<: *two\n",
        "a: {a: {a: 1}}\nb: {a: 1}\n",
        "a: &x {a: 1}\nb: *x\nc: *x\n",
    ],
)
def test_the_same_word_elsewhere_is_no_second_key(text: str) -> None:
    assert len(YamlText(text.encode(), "f.yaml").decode(dict[str, Any])) in (2, 3)
