# SPDX-License-Identifier: Apache-2.0
"""`ci/offline_bundle`, and what `ci/gpu` makes of what it packed."""

import hashlib
import io
import json
import platform
import re
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from gpu_run import bundle
from gpu_run.parts import misfit, unpacked
from gpu_run.places import ROOT
from gpu_run.steps import STEPS

OWN = ".".join(platform.python_version_tuple()[:2])


def image(kind: int, target: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12) + struct.pack("<I", target)
    return head.ljust(64, b"\0") + code


def fatbin(*images: bytes) -> bytes:
    body = b"".join(images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_device_code_for_hopper_travels() -> None:
    """A container keeps its place and its size in the file. One without code for Hopper keeps
    something, since a library registers each."""
    hopper, ptx = image(2, 90, b"H" * 50), image(1, 90, b"text")
    other, smallest = image(2, 100, b"B" * 300), image(2, 103, b"b" * 20)
    library = b"ELF" + fatbin(other, hopper, ptx) + b"between" + fatbin(other, smallest) + b"end"
    slim = bundle.slim(library)
    assert len(slim) == len(library)
    assert slim.startswith(b"ELF" + fatbin(hopper))
    assert slim.index(b"between") == library.index(b"between")
    assert b"between" + fatbin(smallest) in slim
    assert slim.endswith(b"end")
    assert b"B" not in slim
    assert bundle.slim(b"no device code \x50\xed\x55\xba here, only its mark" + bytes(20))


def test_what_no_step_uses_stays_behind(tmp_path: Path) -> None:
    wheel = tmp_path / "nixl_cu13-1.5.1-py3-none-any.whl"
    travels = [
        "nixl_cu13/_api.py",
        "nixl_cu13.libs/libucp-1.so.0",
        "nixl_cu13.libs/nixl/libplugin_UCX.so",
        "nixl_cu13.libs/ucx/libuct_cuda.so.0",
        "nixl_cu13-1.5.1.dist-info/METADATA",
    ]
    stays = [
        "nixl_ep_cu13/nixl_ep.so",
        "nixl_cu13.libs/libaws-cpp-sdk-s3.so",
        "nixl_cu13.libs/nixl/libplugin_OBJ.so",
        "nixl_cu13.libs/ucx/libucx_perftest_cuda.so.0",
        "nixl_cu13-1.5.1.dist-info/RECORD",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*travels, *stays):
            archive.writestr(name, name)
    assert [name for name, _ in bundle.kept(wheel)] == travels


def test_wheels_have_the_versions_that_the_project_is_tested_with() -> None:
    pinned = (ROOT / "ci" / "constraints.txt").read_text().splitlines()
    names = {told.partition("==")[0] for told in bundle.WHEELS}
    tested = {line for line in pinned if line.partition("==")[0] in names}
    assert set(bundle.WHEELS) - tested == {"sgl-flash-mla==1.0.0"}, "a baseline for Hopper only"


def test_wheels_are_what_steps_import_and_hosts_with_torch_lack() -> None:
    modules = {"pyzmq": "zmq", "nixl-cu13": "nixl", "cffi": "cryptography"}
    names = {told.partition("==")[0] for told in bundle.WHEELS} - {"sgl-flash-mla"}
    imported = {module for step in STEPS for module in step.imports}
    assert {modules.get(name, name) for name in names} <= imported


def test_the_tree_travels_without_the_demo_s_model() -> None:
    names = bundle.tree(with_model=False)
    assert {"ci/gpu", "pyproject.toml", "kernels/pd_kernels/tuning.py"} <= set(names)
    assert set(bundle.tree(with_model=True)) - set(names) == {bundle.MODEL}
    needing = {step.name for step in STEPS if bundle.MODEL in step.files}
    assert needing == {step.name for step in STEPS if "vllm" in step.imports}
    packed, count = bundle._packed(iter([("ci/gpu", b"program"), ("LICENSE", b"text")]))
    assert count == 2
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert [member.mode & 0o111 > 0 for member in tar] == [True, False]


def carried(folder: Path, python: str = OWN, optional: bool = True) -> bytes:
    """A folder with one of two parts. The other is `optional`, or not."""
    folder.mkdir()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as tar:
        told = tarfile.TarInfo("package/__init__.py")
        told.size = 3
        tar.addfile(told, io.BytesIO(b"x=1"))
    digest = hashlib.sha256(data.getvalue()).hexdigest()
    parts = [
        {"name": "part-00.tar.xz", "sha256": digest},
        {"name": "part-01.tar.xz", "sha256": "0" * 64, "optional": optional},
    ]
    (folder / "manifest.json").write_text(json.dumps({"python": python, "parts": parts}))
    (folder / "part-00.tar.xz").write_bytes(data.getvalue())
    return data.getvalue()


def test_parts_are_checked_and_unpacked_once(tmp_path: Path) -> None:
    folder = tmp_path / "carry"
    data = carried(folder)
    (folder / "part-00.tar.xz").write_bytes(data[:-9] + b"damaged!!")
    with pytest.raises(
        ValueError, match=r"part-00.tar.xz: sha256 \w+, must be \w+: carry it again"
    ):
        unpacked([folder])
    (folder / "part-00.tar.xz").write_bytes(data)
    assert unpacked([folder]) == ([folder / "site"], ["part-01.tar.xz"])
    own = folder / "site" / "package" / "__init__.py"
    own.write_text("changed here")
    (folder / "part-00.tar.xz").unlink()
    assert unpacked([folder]) == ([folder / "site"], ["part-01.tar.xz"])
    assert own.read_text() == "changed here"


def test_half_an_engine_is_not_used(tmp_path: Path) -> None:
    """Its parts come with different calls. Its steps would fail, and a failed step is not tried again."""
    carried(tmp_path / "carry", optional=False)
    assert unpacked([tmp_path / "carry"]) == ([], ["part-01.tar.xz"])


def test_packages_of_another_python_are_refused(tmp_path: Path) -> None:
    carried(tmp_path / "carry", python="3.8")
    assert re.search(r"for Python 3\.8, this is 3\.\d+\.", misfit(tmp_path / "carry"))
    with pytest.raises(ValueError, match=r"for Python 3\.8"):
        unpacked([tmp_path / "carry"])
    with pytest.raises(ValueError, match=r"no manifest\.json there"):
        unpacked([tmp_path])
