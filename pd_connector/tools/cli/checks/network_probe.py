# SPDX-License-Identifier: Apache-2.0
"""Reads this machine's addresses, names, ports and firewalls."""

import fcntl
import ipaddress
import re
import socket
import struct
from pathlib import Path

from pd_connector.tools.cli.checks.facts import Network

_SIOCGIFADDR = 0x8915
_DEFAULT_PORTS = (32768, 60999)
# Addresses for documentation: connecting a datagram socket sends nothing, it only looks up a route.
_ELSEWHERE = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))


def network(host: str) -> Network:
    """This machine's network, as an engine with this `host` sees it."""
    name = socket.gethostname()
    return Network(
        addresses=_addresses(),
        outward=_outward(),
        hostname=name,
        resolved={each: _resolve(each) for each in (name, host)},
        bindable={host: _cannot_bind(host)},
        port_range=_port_range(),
        firewalls=_firewalls(),
    )


def _addresses() -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            try:
                answer = fcntl.ioctl(asker, _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            found.setdefault(interface, []).append(socket.inet_ntoa(answer[20:24]))
    inet6 = Path("/proc/net/if_inet6")
    for line in inet6.read_text().splitlines() if inet6.exists() else ():
        digits, *_, interface = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            found.setdefault(interface, []).append(str(address))
    return {interface: tuple(addresses) for interface, addresses in found.items()}


def _outward() -> str | None:
    for family, elsewhere in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as asker:
                asker.connect((elsewhere, 9))
                return str(asker.getsockname()[0])
        except OSError:
            continue
    return None


def _resolve(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: not a possible name
        return ()
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # as the connector does
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _cannot_bind(host: str) -> str:
    found = _resolve(host)
    if not found:
        return "the name does not resolve"
    family = socket.AF_INET6 if ":" in found[0] else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((found[0], 0))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _port_range() -> tuple[int, int]:
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not file.exists():
        return _DEFAULT_PORTS
    first, last = file.read_text().split()
    return int(first), int(last)


def _firewalls() -> tuple[str, ...]:
    found = []
    ufw = Path("/etc/ufw/ufw.conf")
    try:
        if ufw.exists() and re.search(r"^ENABLED=yes", ufw.read_text(), re.MULTILINE):
            found.append("ufw")
    except OSError:
        pass
    if Path("/run/firewalld").is_dir():
        found.append("firewalld")
    return tuple(found)
