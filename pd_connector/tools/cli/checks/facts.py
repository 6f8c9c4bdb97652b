# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine: plain data, filled in by `probe`, read by the checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial in a process of its own."""

    works: bool
    detail: str = ""
    """Its output, or why it failed."""


@dataclass(frozen=True)
class Addition:
    """A codec, transport or policy of another package."""

    kind: str
    name: str
    source: str
    """The package, and the object there."""
    trial: Trial
    """The outcome of loading it."""


@dataclass(frozen=True)
class Software:
    """Python, distributions and entry points."""

    python: tuple[int, int, int] = (3, 11, 0)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed version by distribution, for the distributions that the doctor knows; absent if not installed."""
    plugins: tuple[str, ...] = ()
    """Values of the entry points called `pd_connector` in the group `vllm.general_plugins`."""
    sglang_plugins: tuple[str, ...] = ()
    """Values of the same entry points in the group `sglang.srt.plugins`."""
    torch_cuda: str | None = None
    """CUDA version that torch was built for; None for a CPU build or without torch."""
    gpus: tuple[str, ...] = ()
    """One line per GPU: name, driver version, memory."""
    additions: tuple[Addition, ...] = ()
    gpu_error: str = ""
    """Message of a failed nvidia-smi; empty if it worked or is missing."""


@dataclass(frozen=True)
class Transports:
    """Means by which KV can travel."""

    zmq: str = ""
    curve: bool = False
    fast_aes: bool = True
    """Whether the processor has instructions for AES-GCM. If so, that cipher encrypts data over tcp."""
    nixl: Trial | None = None
    """None if it is not installed."""
    device_slots: Trial | None = None
    """Whether NIXL moves memory of the first GPU; None without a GPU, or without NIXL."""
    peermem: bool = False
    """Whether the kernel module is loaded with which RDMA devices reach a GPU's memory."""
    ucxx: Trial | None = None
    """None if it is not installed."""
    ucx_devices: tuple[str, ...] | None = None
    """Lines `transport device` of `ucx_info -d`; None if that program is missing."""
    rdma_devices: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    """Hardware that moves memory between machines without the processors: RDMA devices, NVLink's channels."""
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class Network:
    """Addresses and names of this host."""

    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses by interface, loopback included."""
    outward: str | None = None
    """The address with which this host reaches other networks; None without a route."""
    hostname: str = "localhost"
    resolved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses of the host name and the configured host, by name; empty if a name does not resolve."""
    bindable: Mapping[str, str] = field(default_factory=dict)
    """By host: why no free port can be bound on it; an empty string if one can."""
    port_range: tuple[int, int] = (32768, 60999)
    """Range from which the system picks free ports."""
    firewalls: tuple[str, ...] = ()
    """Active firewall managers."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of processes started from here."""

    memlock_bytes: int | None = None
    """None if unlimited."""
    files: int | None = None
    """Hard limit of open files; None if unlimited."""
    shm_bytes: int = 0
    shm_free_bytes: int = 0


@dataclass(frozen=True)
class CarrierFacts:
    """The carrier of this host."""

    far: str = ""
    """The far store that it reaches; empty: none runs."""
    sealed: bool = False
    problem: str = ""
    """Why it cannot be used at the moment."""
    too_large: int = 0
    """Chunks that were larger than the far store takes."""
    most_bytes: int = 0
    """What it takes."""
    not_put: int = 0
    """Chunks that it did not take for another reason."""
    refused: str = ""
    """Why the address in the environment cannot be used."""
    has_ended: bool = False
    """None runs, and one has run."""


@dataclass(frozen=True)
class Pool:
    """The KV pool of this user on this host."""

    folder: str
    kind: str = "tmpfs"
    """Type of the file system; empty if nothing is there."""
    tmpfs_bytes: int = 0
    default_bytes: int = 0
    """Memory that an engine with `pool: true` would give it."""
    refused: str = ""
    """Why such an engine would not start, and what to do; empty if it would."""
    held: tuple[tuple[str, str, int, int, int], ...] = ()
    """By tier: name, folder, chunks, bytes, budget in bytes (0: not set). Empty if no engine has used the pool."""
    engines: int = 0
    """Processes that use it."""
    unknown: tuple[str, ...] = ()
    """Engines that do not use it, because they do not know their weights."""
    problem: str = ""
    """Why nothing is saved at the moment."""
    unwritable: tuple[tuple[str, str], ...] = ()
    """Tiers that engines could not write to: name, and the folder with what is wrong and what to do."""
    carrier: CarrierFacts = CarrierFacts()


@dataclass(frozen=True)
class Facts:
    """All facts, with the environment variables."""

    software: Software = Software()
    transports: Transports = Transports()
    network: Network = Network()
    limits: Limits = Limits()
    environment: Mapping[str, str] = field(default_factory=dict)
    pool: Pool | None = None
    """None: not looked at."""
