# SPDX-License-Identifier: Apache-2.0
"""Role policies by the names that `--roles` uses.

Another installed package adds a policy by an entry point of the group `scheduler_plugins.roles`. The entry point has
the policy's name. Its object is a subclass of `RolePolicy` that needs no arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from pd_connector.errors import ConfigError
from pd_connector.extensions import load_entry_points, unknown_name
from scheduler_plugins.router.roles.arrow import Arrow
from scheduler_plugins.router.roles.base import RolePolicy
from scheduler_plugins.router.roles.pressure import Pressure
from scheduler_plugins.router.roles.published import Fixed, Mixed, Ratio, Tetri
from scheduler_plugins.router.roles.slo import Slo

GROUP = "scheduler_plugins.roles"
"""Entry points of other packages' role policies."""
DEFAULT = "pressure"
"""The policy if the user names none. docs/roles.md says why it was chosen."""
ROLES: dict[str, Callable[[], RolePolicy]] = {
    "pressure": Pressure,
    "ratio": Ratio,
    "arrow": Arrow,
    "tetri": Tetri,
    "mixed": Mixed,
    "fixed": Fixed,
    "slo": Slo,
}
"""This package's role policies: the names of `--roles`."""


def create(name: str) -> RolePolicy:
    """A new policy object. This package's own names take precedence over names of other packages.

    Raises:
        ConfigError: no role policy has that name, or another package's policy cannot be loaded or is not a role policy.
    """
    if name in ROLES:
        return ROLES[name]()
    extension = load_entry_points(GROUP).get(name)
    if extension is None:
        raise unknown_name("role policy", name, [*ROLES], GROUP, "roles")
    loaded = extension.load()
    if not (isinstance(loaded, type) and issubclass(loaded, RolePolicy)):
        raise ConfigError(
            f"role policy {name!r}, which {extension.source} adds, is {loaded!r}: must be a subclass of "
            "scheduler_plugins.router.roles.base.RolePolicy"
        )
    policy: RolePolicy = extension.make()
    return policy
