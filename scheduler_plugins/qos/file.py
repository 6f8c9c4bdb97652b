# SPDX-License-Identifier: Apache-2.0
"""The configuration file of the scheduler: read, checked, read again when it changes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from scheduler_plugins.order.base import MAX_OVERTAKEN
from scheduler_plugins.order.registry import create
from scheduler_plugins.order.srjf import DEFAULT_LAMBDA
from scheduler_plugins.qos.classes import ONLY, QosClass, QosError, checked
from scheduler_plugins.qos.rules import ClassRule, check_rules
from scheduler_plugins.qos.watched import Watched


class SchedulerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `scheduler`."""

    policy: str = "srjf_calibrated"
    """Order within a class: a name in `order.registry`."""
    lambda_: float = msgspec.field(default=DEFAULT_LAMBDA, name="lambda")
    """Seconds of cost that a second of waiting makes up for."""
    max_overtaken: int = MAX_OVERTAKEN
    """How many later requests of its class may go before a request."""
    qos_classes: tuple[QosClass, ...] = ONLY


class RouterSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `request_router`: which request belongs to which class."""

    routes: tuple[ClassRule, ...] = ()


class SchedulerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    scheduler: SchedulerSection = SchedulerSection()
    request_router: RouterSection = RouterSection()


def parse(text: bytes, source: str = "the configuration") -> SchedulerFile:
    """Read YAML.

    Raises:
        QosError: it is no YAML, has an unknown key, or a value that cannot be used; the message
            begins with `source` and names the key.
    """
    try:
        found = msgspec.yaml.decode(text, type=SchedulerFile) if text.strip() else SchedulerFile()
        checked(found.scheduler.qos_classes)
        check_rules(found.request_router.routes, found.scheduler.qos_classes)
        create(found.scheduler.policy, found.scheduler.lambda_)
        if found.scheduler.max_overtaken < 0:
            raise QosError(f"max_overtaken {found.scheduler.max_overtaken}: must be 0 or more")
    except (msgspec.MsgspecError, ValueError) as error:
        raise QosError(f"{source}: {error}") from None
    return found


class WatchedFile(Watched[SchedulerFile]):
    """A configuration file that may be edited while it is in use."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises QosError if it cannot be used, as `changed` does."""
        super().__init__(path, parse, QosError)
