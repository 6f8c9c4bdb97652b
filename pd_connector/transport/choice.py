# SPDX-License-Identifier: Apache-2.0
"""Chooses the transports that an engine offers with `transports: auto`, and explains why a faster
one is missing.

Each side offers what it can use; a producer takes the first of its own that the consumer offers and
that reaches it. So `nixl` is taken only where both sides offer it.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import msgspec

from pd_connector.config import AUTO, Config

FASTEST_BETWEEN_MACHINES = "nixl"


class Machine(NamedTuple):
    """The properties of this machine that decide.

    Attributes:
        devices: devices that move memory between machines without the processors, such as `mlx5_0`.
        has_nixl: whether NIXL is installed.
    """

    devices: tuple[str, ...]
    has_nixl: bool


class Choice(NamedTuple):
    """The transports that are offered.

    Attributes:
        names: best first.
        automatic: whether the config has `transports: auto`.
        without: why `nixl` is not among them: `device`, `library`, `insecure_data` or `setup`; empty
            where it is, or where the operator has named the transports.
        advice: the reason as a sentence, with advice.
    """

    names: tuple[str, ...]
    automatic: bool = False
    without: str = ""
    advice: str = ""

    def describe(self) -> str:
        """For the log, such as `shm,tcp (auto; not nixl: this machine has no RDMA device)`."""
        suffix = f" (auto; {self.advice})" if self.advice else " (auto)" if self.automatic else ""
        return ",".join(self.names) + suffix

    def failed(self, problem: object) -> "Choice":
        """What is left where `nixl` cannot be set up."""
        names = tuple(name for name in self.names if name != FASTEST_BETWEEN_MACHINES)
        return Choice(names, True, "setup", f"not {FASTEST_BETWEEN_MACHINES}: {problem}")

    def why_slower(self, taken: str) -> str:
        """Why a session with this transport has no faster transport between machines; empty if none
        is faster, or the operator has chosen."""
        if not self.automatic or taken in ("shm", FASTEST_BETWEEN_MACHINES):
            return ""
        return self.without or "peer"


def this_machine(root: Path = Path("/")) -> Machine:
    """Look for RDMA devices (`/sys/class/infiniband`), and for channels of an NVLink that spans
    machines (`/dev/nvidia-caps-imex-channels`)."""
    devices = [
        entry.name
        for folder in ("sys/class/infiniband", "dev/nvidia-caps-imex-channels")
        if (root / folder).is_dir()
        for entry in sorted((root / folder).iterdir())
    ]
    return Machine(tuple(devices), importlib.util.find_spec("nixl") is not None)


def choose(config: Config, machine: Machine) -> Choice:
    """The transports that this engine offers on this machine.

    >>> choose(Config(), Machine(devices=(), has_nixl=True)).names
    ('shm', 'tcp')
    >>> choose(Config(insecure_data=True), Machine(devices=("mlx5_0",), has_nixl=True)).names
    ('shm', 'nixl', 'tcp')
    """
    if config.transports != (AUTO,):
        return Choice(config.transports)
    without, advice = "", ""
    if not machine.devices:
        without, advice = "device", "this machine has no RDMA device and no NVLink to others"
    elif not machine.has_nixl:
        without = "library"
        advice = f"{machine.devices[0]} is there, but not NIXL: pip install 'pd-connector[nixl]'"
    elif not config.insecure_data:
        without = "insecure_data"
        advice = (
            f"{machine.devices[0]} is there, but KV would pass in plaintext: set "
            "`insecure_data: true` if the network may be trusted with it"
        )
    if without:
        return Choice(("shm", "tcp"), True, without, f"not {FASTEST_BETWEEN_MACHINES}: {advice}")
    return Choice(("shm", FASTEST_BETWEEN_MACHINES, "tcp"), True)


def with_names(config: Config, names: tuple[str, ...]) -> Config:
    """The config with these transports in place of `auto`."""
    return msgspec.structs.replace(config, transports=names)
