# SPDX-License-Identifier: Apache-2.0
"""The configuration file: what it says, what is refused and how, and how it is read again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from scheduler_plugins.qos.classes import ONLY, QosError, Slo, default_class
from scheduler_plugins.qos.file import SchedulerFile, WatchedFile, parse
from scheduler_plugins.qos.rules import class_of

TEXT = b"""
scheduler:
  qos_classes:
    - {name: premium,  reserved_fraction: 0.10, priority: 100, slo: {ttft_ms: 500, tpot_ms: 50}}
    - {name: standard, reserved_fraction: 0.30, priority: 50}
    - {name: free,     reserved_fraction: 0.60, priority: 10}
request_router:
  routes:
    - {match: {header: "x-customer-tier: premium"},  qos: premium}
    - {match: {header: "x-customer-tier: standard"}, qos: standard}
    - {match: {}, qos: free}
"""


def test_every_key_that_is_not_known_is_named_at_once() -> None:
    wrong = TEXT.replace(b"priority: 50", b"priorty: 50").replace(b"routes:", b"rutes:")
    wrong = wrong.replace(b"{match: {}, qos: free}", b"{match: {}, qs: free}")
    with pytest.raises(QosError) as caught:
        parse(wrong, "nodes.yaml")
    first, second = str(caught.value).split("; nodes.yaml")
    assert first == "nodes.yaml:5: key 'priorty' is not known; did you mean 'priority'?"
    assert second == ":8: key 'rutes' is not known; did you mean 'routes'?"


def test_a_misspelt_key_is_not_told_as_missing_too() -> None:
    with pytest.raises(QosError) as caught:
        parse(TEXT.replace(b"qos: free", b"qs: free"), "nodes.yaml")
    assert str(caught.value) == "nodes.yaml:11: key 'qs' is not known; did you mean 'qos'?"


def test_the_file_of_the_documentation() -> None:
    found = parse(TEXT)
    premium, standard, free = found.scheduler.qos_classes
    assert premium.slo == Slo(ttft_ms=500, tpot_ms=50)
    assert standard.slo == Slo()
    assert default_class(found.scheduler.qos_classes) is free
    routes = found.request_router.routes
    assert class_of(routes, {"x-customer-tier": "premium"}) == "premium"
    assert class_of(routes, {"x-customer-tier": "Premium"}) == "free"
    assert class_of(routes, {}) == "free"
    assert class_of(routes[:1], {}) == ""


def test_an_empty_file_means_the_defaults() -> None:
    assert parse(b"") == SchedulerFile()
    assert SchedulerFile().scheduler.qos_classes == ONLY


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0.60", "0.70", "reserved_fraction adds up to 1.1; must be at most 1"),
        ("0.60", "0.0", "reserved_fraction 0.0 of free: must be above 0"),
        ("0.60", "much", "nodes.yaml:6: reserved_fraction: Expected `float`, got `str`"),
        ("priority: 50", "priority: 10", "priority 10 is given twice"),
        ("name: free", "name: premium", "name 'premium' is given twice"),
        ("name: free", "name: ''", "name '': must not be empty"),
        ("ttft_ms: 500", "ttft_ms: -1", "ttft_ms -1.* milliseconds > 0"),
        ("tpot_ms", "tpot", r"nodes.yaml:4: key 'tpot' is not known; did you mean 'tpot_ms'\?"),
        ("qos: standard", "qos: gold", r"routes\[1\]: qos 'gold' must be one of premium, stand"),
        ('"x-customer-tier: premium"', '"premium"', "header 'premium': must look like"),
        ('{match: {header: "x-customer-tier: standard"}', "{match: {}", r"routes\[1\].*last"),
        ("scheduler:", "scheduler:\n  policy: best", "policy 'best' is not known: there are fcfs"),
        ("scheduler:", "scheduler:\n  lambda: -1", "lambda -1.0: must be a number of seconds per"),
        ("scheduler:", "scheduler:\n  max_overtaken: -1", "max_overtaken -1: must be 0 or more"),
        ("scheduler:", "scheduler: [", "nodes.yaml"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(old: str, new: str, said: str) -> None:
    assert old in TEXT.decode()
    broken = TEXT.decode().replace(old, new, 1).encode()
    with pytest.raises(QosError, match=said) as refused:
        parse(broken, "nodes.yaml")
    assert re.match(r"nodes\.yaml:\d+: ", str(refused.value))


def replace(path: Path, text: bytes, mtime_s: int) -> None:
    path.write_bytes(text)
    os.utime(path, (mtime_s, mtime_s))


def test_a_change_is_taken_once(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    replace(path, TEXT, 1)
    watched = WatchedFile(path)
    assert watched.changed() is None
    replace(path, TEXT.replace(b"0.60", b"0.50"), 2)
    changed = watched.changed()
    assert changed is not None
    assert changed.scheduler.qos_classes[2].reserved_fraction == 0.5
    assert watched.changed() is None


def test_a_broken_change_is_reported_once_and_leaves_the_old_one_in_force(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    replace(path, TEXT, 1)
    watched = WatchedFile(path)
    before = watched.current
    replace(path, b"scheduler: 7", 2)
    with pytest.raises(QosError, match=r"nodes\.yaml:1: scheduler: Expected `object`"):
        watched.changed()
    assert watched.changed() is None
    assert watched.current is before
    path.unlink()
    with pytest.raises(QosError, match="cannot be read"):
        watched.changed()
    replace(path, TEXT, 3)
    assert watched.changed() is None, "it says the same again"


def test_a_file_that_is_empty_for_a_moment_while_it_is_written_changes_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "scheduler.yaml"
    path.write_bytes(TEXT)
    watched = WatchedFile(path)
    path.write_bytes(b"")
    assert watched.changed() is None
    path.write_bytes(TEXT.replace(b"0.60", b"0.50"))
    found = watched.changed()
    assert found is not None
    assert found.scheduler.qos_classes[2].reserved_fraction == 0.5
    path.write_bytes(b"")
    assert watched.changed() is None
    assert watched.changed() == SchedulerFile(), "it was meant"
    assert watched.changed() is None


def test_a_file_that_cannot_be_used_at_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(QosError, match="cannot be read"):
        WatchedFile(tmp_path / "missing.yaml")
