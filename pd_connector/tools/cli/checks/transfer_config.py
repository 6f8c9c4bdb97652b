# SPDX-License-Identifier: Apache-2.0
"""Finds errors in a `--kv-transfer-config`, without an engine. Pure."""

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pd_connector.config import KEY_VARIABLE, Config
from pd_connector.errors import ConfigError, did_you_mean
from pd_connector.pool.settings import check as check_pool
from pd_connector.tools.cli.checks.finding import Finding, Status

NAME = "PDConnector"
ENGINE_HOST_VARIABLE = "VLLM_HOST_IP"
"""vLLM's own variable for the address of its host."""
WRAPPERS = ("MultiConnector", "PdConnector")
"""Connectors that have others as parts: vLLM's, and Dynamo's subclass of it."""
ANSWERING = ("MooncakeConnector", "NixlConnector", "NixlPushConnector", "NixlPullConnector")
"""Connectors that answer with `kv_transfer_params`, as ours does. vLLM's engine ends where two of them do."""
ROLES = ("kv_producer", "kv_consumer", "kv_both")
KEYS = (
    "kv_connector",
    "kv_role",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "kv_load_failure_policy",
    "engine_id",
    "enable_permute_local_kv",
)
UNUSED = (
    "kv_buffer_device",
    "kv_buffer_size",
    "kv_ip",
    "kv_parallel_size",
    "kv_port",
    "kv_rank",
)
"""Keys of vLLM's for other connectors. 0.32 knows the first and `kv_port` only."""


class Drafting(NamedTuple):
    """An engine in a file.

    Attributes:
        place: place of its config.
        role: its `kv_role`.
        speculation: its `--speculative-config`; empty without one.
    """

    place: str
    role: str
    speculation: str


class Written(NamedTuple):
    """A `--kv-transfer-config`, and where it was found.

    Attributes:
        value: the config as JSON; a text if there is none, with the reason.
        speculation: the `--speculative-config` of the same command; empty without one.
    """

    place: str
    value: Mapping[str, Any] | str
    speculation: str = ""

    @property
    def engines(self) -> list[Drafting]:
        """The engines with PDConnector that it starts: one, or none."""
        if isinstance(self.value, str):
            return []
        roles = [str(part.get("kv_role")) for part in parts_of(self.value)]
        return [Drafting(self.place, role, self.speculation) for role in roles]


def check(written: Written, environment: Mapping[str, str]) -> list[Finding]:
    """All findings about one config.

    Args:
        environment: variables of the engine's process.
    """
    place, value = written.place, written.value
    if isinstance(value, str):
        return [Finding(place, "JSON", Status.FAIL, value, "write it as one JSON object")]
    if "kv_connector" not in value and any(key in Config.__struct_fields__ for key in value):
        return list(_extra(place, value, environment))  # as PD_CONNECTOR_CONFIG has it
    findings = [*_unknown(place, value), *_name(place, value), *_role(place, value)]
    extra = value.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        text = f"kv_connector_extra_config is {_kind(extra)}"
        advice = "must be a JSON object"
        if isinstance(extra, str):
            advice += ", without quotation marks around it"
        return [*findings, Finding(place, "config", Status.FAIL, text, advice)]
    if _is_wrapper(value):
        return [*findings, *_parts(place, value, extra, environment)]
    if _meant(value.get("kv_connector")):
        if "kv_load_failure_policy" in value:
            text = "kv_load_failure_policy has no effect on PDConnector"
            advice = "set `on_failure` in kv_connector_extra_config instead, or leave it out"
            findings.append(Finding(place, "failures", Status.WARN, text, advice))
        findings += _extra(place, extra, environment)
    return findings


def _extra(
    place: str, extra: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[Finding]:
    problems = list[str]()
    host = ""
    try:
        host = Config.load(extra, environment, ENGINE_HOST_VARIABLE).host
    except ConfigError as error:
        problems += error.args
    pool = extra.get("pool", False)
    try:
        if isinstance(pool, bool | Mapping):  # `Config.load` reports a value that is neither
            check_pool(pool)
    except ConfigError as error:
        problems += error.args
    yield from (Finding(place, "config", Status.FAIL, problem) for problem in problems)
    if problems:
        return
    text = ", ".join(f"{name} {extra[name]!r}" for name in extra if name != "key") or "defaults"
    if "key" in extra:
        yield Finding(
            place,
            "config",
            Status.WARN,
            "the key is in the config: engines log their arguments, and other users of the machine see them",
            f"set it in the variable {KEY_VARIABLE}",
        )
        return
    yield Finding(place, "config", Status.OK, f"{text}; host {host}")


def _unknown(place: str, value: Mapping[str, Any]) -> Iterator[Finding]:
    for key in value:
        if key in UNUSED:
            text = f"{key} has no effect on PDConnector"
            yield Finding(place, key, Status.WARN, text, "leave it out")
        elif key in Config.__struct_fields__:
            text = f"{key!r} is a key of the connector, not of vLLM"
            pair = f"{json.dumps(key)}: {json.dumps(value[key], default=str)}"
            advice = f'write "kv_connector_extra_config": {{{pair}}}'
            if key == "key":  # which must not be shown
                advice = f"set it in the variable {KEY_VARIABLE}"
            yield Finding(place, "keys", Status.FAIL, text, advice)
        elif key not in KEYS:
            advice = did_you_mean(key, KEYS) or f"vLLM knows {', '.join(KEYS)}"
            yield Finding(place, "keys", Status.FAIL, f"unknown key {key!r}", advice)


def _kind(value: object) -> str:
    """What a value is, without its contents: a key may be among them."""
    kinds = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}
    if value is None:
        return "missing"
    return kinds.get(type(value), "a number")


def _is_wrapper(value: Mapping[str, Any]) -> bool:
    """Whether it has other connectors as parts. Dynamo's PdConnector lies in a module that has to be named."""
    name = value.get("kv_connector")
    return name in WRAPPERS and (name != "PdConnector" or "kv_connector_module_path" in value)


def _meant(name: object) -> bool:
    """Whether a name is ours, or was meant to be."""
    close = difflib.get_close_matches(str(name).lower(), [NAME.lower()], cutoff=0.8)
    return isinstance(name, str) and bool(close)


def _name(place: str, value: Mapping[str, Any]) -> Iterator[Finding]:
    name = value.get("kv_connector")
    if name == NAME or _is_wrapper(value):
        return
    advice = f'write "kv_connector": "{NAME}"'
    if _meant(name):
        text = f"kv_connector {name!r}: did you mean {NAME!r}?"
        if name == "PdConnector":
            text += " PdConnector is Dynamo's own connector"
        yield Finding(place, "connector", Status.FAIL, text, advice)
    elif not isinstance(name, str):
        yield Finding(
            place,
            "connector",
            Status.FAIL,
            "no kv_connector" if name is None else f"kv_connector is {name!r}",
            advice,
        )
    else:
        text = f"{name}, not PDConnector: nothing of pd-connector is used"
        yield Finding(place, "connector", Status.WARN, text, advice)


def _role(place: str, value: Mapping[str, Any]) -> Iterator[Finding]:
    role, name = value.get("kv_role"), value.get("kv_connector")
    if role in ROLES:
        ours = name == NAME or _is_wrapper(value)  # `_name` says what is wrong with another one
        text = f"{name}, {role}" if ours else str(role)
        yield Finding(place, "connector" if ours else "role", Status.OK, text)
        return
    words = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
    guess = f"kv_{str(role).lower().removeprefix('kv_')}"
    near = words.get(str(role)) or "".join(difflib.get_close_matches(guess, ROLES, n=1))
    text = "no kv_role" if role is None else f"kv_role {role!r}"
    advice = (
        f"did you mean {near!r}?"
        if near and role is not None
        else f"must be one of {', '.join(ROLES)}"
    )
    yield Finding(place, "role", Status.FAIL, text, advice)


def _parts(
    place: str, value: Mapping[str, Any], extra: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[Finding]:
    parts = extra.get("connectors")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        text = f"kv_connector_extra_config.connectors is {_kind(parts)}"
        if isinstance(parts, list):
            text += " with other values than objects"
        yield Finding(
            place, "parts", Status.FAIL, text, "must be a list of objects, one a connector"
        )
        return
    names = [str(part.get("kv_connector")) for part in parts]
    if NAME not in names:
        text = f"{', '.join(names) or 'no connector'}: PDConnector is not among the parts"
        yield Finding(place, "parts", Status.WARN, text, f"add one with kv_connector {NAME}")
        return
    for number, part in enumerate(parts):
        if part.get("kv_connector") == NAME:
            yield from check(Written(f"{place} connectors[{number}]", part), environment)
    if rivals := [name for name in names if name in ANSWERING]:
        yield Finding(
            place,
            "parts",
            Status.FAIL,
            f"{', '.join(rivals)} answers with kv_transfer_params, too: vLLM's engine ends at the first such request",
            f"leave {rivals[0]} out",
        )
    if names[0] != NAME:
        text = (
            f"{names[0]} comes before PDConnector: the first part that has KV of a prompt loads it"
        )
        yield Finding(place, "parts", Status.WARN, text, "name PDConnector first")
    if value.get("kv_load_failure_policy", "fail") != "recompute":
        text = "requests whose KV does not arrive fail"
        advice = 'write "kv_load_failure_policy": "recompute" beside "kv_connector"'
        yield Finding(place, "failures", Status.WARN, text, advice)


def parts_of(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The configs of PDConnector in a config: itself, or parts of a wrapper."""
    if value.get("kv_connector") == NAME:
        return [value]
    parts = extra_of(value).get("connectors")
    parts = parts if isinstance(parts, list) else []
    return [p for p in parts if isinstance(p, Mapping) and p.get("kv_connector") == NAME]


def extra_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its `kv_connector_extra_config`; empty without one."""
    extra = value.get("kv_connector_extra_config")
    return extra if isinstance(extra, Mapping) else {}
