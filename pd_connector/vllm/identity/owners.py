# SPDX-License-Identifier: Apache-2.0
"""Records which module of a model contains which other module.

vLLM gives a connector its attention layers, but not the modules above them. Those know how keys are rotated, and
hold the weights. A hook of PyTorch, installed before vLLM builds the model, records each module's parent.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

_owners: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Module]]" = (
    weakref.WeakKeyDictionary()
)
_watching: list[Any] = []


def watch() -> None:
    """Record the parent of every module made from now on. Harmless to repeat."""
    if not _watching:
        _watching.append(register_module_module_registration_hook(_note))


def owners(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The module's parent, then its parent, and so on up to the model. Nothing if `watch` was not called before
    the model was built."""
    seen = {id(module)}
    while (owner := _owners.get(module)) is not None and (above := owner()) is not None:
        if id(above) in seen:
            return
        seen.add(id(above))
        yield above
        module = above


def model_of(module: torch.nn.Module) -> torch.nn.Module | None:
    """The whole model that contains a module, if known."""
    above = list(owners(module))
    return above[-1] if above else None


def _note(owner: torch.nn.Module, _name: str, part: torch.nn.Module | None) -> None:
    if isinstance(part, torch.nn.Module):
        _owners[part] = weakref.ref(owner)
