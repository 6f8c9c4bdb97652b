# SPDX-License-Identifier: Apache-2.0
"""The options of `pd-router serve`. Defaults are those of `RouterConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import StrEnum
from inspect import Parameter
from pathlib import Path

from pd_connector.hosts import without_secret
from pd_connector.tools.command_line import option
from scheduler_plugins.qos.trust import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from scheduler_plugins.router.roles.registry import ROLES

CLIENT_KEY_VARIABLE = "PD_ROUTER_CLIENT_KEY"
API_KEY_VARIABLE = "PD_ROUTER_API_KEY"

# By group, as in docs/router.md: each option's name, its metavar and its meaning.
OPTIONS = {
    "engines": (
        ("prefill", "URL", "base URLs of the prefill engines"),
        ("decode", "URL", "base URLs of the decode engines"),
        ("engine", "URL", "base URLs of engines that the router asks for their side"),
        (
            "cpu-prefill",
            "URL",
            "base URLs of prefill engines without a GPU; --policy length sends them long background prompts",
        ),
        (
            "kv-events",
            "URL=EVENTS[,REPLAY]",
            "endpoints where an engine publishes and replays its KV events (vLLM's --kv-events-config)",
        ),
        (
            "tokenizer",
            "FOLDER",
            "folder with the model's tokenizer.json; without it, the model folder that the engines report",
        ),
        (
            "profile",
            "FILE",
            "cost model for engines that report none; pd-connector profile writes it",
        ),
        (
            "config",
            "FILE",
            "YAML file with engines, policies and limits; read again when it changes",
        ),
    ),
    "requests": (
        ("policy", "NAME", "policy that chooses the engines of a request"),
        (
            "decode-policy",
            "NAME",
            "rule that chooses the decode engine; without it, the rule that belongs to --policy",
        ),
        (
            "roles",
            "NAME",
            f"policy that moves engines: {', '.join(ROLES)}; dry-run, dry-run:NAME: only say its moves; off: none",
        ),
        ("max-prefill", "N", "most prefill engines of a group; --roles slo needs it"),
        ("max-decode", "N", "most decode engines of a group; --roles slo needs it"),
        (
            "start-command",
            "COMMAND",
            "starts an engine for --roles slo and prints its URL; {role} and {group} are filled in; read by no shell",
        ),
        (
            "stop-command",
            "COMMAND",
            "stops a drained engine for --roles slo; {url}, {role}, {group}",
        ),
        (
            "days",
            "FILE",
            "file that counts requests by the minute of the day, so that --roles slo knows what earlier days had",
        ),
        (
            "front-queue",
            "N",
            "most requests of each class that wait at the router; 0: all wait at the engines",
        ),
        ("attempts", "N", "most engines that can accept one request and fail it"),
        ("body-mib", "N", "largest request body, in MiB"),
        ("bodies-mib", "N", "most memory of all request bodies together, in MiB"),
    ),
    "addresses, processes and keys": (
        ("host", "ADDRESS", "address to listen on"),
        ("port", "N", "port to listen on; 0: any free port"),
        ("workers", "N", "processes that serve clients, on one port"),
        ("connections", "N", "most client connections"),
        (
            "admin-port",
            "N",
            f"port of the admin API; the log names its token, unless {ADMIN_KEY_VARIABLE} does",
        ),
        ("admin-host", "ADDRESS", "address of the admin API"),
        (
            "exchange",
            "ADDRESS",
            "address to publish this router's load to other routers, such as tcp://0.0.0.0:9100",
        ),
        (
            "fellows",
            "ADDRESS",
            f"addresses of the other routers' --exchange; all need the same {KEY_VARIABLE}",
        ),
        (
            "api-key",
            "KEY",
            f"key for the router's own requests to the engines; better given in {API_KEY_VARIABLE}",
        ),
        ("tls-cert", "FILE", "file with the certificate that the router shows to clients"),
        (
            "tls-key",
            "FILE",
            "file with the key of --tls-cert; without it, the key is in the same file",
        ),
        ("engine-ca", "FILE", "file with the CA certificate for engines with https URLs"),
        (
            "allowed-origins",
            "ORIGIN",
            "origins of web pages that can use the router from a browser, such as https://chat.example.org; *: all",
        ),
        (
            "otlp",
            "URL",
            "URL that spans are sent to: http://HOST:4318/v1/traces (extra otel)",
        ),
        ("log-level", "LEVEL", "DEBUG, INFO, WARNING or ERROR"),
    ),
    "times that rarely need a change": (
        ("first-byte-timeout-s", "SECONDS", "longest wait for a stream's first byte"),
        ("answer-timeout-s", "SECONDS", "longest wait for an answer that is not streamed"),
        (
            "idle-timeout-s",
            "SECONDS",
            "longest pause inside an answer, and longest time that a client neither sends nor reads",
        ),
        ("health-interval-s", "SECONDS", "pause between two health checks of one engine"),
        ("health-timeout-s", "SECONDS", "longest wait for an answer of /health"),
        (
            "drain-timeout-s",
            "SECONDS",
            "time that an engine which takes no new requests, or leaves, has for answers that show no progress",
        ),
        (
            "engine-start-s",
            "SECONDS",
            "time that an engine takes to start; --roles slo looks so far ahead",
        ),
        (
            "start-timeout-s",
            "SECONDS",
            "longest wait until an engine that --roles slo has asked for serves",
        ),
        ("stop-timeout-s", "SECONDS", "longest run of --stop-command"),
        (
            "shutdown-timeout-s",
            "SECONDS",
            "time that running requests have to finish after SIGTERM",
        ),
    ),
}

SECRETS = (
    f"Secrets are read from variables: {CLIENT_KEY_VARIABLE} (the key that clients must send), {API_KEY_VARIABLE} "
    f"(--api-key), {ADMIN_KEY_VARIABLE} (the token of the admin API) and {KEY_VARIABLE} (shared by routers and engines)."
)


class LogLevel(StrEnum):
    """What is logged: messages of this importance and above."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


def parameters(config: type) -> Iterator[Parameter]:
    """The options, as parameters of a command. `config`: `RouterConfig`, whose import takes the time of all policies."""
    defaults = {setting.name: setting.default for setting in dataclasses.fields(config)}
    for title, options in OPTIONS.items():
        for name, metavar, meaning in options:
            kind, default = _SPECIAL.get(name) or _by_default(defaults[name.replace("-", "_")])
            yield option(
                name, kind, default, meaning, metavar=metavar, rich_help_panel=title.capitalize()
            )


def _by_default(default: object) -> tuple[object, object]:
    """The type of an option's value and its default, by the default in `RouterConfig`."""
    return (list[str], []) if isinstance(default, tuple) else (type(default), default)


def kv_events(text: str) -> tuple[str, tuple[str, str | None]]:
    """Parse `http://host:8100=tcp://host:5557,tcp://host:5558`: an engine's URL, and the endpoints of its events.

    Raises:
        ValueError: the text has another form.
    """
    url, separator, addresses = text.partition("=")
    events, _, replay = addresses.partition(",")
    if not separator or not events:
        raise ValueError(
            f"kv_events {without_secret(text)!r}: must look like "
            "http://host:8100=tcp://host:5557,tcp://host:5558"
        )
    return url, (events, replay or None)


_SPECIAL: dict[str, tuple[object, object]] = {
    "kv-events": (list[str], []),
    "config": (Path | None, None),
    "admin-port": (int | None, None),
    "api-key": (str | None, None),
    "log-level": (LogLevel, LogLevel.INFO),
}
