# SPDX-License-Identifier: Apache-2.0
"""Checks of a host's carrier: whether a command that starts one can work, and which problems the running carrier
reports."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from pd_connector.errors import ConfigError
from pd_connector.hosts import without_secret
from pd_connector.pool.carrier.asking import CarrierLink
from pd_connector.pool.far.registry import far_address, far_class
from pd_connector.pool.far.seal import read_keys
from pd_connector.pool.settings import text_of
from pd_connector.tools.cli.checks.facts import CarrierFacts
from pd_connector.tools.cli.checks.finding import Finding, Status

FAR_VARIABLE = "PD_CONNECTOR_FAR"
_COMMAND = re.compile(r"pd[-_]connector[\"',\s\\]+pool[\"',\s\\]+carry")
_OPTION = r"{}(?:=|[\"',\s\\]+(?:-\s+[\"']?)?)([^\s\"',\]\\]+)"
_FAR, _KEY_FILE, _PYTHON = (
    re.compile(_OPTION.format(name)) for name in ("--far", "--key-file", "--client-python")
)
_SET = re.compile(rf"{FAR_VARIABLE}[\"']?\s*[:=]\s*[\"']?([^\s\"',\]]+)")
_NEAR = 600
"""Most characters of a command that are looked at."""


def look(folder: Path, environment: Mapping[str, str] = os.environ) -> CarrierFacts:
    """The state of this host's carrier.

    Args:
        folder: folder of the memory tier.
    """
    refused, lacks = "", False
    if far := environment.get(FAR_VARIABLE, ""):
        try:
            far_address(
                far, sealed=True
            )  # the key is an option of a command that is not known here
        except ConfigError as error:
            refused = str(error).replace("--far", FAR_VARIABLE, 1)
            lacks = _lacks_package(far, refused)
    if not os.path.isdir(folder):
        return CarrierFacts(refused=refused)
    link = CarrierLink(folder)
    try:
        status, served = link.status(), link.has_served
    finally:
        link.close()
    if status is None:
        return CarrierFacts(refused=refused, has_ended=served)
    return CarrierFacts(
        far=status.far,
        sealed=status.sealed,
        problem=status.problem,
        too_large=status.counts.get("too_large", 0),
        most_bytes=status.most_bytes,
        not_put=status.counts.get("not_put", 0),
        refused="" if lacks else refused,  # the carrier has it in another Python
    )


def findings(carrier: CarrierFacts, area: str) -> Iterator[Finding]:
    """The doctor's findings about a carrier; none if there was never a carrier."""
    if carrier.refused:
        yield Finding(area, FAR_VARIABLE, Status.FAIL, carrier.refused)
    if carrier.has_ended:
        text = "none runs, and one has run since this machine started: chunks of other hosts do not come"
        yield Finding(
            area, "carrier", Status.WARN, text, "start it again: `pd-connector pool carry`"
        )
    if not carrier.far:
        return
    sealed = "sealed" if carrier.sealed else "not sealed"
    if carrier.problem:
        text = f"{carrier.far}, {sealed}: cannot be used: {carrier.problem}"
        advice = "see that it runs and that this host reaches it; the carrier opens it again by itself, and engines compute meanwhile"
        yield Finding(area, "carrier", Status.WARN, text, advice)
    else:
        yield Finding(area, "carrier", Status.OK, f"{carrier.far}, {sealed}")
    if carrier.too_large:
        text = (
            f"{carrier.too_large:,} chunks were not put into {carrier.far}: with its seal a chunk is larger than the "
            f"{text_of(carrier.most_bytes)} that it takes"
        )
        advice = "keep chunks in half the bytes (pool.codec: int8), or use a store that takes larger objects (docs/pool.md)"
        yield Finding(area, "chunks", Status.WARN, text, advice)
    if carrier.not_put:
        text = f"{carrier.far} did not take {carrier.not_put:,} chunks"
        advice = "let it evict (Redis: maxmemory-policy allkeys-lru), give it more room, and see that the user may write"
        yield Finding(area, "not put", Status.WARN, text, advice)


def in_text(text: str, place: str) -> list[Finding]:
    """Findings about the carriers that a script or manifest starts."""
    listed = []
    for command in _COMMAND.finditer(text):
        where = f"{place}:{text.count(chr(10), 0, command.start()) + 1}"
        listed.append(_finding(text, text[command.end() : command.end() + _NEAR], where))
    return listed


def _finding(text: str, options: str, where: str) -> Finding:
    name = "carrier"
    far = _FAR.search(options) or _SET.search(text)
    if far is None:
        advice = f"name the far store with --far, or in {FAR_VARIABLE}, such as redis://HOST:6379"
        return Finding(where, name, Status.FAIL, "no far store is named", advice)
    address, key, python = far.group(1), _KEY_FILE.search(options), _PYTHON.search(options)
    shown = without_secret(address)
    if "$" in address or "{" in address:
        return Finding(where, name, Status.OK, f"{shown}: known when it starts")
    try:
        far_address(address, sealed=key is not None)
    except ConfigError as error:
        # What a package of this machine lacks says nothing about the one on which the command runs.
        if not _lacks_package(address, str(error)):
            return Finding(where, name, Status.FAIL, str(error))
        if python is None:
            return Finding(where, name, Status.WARN, str(error))
        shown += f" by a client of {python.group(1)}, which checks it when it starts"
    try:
        path = Path(shlex.split(key.group(1))[0]) if key and "$" not in key.group(1) else None
        if path is not None and os.path.exists(path):  # it may be a file of another machine
            read_keys(path)
    except ConfigError as error:
        return Finding(where, name, Status.FAIL, str(error))
    sealed = "sealed" if key else "not sealed"
    return Finding(where, name, Status.OK, f"{shown}, {sealed}")


def _lacks_package(address: str, problem: str) -> bool:
    try:
        return far_class(address.partition(":")[0]).package in problem
    except ConfigError:
        return False
