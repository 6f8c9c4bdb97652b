# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines that tests share, and the engine that their answers are held to."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness import Answer, Prompt, assert_idle, completion
from recipes import (
    COMPILE_NOTHING,
    EXACT_ARGS,
    MODEL,
    NAME_ARGS,
    PROBE_ARGS,
    PROBE_ENVIRONMENT,
    USUAL,
    VLLM,
    WORKER_IN_CORE,
    Recipe,
    Vllm,
    frozen,
)

from pd_connector.tools.launch import RouterProcess, Service, VllmEngine
from pd_connector.tools.launch.progress import wait_all
from pd_connector.tools.launch.service import stop_services

Side = Literal["prefill", "decode"]


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
    worker_apart: bool = False
    """Each engine's worker in a process of its own, as vLLM's CPU build has it, and not in the
    engine core's. Engines of several ranks have it so in any case."""
    forked: bool = True
    """See `Recipe`."""
    vllm: Vllm = USUAL
    """What both engines run. The one engine that answers are held to has `USUAL`."""

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
        worker_apart: bool = False,
        forked: bool = True,
        vllm: Vllm = USUAL,
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
            worker_apart=worker_apart,
            forked=forked,
            vllm=vllm,
        )

    def __str__(self) -> str:
        said = (self.extra_config, *self.args, *self.prefill_args, *self.decode_args)
        return " ".join([self.connector, *(word for word in said if word != "{}")])

    def recipe(self, side: Side) -> Recipe:
        """One engine of the pair."""
        prefill = side == "prefill"
        own = self.prefill_args if prefill else self.decode_args
        own_extra = self.prefill_extra if prefill else self.decode_extra
        role = "kv_both" if self.both else "kv_producer" if prefill else "kv_consumer"
        # The first prompt of a pair is computed on both sides otherwise, and its KV not used: only
        # tests of that (test_audit_live.py) ask for it.
        ours = {"audit": "off"} if self.connector == "PDConnector" else {}
        extra = ours | json.loads(self.extra_config) | json.loads(own_extra)
        place = {} if self.worker_apart else WORKER_IN_CORE
        args = (*EXACT_ARGS, *NAME_ARGS, *PROBE_ARGS, *self.args, *own)
        compiled = {} if "--no-enforce-eager" in args else COMPILE_NOTHING
        return Recipe(
            self.model,
            args,
            frozen(PROBE_ENVIRONMENT, compiled, place, VLLM[self.vllm]),
            role,
            self.connector,
            json.dumps(extra, sort_keys=True),
            self.kv_transfer,
            self.forked,
        )

    @property
    def reference(self) -> Recipe:
        """The engine that this pair's answers are held to."""
        args = (*EXACT_ARGS, *NAME_ARGS, *self.reference_args)
        return Recipe(self.model, args, frozen(COMPILE_NOTHING, WORKER_IN_CORE))


class Pair:
    """A prefill engine, a decode engine, and a router in front of them when it is asked for.

    Args:
        former: a pair that is not used any more. What runs there and has a recipe that is wanted
            here goes on running here; the rest of it is stopped.
    """

    def __init__(self, setup: Setup, logs: Path, former: Pair | None = None) -> None:
        self.setup = setup
        self._recipes: dict[VllmEngine, Recipe] = {}
        free = dict(former._recipes) if former else {}
        self.p = self._engine("prefill", logs, free)
        self.d = self._engine("decode", logs, free)
        if former:
            stop_services([*free, former._router])
        self._router = RouterProcess(
            [self.p.base_url],
            [self.d.base_url],
            hands_over=setup.connector == "PDConnector",
            log_path=logs / "router.log",
        )

    def _engine(self, side: Side, logs: Path, free: dict[VllmEngine, Recipe]) -> VllmEngine:
        """Take a running engine out of `free`, or make a new one."""
        recipe = self.setup.recipe(side)
        for engine, its_recipe in free.items():
            if its_recipe == recipe and engine.running:
                del free[engine]
                engine.name = side
                break
        else:
            engine = recipe.engine(side, logs / f"{side}.log")
        self._recipes[engine] = recipe
        return engine

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
    """All engines of a test session: one pair at a time, and the engines its answers are held to."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._pair: Pair | None = None
        self._number = itertools.count(1)
        self._usual = Setup().reference
        self._asked = self._usual
        self._references: dict[Recipe, VllmEngine] = {}
        self._answers: dict[str, Answer] = {}

    @property
    def services(self) -> list[Service]:
        """Everything that has been started and not stopped."""
        pair = self._pair.services if self._pair else ()
        return [one for one in (*self._references.values(), *pair) if one.family is not None]

    def pair(self, setup: Setup, *, with_reference: bool = True) -> Pair:
        """The pair with this setup, both engines running; what it cannot use of the last one is
        stopped first.

        Args:
            with_reference: the reference will be asked, too: beside others its start costs less.
        """
        if self._pair is None or self._pair.setup != setup:
            self._pair = Pair(setup, self._folder("pair"), self._pair)
        self._asked = setup.reference
        beside = with_reference and not self._asked_engine().running
        self._pair.start([self._asked_engine().start()] if beside else [])
        return self._pair

    def reference(self, prompt: Prompt, max_tokens: int = 32, **extra: Any) -> Answer:
        """What one engine without a connector answers; each question is asked once a session.

        While the engine runs, from any thread.
        """
        question = [self._asked, prompt, max_tokens, extra]
        key = json.dumps(question, sort_keys=True, default=list)
        if key not in self._answers:
            engine = self._asked_engine()
            if not engine.running:
                engine.kill()
                engine.start().wait_ready()
            self._answers[key] = completion(engine, prompt, max_tokens, **extra)
        return self._answers[key]

    def stop(self) -> None:
        stop_services(self.services)

    def _asked_engine(self) -> VllmEngine:
        """The reference that is asked now. The usual one is kept, of others there is one."""
        for recipe in self._references.keys() - {self._usual, self._asked}:
            self._references.pop(recipe).stop()
        if self._asked not in self._references:
            log = self._folder("reference") / "reference.log"
            self._references[self._asked] = self._asked.engine("reference", log)
        return self._references[self._asked]

    def _folder(self, name: str) -> Path:
        return self._logs / f"{name}{next(self._number)}"
