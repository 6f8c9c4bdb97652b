# SPDX-License-Identifier: Apache-2.0
"""Calls a function of ours around one of vLLM's, where vLLM has no hook for it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

_WRAPPED = "_pd_connector_wrapped"


def wrap_once(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Call `around(original, *args, **options)` wherever the function `owner.name` was called. Harmless to repeat, also
    if another plug-in has wrapped the result with `functools.wraps`.

    Args:
        owner: the module, class or object that has the function.

    Raises:
        AttributeError: this version of vLLM has no such function.
    """
    original = getattr(owner, name)
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(original, *args, **options)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)


def with_subclasses(base: type) -> Iterator[type]:
    """A class and all its subclasses, because a subclass can override methods. A base class comes before its
    subclasses: an inherited method is wrapped in the base."""
    yield base
    subclass: type
    for subclass in base.__subclasses__():
        yield from with_subclasses(subclass)
