# SPDX-License-Identifier: Apache-2.0
"""How much memory and disk this machine, or this container, leaves for the pool."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fhgfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
    "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
}  # fmt: skip
_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuseblk"}
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


class Room(NamedTuple):
    """What is left of something."""

    nbytes: int
    what: str
    """That leaves no more."""
    remedy: str
    """How to get more of it."""


def file_system(path: Path) -> str:
    """The type of the file system of this path, which need not exist yet; empty if unknown."""
    resolved = os.path.realpath(path)
    best, kind = "", ""
    for line in _lines(Path("/proc/self/mounts")):
        fields = line.split(" ")
        mount = fields[1].encode().decode("unicode_escape")  # a space is \040
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind


def is_network(kind: str) -> bool:
    """Whether a type of file system belongs to a network, or to a program that could reach one."""
    return kind in _NETWORK or (kind.startswith("fuse") and kind not in _LOCAL_FUSE)


def own_bytes(folder: Path) -> int:
    """Bytes of a file system that the pool itself uses: they count as available to it."""
    total = 0
    for name in ("data", "staged"):
        with contextlib.suppress(OSError), os.scandir(folder / name) as files:
            for file in files:
                with contextlib.suppress(OSError):
                    total += file.stat(follow_symlinks=False).st_blocks * 512
    return total


def memory_rooms(shm: Path, own: int) -> list[Room]:
    """Free bytes that a tmpfs, the machine and the container leave; the smallest first.

    Args:
        own: bytes that the pool holds already.
    """
    left = os.statvfs(shm)
    tmpfs = Room(
        left.f_bavail * left.f_frsize + own if left.f_blocks else _UNLIMITED,
        str(shm),
        f"make it larger: Docker's --shm-size=16g or --ipc=host, in Kubernetes an emptyDir of medium Memory, on a host "
        f"mount -o remount,size=16g {shm}",
    )
    return sorted([tmpfs, *process_rooms(own)])


def process_rooms(own: int = 0) -> list[Room]:
    """Free bytes that the machine and the container leave to a process; the smallest first."""
    rooms = [Room(_available() + own, "the memory of this machine", "end what else needs memory")]
    limit = _cgroup_room()
    if limit < _UNLIMITED:
        raised = "raise it: Docker's --memory, in Kubernetes resources.limits.memory"
        rooms.append(Room(limit + own, "the memory limit of this container (cgroup)", raised))
    return sorted(rooms)


def _available() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _UNLIMITED


def _cgroup_room() -> int:
    """Bytes that the limits of this process's cgroups leave. Memory that the kernel can drop at once (caches) counts as
    free."""
    least = _UNLIMITED
    for folder, limit, usage in _cgroups():
        most, used = _number(folder / limit), _number(folder / usage)
        if most is None or used is None or most >= _UNLIMITED:
            continue
        droppable = 0
        for line in _lines(folder / "memory.stat"):
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                droppable = max(droppable, int(value))
        least = min(least, max(0, most - used + droppable))
    return least


def _cgroups() -> Iterator[tuple[Path, str, str]]:
    """Folders of the memory controller, from this process's group up to the root, and names of two files in them."""
    for line in _lines(Path("/proc/self/cgroup")):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, files = _CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, files = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Within a container the path is often that of the host, and only the root is there.
        inner = root / path.lstrip("/")
        for folder in dict.fromkeys((inner, *inner.parents, root)):
            if folder.is_relative_to(root):
                yield folder, *files


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []
