# SPDX-License-Identifier: Apache-2.0
"""SGLang's features that this door does not support. The engine's start refuses them by name."""

from typing import Any

from pd_connector.errors import ConfigError, UnsupportedGeometryError
from pd_connector.kv.geometry import Geometry


def check_supported(kv_args: Any, server_args: Any, parallel: Any) -> None:
    """Raises ConfigError if the engine is configured for something that cannot be moved.

    Args:
        kv_args: SGLang's `KVArgs` of this rank, filled.
        server_args: SGLang's `ServerArgs`.
        parallel: SGLang's `ParallelContext`.
    """
    from sglang.srt.environ import envs

    for name, supported in _WANTED.items():
        value = getattr(server_args, name, supported)
        if value != supported and (value or supported):  # False and None both mean "not set"
            raise ConfigError(
                _refusal(f"--{name.replace('_', '-')} {value}", f"leave it {supported}")
            )
    for name, mend in _VARIABLES.items():
        if getattr(envs, name).get():
            raise ConfigError(_refusal(f"{name}=1", mend))
    for name in ("attn_cp_size", "dcp_size"):
        if (value := getattr(parallel, name, 1)) != 1:
            mend = "use tensor, pipeline (prefill) or data parallelism"
            raise ConfigError(_refusal(f"{name} {value}", mend))
    if parallel.pp_size != 1 and server_args.disaggregation_mode == "decode":
        mend = "give a decode engine tensor parallelism alone; its prefill engine may have both"
        raise ConfigError(_refusal(f"pp_size {parallel.pp_size} of a decode engine", mend))
    if getattr(server_args, "enable_pd_role_switch", False):
        _check_switch(server_args, parallel)
    method = parallel.load_balance_method
    replicas = max(parallel.dp_size, parallel.attn_dp_size)
    spreads = replicas != 1 and server_args.disaggregation_mode == "prefill"
    if spreads and method != _BY_ROOM:
        raise ConfigError(_refusal(f"--load-balance-method {method}", f"set it to {_BY_ROOM}"))
    if states := [kind.value for kind in kv_args.state_types if kind.value not in _STATES]:
        kinds = ", ".join(states)
        raise ConfigError(
            _refusal(f"state of kind {kinds} beside the KV pool", "serve this model without it")
        )
    if len(kv_args.state_types) > 1:
        kinds = " and ".join(kind.value for kind in kv_args.state_types)
        raise ConfigError(
            _refusal(f"states of kinds {kinds} in one model", "serve this model without it")
        )
    recurrent = any(kind.value == "mamba" for kind in kv_args.state_types)
    if recurrent and getattr(server_args, "enable_pd_role_switch", False):
        mend = "start one engine for each side"
        raise ConfigError(_refusal("--enable-pd-role-switch with recurrent states", mend))
    algorithm = getattr(server_args, "speculative_algorithm", None)
    if algorithm or kv_args.num_draft_entries:
        _check_drafts(algorithm, kv_args, server_args, parallel)


def check_described(kv_args: Any, geometry: Geometry) -> None:
    """Raises UnsupportedGeometryError if recurrent states that SGLang would move are not in the geometry.

    Args:
        kv_args: SGLang's `KVArgs` of this rank, filled.
    """
    described = any(group.kind == "state" for group in geometry.groups)
    if any(kind.value == "mamba" for kind in kv_args.state_types) and not described:
        raise UnsupportedGeometryError(
            "recurrent states beside a KV pool of full or windowed attention: PDConnector moves those of "
            "HybridLinearKVPool; serve this model without --disaggregation-transfer-backend pd_connector"
        )


def _check_drafts(algorithm: str | None, kv_args: Any, server_args: Any, parallel: Any) -> None:
    """Drafts pass with one draft model that has KV, of an engine without pipeline. Raises ConfigError."""
    named = f"--speculative-algorithm {algorithm}"
    if algorithm not in _DRAFTS:
        raise ConfigError(_refusal(named, f"use {', '.join(_DRAFTS)}, or leave it out"))
    beside = {
        "a draft model without a KV pool of its own": not kv_args.num_draft_entries,
        "states beside the KV pool": bool(kv_args.state_types),
        f"pp_size {parallel.pp_size}": parallel.pp_size != 1,
        "--enable-pd-role-switch": getattr(server_args, "enable_pd_role_switch", False),
    }
    for what, used in beside.items():
        if used:
            raise ConfigError(_refusal(f"{named} with {what}", "leave one of both out"))


def _check_switch(server_args: Any, parallel: Any) -> None:
    """An engine that changes its side has tensor parallelism alone. Raises ConfigError."""
    sizes = {
        "dp_size": max(parallel.dp_size, parallel.attn_dp_size),
        "pp_size": parallel.pp_size,
        "ep_size": getattr(server_args, "ep_size", 1) or 1,
    }
    for name, size in sizes.items():
        if size != 1:
            mend = "leave --enable-pd-role-switch out, or use tensor parallelism alone"
            raise ConfigError(_refusal(f"--enable-pd-role-switch with {name} {size}", mend))
    # A prefill engine that becomes a decode engine keeps its radix cache. Without the flag SGLang's decode side does not
    # reckon with one, loses pages, and ends the engine.
    cached = server_args.disaggregation_decode_enable_radix_cache or server_args.disable_radix_cache
    if not cached:
        mend = "add --disaggregation-decode-enable-radix-cache, or --disable-radix-cache"
        raise ConfigError(_refusal("--enable-pd-role-switch with the radix cache of prefill", mend))


_STATES = frozenset({"swa", "mamba", "dsa"})
"""What SGLang keeps beside its KV pool, and is moved: layers with a sliding window, recurrent states, index keys."""

_DRAFTS = ("EAGLE", "EAGLE3", "NEXTN")
"""Kinds of speculative decoding whose drafts pass."""

_BY_ROOM = "follow_bootstrap_room"
"""The setting by which a decode engine knows which replica of a prefill engine has a request."""

_WANTED = {
    "tokenizer_worker_num": 1,
    "enable_hisparse": False,
    "enable_unified_memory": False,
    "enable_pdmux": False,
    "enable_kv_cache_sharding": False,
    "enable_dsa_cache_layer_split": False,
    "disaggregation_enable_kv_checksum": False,
    "disaggregation_decode_allocation_policy": "early",
    "disaggregation_decode_host_receive_threshold": 1.0,
    "optimistic_prefill_attempts": 0,
    "enable_memory_saver": False,
}
"""SGLang's arguments, each with the only value that is known to work here."""


_VARIABLES = {
    "SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "unset it: the final token has no room for a first token's mask",
    "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK": f"unset it, and use --load-balance-method {_BY_ROOM}",
}
"""SGLang's variables that must not be set."""


def _refusal(setting: str, mend: str) -> str:
    return f"{setting}: not supported with --disaggregation-transfer-backend pd_connector; {mend}"
