# SPDX-License-Identifier: Apache-2.0
"""The commands that docs/pool.md prints for an SGLang engine on a CPU, pasted beside those of a vLLM engine: SGLang loads what vLLM
has computed. `test_printed_commands.py` says what the machine is."""

from pathlib import Path

import pytest
from harness import wait_until
from test_printed_commands import Machine, folder, section, shm

__all__ = ["folder", "shm"]

PAGE = "docs/pool.md"
SEEN = r"^pd_connector:pool_hits_total.* [1-9]"


class BothKinds(Machine):
    """The first vLLM engine of the page and its SGLang engine. Each question has prompts of its own: SGLang's engine may not know its
    weights yet when the first ones come."""

    def __init__(self, folder: Path) -> None:
        vllm, asked = (block for block in section(PAGE, "From nothing to a hit"))
        super().__init__(folder, [vllm, asked], SEEN)
        (sglang,) = (block for block in section(PAGE, "SGLang") if "--device cpu" in block.text)
        (folder / "terminal-1").write_text(sglang.text)
        self.script = self.script.replace("8100 8200", "8100 8300")
        loop = (folder / "asked").read_text()
        for printed, other in (
            ("8100 8200", "8100 8300"),
            ("400 500", "$((300 + RANDOM % 100)) $((400 + RANDOM % 100))"),
            (":8200/metrics", ":8300/metrics"),
        ):
            assert printed in loop
            loop = loop.replace(printed, other)
        (folder / "asked").write_text(loop)


@pytest.mark.netns
def test_a_pasted_sglang_engine_loads_what_a_pasted_vllm_engine_computed(
    folder: Path, shm: Path
) -> None:
    machine = BothKinds(folder)
    with machine.run(shm) as family:
        ended = folder / "done"
        wait_until(
            lambda: ended.exists() or family.returncode is not None, machine.said, deadline_s=600
        )
        assert ended.exists(), machine.said()
