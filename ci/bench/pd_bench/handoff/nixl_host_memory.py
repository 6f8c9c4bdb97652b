# SPDX-License-Identifier: Apache-2.0
"""SGLang's own NIXL backend on a machine without a GPU. The backend treats every pool as GPU memory, although its
transfers also work from host memory. A plugin of SGLang corrects that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TARGET = "sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds"
_METADATA = "Metadata-Version: 2.1\nName: pd-connector-nixl-host-memory\nVersion: 0\n"
_ENTRY_POINT = f"[sglang.srt.plugins]\nnixl_host_memory = {__name__}:register\n"


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, _host_memory, HookType.REPLACE)


def _host_memory(kinds: Any, expected_len: int) -> Sequence[str]:
    return ["DRAM"] * expected_len


def with_plugin(folder: Path) -> dict[str, str]:
    """Environment variables with which an SGLang engine finds this plugin.

    Args:
        folder: gets the files that install the plugin; keep it while engines start.
    """
    info = folder / "pd_connector_nixl_host_memory-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINT)
    path_before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{path_before}" if path_before else str(folder)}
