# SPDX-License-Identifier: Apache-2.0
"""Kernels that were compiled on one machine are found on another, in another folder."""

import ast
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_run import bundle
from gpu_run.parts import TRITON_CACHE, unpacked
from gpu_run.places import ROOT, environment

pytest.importorskip("triton")
SOURCE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) * 2)

triton.knobs.compilation.listener = lambda **told: print(told["cache_hit"])
triton.compile(ASTSource(double, {"x": "*fp32"}, {"N": 128}), target=GPUTarget("cuda", 90, 32))
"""


def hit(folder: Path, cache: Path) -> bool:
    """Compile a kernel whose source lies in a folder; returns whether it was in the cache."""
    folder.mkdir(exist_ok=True)
    (folder / "kernel.py").write_text(SOURCE)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "kernel.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1] == "True"


def test_a_carried_kernel_is_not_compiled_again(tmp_path: Path) -> None:
    made, carry = tmp_path / "made", tmp_path / "carry"
    assert not hit(tmp_path / "here", made)
    part, _ = bundle._packed(bundle.compiled(made))
    carry.mkdir()
    (carry / "part-01.tar.xz").write_bytes(part)
    parts = [{"name": "part-01.tar.xz", "sha256": hashlib.sha256(part).hexdigest()}]
    own = ".".join(platform.python_version_tuple()[:2])
    (carry / "manifest.json").write_text(json.dumps({"python": own, "parts": parts}))
    shutil.move(made, tmp_path / "moved")
    assert not hit(tmp_path / "there", tmp_path / "moved"), "Triton notes absolute paths"
    (site,), _ = unpacked([carry])
    assert not list(site.rglob("*.ptx")), "only what a launch reads travels"
    env = environment(tmp_path / "state", [site])
    assert env["TRITON_CACHE_DIR"] == str(site / TRITON_CACHE)
    assert hit(tmp_path / "there", Path(env["TRITON_CACHE_DIR"]))


def test_constants_of_one_name_have_one_value() -> None:
    """Triton puts constants of one name into a kernel's key by the addresses of their modules, which differ between
    processes. With two values, a kernel would be compiled again in half of them."""
    values: dict[str, set[str]] = {}
    for file in (ROOT / "kernels" / "pd_kernels").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            match node:
                case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(_, "constexpr"), [value])):
                    values.setdefault(name, set()).add(ast.unparse(value))
    assert len(values) > 20
    assert {name: told for name, told in values.items() if len(told) > 1} == {}
