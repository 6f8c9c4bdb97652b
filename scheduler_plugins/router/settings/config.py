# SPDX-License-Identifier: Apache-2.0
"""Every setting of the router."""

import os
import re
import signal
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from pd_connector.hosts import is_loopback, without_secret
from scheduler_plugins.qos.classes import ONLY, QosClass, checked
from scheduler_plugins.qos.rules import ClassRule, check_rules
from scheduler_plugins.qos.trust import ADMIN_KEY_VARIABLE, KEY_VARIABLE, checked_key, class_key
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.policies.registry import DEFAULT, create
from scheduler_plugins.router.roles.days import Days
from scheduler_plugins.router.roles.registry import create as create_roles
from scheduler_plugins.router.settings.elastic import (
    DEFAULT_GROUP,
    MOVABLE,
    Bounds,
    Moving,
    Place,
    check_groups,
    default_group,
    moving_of,
)
from scheduler_plugins.router.settings.members import is_name
from scheduler_plugins.router.settings.scaling import START, STOP, check_program, checked_command
from scheduler_plugins.router.settings.urls import (
    base_urls,
    check_exchange,
    check_sides,
    checked_events,
    is_url,
)

SIDES = ("prefill", "decode", "engine", "cpu_prefill")
"""Settings that list engines."""
_HOMES = {
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "cpu_prefill": Role.CPU_PREFILL,
    "engine": None,
}
COUNTS = ("attempts", "body_mib", "bodies_mib", "connections", "workers")
"""Settings that must be 1 or more."""
MOST_WORKERS = 256
"""A larger number is a typing error that would exhaust the machine's memory."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Engines, addresses to listen on, and time limits. Times are in seconds."""

    prefill: tuple[str, ...] = ()
    """Base URLs of the prefill engines; `host:port` means `http://host:port`."""
    decode: tuple[str, ...] = ()
    """Base URLs of the decode engines."""
    engine: tuple[str, ...] = ()
    """Base URLs of engines that tell the router which side they are on."""
    cpu_prefill: tuple[str, ...] = ()
    """Base URLs of prefill engines without a GPU. Policy `length` sends them long prompts of classes that are not
    interactive."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 lets the system choose one."""
    workers: int = 1
    """Processes that serve clients, on one port."""
    kv_events: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    """Endpoints where engines publish and replay KV events, by the engine's base URL. An engine that is left out
    publishes none."""
    tokenizer: str = ""
    """Folder with the model's `tokenizer.json`; empty: the model folder that the engines report."""
    profile: str = ""
    """Cost model for engines that report none (`pd-connector profile` writes it); empty: costs are learnt while
    serving."""
    policy: str = DEFAULT
    """Policy that chooses the engines of a request; other packages can add policies (`policies/registry.py`)."""
    decode_policy: str = ""
    """Rule that chooses the decode engine; empty: the rule that belongs to `policy`."""
    roles: str = ""
    """Policy that moves engines between prefill and decode: a name, `dry-run`, `dry-run:NAME` or `off`. Empty: the
    default policy if any engine has `may`, else no engine is moved."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Allowed roles and groups of engines, by URL or name. An engine that is left out is in the default group; without
    any `may` here, a policy that `roles` names may move every engine."""
    groups: Mapping[str, Bounds] = field(default_factory=dict)
    """Fewest and most engines on each side of a group, by the group's name. A group that is left out has at least 1."""
    max_prefill: int = 0
    """Most prefill engines of a group that gives no number, for role policies that start engines; 0: none is given."""
    max_decode: int = 0
    """As `max_prefill`, for decode engines."""
    start_command: str = ""
    """Starts an engine for a role policy, and prints its URL; empty: the policy's numbers are only shown in a metric."""
    stop_command: str = ""
    """Stops an engine that is drained."""
    days: str = ""
    """File where the requests of each minute of the day are summed up, for role policies that start engines; empty: only
    the last minutes predict."""
    classes: tuple[QosClass, ...] = ONLY
    """Classes of users, with their SLOs."""
    routes: tuple[ClassRule, ...] = ()
    """Rules that give a request its class; the first match counts. If none matches, the request gets the class of the
    lowest priority."""
    admin_port: int | None = None
    """Port of the admin API; None: no admin API, 0: any free port."""
    admin_host: str = "127.0.0.1"
    """Address of the admin API; an address other than loopback needs `admin_key`."""
    admin_key: str = field(default="", repr=False)
    """The operator's token (`PD_ROUTER_ADMIN_KEY`); empty: the router makes one at each start."""
    router_key: str = field(default="", repr=False)
    """Secret that this router shares with its fellows and the engines (`PD_ROUTER_KEY`). It encrypts messages between
    fellows, and proves to engines that a request's class comes from the router."""
    exchange: str = ""
    """Address where this router publishes its load on each engine to other routers, as `tcp://0.0.0.0:9100`; empty:
    nowhere."""
    fellows: tuple[str, ...] = ()
    """Addresses where other routers of the same engines publish their load."""
    otlp: str = ""
    """URL that spans are sent to (OTLP over HTTP), as `http://127.0.0.1:4318/v1/traces`; empty: nothing is traced."""
    client_key: str = field(default="", repr=False)
    """Key that clients must send in `Authorization: Bearer` (`PD_ROUTER_CLIENT_KEY`); engines get `api_key` instead.
    Empty: the router passes clients' keys on, and the engines check them."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the router from a browser (CORS), as `https://chat.example.org`; `*`: all
    origins. Empty: none."""
    tls_cert: str = ""
    """File with the certificate that the router shows to clients; empty: plain HTTP."""
    tls_key: str = ""
    """File with the key of `tls_cert`; empty: the key is in the same file."""
    engine_ca: str = ""
    """File with the CA certificate for engines with `https` URLs; empty: the system's trusted CAs."""
    front_queue: int = 0
    """Most requests of each class that wait at the router while engines are busy; 0: requests wait at the engines."""
    api_key: str = field(default="", repr=False)
    """Key for the router's own requests to the engines (`/v1/models` and the probe of prefill
    engines). Client requests carry the client's key, unless `client_key` is set."""
    first_byte_timeout_s: float = 300.0
    """Longest wait for the first byte of a stream, queueing and prefill included."""
    answer_timeout_s: float = 3600.0
    """Longest wait for an answer that is not streamed, the whole generation included."""
    idle_timeout_s: float = 120.0
    """Longest pause inside an answer, and longest time that a client neither sends nor reads."""
    health_interval_s: float = 1.0
    """Pause between two health checks of one engine."""
    health_timeout_s: float = 5.0
    """Longest wait for an answer of `/health`."""
    drain_timeout_s: float = 30.0
    """Time that an engine which takes no new requests, or leaves, has for answers that show no progress."""
    engine_start_s: float = 60.0
    """From the wish for an engine until it serves, for role policies that start engines."""
    start_timeout_s: float = 900.0
    """An engine that was asked for and does not serve by then is given up."""
    stop_timeout_s: float = 120.0
    """Longest run of `stop_command`."""
    attempts: int = 3
    """Most engines that may accept one request and fail it. Engines that cannot be reached do not count."""
    body_mib: int = 64
    """Largest request body, in MiB."""
    bodies_mib: int = 256
    """Most memory of all request bodies together, in MiB. A request beyond it is answered with 503."""
    connections: int = 2000
    """Most client connections. A further connection closes the connection that has been idle longest."""
    shutdown_timeout_s: float = 10.0
    """Time that running requests have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        """Normalise the URLs and check every value.

        Raises:
            ValueError: names the setting, the value found and the value wanted.
        """
        create(self.policy, self.decode_policy)
        for side in SIDES:
            object.__setattr__(self, side, base_urls(side, getattr(self, side)))
            if side in ("prefill", "decode") and not (getattr(self, side) or self.engine):
                raise ValueError(
                    f"{side}: no URL given; name at least one engine (--{side} URL, or --engine URL for "
                    "engines of both sides)"
                )
        if not self.host:
            raise ValueError(
                "host '': must be an address to listen on, such as 127.0.0.1; 0.0.0.0 stands for all of this machine"
            )
        check_sides({side: getattr(self, side) for side in SIDES}, self.host, self.port)
        if self.admin_port is not None and not (self.admin_key or is_loopback(self.admin_host)):
            raise ValueError(
                f"admin_host {self.admin_host}: must be a loopback address without a key; set {ADMIN_KEY_VARIABLE}"
            )
        object.__setattr__(self, "router_key", checked_key(KEY_VARIABLE, self.router_key))
        object.__setattr__(self, "admin_key", checked_key(ADMIN_KEY_VARIABLE, self.admin_key))
        class_key(self.router_key)  # key stretching is slow: do it now, not while a request waits
        check_exchange(self.exchange, self.fellows, has_key=bool(self.router_key))
        for name in ("tls_cert", "tls_key", "engine_ca"):
            if (path := getattr(self, name)) and not os.path.isfile(path):
                raise ValueError(f"{name} {path}: no such file")
        if self.tokenizer and not os.path.isfile(Path(self.tokenizer) / "tokenizer.json"):
            raise ValueError(
                f"tokenizer {self.tokenizer}: must be a folder with a tokenizer.json in it"
            )
        if self.otlp and not is_url(self.otlp):
            shown = without_secret(self.otlp)
            raise ValueError(f"otlp {shown!r}: must look like http://127.0.0.1:4318/v1/traces")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                form = "must look like https://chat.example.org, or be *"
                raise ValueError(f"allowed_origins {without_secret(origin)!r}: {form}")
        if self.tls_key and not self.tls_cert:
            raise ValueError("tls_key: is set without tls_cert; set both, or neither")
        if self.front_queue < 0:
            raise ValueError(f"front_queue {self.front_queue}: must be 0 or more")
        check_rules(self.routes, checked(self.classes))
        self._check_roles()
        if self.profile:
            from scheduler_plugins.cost.profile import load  # numpy takes a while

            load(Path(self.profile))  # ProfileError is a ValueError, and names the file
        urls = {url for side in SIDES for url in getattr(self, side)}
        object.__setattr__(self, "kv_events", checked_events(self.kv_events, urls))
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in ("port", "admin_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ValueError(f"{name} {getattr(self, name)}: must be between 0 and 65535")
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name.endswith("_s") and not 0 < value < float("inf"):
                raise ValueError(f"{setting.name} {value}: must be a number of seconds > 0")
            if setting.name in COUNTS and value < 1:
                raise ValueError(f"{setting.name} {value}: must be 1 or more")
        if self.workers > MOST_WORKERS:
            raise ValueError(f"workers {self.workers}: must be {MOST_WORKERS} at most")
        if self.workers > 1 and not hasattr(signal, "sigtimedwait"):
            raise ValueError(f"workers {self.workers}: more than 1 is possible on Linux only")
        if self.bodies_mib < self.body_mib:
            raise ValueError(
                f"bodies_mib {self.bodies_mib}: must be at least body_mib ({self.body_mib})"
            )

    def placed(self, members: Callable[[str], Iterable[str]]) -> dict[str, Place]:
        """Every engine's place. An engine that is named on both sides has the home `BOTH`.

        Args:
            members: the URLs of the engines that a URL of the settings stands for.
        """
        homes: dict[str, Role | None] = {}
        given: dict[str, str] = {}  # the engine's URL to the URL of the settings
        for side, role in _HOMES.items():
            for url in getattr(self, side):
                for member in members(url):
                    given.setdefault(member, url)
                    before = homes.setdefault(member, role)
                    if (before, role) == (Role.PREFILL, Role.DECODE):
                        homes[member] = Role.BOTH
        return {url: self._place(given[url], home) for url, home in homes.items()}

    def without(self, urls: Container[str]) -> Self:
        """The same without these engines. Raises: ValueError: the settings need them."""
        settings: dict[str, Any] = {
            side: tuple(url for url in getattr(self, side) if url not in urls) for side in SIDES
        }
        for name in ("kv_events", "places"):
            of_url = getattr(self, name).items()
            settings[name] = {url: value for url, value in of_url if url not in urls}
        return replace(self, **settings)

    def _place(self, url: str, home: Role | None) -> Place:
        """The place of an engine that the settings know by `url`."""
        place = self.places.get(url, Place())
        may = place.may
        if self.roles and self.moving is not None and not (self._elastic or self._scales):
            may = frozenset((Role.PREFILL, Role.DECODE))
        if home is not None and home not in MOVABLE:
            may = frozenset()
        return place._replace(home=home, may=may)

    @property
    def moving(self) -> Moving | None:
        """The policy that moves engines; None: no engine is moved."""
        return moving_of(self.roles, elastic=self._elastic)

    @property
    def route_policy(self) -> str:
        """The policy that chooses engines: `policy`, unless that is the default and the role policy has a route policy
        of its own."""
        if self.policy != DEFAULT or (moving := self.moving) is None:
            return self.policy
        return create_roles(moving.policy).route or self.policy

    @property
    def default_group(self) -> str:
        """The group of requests that no route leads to one."""
        return default_group(self.places.values()) if self.places else DEFAULT_GROUP

    @property
    def _elastic(self) -> bool:
        return any(place.may for place in self.places.values())

    @property
    def _scales(self) -> bool:
        """Whether the role policy starts and stops engines."""
        moving = self.moving
        return moving is not None and create_roles(moving.policy).scales

    def _check_roles(self) -> None:
        if (moving := self.moving) is not None:
            create_roles(moving.policy)
            create(self.route_policy, self.decode_policy)  # a role policy may name any
        urls = [url for side in SIDES for url in getattr(self, side)]
        for url, place in self.places.items():
            if url not in urls:
                raise ValueError(f"places {url}: no engine has this URL")
            if place.may and url in self.cpu_prefill:
                raise ValueError(
                    f"engines '{url}': may: an engine of role cpu_prefill cannot change its role; take `may` out"
                )
        placed = self.placed(lambda url: (url,))
        names = {place.group for url, place in placed.items() if is_name(url)}
        own = [place for url, place in placed.items() if not is_name(url)]
        scales = self._scales
        if scales:
            for group in sorted({place.group for place in placed.values()}):
                self.bounds(group).limits(group, self.start_timeout_s)
        check_groups(self.groups, self.routes, own, named=names, grows=scales)
        self._check_scaling()

    def _check_scaling(self) -> None:
        scales = self._scales
        for setting in (START, STOP):
            if not (text := getattr(self, setting)):
                continue
            if not scales:
                moving = self.moving
                name = "no role policy" if moving is None else f"role policy {moving.policy}"
                raise ValueError(
                    f"{setting}: {name} starts or stops no engine; set roles to slo, or take the command out"
                )
            checked_command(setting, text)
        if bool(self.start_command) is not bool(self.stop_command):
            given, lacking = (START, STOP) if self.start_command else (STOP, START)
            raise ValueError(f"{given}: is set without {lacking}; set both, or neither")
        if self.start_command and self.fellows:
            raise ValueError(
                f"{START}: cannot be used with fellows, because only one of the routers would drain an engine before it is "
                "stopped; run one router (workers gives it more processes), or leave the commands out and let Kubernetes "
                "count by the metric pd_router:engines_wanted"
            )
        if scales and self.engine_start_s > self.start_timeout_s:
            raise ValueError(
                f"engine_start_s {self.engine_start_s:g}: must be at most start_timeout_s ({self.start_timeout_s:g}), after which "
                "a start is given up; raise start_timeout_s (limits in the file)"
            )
        if self.days and not scales:
            raise ValueError(
                "days: only a role policy that starts engines reads it; set roles to slo"
            )
        for name in ("max_prefill", "max_decode"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: must be 1 or more, or 0 for none")

    def checked_here(self) -> Self:
        """Check that the commands and the file of days can be used on this machine now; returns the settings. Call it
        only when settings are read, not when the router changes them: a broken command must not keep an engine out of
        the list.

        Raises:
            ValueError: names the setting and what to do.
        """
        for setting in (START, STOP):
            if text := getattr(self, setting):
                check_program(setting, text)
        if self.days:
            Days.load(Path(self.days))  # DaysError is a ValueError, and names the file
        return self

    def bounds(self, group: str) -> Bounds:
        """Fewest and most engines of a group."""
        bounds = self.groups.get(group, Bounds())
        return msgspec.structs.replace(
            bounds,
            max_prefill=bounds.max_prefill or self.max_prefill,
            max_decode=bounds.max_decode or self.max_decode,
        )

    @property
    def look_s(self) -> float:
        """Interval at which a silent exchange checks that its engine still lives."""
        return min(0.5, self.health_interval_s)
