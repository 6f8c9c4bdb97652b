# SPDX-License-Identifier: Apache-2.0
"""Commands of the documents, pasted as they are printed on a machine with 16 GiB and no GPU, start engines that hand KV over, and
that load from the pool what another has computed, also of another kind.

The machine is a network namespace, in which every printed port is free, and a memory of which vLLM reads that it has 16 GiB. Its clone
has what `make setup` and `ci/setup-sglang` made, and vLLM has started there before: it has looked at the class of the model, which takes
an import of vLLM. A terminal is a shell that has got the lines for a CPU; each server that a page does not put into the background has
its own. A person waits until servers answer, so the test does.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import warnings
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
VLLM_CACHE = "VLLM_CACHE_ROOT"
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
for asked in asked-*; do
    until bash -e $asked > said-$asked 2>&1 && grep -q "$(cat until-$asked)" said-$asked; do sleep 1; done
done
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
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for entry in ROOT.iterdir():
            (folder / entry.name).symlink_to(entry)
        (self._lines,) = (block.text for block in section("docs/quickstart.md", "On a CPU"))
        (folder / "meminfo").write_text(
            "".join(f"Node 0 {name}: {gib << 20} kB\n" for name, gib in MEMINFO.items())
        )
        self._ports: list[str] = []
        self._questions = 0

    def paste(self, *pasted: Block, until: str = "") -> None:
        """Servers into a terminal each, and what asks into another once all servers answer and earlier questions are answered.

        Args:
            until: a pattern of what the commands that ask print in the end. They are given again until then: a first request may
                come while the pair is compared.
        """
        given = [command for block in pasted for command in commands(block.text)]
        servers = [command for command in given if serves(command)]
        for server in servers:
            self.open_terminal(self._lines + server)
        if asked := "".join(command for command in given if command not in servers):
            self.ask(asked, until)

    def open_terminal(self, text: str) -> None:
        """A terminal with a server."""
        (self.folder / f"terminal-{len(self._ports)}").write_text(text)
        self._ports.append(port_of(text))

    def ask(self, text: str, until: str) -> None:
        """See `paste`."""
        (self.folder / f"asked-{self._questions}").write_text(self._lines + text)
        (self.folder / f"until-asked-{self._questions}").write_text(until)
        self._questions += 1

    def run(self, shm: Path) -> Family:
        """Start all. `shm` stands for /dev/shm, where a pool would outlive it."""
        names = set(filter(OF_TESTS.match, os.environ)) - {MARKER}
        unset = [f"--unset={name}" for name in names]
        script = RUN.format(node=NODE, ports=" ".join(self._ports))
        unshared = ["unshare", "--net", "--mount", "bash", "-c", script]
        env = {"HOME": str(self.folder / "home"), SHM_VARIABLE: str(shm)}
        env[VLLM_CACHE] = os.environ.get(VLLM_CACHE, str(Path.home() / ".cache" / "vllm"))
        given = [f"{name}={value}" for name, value in env.items()]
        command = ["env", f"--chdir={self.folder}", *unset, *given, *unshared]
        return Family(command, log=self.folder / "log")

    def said(self) -> str:
        """The end of what each terminal shows."""
        logs = sorted([*self.folder.glob("log*"), *self.folder.glob("said*")])
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


def quick_start(machine: Machine) -> None:
    machine.paste(*PAIR, *section("docs/quickstart.md", "Ask it"), until='cause="handed_over')


def pool_then_roles(machine: Machine) -> None:
    """The engines of the second section can do the same without a pool. Those with one are there already, and so is SGLang's."""
    engines, asked = section("docs/pool.md", "From nothing to a hit")
    machine.paste(engines, asked)
    if not (ROOT / ".venv-sglang" / ".setup-done").exists():  # the page activates it
        warnings.warn("the printed SGLang engine is SKIPPED: run ci/setup-sglang", stacklevel=1)
    else:
        (sglang,) = (b for b in section("docs/pool.md", "SGLang") if "--device cpu" in b.text)
        machine.open_terminal(sglang.text)
        machine.ask(asked_of_sglang(asked.text), r"^pd_connector:pool_hits_total.* [1-9]")
    machine.paste(section("docs/router.md", "Elastic roles")[1], until="pinned")


def asked_of_sglang(asked: str) -> str:
    """The same questions with its port, and each time of prompts of their own: it may not know its weights yet when the first come."""
    for printed, other in (
        ("8100 8200", "8100 8300"),
        ("400 500", "$((300 + RANDOM % 100)) $((400 + RANDOM % 100))"),
        (":8200/metrics", ":8300/metrics"),
    ):
        assert printed in asked
        asked = asked.replace(printed, other)
    return asked


PAIR = [block for block in section("docs/quickstart.md", "One machine") if "vllm" in block.text]
CASES = {"quick start": quick_start, "pool, then roles": pool_then_roles}


@pytest.mark.netns
@pytest.mark.parametrize("case", CASES)
def test_what_a_page_prints_works_when_it_is_pasted(folder: Path, shm: Path, case: str) -> None:
    """vLLM's CPU build took 92 % of the memory for the first engine; the second did not start, and nor did `vllm`."""
    machine = Machine(folder)
    CASES[case](machine)
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
