# SPDX-License-Identifier: Apache-2.0
"""`python -m scheduler_plugins.router --prefill URL... --decode URL...`"""

import argparse
import dataclasses
import logging
import os
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from scheduler_plugins.qos.trust import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from scheduler_plugins.router.policies.registry import DEFAULT

CLIENT_KEY_VARIABLE = "PD_ROUTER_CLIENT_KEY"
API_KEY_VARIABLE = "PD_ROUTER_API_KEY"

# Everything else in RouterConfig is a number with a default, and becomes an option by its name.
HELP = {
    "workers": "processes that serve clients, on one port",
    "members_interval_s": "pause between two looks at which engines dns+http:// and k8s+http:// stand for",
    "front_queue": "requests of each class that may wait at the router; 0: all wait at the engines",
    "engine_queue_s": "with --front-queue: prefill that every engine may have queued meanwhile",
    "port": "port to listen on, 0 for any free one",
    "connect_timeout_s": "time to open a connection to an engine",
    "first_byte_timeout_s": "longest wait for a stream's first byte",
    "answer_timeout_s": "longest wait for an answer that is not streamed",
    "idle_timeout_s": "longest pause inside an answer, and of a client",
    "refusal_grace_s": "wait for the decode engine after the prefill engine refused its copy",
    "health_interval_s": "pause between two health checks of one engine",
    "health_timeout_s": "time in which /health must be answered",
    "health_misses": "unanswered health checks in a row after which an engine counts as hung",
    "drain_timeout_s": "how long an engine that refuses connections may finish its requests",
    "probe_timeout_s": "time in which a prefill engine must tell its address",
    "probe_retry_s": "pause before a prefill engine without an address is asked again",
    "attempts": "engines that may accept one request and fail it",
    "body_mib": "largest request body in MiB",
    "bodies_mib": "most that all request bodies may take together, in MiB",
    "connections": "most connections of clients",
    "header_timeout_s": "time in which a new connection must send its first request's headers",
    "shutdown_timeout_s": "how long running requests may go on after SIGTERM",
}


INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the router until SIGINT or SIGTERM. Returns the exit status."""
    try:
        return _serve(arguments)
    except KeyboardInterrupt:  # while it started, before it listens to signals
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _serve(arguments: Sequence[str] | None) -> int:
    try:
        from scheduler_plugins.router.loop import run
        from scheduler_plugins.router.server import serve
        from scheduler_plugins.router.settings.config import RouterConfig
        from scheduler_plugins.router.settings.settings_file import SettingsFile
    except ModuleNotFoundError as error:
        print(f"{error}: pip install 'pd-connector[router]'", file=sys.stderr)
        return 2

    parser = _parser(RouterConfig)
    given = vars(parser.parse_args(arguments))
    given.setdefault("api_key", os.environ.get(API_KEY_VARIABLE))
    level = given.pop("log_level")
    given["kv_events"] = dict(given["kv_events"])
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    path = given.pop("config")
    wanted = {name: value for name, value in given.items() if value is not None}
    wanted["admin_key"] = os.environ.get(ADMIN_KEY_VARIABLE, "")
    wanted["client_key"] = os.environ.get(CLIENT_KEY_VARIABLE, "")
    wanted["router_key"] = os.environ.get(KEY_VARIABLE, "")
    try:
        settings = SettingsFile(path, wanted) if path else None
        config = settings.current if settings else RouterConfig(**wanted)
    except ValueError as error:
        parser.error(str(error))
    try:
        if config.workers > 1:
            from scheduler_plugins.router.workers.keeper import keep

            run(keep(config, settings))
        else:
            run(serve(config, settings))
    except ssl.SSLError as error:
        print(f"tls_cert, tls_key or engine_ca cannot be used: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cannot listen on {error}", file=sys.stderr)
        return 1
    return 0


def _parser(config: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scheduler_plugins.router",
        description="One OpenAI API in front of prefill and decode engines.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for side, which in (
        ("prefill", "the prefill engines"),
        ("decode", "the decode engines"),
        ("cpu-prefill", "prefill engines for long prompts that nobody waits for: --policy length"),
    ):
        parser.add_argument(
            f"--{side}", nargs="+", action="extend", metavar="URL", help=f"base URLs of {which}"
        )
    parser.add_argument(
        "--kv-events",
        nargs="+",
        action="extend",
        default=[],
        type=_kv_events,
        metavar="URL=EVENTS[,REPLAY]",
        help="where an engine publishes its KV events (vLLM's --kv-events-config), and replays them",
    )
    parser.add_argument(
        "--engine",
        nargs="+",
        action="extend",
        metavar="URL",
        help="base URLs of engines of either side, which are asked which one it is",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file with engines, policies and limits; read again when it changes",
    )
    parser.add_argument(
        "--admin-port",
        type=int,
        metavar="N",
        help=f"port of the admin API; its token is printed at the start, or given in {ADMIN_KEY_VARIABLE}",
    )
    parser.add_argument("--admin-host", default="127.0.0.1", help="address of the admin API")
    parser.add_argument(
        "--exchange",
        default="",
        metavar="ADDRESS",
        help="where to tell other routers what this one has sent, as tcp://0.0.0.0:9100",
    )
    parser.add_argument(
        "--fellows",
        nargs="+",
        action="extend",
        metavar="ADDRESS",
        help=f"where other routers of these engines tell so; all have the same {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--otlp",
        default="",
        metavar="URL",
        help="where spans are sent, as http://127.0.0.1:4318/v1/traces (extra otel)",
    )
    parser.add_argument(
        "--allowed-origins",
        nargs="+",
        action="extend",
        metavar="ORIGIN",
        help="origins of web pages that may use the router from a browser, as https://chat.example.org; *: all",
    )
    for option, meaning in (
        ("--tls-cert", f"certificate for clients; what they must know is in {CLIENT_KEY_VARIABLE}"),
        ("--tls-key", "its key, if not in the same file"),
        ("--engine-ca", "certificate that signed those of engines with https URLs"),
    ):
        parser.add_argument(option, default="", metavar="FILE", help=meaning)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--policy", default=DEFAULT, metavar="NAME", help="which engines serve a request"
    )
    parser.add_argument(
        "--tokenizer",
        default="",
        metavar="FOLDER",
        help="where the model's tokenizer.json lies, if not where the engines say that their model does",
    )
    parser.add_argument(
        "--profile",
        default="",
        metavar="FILE",
        help="cost model of engines that tell none; pd-connector profile writes it",
    )
    parser.add_argument(
        "--decode-policy",
        default="",
        metavar="NAME",
        help="which decode engine, if not by the rule that goes with --policy",
    )
    parser.add_argument(
        "--api-key",
        default=argparse.SUPPRESS,  # the help would show the variable's value
        metavar="KEY",
        help=f"key for the router's own requests to the engines; better given in {API_KEY_VARIABLE}",
    )
    parser.add_argument(
        "--log-level",
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="log level",
    )
    for field in dataclasses.fields(config):
        if field.name in HELP:
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                type=int if field.type in (int, "int") else float,
                default=field.default,
                metavar="N" if field.type in (int, "int") else "SECONDS",
                help=HELP[field.name],
            )
    return parser


def _kv_events(text: str) -> tuple[str, tuple[str, str | None]]:
    """`http://host:8100=tcp://host:5557,tcp://host:5558`: an engine's URL, and where its events are."""
    url, separator, addresses = text.partition("=")
    events, _, replay = addresses.partition(",")
    if not separator or not events:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must look like http://host:8100=tcp://host:5557,tcp://host:5558"
        )
    return url, (events, replay or None)


if __name__ == "__main__":
    sys.exit(main())
