# SPDX-License-Identifier: Apache-2.0
"""Serve applications with PDConnector."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ray import serve
from ray.llm._internal.common.dict_utils import maybe_apply_llm_deployment_config_defaults
from ray.llm._internal.serve.constants import RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.llm._internal.serve.core.ingress.builder import (
    _build_direct_streaming_llm_deployment,
    _build_openai_ingress_request_router,
    _validate_direct_streaming_ingress_config,
)
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress, make_fastapi_ingress
from ray.llm._internal.serve.core.server.builder import build_llm_deployment
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.serving_patterns.data_parallel.builder import build_dp_deployment
from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs
from ray.serve.deployment import Application

from pd_connector.errors import ConfigError
from pd_connector.ray.servers import (
    DecodeServer,
    DPDecodeServer,
    DPPrefillServer,
    PrefillServer,
    SecondChanceIngress,
)

NAME = "PDConnector"


def register() -> None:
    """Register `"kv_connector": "PDConnector"` with Ray Serve LLM. Harmless to repeat.

    `build_pd_app` registers by itself. Call `register` before Ray's own `build_pd_openai_app`. Prefill and decode
    then run at the same time, but a request whose prefill fails gets Ray's error.
    """
    if not KVConnectorBackendFactory.is_registered(NAME):
        path = "pd_connector.ray.backend:PDConnectorBackend"
        KVConnectorBackendFactory.register_backend(NAME, path)


def build_pd_app(args: Mapping[str, Any]) -> Application:
    """A Serve application of prefill and decode replicas, for the `import_path` of a Serve config.

    Args:
        args: as for Ray's `build_pd_openai_app`. `prefill_config` and `decode_config` (each an `LLMConfig`, a
            dict of its fields, or the path of a file with them) may omit `kv_transfer_config`, or parts of
            it.

    Raises:
        ConfigError: a side has another connector, or arguments that Ray ignores.
    """
    register()
    sides = {
        side: _with_connector(side, _config(args[side]), role)
        for side, role in (("prefill_config", "kv_producer"), ("decode_config", "kv_consumer"))
    }
    pd = PDServingArgs.model_validate({**args, **sides})
    prefill = _deploy(pd.prefill_config, "Prefill:", PrefillServer, DPPrefillServer)
    if RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING:
        return _without_ingress(pd, prefill)
    decode = _deploy(
        pd.decode_config, "Decode:", DecodeServer, DPDecodeServer, prefill_server=prefill
    )
    ingress = pd.ingress_cls_config
    options = maybe_apply_llm_deployment_config_defaults(
        ingress.ingress_cls.get_deployment_options([pd.decode_config]),
        pd.ingress_deployment_config,
    )
    model, adapters = pd.decode_config.model_id, pd.decode_config.lora_config
    chosen = (
        ingress.ingress_cls if ingress.ingress_cls is not OpenAiIngress else SecondChanceIngress
    )
    return serve.deployment(make_fastapi_ingress(chosen), **options).bind(
        llm_deployments={model: decode},
        model_cards={model: to_model_metadata(model, pd.decode_config)},
        lora_paths={model: adapters.dynamic_lora_loading_path} if adapters else {},
        **ingress.ingress_extra_kwargs,
    )


def _deploy(
    config: LLMConfig, prefix: str, single: type, several: type, **bound: Any
) -> Application:
    """One side's deployment: of `single`, or of `several` if its engines are data-parallel."""
    parallel = config.engine_kwargs.get("data_parallel_size", 1) > 1
    build = build_dp_deployment if parallel else build_llm_deployment
    return build(
        config,
        name_prefix=prefix,
        bind_kwargs=bound,
        deployment_cls=several if parallel else single,
    )


def _without_ingress(pd: PDServingArgs, prefill: Application) -> Application:
    """Decode replicas serve HTTP themselves (RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1)."""
    _validate_direct_streaming_ingress_config(pd.ingress_deployment_config, pd.ingress_cls_config)
    config = pd.decode_config
    parallel = config.engine_kwargs.get("data_parallel_size", 1) > 1
    decode = _build_direct_streaming_llm_deployment(
        config,
        name_prefix="Decode:",
        bind_kwargs={"prefill_server": prefill},
        deployment_cls=DPDecodeServer if parallel else DecodeServer,
    )
    router = _build_openai_ingress_request_router(server=decode, llm_config=config)
    return decode._with_ingress_request_router(router)


def _config(given: str | Mapping[str, Any] | LLMConfig) -> LLMConfig:
    """One side's config; a copy, because one object may be given for both sides."""
    if isinstance(given, str):
        return LLMConfig.from_file(given)
    if isinstance(given, LLMConfig):
        return given.model_copy(deep=True)
    return LLMConfig.model_validate(deepcopy(dict(given)))


def _with_connector(side: str, config: LLMConfig, role: str) -> LLMConfig:
    """The config, with PDConnector in the role of its side unless the config names a role."""
    given = config.engine_kwargs.get("kv_transfer_config") or {}
    connector = given.get("kv_connector", NAME)
    if connector != NAME:
        raise ConfigError(
            f"{side}: kv_connector {connector!r}: build_pd_app is for {NAME}; leave it out, or use "
            "ray.serve.llm:build_pd_openai_app"
        )
    if config.engine_kwargs.get("middleware"):
        raise ConfigError(
            f"{side}: middleware {config.engine_kwargs['middleware']!r}: Ray's ingress passes requests "
            "to engines without vLLM's HTTP server, so it would never be called, and classes would not "
            "be read from headers. Leave it out; a request names its class as `vllm_xargs.qos`"
        )
    transfer = {"kv_role": role, **given, "kv_connector": NAME}
    config.engine_kwargs["kv_transfer_config"] = transfer
    return config
