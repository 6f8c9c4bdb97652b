# SPDX-License-Identifier: Apache-2.0
"""`pd-connector demo`: prefill, decode and router as real processes, with a check of their answers."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from pd_connector.errors import PDConnectorError
from pd_connector.tools.cli.asker import (
    DECODED_TOKENS,
    Asker,
    CrossAsker,
    PromptResult,
    SglangAsker,
    VllmAsker,
)
from pd_connector.tools.cli.checks.model import config_of
from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch import (
    RouterProcess,
    Service,
    VllmEngine,
    stop_services,
    terminate_as_interrupt,
    wait_all,
    working,
)
from pd_connector.tools.launch.engine import Role, on_cpu
from pd_connector.tools.launch.service import log_folder
from pd_connector.tools.launch.sglang import (
    SglangEngine,
    SglangRole,
    sglang_on_cpu,
    sglang_python,
)


class EngineName(StrEnum):
    """Engines that the demo can start: one for both sides, or one for prefill and one for decode."""

    VLLM = "vllm"
    SGLANG = "sglang"
    VLLM_SGLANG = "vllm:sglang"
    SGLANG_VLLM = "sglang:vllm"


class Stage(NamedTuple):
    """Shared by the engines of a demo."""

    model: Path
    config: dict[str, Any]  # the connector's keys
    args: list[str]  # further arguments of each engine
    logs: Path


Demo = tuple[list[Service], Callable[[], Asker]]
"""A demo's services, and a function that makes their asker once they run."""


def _vllm(stage: Stage) -> Demo:
    """A pair of vLLM engines and a router, and their asker's maker."""
    prefill = _vllm_engine(stage, "prefill", "kv_producer")
    decode = _vllm_engine(stage, "decode", "kv_consumer")
    router = _router(stage, prefill, decode)
    return [prefill, decode, router], lambda: VllmAsker(
        prefill.client, decode.client, router.client
    )


def _sglang(stage: Stage) -> Demo:
    """A pair of SGLang engines and an engine that works alone, and their asker's maker."""
    prefill, decode = _sglang_engine(stage, "prefill"), _sglang_engine(stage, "decode")
    reference = _sglang_engine(stage, None)
    return [prefill, decode, reference], lambda: SglangAsker(prefill, decode, reference)


def _vllm_to_sglang(stage: Stage) -> Demo:
    """vLLM prefills, SGLang decodes."""
    prefill = _vllm_engine(stage, "prefill", "kv_producer", _EXACT)
    decode = _sglang_engine(stage, "decode")
    router = _router(stage, prefill, decode)
    services: list[Service] = [prefill, decode, router]
    return services, lambda: CrossAsker(decode.client, router.client, reference=prefill.client)


def _sglang_to_vllm(stage: Stage) -> Demo:
    """SGLang prefills, vLLM decodes."""
    prefill = _sglang_engine(stage, "prefill")
    decode = _vllm_engine(stage, "decode", "kv_consumer", _EXACT)
    router = _router(stage, prefill, decode)
    services: list[Service] = [prefill, decode, router]
    return services, lambda: CrossAsker(decode.client, router.client, reference=decode.client)


_EXACT = ("--dtype", "float32")
"""In bfloat16, tokens of different engines may tie. On a GPU, memory and speed count for more."""


def _vllm_engine(stage: Stage, name: str, role: Role, cpu_args: Sequence[str] = ()) -> VllmEngine:
    args = [*(cpu_args if on_cpu() else ()), *stage.args]
    return VllmEngine(
        stage.model,
        role,
        extra_config=stage.config,
        name=name,
        args=args,
        log_path=stage.logs / f"{name}.log",
    )


def _sglang_engine(stage: Stage, role: SglangRole | None) -> SglangEngine:
    # Three engines may have to share one GPU.
    on_gpu = ("--dtype", "bfloat16", "--mem-fraction-static", "0.25")
    name = role or "reference"
    return SglangEngine(
        stage.model,
        role,
        extra_config=stage.config,
        name=name,
        args=[*(_EXACT if sglang_on_cpu(sglang_python()) else on_gpu), *stage.args],
        log_path=stage.logs / f"{name}.log",
    )


def _router(stage: Stage, prefill: Service, decode: Service) -> RouterProcess:
    log = stage.logs / "router.log"
    return RouterProcess([prefill.base_url], [decode.base_url], log_path=log)


MAKERS: Mapping[EngineName, Callable[[Stage], Demo]] = {
    EngineName.VLLM: _vllm,
    EngineName.SGLANG: _sglang,
    EngineName.VLLM_SGLANG: _vllm_to_sglang,
    EngineName.SGLANG_VLLM: _sglang_to_vllm,
}


ENGINE_GIB = 3
"""What an engine with the demo's model takes on a CPU, measured."""

PROMPT_TOKENS = (5, 32, 300, 1000, 3000)

FAILED = 1
INTERRUPTED = 130
"""Exit codes other than 0."""

# An engine that computes a prompt in other portions may get slightly different bfloat16 logprobs, by a hundredth
# or two. A decode engine does so with the last token. Wrong KV differs by more.
TOLERANCE = 0.05

_TWO_VLLM_HOSTS = (
    "The same on two GPU hosts A and B: `export PD_CONNECTOR_KEY=<one secret for both> "
    "PD_CONNECTOR_HOST=<the host's own address>`, then on A `vllm serve MODEL --kv-transfer-config "
    '\'{"kv_connector": "PDConnector", "kv_role": "kv_producer"}\'`, on B the same with '
    '"kv_consumer", and anywhere `python -m scheduler_plugins.router --prefill http://A:8000 '
    "--decode http://B:8000`."
)


_TWO_SGLANG_HOSTS = (
    "The same on two GPU hosts A and B: `export PD_CONNECTOR_KEY=<one secret for both> "
    "PD_CONNECTOR_HOST=<the host's own address>`, then on A `python -m sglang.launch_server "
    "--model-path MODEL --host 0.0.0.0 --disaggregation-mode prefill "
    "--disaggregation-transfer-backend pd_connector`, on B the same with decode, and SGLang's "
    "own router in front of both."
)


_TWO_KINDS = (
    "The same on two GPU hosts: each engine as docs/sglang.md and the README start it, and anywhere "
    "`python -m scheduler_plugins.router --prefill http://A:8000 --decode http://B:8000`, which finds "
    "out which engine is of which kind."
)


TWO_HOSTS = {
    EngineName.VLLM: _TWO_VLLM_HOSTS,
    EngineName.SGLANG: _TWO_SGLANG_HOSTS,
    EngineName.VLLM_SGLANG: _TWO_KINDS,
    EngineName.SGLANG_VLLM: _TWO_KINDS,
}


_LAST_KV = "from the end of the prefill until all its KV is verified and in place"
HANDOFFS = {
    EngineName.VLLM: "from the finished prefill to the first token, in two steps",
    EngineName.SGLANG: _LAST_KV,
    EngineName.VLLM_SGLANG: _LAST_KV,
    EngineName.SGLANG_VLLM: (
        "from the first pages allocated until all KV is verified and in place; it streams while the "
        "prefill computes, so most of this is the prefill"
    ),
}
"""Meaning of the column `handoff`."""


class TransportName(StrEnum):
    """Transports of PDConnector."""

    SHM = "shm"
    TCP = "tcp"
    NIXL = "nixl"


_OTHER_HUBS = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")
"""With one of these variables an engine takes a name from elsewhere."""
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""A model's name at Hugging Face."""


def _has_config(model: Path) -> Path:
    """Raises typer.BadParameter unless it is a model on this machine: engines take a minute to say so."""
    try:
        config = config_of(str(model))
        if config == model or not config.is_file():
            raise typer.BadParameter(f"{model}: has no config.json; name the folder of a model")
    except OSError as error:
        # Only an engine's environment may have the client that reads Hugging Face's cache.
        unread = importlib.util.find_spec("huggingface_hub") is None
        may_be_cached = unread and not error.strerror and _NAME.fullmatch(str(model))
        if not may_be_cached and not any(map(os.environ.get, _OTHER_HUBS)):
            why = f"{model}: {error.strerror}" if error.strerror else error
            raise typer.BadParameter(
                f"{why}: name the folder of a model (the demo's engines download nothing)"
            ) from None
    return Path(os.path.expanduser(model))


def _print_model(given: bool) -> None:
    if given:
        typer.echo(MODEL_DIR)
        raise typer.Exit


def demo(
    engine: Annotated[EngineName, typer.Option(help="Which engines.")] = EngineName.VLLM,
    model: Annotated[
        Path,
        typer.Option(
            help="Folder of the model.", callback=_has_config, show_default="a small one, shipped"
        ),
    ] = MODEL_DIR,
    transport: Annotated[
        TransportName | None, typer.Option(help="How KV travels.  [default: the connector's own]")
    ] = None,
    print_model: Annotated[
        bool,
        typer.Option(
            "--print-model",
            help="Print the folder of the model that ships with the package, and start nothing.",
            is_eager=True,
            callback=_print_model,
        ),
    ] = False,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARG",
            help="Further argument of each engine's server; may be repeated. Example: "
            "--engine-arg=--seed --engine-arg=1.",
        ),
    ] = None,
) -> None:
    """Start prefill, decode and router on this machine, send prompts, and check every answer.

    Exit code 1 when a logprob differs from what one engine computes alone, or when no KV came.
    """
    stdout, stderr = Console(), Console(stderr=True)
    logs = log_folder()
    try:
        with terminate_as_interrupt():
            # Every answer, also the first, is compared here: there is nothing left to audit.
            config: dict[str, Any] = {"audit": "off"}
            if transport is not None:
                config["transports"] = [str(transport)]
            stage = Stage(model, config, engine_arg or [], logs)
            rows = _run(engine, stage, stderr)
    except KeyboardInterrupt:
        rmtree(logs, ignore_errors=True)
        stderr.print("all processes have been ended")  # the command line says why
        raise typer.Exit(INTERRUPTED) from None
    except (PDConnectorError, OSError) as error:
        said = f"failed: {error}"
        if any(logs.iterdir()):
            said += f"\nlogs: {logs}"
        else:  # nothing was started
            logs.rmdir()
        stderr.print(said, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(FAILED) from None
    stdout.print(_table(rows, HANDOFFS[engine]))
    differing = [row.prompt_tokens for row in rows if not row.difference <= TOLERANCE]
    if differing:
        stderr.print(f"logprobs differ for prompts of {differing} tokens; logs: {logs}")
    else:
        rmtree(logs, ignore_errors=True)
    stdout.print(TWO_HOSTS[engine], soft_wrap=True, markup=False, highlight=False)
    if differing:
        raise typer.Exit(FAILED)


def _run(engine: EngineName, stage: Stage, console: Console) -> list[PromptResult]:
    """Start everything, send every prompt, and end everything, whatever happens."""
    services, asker_of_them = MAKERS[engine](stage)
    names = ", ".join(service.name for service in services)
    console.print(
        f"Starting {names} on this machine: {ENGINE_GIB} GiB of memory for each engine, half a minute or more. "
        f"Logs: {stage.logs}",
        highlight=False,
    )
    try:
        for service in services:
            service.start()
        wait_all(services, console=console)
        asker = asker_of_them()
        with working(console, "warming up") as status:
            asker.warm_up()
            rows = []
            for tokens, prompt in zip(PROMPT_TOKENS, _prompts(PROMPT_TOKENS), strict=True):
                status(f"prompt of {tokens:,} tokens")
                rows.append(asker.ask(prompt))
        return rows
    finally:
        stop_services(services)


def _prompts(lengths: Iterable[int]) -> list[str]:
    """Texts of these lengths in bytes; each byte is a token of the demo's model. The text is Python's own source."""
    source = inspect.getsource(argparse).encode("ascii", "replace").decode()
    texts, start = [], 0
    for length in lengths:
        texts.append(source[start : start + length])
        start += length
    return texts


def _table(rows: list[PromptResult], handoff: str) -> Table:
    caption = (
        f"{DECODED_TOKENS} tokens decoded for each prompt. Handoff: {handoff}. Last column: "
        "against the same prompt computed whole by one engine."
    )
    if any(0 < row.difference <= TOLERANCE for row in rows):
        caption += (
            " One engine differs from itself by as much if its prefix cache has a long prompt: "
            "it then sums in another order."
        )
    table = Table(
        title="Prefill in one process, decode in another", caption=caption, caption_justify="left"
    )
    for heading in ("prompt\ntokens", "time to\nfirst token", "handoff", "bytes on\nthe wire"):
        table.add_column(heading, justify="right")
    table.add_column("descriptors", justify="right")
    table.add_column("logprobs equal\none engine's")
    for row in rows:
        table.add_row(
            f"{row.prompt_tokens:,}",
            f"{row.first_token_s * 1e3:,.0f} ms",
            f"{row.handoff_s * 1e3:,.1f} ms",
            f"{row.wire_bytes:,}",
            f"{row.descriptors:,}",
            _verdict(row.difference),
        )
    return table


def _verdict(difference: float) -> str:
    if difference == 0.0:
        return "[green]yes, bit for bit[/]"
    if difference <= TOLERANCE:
        return f"[green]within {difference:.1e}[/]"
    if math.isinf(difference):
        return "[red]no: other tokens[/]"
    return f"[red]no: {difference:.1e} apart[/]"
