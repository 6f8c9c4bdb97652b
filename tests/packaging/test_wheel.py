# SPDX-License-Identifier: Apache-2.0
"""What a user gets from `pip install`."""

import subprocess
import sys
import tarfile
from zipfile import ZipFile

from pd_connector import __version__

PACKAGES = ("pd_connector", "scheduler_plugins", "pd_kernels")
DIST_INFO = f"pd_connector-{__version__}.dist-info"


def test_the_wheel_holds_the_three_packages_and_nothing_else(contents):
    assert {name.split("/")[0] for name in contents} == {*PACKAGES, DIST_INFO}


def test_no_module_of_the_packages_is_left_out(contents, root):
    """A folder without __init__.py would be."""
    for package in PACKAGES:
        where = root / "kernels" if package == "pd_kernels" else root
        modules = {str(file.relative_to(where)) for file in (where / package).rglob("*.py")}
        assert modules
        assert modules <= contents


def test_the_demo_model_is_in_it(contents, root):
    files = {file.name for file in (root / "pd_connector/tools/demo/model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    assert {f"pd_connector/tools/demo/model/{file}" for file in files} <= contents


def test_the_source_distribution_has_what_the_wheel_has_and_the_documents_and_no_tests(
    source, contents, tmp_path
):
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    own = {name for name in contents if not name.startswith(DIST_INFO)}
    kernels = {name for name in own if name.startswith("pd_kernels/")}
    assert own - kernels | {f"kernels/{name}" for name in kernels} <= names
    assert {"docs/configuration.md", "docs/router-grafana.json", "CHANGELOG.md"} <= names
    assert not [name for name in names if name.startswith("tests") or name.endswith(".pyc")]


def test_the_live_page_is_whole(contents):
    folder = "scheduler_plugins/router/endpoints/"
    wanted = {f"{folder}{name}" for name in ("page.html", "page.css", "page.js", "page_engines.js")}
    assert wanted <= set(contents)


def test_types_are_offered_to_type_checkers(contents):
    assert "pd_connector/py.typed" in contents


def test_entry_points_are_registered_and_exist(wheel, root):
    with ZipFile(wheel) as archive:
        text = archive.read(f"{DIST_INFO}/entry_points.txt").decode()
    assert "[vllm.general_plugins]\npd_connector = pd_connector.vllm.plugin:register" in text
    assert "[sglang.srt.plugins]\npd_connector = pd_connector.sglang.plugin:register" in text
    assert "\ndef register()" in (root / "pd_connector/sglang/plugin.py").read_text()
    assert "[console_scripts]\npd-connector = pd_connector.tools.cli.app:main" in text
    assert "\ndef register()" in (root / "pd_connector/vllm/plugin.py").read_text()
    assert "\ndef main(" in (root / "pd_connector/tools/cli/app.py").read_text()


def test_the_licence_is_in_it(contents):
    assert f"{DIST_INFO}/licenses/LICENSE" in contents
