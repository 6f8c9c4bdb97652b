# SPDX-License-Identifier: Apache-2.0
"""The configuration file of the scheduler. It is read, checked, and read again when it changes."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from scheduler_plugins.order.base import MAX_OVERTAKEN
from scheduler_plugins.order.registry import create
from scheduler_plugins.order.srjf import DEFAULT_LAMBDA
from scheduler_plugins.qos.classes import ONLY, QosClass, QosError, checked
from scheduler_plugins.qos.rules import ClassRule, check_rules
from scheduler_plugins.qos.watched import Watched
from scheduler_plugins.qos.yaml_text import YamlText

logger = logging.getLogger("scheduler_plugins")

LOOK_EVERY_S = 1.0
"""Shortest time between two checks whether the file has changed, in seconds."""


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
        self._look_s = 0.0

    def poll(self, now_s: float) -> SchedulerFile | None:
        """The new content, once after each valid change. Looks at the file once in `LOOK_EVERY_S`.

        If the file is invalid, the log says so, and `current` stays.
        """
        if now_s < self._look_s:
            return None
        self._look_s = now_s + LOOK_EVERY_S
        try:
            return self.changed()
        except QosError as error:
            logger.error("the changed settings cannot be used, so the old settings stay: %s", error)
            return None
