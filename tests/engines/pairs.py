# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines that tests share, and the engine that their answers are held to."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Answer, Prompt, assert_idle, completion

from pd_connector.launch import RouterProcess, Service, VllmEngine
from pd_connector.launch.progress import wait_all
from pd_connector.launch.service import stop_services

MODEL = Path(__file__).parents[2] / "pd_connector" / "demo" / "model"

# In bfloat16 an engine differs from itself by a hundredth when it computes a prompt in other
# portions; in float32 a comparison can be a thousand times sharper.
EXACT_ARGS = ("--dtype", "float32")
NAME_ARGS = ("--served-model-name", "tiny")  # one for all: a port may be taken by another model
PROBE_ARGS = ("--worker-extension-cls", "probe.Probe")
PROBE_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # for the route /collective_rpc
    "PYTHONPATH": str(Path(__file__).parent),
}


@dataclass(frozen=True)
class Setup:
    """How a pair of engines is configured. Tests with equal setups share the engines."""

    connector: str = "PDConnector"
    extra_config: str = "{}"  # JSON, so that a setup can be a key
    prefill_extra: str = "{}"  # wins over extra_config
    decode_extra: str = "{}"
    kv_transfer: str = "{}"
    args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    both: bool = False
    """Both engines in both roles: KV passes either way, see `Pair.turned`."""
    model: str = str(MODEL)
    reference_args: tuple[str, ...] = ()
    """Arguments of the one engine that this pair's answers are held to."""

    @classmethod
    def of(
        cls,
        *,
        kv_transfer: Mapping[str, Any] | None = None,
        args: Sequence[str] = (),
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        prefill_extra: Mapping[str, Any] | None = None,
        decode_extra: Mapping[str, Any] | None = None,
        both: bool = False,
        model: str | Path = MODEL,
        reference_args: Sequence[str] = (),
        **extra: Any,
    ) -> Setup:
        """PDConnector with these config keys."""
        return cls(
            extra_config=json.dumps(extra, sort_keys=True),
            prefill_extra=json.dumps(prefill_extra or {}, sort_keys=True),
            decode_extra=json.dumps(decode_extra or {}, sort_keys=True),
            kv_transfer=json.dumps(kv_transfer or {}, sort_keys=True),
            args=tuple(args),
            prefill_args=tuple(prefill_args),
            decode_args=tuple(decode_args),
            both=both,
            model=str(model),
            reference_args=tuple(reference_args),
        )

    def __str__(self) -> str:
        said = (self.extra_config, *self.args, *self.prefill_args, *self.decode_args)
        return " ".join([self.connector, *(word for word in said if word != "{}")])

    def engine(self, side: str, role: Any, logs: Path) -> VllmEngine:
        """One engine of the pair, not started."""
        prefill = role == "kv_producer"
        own = self.prefill_args if prefill else self.decode_args
        own_extra = self.prefill_extra if prefill else self.decode_extra
        return VllmEngine(
            self.model,
            "kv_both" if self.both else role,
            self.connector,
            json.loads(self.extra_config) | json.loads(own_extra),
            json.loads(self.kv_transfer),
            name=side,
            args=[*EXACT_ARGS, *NAME_ARGS, *PROBE_ARGS, *self.args, *own],
            env=PROBE_ENVIRONMENT,
            log_path=logs / f"{side}.log",
        )

    @property
    def asks(self) -> tuple[str, tuple[str, ...]]:
        """Which reference this setup asks: pairs that agree in it share one."""
        return self.model, self.reference_args

    def reference(self, logs: Path) -> VllmEngine:
        """The engine that this pair's answers are held to, not started."""
        return VllmEngine(
            self.model,
            connector=None,
            name="reference",
            args=[*EXACT_ARGS, *NAME_ARGS, *self.reference_args],
            log_path=logs / "reference.log",
        )


class Pair:
    """A prefill engine, a decode engine, and a router in front of them when it is asked for."""

    def __init__(self, setup: Setup, logs: Path) -> None:
        self.setup = setup
        self.p = setup.engine("prefill", "kv_producer", logs)
        self.d = setup.engine("decode", "kv_consumer", logs)
        self._router = RouterProcess(
            [self.p.base_url],
            [self.d.base_url],
            hands_over=setup.connector == "PDConnector",
            log_path=logs / "router.log",
        )

    @property
    def engines(self) -> tuple[VllmEngine, VllmEngine]:
        return self.p, self.d

    def turned(self) -> Pair:
        """The same engines the other way round: what decoded prefills. They must be in both roles.

        It has no router, and starts and stops nothing.
        """
        assert self.setup.both, "engines of one role each cannot be turned round"
        turned = copy.copy(self)
        turned.p, turned.d = self.d, self.p
        return turned

    @property
    def services(self) -> list[Service]:
        return [self.p, self.d, self._router]

    @property
    def router(self) -> RouterProcess:
        """The router, running; while both engines run, it also knows where to fetch KV."""
        if not self._router.running:
            self._router.stop()
            self._router.start()
        if all(engine.running for engine in self.engines):
            self._router.wait_ready()
        return self._router

    def start(self, beside: Sequence[Service] = ()) -> None:
        """Start what does not run, side by side with `beside`, and wait for all of it."""
        started: list[Service] = list(beside)
        for engine in self.engines:
            if not engine.running:
                engine.kill()
                started.append(engine.start())
        wait_all(started)

    def stop(self) -> None:
        stop_services(self.services)

    def assert_idle(self) -> None:
        """Both engines that run have nothing under way."""
        for engine in self.engines:
            if engine.running:
                assert_idle(engine)


class EnginePool:
    """All engines of a test session: one pair at a time, and the engine its answers are held to."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._pair: Pair | None = None
        self._number = itertools.count(1)
        self._asked = Setup().asks
        self._reference = Setup().reference(logs)
        self._answers: dict[str, Answer] = {}

    @property
    def services(self) -> list[Service]:
        """Everything that has been started and not stopped."""
        all_services = [self._reference, *(self._pair.services if self._pair else ())]
        return [service for service in all_services if service.family is not None]

    def pair(self, setup: Setup, *, with_reference: bool = True) -> Pair:
        """The pair with this setup, both engines running; another pair is stopped first.

        Args:
            with_reference: the reference will be asked, too: beside others its start costs less.
        """
        if self._pair is not None and self._pair.setup != setup:
            self._pair.stop()
            self._pair = None
        if self._pair is None:
            self._pair = Pair(setup, self._logs / f"pair{next(self._number)}")
        if setup.asks != self._asked:
            self._asked = setup.asks
            self._reference.stop()
            self._reference = setup.reference(self._logs)
        beside = with_reference and not self._reference.running
        self._pair.start([self._reference.start()] if beside else [])
        return self._pair

    def reference(self, prompt: Prompt, max_tokens: int = 32, **extra: Any) -> Answer:
        """What one engine without a connector answers; each question is asked once a session."""
        question = [self._asked, prompt, max_tokens, extra]
        key = json.dumps(question, sort_keys=True, default=list)
        if key not in self._answers:
            if not self._reference.running:
                self._reference.kill()
                self._reference.start().wait_ready()
            self._answers[key] = completion(self._reference, prompt, max_tokens, **extra)
        return self._answers[key]

    def stop(self) -> None:
        stop_services(self.services)
