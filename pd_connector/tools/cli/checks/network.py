# SPDX-License-Identifier: Apache-2.0
"""The address at which peers reach this host, whether it can be bound, and how it is protected."""

from collections.abc import Mapping

from pd_connector.config import HOST_VARIABLE, KEY_VARIABLE, Config
from pd_connector.errors import ConfigError
from pd_connector.hosts import is_loopback
from pd_connector.tools.cli.checks.facts import Facts
from pd_connector.tools.cli.checks.finding import Finding, Status

AREA = "network"
ENGINE_HOST_VARIABLES = ("VLLM_HOST_IP", "SGLANG_HOST_IP")
"""The engines' own variables for the address of this host. Their doors use them."""


def check(facts: Facts) -> list[Finding]:
    """All findings of this area."""
    findings = [addresses(facts), host_name(facts), settings(facts)]
    if not _loopback_only(facts):
        findings.append(host(facts))
    return [*findings, port(facts), firewall(facts)]


def configured_host(environment: Mapping[str, str]) -> str:
    """The host of engines started from here, unless their config names another."""
    try:
        return Config.load({}, environment, _engines_own(environment)).host
    except ConfigError:
        return environment.get(HOST_VARIABLE) or Config().host


def _engines_own(environment: Mapping[str, str]) -> str:
    """An engine's own variable that names this host; empty for none."""
    return next((name for name in ENGINE_HOST_VARIABLES if environment.get(name)), "")


def addresses(facts: Facts) -> Finding:
    outside = [
        f"{address} ({interface})"
        for interface, shown in facts.network.addresses.items()
        for address in shown
        if not is_loopback(address)
    ]
    if outside:
        shown = ", ".join(outside)
        if facts.network.outward:
            shown += f"; other networks see {facts.network.outward}"
        return Finding(AREA, "addresses", Status.OK, shown)
    return Finding(
        AREA,
        "addresses",
        Status.WARN,
        "loopback only",
        "engines on one machine work; for two, bring a network interface up",
    )


def host_name(facts: Facts) -> Finding:
    """Debian writes the host's own name to /etc/hosts as 127.0.1.1. Peers that get this address dial themselves."""
    name = facts.network.hostname
    resolved = facts.network.resolved.get(name, ())
    shown = f"{name} -> {', '.join(resolved) or 'nothing'}"
    if resolved and not all(is_loopback(address) for address in resolved):
        return Finding(AREA, "host name", Status.OK, shown)
    instead = facts.network.outward or "an address of this host"
    return Finding(
        AREA,
        "host name",
        Status.OK if _loopback_only(facts) else Status.WARN,
        f"{shown}: not usable by other machines",
        f"between machines set {HOST_VARIABLE}={instead}, not the name",
    )


def settings(facts: Facts) -> Finding:
    """Whether the connector would start with these variables."""
    host, key = configured_host(facts.environment), facts.environment.get(KEY_VARIABLE)
    try:
        Config.load({}, facts.environment, _engines_own(facts.environment))
    except ConfigError as error:
        return Finding(AREA, "host and key", Status.FAIL, str(error))
    if key:
        return Finding(AREA, "host and key", Status.OK, f"{host}, authenticated and encrypted")
    own = _engines_own(facts.environment)
    note = f" ({own}={facts.environment[own]} is not used without a key)" if own else ""
    return Finding(
        AREA,
        "host and key",
        Status.OK,
        f"{host}, no key: engines on this machine only{note}",
        f"for two machines set {HOST_VARIABLE} on each, and the same {KEY_VARIABLE} "
        "(`pd-connector key` makes one)",
    )


def host(facts: Facts) -> Finding:
    """Whether the configured host is one of this machine's addresses."""
    name = configured_host(facts.environment)
    resolved = facts.network.resolved.get(name, ())
    own = [address for some in facts.network.addresses.values() for address in some]
    set_it = f"set {HOST_VARIABLE} to an address of this host: {_suggestions(facts)}"
    if not resolved:
        return Finding(AREA, HOST_VARIABLE, Status.FAIL, f"{name} does not resolve", set_it)
    shown = name if resolved == (name,) else f"{name} -> {', '.join(resolved)}"
    if is_loopback(resolved[0]):
        return Finding(
            AREA, HOST_VARIABLE, Status.FAIL, f"{shown}: peers would dial themselves", set_it
        )
    if resolved[0] not in own:
        return Finding(
            AREA, HOST_VARIABLE, Status.FAIL, f"{shown}: no address of this host", set_it
        )
    return Finding(AREA, HOST_VARIABLE, Status.OK, shown)


def port(facts: Facts) -> Finding:
    name = configured_host(facts.environment)
    reason = facts.network.bindable.get(name, "not tried")
    if not reason:
        return Finding(AREA, "free port", Status.OK, f"can be bound on {name}")
    return Finding(
        AREA,
        "free port",
        Status.FAIL,
        f"cannot be bound on {name}: {reason}",
        f"set {HOST_VARIABLE} to an address of this host: {_suggestions(facts)}",
    )


def firewall(facts: Facts) -> Finding:
    """Only root can ask firewalls; the doctor says which ports must be open."""
    first, last = facts.network.port_range
    advice = (
        f"between machines let TCP ports {first}-{last} through from the other engines; or set control_port and "
        "data_port of the prefill engines, and let those through"
    )
    active = ", ".join(facts.network.firewalls)
    if _loopback_only(facts):
        return Finding(AREA, "firewall", Status.OK, active or "none seen", advice)
    if active:
        return Finding(AREA, "firewall", Status.WARN, f"{active} is switched on", advice)
    return Finding(AREA, "firewall", Status.OK, "none seen on this host", advice)


def _loopback_only(facts: Facts) -> bool:
    return is_loopback(configured_host(facts.environment))


def _suggestions(facts: Facts) -> str:
    own = [address for some in facts.network.addresses.values() for address in some]
    outside = [address for address in own if not is_loopback(address)]
    return ", ".join(outside) or "none but loopback is up"
