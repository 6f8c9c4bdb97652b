# SPDX-License-Identifier: Apache-2.0
"""What the spelling of a host says: a numeric address, loopback, within a network. No name is looked up."""

import ipaddress
import re
from urllib.parse import urlsplit

_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_PLAIN = re.compile(rb"[A-Za-z0-9_.-]+")
_USER = re.compile(r"(?<=://)([^:@?#]*):.*(?=@)")
_TOKEN = re.compile(r"(?<=://)(/*)(?![:/])[^:@/?#]+(?=@)")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_QUERY = re.compile(r"([?&][^=&#]*(?:pass|pwd|secret|token|key|auth)[^=&#]*=)[^&#]+", re.IGNORECASE)
_FILE = re.compile(r"[?&]ca=/[^&]*$")
"""A file in an address, whose name can have an @."""
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
"""Name or number of a network interface."""


def numeric_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A numeric address; None for anything else. An IPv4 address in IPv6's spelling becomes the IPv4 address.

    Python takes any text as the zone of an IPv6 address, and libzmq dials what follows a `;` in it. So a
    zone must look like the name of an interface.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.scope_id is not None and not _ZONE.fullmatch(address.scope_id):
        return None
    return address.ipv4_mapped or address


def is_host(host: str) -> bool:
    """Whether `host` can be the name or the address of a machine, without scheme, port and user."""
    if numeric_address(host) is not None:
        return True
    try:
        return bool(_PLAIN.fullmatch(host.encode("idna")))
    except UnicodeError:  # a part between dots is empty, or too long
        return False


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address or `localhost`."""
    address = numeric_address(host)
    return host == "localhost" if address is None else address.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for all addresses of a machine."""
    address = numeric_address(host)
    return host in ("", "*") if address is None else address.is_unspecified


def is_peer_entry(entry: str) -> bool:
    """Whether `entry` is a network, an address, or a name whose first part may be `*`."""
    return _network(entry) is not None or bool(_NAME.fullmatch(entry))


def port_range(written: int | str) -> range:
    """The ports of a config key: a number, or the first and the last such as `7100-7107`. 0 lets the system choose.

    Raises:
        ValueError: it is neither, or no ports lie between.
    """
    first, dash, last = str(written).partition("-")
    if not (first.isdecimal() and (last.isdecimal() or not dash)):
        raise ValueError('must be a port, or a range of ports such as "7100-7107"')
    ports = range(int(first), int(last or first) + 1)
    if ports != range(1) and not (ports and ports[0] > 0 and ports[-1] < 1 << 16):
        raise ValueError("must be between 1 and 65535, the smaller port first")
    return ports


def stray_character(text: str) -> str:
    """The first space, line break or other character of `text` that no URL has, in words; empty: there is none.

    Python's `urlsplit` silently drops line breaks, tabs, and spaces at the beginning.
    """
    stray = next(
        (character for character in text if character.isspace() or not character.isprintable()), ""
    )
    return f"it has {stray!r} in it" if stray else ""


def without_secret(text: str) -> str:
    """An address for people, without the password that it has, or that a mistake may have put into it."""
    if file := _FILE.search(text):
        return _masked(text[: file.start()]) + file[0]
    return _masked(text)


def _masked(text: str) -> str:
    text = _QUERY.sub(r"\1***", text)
    before, at, host = text.rpartition("@")
    if "://" in text or not at:
        return _TOKEN.sub(r"\1***", _USER.sub(r"\1:***", text))
    scheme = match[0] if (match := _SCHEME.match(before)) else ""
    rest = before.removeprefix(scheme)
    is_path = rest.startswith("/") and not rest.startswith("//") and ":" not in rest
    return text if is_path else f"{scheme}***@{host}"


def server_url(given: str) -> str:
    """The base URL of an HTTP server, `http://` in front where it has no scheme, without `/v1` at its end.

    Raises:
        ValueError: it is not such a URL.
    """
    url = given if "://" in given else f"http://{given}"
    form = "must look like http://host:port"
    if stray := stray_character(given):
        raise ValueError(f"{form}; {stray}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        rest = url.partition("://")[2]
        if "," in rest:
            form += "; name each URL by itself, without commas"
        elif rest.count(":") > 1:
            form += "; an IPv6 address needs brackets, as in http://[::1]:8100"
        raise ValueError(form) from None
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not is_host(host) or host.isdigit() or port == 0:
        raise ValueError(form)
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{form}, without query, fragment, user name or password")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def matches(host: str, entry: str) -> bool:
    """Whether `host` equals the address or name `entry`, or lies within the network `entry`."""
    network = _network(entry)
    if network is None:
        name, entry = host.lower(), entry.lower()
        return name.endswith(entry[1:]) if entry.startswith("*.") else name == entry
    address = numeric_address(host)
    return address is not None and address in network


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None
