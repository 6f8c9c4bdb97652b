# SPDX-License-Identifier: Apache-2.0
"""Makes `--disaggregation-transfer-backend pd_connector` known to SGLang.

SGLang calls `register` (entry point group `sglang.srt.plugins`) in each of its processes, before it
reads its arguments.
"""

import inspect
import logging
import pkgutil
from importlib.metadata import version

from pd_connector.errors import PDConnectorError
from pd_connector.sglang.hooks import HOOKS, POOL_HOOKS, Hook
from pd_connector.sglang.pool_settings import uses_pool
from pd_connector.sglang.settings import BACKEND
from pd_connector.versions import SGLANG

logger = logging.getLogger("pd_connector.sglang")


def register() -> None:
    """Add the backend's name and classes, and the hooks that hand engine objects to them.

    SGLang logs an exception of a plugin and continues. Its argument parser would then call the backend's name
    invalid. So the reason is logged here, with advice.
    """
    try:
        _register()
    except Exception as error:
        logger.exception(
            "PDConnector cannot be registered with SGLang %s, so `%s` will not be known as a "
            "transfer backend: %s. Known to work: SGLang %s",
            *(_installed(), BACKEND, error, ", ".join(SGLANG)),
        )
        raise


def _register() -> None:
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    installed = _installed()
    if installed not in SGLANG:
        logger.warning(
            "SGLang %s is untested with PDConnector (%s is tested): only the signatures of its hooks "
            "were checked",
            *(installed, ", ".join(SGLANG)),
        )
    for hook in HOOKS:
        _check(hook)
    hooks = (*HOOKS, *_pool_hooks())
    if not _add_member():
        return  # registered before
    add_disagg_transfer_backend_choices([BACKEND])
    for hook in hooks:
        HookRegistry.register(hook.target, hook.around, HookType.AROUND)


def _pool_hooks() -> tuple[Hook, ...]:
    """The hooks of the KV pool; none if this SGLang lacks them and the engine has no pool."""
    try:
        for hook in POOL_HOOKS:
            _check(hook)
    except PDConnectorError as error:
        if uses_pool():
            raise
        logger.warning("SGLang %s cannot use the KV pool: %s", _installed(), error)
        return ()
    return POOL_HOOKS


def _installed() -> str:
    return version("sglang")


def _check(hook: Hook) -> None:
    """Raises PDConnectorError if SGLang's function does not have the known parameters."""
    try:
        function = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        raise PDConnectorError(f"SGLang has no {hook.target}: {error}") from error
    parameters = tuple(inspect.signature(function).parameters)
    if parameters[: len(hook.parameters)] != hook.parameters:
        raise PDConnectorError(
            f"{hook.target} has the parameters {parameters}: wanted {hook.parameters}"
        )


def _add_member() -> bool:
    """Add the backend to SGLang's `TransferBackend`, a closed enumeration in which SGLang looks up names.
    Returns whether it was missing before."""
    from sglang.srt.disaggregation.utils import TransferBackend

    if BACKEND in TransferBackend._value2member_map_:
        return False
    member = object.__new__(TransferBackend)
    name = BACKEND.upper()
    member._value_ = BACKEND
    member._name_ = name
    member.__objclass__ = TransferBackend
    member._sort_order_ = len(TransferBackend._member_names_)
    TransferBackend._member_names_.append(name)
    TransferBackend._member_map_[name] = member
    TransferBackend._value2member_map_[BACKEND] = member
    type.__setattr__(TransferBackend, name, member)
    return True
