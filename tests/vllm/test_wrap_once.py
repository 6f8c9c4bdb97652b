# SPDX-License-Identifier: Apache-2.0
"""One call of ours around each of vLLM's functions, even if asked for twice, or beside another plug-in's."""

import functools
import inspect
from typing import Any

import pytest

from pd_connector.vllm.wrap_once import with_subclasses, wrap_once


class Engine:
    """Stands for a class of vLLM's."""

    def run(self, steps: int, *, fast: bool = False) -> list[Any]:
        """As vLLM says."""
        return ["vllm", steps, fast]


class Inherits(Engine):
    pass


class Overrides(Engine):
    def run(self, steps: int, *, fast: bool = False) -> list[Any]:
        return ["own", *super().run(steps, fast=fast)]


@pytest.fixture(autouse=True)
def _unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test finds the classes as they are written."""
    for owner in (Engine, Overrides):
        monkeypatch.setattr(owner, "run", owner.run)


def ours(original: Any, *args: Any, **options: Any) -> list[Any]:
    return ["ours", *original(*args, **options)]


def theirs(original: Any) -> Any:
    """The function as another plug-in has wrapped it."""

    @functools.wraps(original)
    def run(*args: Any, **options: Any) -> list[Any]:
        return ["theirs", *original(*args, **options)]

    return run


def test_arguments_and_the_result_pass_through() -> None:
    wrap_once(Engine, "run", ours)
    assert Engine().run(3, fast=True) == ["ours", "vllm", 3, True]
    assert Engine.run.__doc__ == "As vLLM says."
    assert list(inspect.signature(Engine.run).parameters) == ["self", "steps", "fast"]


def test_wrapped_twice_is_wrapped_once() -> None:
    for _ in range(2):
        wrap_once(Engine, "run", ours)
    assert Engine().run(1) == ["ours", "vllm", 1, False]


def test_a_plug_in_that_came_before_is_called_too() -> None:
    Engine.run = theirs(Engine.run)  # type: ignore[method-assign]
    wrap_once(Engine, "run", ours)
    assert Engine().run(1) == ["ours", "theirs", "vllm", 1, False]


def test_a_plug_in_that_came_after_does_not_hide_that_it_is_wrapped() -> None:
    wrap_once(Engine, "run", ours)
    Engine.run = theirs(Engine.run)  # type: ignore[method-assign]
    wrap_once(Engine, "run", ours)
    assert Engine().run(1) == ["theirs", "ours", "vllm", 1, False]


def test_a_function_that_was_put_back_is_wrapped_again() -> None:
    original = Engine.run
    wrap_once(Engine, "run", ours)
    Engine.run = original  # type: ignore[method-assign]
    wrap_once(Engine, "run", ours)
    assert Engine().run(1) == ["ours", "vllm", 1, False]


def test_what_a_class_inherits_is_wrapped_once_and_what_it_overrides_too() -> None:
    for owner in with_subclasses(Engine):
        wrap_once(owner, "run", ours)
    assert "run" not in vars(Inherits)
    assert Inherits().run(1) == ["ours", "vllm", 1, False]
    assert Overrides().run(1) == ["ours", "own", "ours", "vllm", 1, False]


def test_a_method_of_one_object_leaves_its_class_alone() -> None:
    engine = Engine()
    for _ in range(2):
        wrap_once(engine, "run", ours)
    assert engine.run(1) == ["ours", "vllm", 1, False]
    assert Engine().run(1) == ["vllm", 1, False]


def test_a_function_that_vllm_lacks_is_named() -> None:
    with pytest.raises(AttributeError, match="'Engine' has no attribute 'walk'"):
        wrap_once(Engine, "walk", ours)
