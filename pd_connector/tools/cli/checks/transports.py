# SPDX-License-Identifier: Apache-2.0
"""Means by which KV can travel from here, and the effect of UCX's variables on them."""

from pd_connector.config import Config
from pd_connector.tools.cli.checks.facts import Facts, Trial
from pd_connector.tools.cli.checks.finding import Finding, Status
from pd_connector.transport.choice import Machine, choose

AREA = "transports"
# Names of UCX transports that reach another machine, or their beginnings.
_REACHES_OUT = ("all", "tcp", "rc", "ud", "dc", "ib", "srd", "gga")


def check(facts: Facts) -> list[Finding]:
    """All findings of this area."""
    seen = facts.transports
    findings = [
        automatic(facts),
        Finding(AREA, "shm", Status.OK, "engines of one user on one machine"),
        tcp(facts),
        nixl(facts),
        *device_slots(facts),
        ucx(facts),
    ]
    if seen.nixl is None and seen.ucxx is None:
        return findings
    return [*findings, devices(facts), *ucx_tls(facts), *ucx_net_devices(facts)]


def automatic(facts: Facts) -> Finding:
    """The transports that `transports: auto` takes here, and why none is faster between machines."""
    seen = facts.transports
    machine = Machine(seen.devices, seen.nixl is not None)
    plain = choose(Config(), machine)
    trusted = choose(Config(insecure_data=True), machine)
    text = ", ".join(plain.names)
    if plain.names == trusted.names:
        return Finding(AREA, "auto", Status.OK, text, plain.advice)
    text += f"; with `insecure_data: true` {', '.join(trusted.names)}"
    return Finding(AREA, "auto", Status.OK, text, plain.advice)


def tcp(facts: Facts) -> Finding:
    """The ciphers for control messages and bulk data between machines, once a key is set."""
    text = f"pyzmq {facts.software.versions.get('pyzmq', '?')}, libzmq {facts.transports.zmq}"
    if facts.transports.curve:
        cipher = "AES-GCM" if facts.transports.fast_aes else "ChaCha20-Poly1305"
        said = f"{text}; with a key, CURVE encrypts control messages and {cipher} data"
        if not facts.transports.fast_aes:
            said += " (this processor has no instructions for AES)"
        return Finding(AREA, "tcp", Status.OK, said)
    return Finding(
        AREA,
        "tcp",
        Status.FAIL,
        f"{text}, without CURVE encryption",
        "engines on different machines cannot be protected: pip install --force-reinstall "
        "--no-deps --only-binary pyzmq pyzmq",
    )


def nixl(facts: Facts) -> Finding:
    """Whether a NIXL agent with the backend UCX can be made."""
    trial = facts.transports.nixl
    if trial is None:
        return Finding(
            AREA,
            "nixl",
            Status.OK,
            "not installed (optional)",
            "for RDMA between machines: pip install 'pd-connector[nixl]', and name it in `transports`",
        )
    if trial.works:
        version = facts.software.versions.get("nixl", "?")
        return Finding(AREA, "nixl", Status.OK, f"{version}, agent with UCX made")
    return _trial(
        "nixl",
        trial,
        "leave nixl out of `transports`, or reinstall it: pip install --force-reinstall --no-deps "
        "nixl==1.5.1 nixl-cu13==1.5.1 (nixl-cu12 beside a CUDA 12 torch; 1.5.2 lacks these two on PyPI)",
    )


def device_slots(facts: Facts) -> list[Finding]:
    """Whether chunks of a cache on a GPU pass from GPU to GPU, or through host memory; nothing without a GPU."""
    seen, name = facts.transports, "slots on the GPU"
    if not facts.software.gpus:
        return []
    if seen.nixl is None:
        advice = "chunks pass through host memory: pip install 'pd-connector[nixl]'"
        return [Finding(AREA, name, Status.OK, "NIXL is not installed", advice)]
    if seen.device_slots is None or not seen.device_slots.works:
        why = seen.device_slots.detail if seen.device_slots else "not tried"
        advice = (
            "chunks pass through pinned host memory (slot_memory: auto falls back to it): install a "
            "NIXL for torch's CUDA (nixl-cu13 or nixl-cu12), and Triton"
        )
        return [Finding(AREA, name, Status.WARN, why, advice)]
    text = "NIXL moves the GPU's memory"
    if seen.rdma_devices and not seen.peermem:
        advice = (
            "between machines UCX needs nvidia_peermem (modprobe nvidia_peermem) or the driver's dma-buf, "
            "or it copies through host memory"
        )
        return [Finding(AREA, name, Status.OK, text, advice)]
    return [Finding(AREA, name, Status.OK, text)]


def ucx(facts: Facts) -> Finding:
    """Whether ucxx can be used."""
    trial = facts.transports.ucxx
    if trial is None:
        return Finding(
            AREA,
            "ucx",
            Status.OK,
            "not installed (optional)",
            "an alternative to nixl: pip install 'pd-connector[ucx]', and name it in `transports`",
        )
    return _trial(
        "ucx",
        trial,
        "leave ucx out of `transports`, or reinstall it: pip install --force-reinstall --no-deps "
        "ucxx-cu13 libucxx-cu13 'libucx-cu13<1.22' (cu12 beside a CUDA 12 torch)",
    )


def devices(facts: Facts) -> Finding:
    """RDMA devices; without any, UCX falls back to shared memory and TCP."""
    seen = facts.transports
    if seen.ucx_devices:
        return Finding(AREA, "UCX devices", Status.OK, ", ".join(seen.ucx_devices))
    if seen.rdma_devices:
        return Finding(AREA, "UCX devices", Status.OK, f"RDMA: {', '.join(seen.rdma_devices)}")
    return Finding(
        AREA,
        "UCX devices",
        Status.OK,
        "no RDMA device: UCX uses shared memory and TCP",
        "if this host has one, load its driver; in a container add --device /dev/infiniband",
    )


def ucx_tls(facts: Facts) -> list[Finding]:
    """Whether UCX_TLS keeps KV on this machine."""
    value = facts.environment.get("UCX_TLS")
    if value is None:
        return []
    # "^a,b" means everything except a and b.
    names = [name.strip().lstrip("\\") for name in value.split(",")]
    if value.startswith("^") or any(name.startswith(_REACHES_OUT) for name in names):
        return [Finding(AREA, "UCX_TLS", Status.OK, value)]
    return [
        Finding(
            AREA,
            "UCX_TLS",
            Status.WARN,
            value,
            "no transport in it reaches another machine: add tcp, or rc with RDMA, or unset it",
        )
    ]


def ucx_net_devices(facts: Facts) -> list[Finding]:
    """Whether UCX_NET_DEVICES names devices that this host does not have."""
    value = facts.environment.get("UCX_NET_DEVICES")
    if value is None:
        return []
    devices = {"all", *facts.transports.interfaces, *facts.transports.rdma_devices}
    # An RDMA device is written with its port: mlx5_0:1.
    names = [name.strip() for name in value.lstrip("^").split(",")]
    missing = [name for name in names if name.partition(":")[0] not in devices]
    # UCX itself resolves patterns.
    missing = [name for name in missing if not set(name) & set("*?[")]
    if not missing:
        return [Finding(AREA, "UCX_NET_DEVICES", Status.OK, value)]
    return [
        Finding(
            AREA,
            "UCX_NET_DEVICES",
            Status.FAIL,
            f"{value}: no device {', '.join(missing)} here",
            f"name one of {', '.join(sorted(devices - {'all'}))}, or unset it",
        )
    ]


def _trial(name: str, trial: Trial, advice: str) -> Finding:
    if trial.works:
        return Finding(AREA, name, Status.OK, trial.detail)
    return Finding(AREA, name, Status.WARN, f"installed, but {trial.detail}", advice)
