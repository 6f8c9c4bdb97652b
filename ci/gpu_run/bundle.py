# SPDX-License-Identifier: Apache-2.0
"""Pack what a GPU host without a package index needs for `ci/gpu`: this tree and the packages that such hosts lack.

Two files and a manifest of at most 20 MiB together: `tree.tar.xz` (the working tree without the demo's model) and
`part-00.tar.xz` (wheels for the host's Python, without what no step uses, device code for Hopper only). The host needs
torch, Triton and numpy. `ci/gpu --parts DIR` checks and unpacks the part there. vLLM is not in it.

Fetching takes pip, which asks the index that it is set up for.
"""

import argparse
import hashlib
import io
import json
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from gpu_run.parts import MANIFEST, TRITON_CACHE
from gpu_run.places import CARRIED, ROOT

MIB = 1 << 20
LIMIT = 16 * MIB
"""The most bytes of a part."""

WHEELS = (
    *(
        "nixl==1.5.1",
        "nixl-cu13==1.5.1",
        "sgl-flash-mla==1.0.0",
        "msgspec==0.22.0",
        "pyzmq==27.3.0",
    ),
    *("cryptography==50.0.2", "cffi==2.1.1", "httptools==0.9.0"),
)
"""What the steps of `ci/gpu` import, and a host with torch, pytest and the usual packages lacks."""

DROPPED = re.compile(
    # The index of files would be wrong, and other metadata say nothing to the steps.
    r"[^/]+\.dist-info/(?:RECORD|licenses/|sboms/)|[^/]+\.data/|.*\.pyi$"
    # NIXL: its UCX plugin stays, with UCX's CUDA, TCP and shared-memory transports.
    r"|nixl_ep(?:_cu13)?/|nixl_cu13\.scripts/|\.nixl_cu13\.mesonpy\.libs/plugins/(?!libplugin_UCX)"
    r"|nixl_cu13\.libs/(?!nixl/libplugin_UCX|ucx/lib(?:uct|ucm)_(?:cuda|cma)\.so"
    r"|lib(?:absl|address_sort|etcd|gpr|grpc|proto|re2|uc[mpst]|upb|utf8))"
)
"""Paths in wheels that stay behind."""

MODEL = "pd_connector/tools/demo/model/model.safetensors"
"""Only steps with engines read it."""

HOPPER = 90
FATBIN = b"\x50\xed\x55\xba"
CUBIN = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code. 1: the part is too large.
    """
    options = _parser().parse_args(arguments)
    out: Path = options.out
    cache = ROOT / "build" / "wheels"  # not in the folder that is carried
    for folder in (out, cache):
        folder.mkdir(parents=True, exist_ok=True)
    _fetch(cache, options.python)
    wheels = [_wheel(cache, told) for told in WHEELS]
    part, count = _packed(each for wheel in wheels for each in kept(wheel))
    files = ((name, (ROOT / name).read_bytes()) for name in tree(options.with_model))
    sizes = {"part-00.tar.xz": (part, count), "tree.tar.xz": _packed(files)}
    parts = [("part-00.tar.xz", part)]
    if options.triton_cache:
        sizes["part-01.tar.xz"] = _packed(compiled(options.triton_cache))
        parts.append(("part-01.tar.xz", sizes["part-01.tar.xz"][0]))
    for name, (data, files_in) in sizes.items():
        (out / name).write_bytes(data)
        print(f"{name}: {len(data) / MIB:.1f} MiB, {files_in} files")
    manifest = {
        "python": options.python,
        "wheels": [wheel.name for wheel in wheels],
        "parts": [
            {
                "name": name,
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "optional": name != "part-00.tar.xz",
            }
            for name, data in parts
        ],
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    large = [(name, data) for name, data in parts if len(data) > LIMIT]
    for name, data in large:
        print(f"{name} has {len(data):,} bytes: must be at most {LIMIT:,}", file=sys.stderr)
    return 1 if large else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ci/offline_bundle", description=__doc__)
    parser.add_argument("--out", type=Path, default=CARRIED, help="folder (build/carry)")
    parser.add_argument("--python", default="3.12", help="the host's Python (3.12)")
    parser.add_argument(
        "--with-model", action="store_true", help="6 MB more, for the steps with engines"
    )
    parser.add_argument(
        "--triton-cache",
        type=Path,
        metavar="DIR",
        help="kernels that Triton compiled into this folder (TRITON_CACHE_DIR). They are used only by the same "
        "build of Triton, for the same Python, and the same sources",
    )
    return parser


def _fetch(cache: Path, python: str) -> None:
    """Download the wheels for x86-64 Linux that are not in `cache`."""
    missing = [told for told in WHEELS if not _found(cache, told)]
    if not missing:
        return
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
    platforms += [f"--platform=manylinux{year}_x86_64" for year in ("2014", "2010", "1")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(cache), "--python-version", python, "--implementation", "cp"]
    subprocess.run([*command, *platforms, *missing], check=True)


def _found(cache: Path, told: str) -> list[Path]:
    name, _, version = told.partition("==")
    return sorted(cache.glob(f"{name.replace('-', '_')}-{version}-*.whl"))


def _wheel(cache: Path, told: str) -> Path:
    found = _found(cache, told)
    if len(found) != 1:
        raise SystemExit(f"{told}: {len(found)} wheels in {cache}: must be one, remove the others")
    return found[0]


def kept(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file of a wheel that travels."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("/") and not DROPPED.match(name):
                data = archive.read(name)
                yield name, slim(data) if name.endswith(".so") else data


def compiled(cache: Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of what a launch reads of Triton's cache: machine code, its description, and launchers."""
    for file in sorted(cache.glob("*/*")):
        if file.suffix in (".cubin", ".json", ".so"):
            yield f"{TRITON_CACHE}/{file.relative_to(cache)}", file.read_bytes()


def slim(library: bytes) -> bytes:
    """A library whose embedded device code is only what Hopper runs.

    Device code lies in containers of images. A container keeps its machine code for exactly this
    architecture (90 is sm_90 and sm_90a), or its smallest image if it has none. The kept images move
    to its start and its size shrinks. The container itself stays where it is, followed by zeros.
    """
    out, place = bytearray(library), 0
    while (at := out.find(FATBIN, place)) >= 0:
        version, head, size = struct.unpack_from("<HHQ", out, at + 4)
        begin, end = at + head, at + head + size
        if version != 1 or head != 16 or end > len(out):
            place = at + 4
            continue
        images, place = [], begin
        while place < end:
            kind, _, own_head, own_size = struct.unpack_from("<HHIQ", out, place)
            (target,) = struct.unpack_from("<I", out, place + 28)
            images.append((kind, target, bytes(out[place : place + own_head + own_size])))
            place += own_head + own_size
        fitting = [data for kind, target, data in images if kind == CUBIN and target == HOPPER]
        if images and not fitting:
            fitting = [min((data for *_, data in images), key=len)]
        found = b"".join(fitting)
        struct.pack_into("<Q", out, at + 8, len(found))
        out[begin:end] = found + bytes(size - len(found))
    return bytes(out)


def tree(with_model: bool) -> list[str]:
    """Files of the working tree that git does not ignore, by their paths."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = sorted(name for name in told.split("\0") if name and (ROOT / name).is_file())
    return [name for name in names if with_model or name != MODEL]


def _packed(files: Iterator[tuple[str, bytes]]) -> tuple[bytes, int]:
    """Files as a tar, compressed with xz, and their number."""
    plain, count = io.BytesIO(), 0
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for count, (name, data) in enumerate(files, 1):  # noqa: B007
            told = tarfile.TarInfo(name)
            told.size = len(data)
            own = ROOT / name
            told.mode = 0o755 if own.is_file() and own.stat().st_mode & 0o100 else 0o644
            tar.addfile(told, io.BytesIO(data))
    filters = [
        {"id": lzma.FILTER_X86},
        {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 64 * MIB},
    ]
    return lzma.compress(plain.getvalue(), filters=filters), count
