# SPDX-License-Identifier: Apache-2.0
"""SGLang's functions around which PDConnector works, and what it does there."""

import logging
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from pd_connector.sglang.settings import BACKEND

logger = logging.getLogger("pd_connector.sglang")


_DISAGGREGATION = "sglang.srt.disaggregation"


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


class Hook(NamedTuple):
    """One of SGLang's functions, its required parameters, and the function to call around it."""

    target: str
    parameters: tuple[str, ...]
    around: Callable[..., Any]


def _classes(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """PDConnector's class for each of the backend's parts."""
    if transfer_backend.value != BACKEND or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    from pd_connector.sglang.manager import Manager
    from pd_connector.sglang.receiver import Receiver
    from pd_connector.sglang.sender import Sender

    return {
        "manager": Manager,
        "sender": Sender,
        "receiver": Receiver,
        "bootstrap_server": CommonKVBootstrapServer,
    }[class_type.value]


def _manager_made(original: Callable[..., Any], queue: Any, *args: Any, **options: Any) -> Any:
    """Pass the queue to the manager: the queue has the pool, buffers and scheduler, which a manager's constructor does
    not get."""
    manager = original(queue, *args, **options)
    if _is_ours(queue):
        manager.attach(queue)
    return manager


def _admit(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **options: Any) -> Any:
    """Let only requests that cannot end the engine enter a queue. SGLang's own health checks are not checked: no KV
    passes for them."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, is_unadmitted_reject

    from pd_connector.sglang.admission import refuse

    back_again = any(options.values())  # retracted; it was examined when it came first
    if not _is_ours(queue) or req.bootstrap_host == FAKE_BOOTSTRAP_HOST or back_again:
        return original(queue, req, *args, **options)
    manager = queue.kv_manager
    rank = manager.rank
    unnamed = rank.admission.room_problem(req)
    if is_unadmitted_reject(req):  # SGLang refused it, and says why
        problem = ""
    else:
        problem = unnamed or rank.admission.request_problem(req)
    if problem:
        refuse(req, problem, queue.scheduler)
        result = None
    else:
        result = original(queue, req, *args, **options)
    if rank.produces and not unnamed and req.disagg_kv_sender is None:
        rank.refused(req)
    return result


def _sender_made(
    original: Callable[..., Any], queue: Any, req: Any, *args: Any, **options: Any
) -> Any:
    made = original(queue, req, *args, **options)
    if made and _is_ours(queue) and hasattr(req.disagg_kv_sender, "bind"):  # SGLang's fake has none
        req.disagg_kv_sender.bind(req)
    return made


def _receiver_made(
    original: Callable[..., Any], queue: Any, req: Any, *args: Any, **options: Any
) -> Any:
    made = original(queue, req, *args, **options)
    if _is_ours(queue) and hasattr(made.kv_receiver, "bind"):
        made.kv_receiver.bind(req)
    return made


def _step(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **options: Any
) -> Any:
    linker = linker_of(scheduler)
    if linker is not None:
        linker.step(batch)
    manager = manager_of(scheduler)
    if manager is None:
        return original(scheduler, batch, *args, **options)
    with manager.step(batch):
        return original(scheduler, batch, *args, **options)


def _idle(original: Callable[..., Any], scheduler: Any) -> Any:
    result = original(scheduler)
    manager, linker = manager_of(scheduler), linker_of(scheduler)
    if manager is not None:
        manager.idle()
    if linker is not None:
        linker.idle()
    return result


def _flush(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    flushed = original(scheduler, *args, **options)
    for weights in _weights_of(scheduler):
        weights.flushed(done=bool(flushed))
    return flushed


def _changes_weights(**change: bool) -> Callable[..., Any]:
    """A wrapper for a method with which SGLang changes weights in place."""

    def around(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
        watches = _weights_of(updater.scheduler) if updater.scheduler is not None else []
        if not watches:
            return original(updater, recv_req)
        with watches[0].change(**change):
            result = original(updater, recv_req)
        for weights in watches:
            if not getattr(result, "success", True):
                weights.failed()
        return result

    return around


def _late(name: str) -> Callable[..., Any]:
    """A wrapper whose module is imported only at the first call, because that module imports SGLang."""

    def around(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return pkgutil.resolve_name(f"pd_connector.sglang.{name}")(original, *args, **options)

    return around


def _state(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """`GET /server_info` returns the engine's address for KV transfers, too."""
    output = original(scheduler, *args, **options)
    try:
        manager = manager_of(scheduler)
        if manager is not None:
            output.internal_state[BACKEND] = manager.describe()
    except Exception:  # SGLang ends the engine if a hook raises
        logger.exception("the engine's state is returned without its address for KV transfers")
    return output


def manager_of(scheduler: Any) -> Any:
    """PDConnector's manager of this scheduler, if it uses this backend."""
    queue = scheduler.disagg_prefill_bootstrap_queue or scheduler.disagg_decode_prealloc_queue
    return queue.kv_manager if queue is not None and _is_ours(queue) else None


def linker_of(scheduler: Any) -> Any:
    """PDConnector's linker of this scheduler's cache, if the engine has a KV pool."""
    return linker_behind(getattr(getattr(scheduler, "tree_cache", None), "linker", None))


def linker_behind(wrapper: Any) -> Any:
    """PDConnector's linker behind SGLang's `UnifiedCacheLinkerWrapper`; None if there is none."""
    linker = getattr(wrapper, "cache_linker", None)
    return linker if hasattr(linker, "offloading") else None


def _weights_of(scheduler: Any) -> list[Any]:
    """What watches the weights of this scheduler's rank."""
    manager, linker = manager_of(scheduler), linker_of(scheduler)
    watches = [] if manager is None else [manager.weights]
    return watches if linker is None or linker.weights is None else [*watches, linker.weights]


def _is_ours(queue: Any) -> bool:
    return bool(queue.transfer_backend.value == BACKEND)


_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"

HOOKS = (
    Hook(f"{_DISAGGREGATION}.utils.get_kv_class", ("transfer_backend", "class_type"), _classes),
    Hook(
        f"{_DISAGGREGATION}.prefill.PrefillBootstrapQueue._init_kv_manager",
        ("self",),
        _manager_made,
    ),
    Hook(
        f"{_DISAGGREGATION}.decode.DecodePreallocQueue._init_kv_manager", ("self",), _manager_made
    ),
    Hook(f"{_DISAGGREGATION}.prefill.PrefillBootstrapQueue.add", ("self", "req"), _admit),
    Hook(f"{_DISAGGREGATION}.decode.DecodePreallocQueue.add", ("self", "req"), _admit),
    Hook(
        f"{_DISAGGREGATION}.prefill.PrefillBootstrapQueue.create_sender",
        ("self", "req"),
        _sender_made,
    ),
    Hook(
        f"{_DISAGGREGATION}.decode.DecodePreallocQueue._create_receiver_and_enqueue",
        ("self", "req"),
        _receiver_made,
    ),
    Hook(f"{_SCHEDULER}.run_batch", ("self", "batch"), _step),
    Hook(f"{_SCHEDULER}.on_idle", ("self",), _idle),
    Hook(f"{_SCHEDULER}.flush_cache", ("self",), _flush),
    *(
        Hook(f"{_UPDATER}.{name}", ("self", "recv_req"), _changes_weights(**change))
        for name, change in (
            ("update_weights_from_disk", {"whole": True}),
            ("update_weights_from_distributed", {}),
            ("update_weights_from_tensor", {}),
            ("update_weights_from_ipc", {}),
            ("begin_weight_update", {"begins": True}),
            ("end_weight_update", {"ends": True}),
        )
    ),
    Hook(
        "sglang.srt.model_loader.loader.DefaultModelLoader._prepare_weights",
        ("self", "model_name_or_path", "revision"),
        _late("model.prepares"),
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        ("self",),
        _late("model.loads"),
    ),
    Hook(
        "sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter",
        ("self", "lora_ref"),
        _late("adapters.loads_adapter"),
    ),
    Hook(
        "sglang.srt.configs.model_config.ModelConfig.__init__",
        ("self", "model_path"),
        _late("model.config_made"),
    ),
    Hook(f"{_SCHEDULER}.get_internal_state", ("self", "recv_req"), _state),
)

POOL_HOOKS = (
    Hook(
        "sglang.srt.arg_groups.pipeline.run_resolution_pipeline",
        ("server_args",),
        _late("pool_hooks.resolved"),
    ),
    Hook(f"{_SCHEDULER}.init_disaggregation", ("self",), _late("pool_hooks.scheduler_made")),
    Hook(f"{_SCHEDULER}._add_request_to_queue", ("self", "req"), _late("pool_hooks.arrives")),
    Hook(
        f"{_SCHEDULER}._get_new_batch_prefill_raw",
        ("self", "prefill_delayer_single_pass", "running_batch"),
        _late("pool_hooks.schedules"),
    ),
    Hook(f"{_SCHEDULER}.process_decode_queue", ("self",), _late("pool_hooks.decodes")),
    Hook(f"{_CACHE}.checkpoint_into_tree", ("self", "req"), _late("pool_hooks.inserts")),
    Hook(f"{_WRAPPER}.match", ("self", "key", "req", "result"), _late("pool_hooks.matches")),
    Hook(
        f"{_WRAPPER}._offload_node",
        ("self", "node_id", "transfers"),
        _late("pool_hooks.offloads_node"),
    ),
)
"""For the KV pool. Engines without one do not need them."""
