# SPDX-License-Identifier: Apache-2.0
"""The slots of one rank."""

from typing import Any

import pytest
import torch

from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.memory import buffers

HERE = torch.device("cpu")


@pytest.mark.parametrize("error", [MemoryError("8 PiB"), OSError(28, "No space left on device")])
def test_slots_for_which_there_is_no_memory_are_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(buffers, "Slab", no_memory)
    with pytest.raises(ConfigError, match=r"slots 4096 of slot_mib 1000: .* no memory for them"):
        buffers.Buffers(
            Config(slots=4096, slot_mib=1000), HERE, buffers.SlotUse(), produces=True, consumes=True
        )
