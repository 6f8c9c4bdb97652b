# SPDX-License-Identifier: Apache-2.0
"""Table of models: which models hand over with which engine, and why others do not; for `pd-connector doctor MODEL` and
docs/models.md. Whether a model hands over depends on its caches, which the engine reports when it starts."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Standing(StrEnum):
    """Whether KV and states of a model pass."""

    RUN = "yes"
    """Engines of the tests hand over a small model of this architecture."""
    SAME = "yes, not run"
    """Its cache is of kinds that models with `RUN` have. No engine of the tests has run it."""
    REFUSED = "no"
    """An engine refuses it by name when it starts, or the pair in the handshake."""


class Support(NamedTuple):
    """How one engine's door supports a model.

    Attributes:
        standing: whether KV of the model passes.
        why: the reason, or a limit.
        remedy: what to do; empty if there is nothing to do.
    """

    standing: Standing
    why: str = ""
    remedy: str = ""


class Model(NamedTuple):
    """Models whose caches are alike.

    Attributes:
        names: their usual names.
        architectures: their names in `config.json`.
        cache: the caches that they have.
    """

    names: str
    architectures: tuple[str, ...]
    cache: str
    vllm: Support
    sglang: Support


_RUN, _SAME = Support(Standing.RUN), Support(Standing.SAME)
_ALONE = "serve it without disaggregation"
_SGLANG_STATE = Support(Standing.SAME)
_STATES = "The prefill engine leaves a prompt's last token to the decode engine, so its own answer is not used. Without a pool"

MODELS = (
    Model(
        "Llama 2 and 3, Mistral, Phi-3",
        ("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"),
        "full attention, or windows",
        _RUN,
        _RUN,
    ),
    Model(
        "LLaVA",
        ("LlavaForConditionalGeneration",),
        "full attention",
        _RUN,
        _SAME,
    ),
    Model(
        "Qwen2, Qwen2.5, Qwen3 (also MoE and VL), MiniMax-M2, GLM-4 to 4.7, Hy3, Seed-OSS",
        (
            "Qwen2ForCausalLM",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "MiniMaxM2ForCausalLM",
            "Glm4ForCausalLM",
            "Glm4MoeForCausalLM",
            "HYV3ForCausalLM",
            "SeedOssForCausalLM",
        ),
        "full attention",
        _SAME,
        _SAME,
    ),
    Model(
        "Gemma 3, Gemma 4",
        (
            "Gemma3ForCausalLM",
            "Gemma3ForConditionalGeneration",
            "Gemma4ForCausalLM",
            "Gemma4ForConditionalGeneration",
        ),
        "full attention and windows; in Gemma 4 with other numbers of heads",
        _RUN,
        _SAME,
    ),
    Model(
        "gpt-oss, MiMo-V2, Step-3.5",
        (
            "GptOssForCausalLM",
            "MiMoV2FlashForCausalLM",
            "MiMoV2ForCausalLM",
            "Step3p5ForCausalLM",
        ),
        "full attention and windows",
        _SAME,
        _SAME,
    ),
    Model(
        "DeepSeek V2, V3, V3.1 and R1, Kimi K2, Mistral Large 3",
        (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "KimiK25ForConditionalGeneration",
            "MistralLarge3ForCausalLM",
        ),
        "latents (MLA)",
        _RUN,
        _RUN,
    ),
    Model(
        "DeepSeek V3.2, GLM-5, MiniMax-M3",
        (
            "DeepseekV32ForCausalLM",
            "GlmMoeDsaForCausalLM",
            "MiniMaxM3SparseForCausalLM",
            "MiniMaxM3SparseForConditionalGeneration",
        ),
        "latents or KV, and those of the indexer (sparse attention)",
        Support(
            Standing.SAME, "pages of the indexer pass as they are, between engines that are alike"
        ),
        Support(
            Standing.SAME,
            "pages of the indexer pass as they are, between pages of one size; MiniMax-M3 is refused (state of kind minimax_index_k)",
        ),
    ),
    Model(
        "LFM2, LFM2.5",
        ("Lfm2ForCausalLM",),
        "short convolutions (states) and full attention",
        Support(Standing.RUN, _STATES),
        _SGLANG_STATE,
    ),
    Model(
        "Qwen3-Next",
        ("Qwen3NextForCausalLM",),
        "gated delta nets (states) and full attention",
        Support(Standing.RUN, _STATES),
        _RUN,
    ),
    Model(
        "Nemotron-H, Nemotron Nano v2, Nemotron 3",
        ("NemotronHForCausalLM",),
        "Mamba2 (states) and full attention",
        Support(Standing.RUN, _STATES),
        _SGLANG_STATE,
    ),
    Model(
        "Qwen3.5, Qwen3.6, LFM2 MoE and VL, Granite 4, Kimi Linear, Kimi K3",
        (
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
            "Lfm2MoeForCausalLM",
            "Lfm2VlForConditionalGeneration",
            "GraniteMoeHybridForCausalLM",
            "KimiLinearForCausalLM",
            "KimiK3ForConditionalGeneration",
        ),
        "states (delta nets, KDA, Mamba, convolutions), and attention",
        Support(Standing.SAME, _STATES),
        _SGLANG_STATE,
    ),
    Model(
        "Falcon-H1, Olmo Hybrid, Jamba, Ling and Ring 2.5 and 2.6",
        (
            "FalconH1ForCausalLM",
            "OlmoHybridForCausalLM",
            "JambaForCausalLM",
            "BailingMoeV2_5ForCausalLM",
        ),
        "states (Mamba, delta nets, linear attention), and attention; in Falcon-H1 both in each layer",
        Support(Standing.SAME, _STATES),
        Support(
            Standing.REFUSED,
            "states of linear attention, or in layers that also have attention",
            "use vLLM, or serve it without disaggregation",
        ),
    ),
    Model(
        "DeepSeek V4",
        ("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"),
        "one latent for several tokens, windows of a compressor",
        Support(
            Standing.SAME,
            "pages of vLLM's own formats pass as they are, between engines that are alike. Without a pool",
        ),
        Support(Standing.REFUSED, "KV pool of a kind of its own, with rings (swa_ring)", _ALONE),
    ),
    Model(
        "DeepSeek V4.1",
        ("DeepseekV41ForCausalLM",),
        "one latent for several tokens, rings of a compressor",
        Support(Standing.SAME, _STATES),
        Support(Standing.REFUSED, "KV pool of a kind of its own, with rings (swa_ring)", _ALONE),
    ),
    Model(
        "GLM-5-Next, Qwen3.8-Flash-Next",
        (
            "Glm5NextForCausalLM",
            "Glm5NextForConditionalGeneration",
            "Qwen4ExpForCausalLM",
            "Qwen4ExpForConditionalGeneration",
        ),
        "states, attention and rings",
        Support(Standing.SAME, f"{_STATES}. Not with vLLM 0.31"),
        Support(
            Standing.REFUSED,
            "index keys of several tokens, with a ring (dsa_tail), or a KV pool of a kind of its own",
            _ALONE,
        ),
    ),
    Model(
        "Inkling",
        ("InklingForCausalLM", "InklingForConditionalGeneration"),
        "full attention, windows, and convolutions kept as a window without V",
        _SAME,
        Support(Standing.REFUSED, "KV pool of a kind of its own", _ALONE),
    ),
    Model(
        "Llama 4",
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        "full attention, and attention in chunks",
        Support(
            Standing.REFUSED,
            "attention in chunks (ChunkedLocalAttentionSpec)",
            "start both engines with --disable-hybrid-kv-cache-manager: then it hands over",
        ),
        _SAME,
    ),
    Model(
        "BERT, ModernBERT, Whisper and other encoders",
        (
            "BertModel",
            "BertForSequenceClassification",
            "RobertaModel",
            "RobertaForSequenceClassification",
            "XLMRobertaModel",
            "ModernBertModel",
            "WhisperForConditionalGeneration",
        ),
        "no KV of a prompt, or cross attention",
        Support(Standing.REFUSED, "there is nothing to move, or KV of an encoder", _ALONE),
        Support(Standing.REFUSED, "there is nothing to move, or KV of an encoder", _ALONE),
    ),
)


def find(architectures: Iterable[str]) -> Model | None:
    """The models that have one of these architectures (`architectures` of `config.json`); None if the table has none.

    >>> find(["Qwen3NextForCausalLM"]).names
    'Qwen3-Next'
    """
    names = set(architectures)
    return next((model for model in MODELS if names.intersection(model.architectures)), None)


def markdown() -> str:
    """The table of docs/models.md."""
    rows = ["| models | what they keep | vLLM | SGLang |", "|---|---|---|---|"]
    for model in MODELS:
        cells = model.names, model.cache, _cell(model.vllm), _cell(model.sglang)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(support: Support) -> str:
    reason = ". ".join(filter(None, (support.why, support.remedy)))
    return f"{support.standing}: {reason}" if reason else str(support.standing)


if __name__ == "__main__":
    print(markdown())
