# SPDX-License-Identifier: Apache-2.0
"""What can be imported, from where, and with what absent."""

import subprocess
import sys

import pytest

ENGINES = ("vllm", "sglang", "ray", "torch", "transformers", "nixl", "ucxx", "triton")


def python(code, cwd, *arguments):
    """Run code as a user would from a folder, which is first on sys.path then; returns its output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
"""


@pytest.mark.parametrize(
    "module", ["pd_connector", "scheduler_plugins", "pd_connector.tools.cli.doctor"]
)
def test_it_imports_with_no_engine_installed(module, tmp_path):
    python(f"{BLOCK}\nimport {module}", tmp_path, ",".join(ENGINES))


def test_the_block_blocks(tmp_path):
    with pytest.raises(AssertionError, match="torch is blocked"):
        python(f"{BLOCK}\nimport torch", tmp_path, ",".join(ENGINES))


def test_importing_it_imports_no_engine(tmp_path):
    code = (
        "import pd_connector, sys; print(*sorted({'vllm', 'sglang', 'torch'} & set(sys.modules)))"
    )
    assert python(code, tmp_path) == ""


def test_help_of_every_command_needs_no_engine(tmp_path):
    code = (
        f"{BLOCK}\nfrom pd_connector.tools.cli.app import Commands, main\n"
        "for name in Commands.lines: assert main([name, '--help']) == 0, name"
    )
    said = python(code, tmp_path, ",".join(ENGINES))
    assert "Not available" not in said
    assert all(f"pd-connector {command}" in said for command in ("demo", "doctor", "bench", "key"))


def test_pd_kernels_imports_from_anywhere(root, tmp_path):
    for folder in (root, tmp_path):
        python("import pd_kernels", folder)


# As in site-packages: later on sys.path than the current folder.
FIND_KERNELS = "import sys; sys.path.append(sys.argv[1]); import kernels; print(kernels.__file__)"


@pytest.fixture
def site(tmp_path):
    """A folder with a package called `kernels`, as Hugging Face's is."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    return package.parent


def test_hugging_faces_kernels_is_not_shadowed_from_the_repository_root(root, site):
    assert python(FIND_KERNELS, root, site) == str(site / "kernels/__init__.py")


def test_an_init_file_in_the_folder_would_shadow_it(site, tmp_path):
    ours = tmp_path / "repository" / "kernels"
    ours.mkdir(parents=True)
    (ours / "__init__.py").touch()
    assert python(FIND_KERNELS, ours.parent, site) == str(ours / "__init__.py")


def test_transformers_does_not_take_our_folder_for_hugging_faces(root, tmp_path):
    pytest.importorskip("transformers")
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    assert python(code, root) == python(code, tmp_path)


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("pd_connector bench handoff --gpu", "torch"),
        ("pd_connector profile --url http://127.0.0.1:1", "aiohttp"),
        ("pd_connector bench router peers trace.jsonl", "aiohttp"),
        ("scheduler_plugins.router --prefill a:1 --decode b:1", "aiohttp"),
        ("scheduler_plugins.router --prefill a:1 --decode b:1 --otlp http://a:1", "opentelemetry"),
        ("pd_bench.kernels decode", "torch"),
    ],
)
def test_a_program_says_what_it_lacks_and_what_brings_it(program, absent, tmp_path):
    block = BLOCK.replace("sys.argv[1]", repr(absent))
    module, *options = program.split()
    code = (
        f"{block}\nimport runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", code, *options]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    assert absent in ended.stderr
    extras = {"aiohttp": "pd-connector[router]", "opentelemetry": "pd-connector[otel]"}
    assert extras.get(absent, "environment of your engine") in ended.stderr
