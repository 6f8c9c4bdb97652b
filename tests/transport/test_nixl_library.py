# SPDX-License-Identifier: Apache-2.0
"""Processes that have used NIXL end cleanly, whatever RDMA packages the machine has."""

import ctypes
import signal
import subprocess
import sys

import pytest

from pd_connector.tools.cli.checks import probe, transports
from pd_connector.tools.cli.checks.facts import Facts, Transports
from pd_connector.tools.cli.checks.finding import Status
from pd_connector.transport.nixl.library import persistently

pytest.importorskip("nixl._api", reason="nixl cannot be imported")

OURS = """
from pd_connector.memory.slab import Slab
from pd_connector.transport.nixl.transport import NixlTransport
transport = NixlTransport(Slab(2, 4096), Slab(2, 4096))
if {closes}:
    transport.close()
print("done", flush=True)
"""
BY_HAND = """
from nixl import _api
from pd_connector.transport.nixl.library import persistently
agent = persistently(lambda: _api.nixl_agent("by-hand", _api.nixl_agent_config(backends=["UCX"])))
print("done", flush=True)
"""


def end_of(program: str) -> int:
    """The exit status of a process that has done all its work with NIXL."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "done" in done.stdout, done.stderr
    return done.returncode


def rdma_packages() -> bool:
    """Whether this machine has the libraries that collide with those of NIXL's wheel."""
    try:
        for name in ("libnl-route-3.so.200", "libibverbs.so.1", "libefa.so.1"):
            ctypes.CDLL(name)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "left open"])
def test_a_process_that_has_used_the_transport_ends_with_status_0(closes: bool) -> None:
    assert end_of(OURS.format(closes=closes)) == 0


def test_doctor_finds_nixl_usable() -> None:
    trial = probe.attempt(probe._NIXL_TRIAL)
    assert trial.works, trial.detail
    finding = transports.nixl(Facts(transports=Transports(nixl=trial)))
    assert finding.status is Status.OK
    assert not finding.advice


@pytest.mark.skipif(
    not rdma_packages(),
    reason="no RDMA packages here: apt-get install libibverbs1 librdmacm1 ibverbs-providers",
)
def test_without_our_order_of_loading_the_process_would_crash_at_its_end() -> None:
    assert end_of(BY_HAND) == -signal.SIGSEGV
    assert end_of(OURS.format(closes=True)) == 0


def test_ucx_is_opened_again_where_an_interface_of_the_host_goes_meanwhile() -> None:
    """As NIXL says it, seen with interfaces of containers that came and went."""
    calls = []

    def twice_in_vain() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("NIXL_ERR_BACKEND")
        return "agent"

    assert persistently(twice_in_vain) == "agent"


def test_what_never_opens_is_told_as_it_is() -> None:
    def in_vain() -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    with pytest.raises(RuntimeError, match="NIXL_ERR_BACKEND"):
        persistently(in_vain)
