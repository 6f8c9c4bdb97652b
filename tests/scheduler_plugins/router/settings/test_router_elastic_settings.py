# SPDX-License-Identifier: Apache-2.0
"""Roles in the file: what an engine may do, its group, and errors that say what to change."""

from __future__ import annotations

import pytest

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.published import Fixed
from scheduler_plugins.router.roles.registry import ROLES
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.elastic import Moving, Place
from scheduler_plugins.router.settings.settings_file import SettingsError, parse

ENGINES = """
engines:
  - {url: "http://a:1", role: prefill, may: [prefill, decode], group: chat}
  - {url: "http://b:1", role: decode, may: [prefill, decode, both], group: chat}
  - {url: "dns+http://more.example:1", role: decode, may: [prefill], group: code}
  - {url: "http://c:1", role: prefill, group: code}
"""


def read(text: str) -> RouterConfig:
    return parse(text.encode(), {}, "router.yaml")


def placed(config: RouterConfig) -> dict[str, Place]:
    return config.placed(lambda url: (url,))


def test_the_file_says_home_may_and_group_for_names_too() -> None:
    found = placed(read(ENGINES + "roles: fixed"))
    pd = frozenset((Role.PREFILL, Role.DECODE))
    assert found["http://a:1"] == Place(Role.PREFILL, pd, "chat")
    assert found["http://b:1"] == Place(Role.DECODE, pd | {Role.BOTH}, "chat")
    assert found["dns+http://more.example:1"] == Place(
        Role.DECODE, frozenset((Role.PREFILL,)), "code"
    )
    assert found["http://c:1"] == Place(Role.PREFILL, frozenset(), "code")


def test_nothing_moves_unless_an_engine_may_or_a_policy_is_named() -> None:
    plain = {"prefill": ("a:1",), "decode": ("b:1",)}
    assert RouterConfig(**plain).moving is None
    assert placed(RouterConfig(**plain))["http://a:1"].may == frozenset()
    named = RouterConfig(**plain, roles="fixed")
    assert named.moving == Moving("fixed", False)
    assert placed(named)["http://a:1"].may == {Role.PREFILL, Role.DECODE}
    assert RouterConfig(**plain, roles="dry-run:fixed").moving == Moving("fixed", True)
    assert RouterConfig(**plain, roles="off").moving is None
    assert read(ENGINES + "roles: off").moving is None


def test_a_route_leads_to_a_group_and_the_first_engines_group_is_the_default() -> None:
    config = read(
        ENGINES + "roles: fixed\nroutes:\n  - {match: {header: 'x-app: ide'}, group: code}\n"
    )
    assert config.default_group == "chat"
    assert config.routes[0].qos == "default"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("routes:\n  - {match: {}, group: chta}", "group 'chta' has no engine; groups are chat, c"),
        ("groups: {chta: {min_prefill: 1}}", "'chta' has no engine"),
        ("groups: {chat: {min_prefill: 3}}", "min_prefill 3: only 2 of its engines can prefill"),
        ("groups: {chat: {min_prefill: 2, min_decode: 2}}", "need more than its 2 engines"),
        ("groups: {chat: {min_decode: 0}}", "min_decode 0: must be 1 or more"),
        ("roles: presure", "presure"),
        ("roles: dry-run:presure", "router.yaml:7: role policy 'presure' is not known"),
        ("groups: {chat: }", "router.yaml:7: groups: Expected `object`, got `null`"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(more: str, said: str) -> None:
    text = ENGINES + more + ("" if "roles:" in more else "\nroles: fixed")
    with pytest.raises(SettingsError, match=said.split(";")[0].replace("(", r"\(")) as error:
        read(text)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            '{url: "http://a:1", role: decode, may: [prefill], group: chat}',
            "two entries of it differ",
        ),
        ('{url: "a:1", role: decode, group: chat}', "two entries of it differ in may or group"),
        ('{url: "http://d:1", role: decode, group: ""}', "group '': must be a name"),
        (
            '{url: "http://d:1", role: prefill, group: alone}',
            "no engine of group 'alone' can decode",
        ),
    ],
)
def test_an_entry_that_would_be_ignored_or_could_serve_nobody_is_refused(
    entry: str, said: str
) -> None:
    """The later of two entries won; a group without a decode engine answered by its prefill engine alone."""
    with pytest.raises(SettingsError) as refused:
        read(ENGINES + f"  - {entry}\nroles: fixed")
    assert said in str(refused.value)
    fine = '{url: "http://a:1", role: decode, may: [prefill, decode], group: chat}'
    read(ENGINES + f"  - {fine}\nroles: fixed")


def test_a_cpu_engine_cannot_change_its_role() -> None:
    text = ENGINES + '  - {url: "http://d:1", role: cpu_prefill, may: [decode]}\nroles: fixed'
    with pytest.raises(SettingsError, match="cpu_prefill cannot change its role"):
        read(text)


def test_a_role_policy_that_names_a_route_policy_which_is_not_there_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Elsewhere(Fixed):
        route = "elsewhere"

    monkeypatch.setitem(ROLES, "theirs", Elsewhere)
    with pytest.raises(ValueError, match="policy 'elsewhere' is not known"):
        RouterConfig(prefill=("http://a",), decode=("http://b",), roles="theirs")
