# SPDX-License-Identifier: Apache-2.0
"""The configuration file of the scheduler. It is read, checked, and read again when it changes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from scheduler_plugins.order.base import MAX_OVERTAKEN
from scheduler_plugins.order.registry import create
from scheduler_plugins.order.srjf import DEFAULT_LAMBDA
from scheduler_plugins.qos.classes import ONLY, QosClass, QosError, checked
from scheduler_plugins.qos.rules import ClassRule, check_rules
from scheduler_plugins.qos.watched import Watched
from scheduler_plugins.qos.yaml_text import YamlText


class SchedulerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `scheduler`."""

    policy: str = "srjf_calibrated"
    """Order within a class: the name of a policy in `order.registry`."""
    lambda_: float = msgspec.field(default=DEFAULT_LAMBDA, name="lambda")
    """The cost, in seconds, that one second of waiting compensates."""
    max_overtaken: int = MAX_OVERTAKEN
    """The most requests of its class that may overtake a request."""
    qos_classes: tuple[QosClass, ...] = ONLY


class RouterSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `request_router`: the rules that give requests their class."""

    routes: tuple[ClassRule, ...] = ()


class SchedulerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    scheduler: SchedulerSection = SchedulerSection()
    request_router: RouterSection = RouterSection()


def parse(text: bytes, source: str = "the configuration") -> SchedulerFile:
    """Read YAML.

    Raises:
        QosError: the text is not YAML, or has an unknown key or an invalid value. The message begins with `source` and
            names the key.
    """
    written = YamlText(text, source)
    try:
        file = written.decode(SchedulerFile) if text.strip() else SchedulerFile()
    except ValueError as error:
        raise QosError(str(error)) from None
    try:
        checked(file.scheduler.qos_classes)
        check_rules(file.request_router.routes, file.scheduler.qos_classes)
        create(file.scheduler.policy, file.scheduler.lambda_)
        if file.scheduler.max_overtaken < 0:
            raise QosError(f"max_overtaken {file.scheduler.max_overtaken}: must be 0 or more")
    except ValueError as error:
        raise QosError(written.wrong(error)) from None
    return file


class WatchedFile(Watched[SchedulerFile]):
    """A configuration file that can be edited while it is in use."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises QosError, like `changed`, if the file is invalid."""
        super().__init__(path, parse, QosError)
