# SPDX-License-Identifier: Apache-2.0
"""Commands of the documents, pasted as they are printed on a machine with 16 GiB and no GPU, start engines that hand KV over.

The machine is a network namespace, in which every printed port is free, and a memory of which vLLM reads that it has 16 GiB. Its clone
has what `make setup` made. A terminal is a shell that has got the lines for a CPU; each server that a page does not
put into the background has its own. A person waits until servers answer, so the test does.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import wait_until
from support.printed import OF_TESTS, ROOT, Block, blocks, commands, words

from pd_connector.pool.settings import SHM_VARIABLE
from pd_connector.tools.launch import Family
from pd_connector.tools.launch.engine import on_cpu
from pd_connector.tools.launch.proc import MARKER

NODE = Path("/sys/devices/system/node/node0/meminfo")
# A quarter is taken by other programs.
MEMINFO = {"MemTotal": 16, "MemFree": 12, "Active(file)": 0, "Inactive(file)": 0, "SReclaimable": 0}
SERVERS = (["vllm", "serve"], ["pd-router"])
RUN = """
set -e
mount --bind meminfo {node}
ip link set lo up
for terminal in terminal-*; do bash -e $terminal > log-$terminal 2>&1 & done
for port in {ports}; do
    curl --noproxy "*" -sf -o answer --retry 600 --retry-delay 1 --retry-connrefused http://127.0.0.1:$port/health
done
touch ready
mkdir -p home
until bash -e asked > said 2>&1 && grep -q "{until}" said; do sleep 1; done
touch done
sleep 600
"""


def section(page: str, name: str) -> list[Block]:
    return [block for block in blocks(ROOT / page) if block.section == name]


def serves(command: str) -> bool:
    """Whether it stays in its terminal."""
    return any(words(command)[: len(server)] == server for server in SERVERS) and not (
        command.rstrip().endswith("&")
    )


def port_of(server: str) -> str:
    found = re.search(r"--port (\d+)", server)
    return found[1] if found else "8000"


class Machine:
    """Runs what is pasted.

    Args:
        folder: its clone.
        pasted: blocks in their order.
        until: what the commands that ask print in the end. They are given again until then: a first request may come while the
            pair is compared.
    """

    def __init__(self, folder: Path, pasted: list[Block], until: str = "") -> None:
        self.folder = folder
        for entry in ROOT.iterdir():
            (folder / entry.name).symlink_to(entry)
        (lines,) = (block.text for block in section("docs/quickstart.md", "On a CPU"))
        given = [command for block in pasted for command in commands(block.text)]
        servers = [command for command in given if serves(command)]
        for number, server in enumerate(servers):
            (folder / f"terminal-{number}").write_text(lines + server)
        asked = "".join(command for command in given if command not in servers)
        (folder / "asked").write_text(lines + asked)
        (folder / "meminfo").write_text(
            "".join(f"Node 0 {name}: {gib << 20} kB\n" for name, gib in MEMINFO.items())
        )
        ports = " ".join(map(port_of, servers))
        self.script = RUN.format(node=NODE, ports=ports, until=until)

    def run(self, shm: Path) -> Family:
        """Start all. `shm` stands for /dev/shm, where a pool would outlive it."""
        names = set(filter(OF_TESTS.match, os.environ)) - {MARKER}
        unset = [f"--unset={name}" for name in names]
        unshared = ["unshare", "--net", "--mount", "bash", "-c", self.script]
        env = {"HOME": str(self.folder / "home"), SHM_VARIABLE: str(shm)}
        given = [f"{name}={value}" for name, value in env.items()]
        command = ["env", f"--chdir={self.folder}", *unset, *given, *unshared]
        return Family(command, log=self.folder / "log")

    def said(self) -> str:
        """The end of what each terminal shows."""
        logs = sorted([*self.folder.glob("log*"), *self.folder.glob("said")])
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)


def memory_gib(family: Family) -> float:
    """Memory that these processes have, each page counted once."""
    kib = 0
    for process in family.members():
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            kib += int(re.findall(r"^Pss: +(\d+)", rollup, re.M)[0])
    return kib / (1 << 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not on_cpu():
        pytest.skip("this vLLM is for GPUs")
    if not NODE.exists() or not shutil.which("ip"):
        pytest.skip("no iproute2, or no node of memory in /sys")
    probe = ["unshare", "--net", "--mount", "ip", "link", "set", "lo", "up"]
    if (tried := subprocess.run(probe, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no namespaces: {tried.stderr.strip()}")
    return tmp_path


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pd-printed-") as name:
        yield Path(name)


PAIR = [block for block in section("docs/quickstart.md", "One machine") if "vllm" in block.text]
POOL = section("docs/pool.md", "From nothing to a hit")
# The engines of this section can do the same without a pool. Those with one are there already.
ROLES = section("docs/router.md", "Elastic roles")[1]
CASES = {
    "quick start": ([*PAIR, *section("docs/quickstart.md", "Ask it")], 'cause=\\"handed_over'),
    "pool, then roles": ([*POOL, ROLES], "pinned"),
}


@pytest.mark.netns
@pytest.mark.parametrize("case", CASES)
def test_what_a_page_prints_works_when_it_is_pasted(folder: Path, shm: Path, case: str) -> None:
    """vLLM's CPU build took 92 % of the memory for the first engine; the second did not start, and nor did `vllm`."""
    machine = Machine(folder, *CASES[case])
    with machine.run(shm) as family:
        ended = folder / "done"
        wait_until(
            lambda: ended.exists() or family.returncode is not None, machine.said, deadline_s=600
        )
        assert ended.exists(), machine.said()
        assert memory_gib(family) < MEMINFO["MemFree"], machine.said()


def test_the_front_page_prints_the_pair_and_the_question_of_the_quick_start() -> None:
    front = [block.text for block in section("README.md", "Use it")]
    assert front[: len(PAIR)] == [block.text for block in PAIR]
    asked = list(commands(section("docs/quickstart.md", "Ask it")[0].text))
    assert list(commands(front[len(PAIR)])) == asked[:1]
