# SPDX-License-Identifier: Apache-2.0
"""Whether NIXL moves memory of a device. UCX registers such memory even where it was built without CUDA, and fails, or
copies garbage, when a chunk is on its way.
"""

import time

from pd_connector.errors import TransportError
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.transport.nixl.agent import NixlAgent, place_in

_BYTES = 4096
_TIMEOUT_S = 10.0


def try_out(agent: NixlAgent, name: str, slab: DeviceSlab) -> None:
    """Move a few bytes within the first slot of a slab that the agent has registered.

    Args:
        name: the agent's own.

    Raises:
        TransportError: they did not arrive.
    """
    nbytes = min(_BYTES, slab.slot_bytes // 2)
    slot = slab.slot(0).tensor
    slot[:nbytes] = slot.new_ones(nbytes).cumsum(0) % 251
    slot[nbytes : 2 * nbytes] = 0
    wanted = slot[:nbytes].cpu()  # waits for both
    try:
        handle = agent.start("WRITE", name, place_in(slab, 0), place_in(slab, nbytes), nbytes)
    except Exception as error:
        raise TransportError(f"nixl does not move memory of {slab.device}: {error!r}") from error
    deadline = time.monotonic() + _TIMEOUT_S
    while (problem := agent.progress(handle)) is None and time.monotonic() < deadline:
        time.sleep(0.0005)
    agent.release(handle)
    if problem is None:
        problem = f"nothing arrived within {_TIMEOUT_S:g} s"
    elif not problem and not slot[nbytes : 2 * nbytes].cpu().equal(wanted):
        problem = "what arrived is not what was sent"
    if problem:
        raise TransportError(f"nixl does not move memory of {slab.device}: {problem}")
