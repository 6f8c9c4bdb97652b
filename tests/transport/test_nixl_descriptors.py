# SPDX-License-Identifier: Apache-2.0
"""NIXL where a process runs out of descriptors. UCX would end the process, so it is another process here."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nixl")

SCRIPT = """
from pd_connector.errors import TransportError
from pd_connector.memory.slab import Slab
from pd_connector.transport.nixl.transport import NixlTransport
from support.descriptors import no_descriptors

producer, consumer = (NixlTransport(Slab(4, 4096), Slab(4, 4096)) for _ in range(2))
for free in range(0, 9, 2):
    with no_descriptors(free):
        try:
            producer.connect(consumer.address())
        except TransportError as error:
            assert "descriptors" in str(error), error
    producer.disconnect(producer.connect(consumer.address()))
print("lives")
"""


def test_an_agent_that_is_made_without_descriptors_does_not_end_the_process() -> None:
    place = [*sys.path, str(Path(__file__).parents[1])]
    script = f"import sys; sys.path[:] = {place!r}\n{SCRIPT}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.endswith("lives\n"), done.stderr[-2000:]
