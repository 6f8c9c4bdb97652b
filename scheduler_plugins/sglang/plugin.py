# SPDX-License-Identifier: Apache-2.0
"""Makes `--schedule-policy pd_scheduler` known to SGLang.

SGLang calls `register` (entry point group `sglang.srt.plugins`) in each of its processes, before it
reads its arguments. Nothing changes for an engine that does not name the policy. An engine that names it with settings
that it does not support is refused at its start, with the option's name (`check_supported`, `check_routes`).
"""

from __future__ import annotations

import inspect
import logging
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from pd_connector.errors import ConfigError
from pd_connector.pool.advertised import ENGINE_VARIABLE
from scheduler_plugins.qos.settings import SETTINGS_VARIABLE, path_in

logger = logging.getLogger("scheduler_plugins.sglang")

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"


class _Function(NamedTuple):
    """A function of SGLang, and the first parameters that it must have."""

    target: str
    parameters: tuple[str, ...]


def register() -> None:
    """Add the policy's name and the hooks.

    If a plugin raises, SGLang logs the error and goes on. Its argument parser would then call the policy's name
    invalid. So the reason is logged here.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        for function in (*_HOOKS, *_OVERRIDDEN):
            _check(function)
    except ConfigError as error:
        logger.error("SGLang will not know --schedule-policy %s: %s", POLICY, error)
        raise
    for function, (kind, hook) in _HOOKS.items():
        HookRegistry.register(function.target, hook, HookType[kind])


def _check(hooked: _Function) -> None:
    """Raises ConfigError if SGLang's function is missing or has other parameters."""
    try:
        function = pkgutil.resolve_name(hooked.target)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"this SGLang has no {hooked.target}: {error}") from error
    parameters = tuple(inspect.signature(function).parameters)
    if parameters[: len(hooked.parameters)] != hooked.parameters:
        raise ConfigError(
            f"{hooked.target} of this SGLang has the parameters {parameters}: wanted {hooked.parameters}"
        )


def _add_choice(result: Any, parser: Any) -> None:
    """AFTER the arguments were added: SGLang has no way to add a policy's name."""
    for action in parser._actions:
        if action.dest == "schedule_policy" and POLICY not in action.choices:
            action.choices = [*action.choices, POLICY]


def _make_policy(original: Callable[..., Any], scheduler: Any) -> Any:
    """AROUND: SGLang refuses unknown names, so it makes another policy first."""
    if scheduler.schedule_policy != POLICY:
        return original(scheduler)
    from sglang.srt.runtime_context import get_disagg, get_parallel

    from scheduler_plugins.sglang.policy import OrderedPolicy

    check_supported(scheduler, get_parallel(), get_disagg())
    scheduler.schedule_policy = "fcfs"
    original(scheduler)
    scheduler.schedule_policy = POLICY
    scheduler.policy = OrderedPolicy(scheduler)
    return None


def _choose_adder(original: Callable[..., Any], scheduler: Any) -> Any:
    if scheduler.schedule_policy != POLICY:
        return original(scheduler)
    return scheduler.policy.adder


def _step_ended(result: Any, scheduler: Any, batch: Any, *args: Any, **options: Any) -> None:
    if scheduler.schedule_policy == POLICY:
        scheduler.policy.ended(batch)


def _manager_made(result: Any, manager: Any, *args: Any, **options: Any) -> None:
    """AFTER the tokenizer manager is made. It receives all requests."""
    from sglang.srt.runtime_context import get_schedule, get_serving

    report_pool()
    if get_schedule().schedule_policy != POLICY:
        return
    from scheduler_plugins.sglang.requests import ClassMarker

    marker = ClassMarker(path_in(SETTINGS_VARIABLE))
    check_routes(get_serving().tokenizer_worker_num, routes=marker.has_rules)
    manager.pd_class_marker = marker


def report_pool() -> None:
    """The HTTP server of this process answers `GET /pd/pool` if its engine uses the KV pool. SGLang checks its API key before.
    The server does not run yet."""
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    engine = os.environ.get(ENGINE_VARIABLE)
    if server is not None and engine:
        from scheduler_plugins.middleware.pool import PoolMiddleware

        server.app.add_middleware(PoolMiddleware, engine=engine)


def _mark_class(manager: Any, obj: Any, request: Any = None) -> None:
    """BEFORE a request is tokenised. `request` is the HTTP request, if there is one."""
    marker = getattr(manager, "pd_class_marker", None)
    if marker is not None:
        headers = {} if request is None else {k.lower(): v for k, v in request.headers.items()}
        marker.mark(obj, headers)


_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_HOOKS: dict[_Function, tuple[str, Callable[..., Any]]] = {
    _Function("sglang.srt.server_args.ServerArgs.add_cli_args", ("parser",)): (
        "AFTER",
        _add_choice,
    ),
    _Function(f"{_SCHEDULER}.init_schedule_policy", ("self",)): ("AROUND", _make_policy),
    _Function(f"{_SCHEDULER}.get_prefill_adder_class", ("self",)): ("AROUND", _choose_adder),
    _Function(f"{_SCHEDULER}.process_batch_result", ("self", "batch")): ("AFTER", _step_ended),
    _Function(f"{_TOKENIZER}.__init__", ("self",)): ("AFTER", _manager_made),
    _Function(f"{_TOKENIZER}.generate_request", ("self", "obj", "request")): (
        "BEFORE",
        _mark_class,
    ),
}
_OVERRIDDEN = (
    _Function(f"{_POLICY}.calc_priority", ("self", "waiting_queue", "running_batch")),
    _Function(
        f"{_POLICY}.shortest_prefill_chunk_limit",
        ("self", "chunked_req", "waiting_queue", "budget", "page_size"),
    ),
    _Function(f"{_ADDER}.add_one_req", ("self", "req", "has_chunked_req")),
    _Function(f"{_ADDER}._select_prefill_admission", ("self", "req")),
)
"""Methods that our classes override."""


POLICY = "pd_scheduler"
"""Our name for SGLang's `--schedule-policy`."""

_ALONE = {
    "pp_size": "--pipeline-parallel-size",
    "attn_dp_size": "--enable-dp-attention: ranks",
    "attn_cp_size": "--attn-cp-size",
}


def check_supported(scheduler: Any, parallel: Any, disaggregation: Any) -> None:
    """Raises ConfigError if SGLang has settings with which this scheduler cannot order requests.

    Args:
        scheduler: SGLang's, initialised up to its schedule policy.
        parallel: its parallel context.
        disaggregation: its disaggregation settings.
    """
    for name, option in _ALONE.items():
        if (size := getattr(parallel, name, 1)) != 1:
            raise ConfigError(
                _refusal(f"{option} {size}", "its ranks do not schedule in the same step, use --tp")
            )
    if disaggregation.disaggregation_mode == "decode":
        raise ConfigError(
            _refusal("--disaggregation-mode decode", "prompts are computed on the prefill engine")
        )
    if scheduler.dllm_config is not None:
        raise ConfigError(
            _refusal("a diffusion model (--dllm-algorithm)", "it has no prefill to order")
        )
    if disaggregation.enable_pdmux:
        raise ConfigError(_refusal("--enable-pdmux", "it does not take SGLang's prefill adder"))


def check_routes(tokenizer_workers: int, *, routes: bool) -> None:
    """Raises ConfigError if classes come from headers, but none of our code sees the headers."""
    if routes and tokenizer_workers > 1:
        raise ConfigError(
            _refusal(
                f"--tokenizer-worker-num {tokenizer_workers} with request_router.routes",
                "SGLang loads no plug-in in such workers, so they do not know the classes; use 1, or let "
                "clients name their class in custom_params",
            )
        )


def _refusal(setting: str, why: str) -> str:
    return f"{setting}: not supported with --schedule-policy {POLICY}; {why}"
