# SPDX-License-Identifier: Apache-2.0
"""Which model an engine serves, as it is loaded, and whether two engines serve the same one.

KV may be used in place of a computation only if two engines serve the same model. Weights that were not hashed are not
trusted: see `weights_problem`.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from pd_connector.kv.geometry import DRAFT_LAYERS, Layers
from pd_connector.kv.model_config import FINGERPRINT_BYTES, Fields, fields_unlike, printable

MOST_TEXT = 200
"""Most characters of a text that is for messages only."""
_Print = Annotated[bytes, msgspec.Meta(max_length=64)]
_Name = Annotated[str, msgspec.Meta(max_length=512)]


class LayerFacts(msgspec.Struct, frozen=True):
    """What some layers do, as they are loaded.

    Attributes:
        layers: their numbers, ascending.
        label: which cache of which part of the model these are, such as `model/self_attn.attn`.
            Layers of the same number and unlike labels are not the same.
        attention: scale, soft cap and window, as text.
        rotation: fingerprint of the rotation of keys; empty where there is none or it is not known.
        rotated: the rotation in a few words, for messages.
    """

    layers: Layers
    label: _Name
    attention: _Name
    rotation: _Print = b""
    rotated: _Name = ""


class ModelFacts(msgspec.Struct, frozen=True):
    """A model as one rank has loaded it. An empty fingerprint: not known.

    Attributes:
        config: fingerprint of the model's config, the dtype it computes in, and its quantisation.
        weights: fingerprint of all bytes of the weights on disk.
        loaded: fingerprint of all bytes of every parameter in memory, if the weights are not those of files. It can
            only be compared between ranks that hold the same part of the model.
        held: the part of the model that this rank holds.
        model_id: the operator's name for the model (config key `model_id`).
        updates: how often the weights were found to have changed since the engine started.
        version: the operator's name for the weights after a change.
        draft: fingerprint of the draft model; layers from `DRAFT_LAYERS` on belong to the draft model.
        layers: facts about the layers.
        source: the name or path of the model in the engine's arguments. For messages only.
        fields: the fields of `config` with their values. For messages only.
        reading: `weights` or `draft` will be known once all of their bytes were read. Until then no KV passes.
        samples: sent by an older version, which compares samples until it has read all bytes. Never trusted. On the
            wire, that version has its samples in the fields `weights` and `loaded`.
    """

    config: _Print
    weights: _Print = msgspec.field(default=b"", name="weights_full")
    loaded: _Print = msgspec.field(default=b"", name="loaded_full")
    held: _Name = ""
    model_id: _Name = ""
    updates: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    version: _Name = ""
    draft: _Print = b""
    layers: Annotated[tuple[LayerFacts, ...], msgspec.Meta(max_length=4096)] = ()
    source: _Name = ""
    fields: Fields = ()
    reading: bool = False
    samples: _Print = msgspec.field(default=b"", name="weights")


def knowing(facts: ModelFacts, weights: bytes, draft: bytes) -> ModelFacts:
    """The same model with the fingerprints of its weights and draft model, which have now been read."""
    return msgspec.structs.replace(facts, weights=weights, draft=draft, reading=False)


def draft_fingerprint(config: bytes, weights: bytes) -> bytes:
    """Fingerprint of a draft model, from those of its config and of its weights."""
    return hashlib.blake2b(config + weights, digest_size=FINGERPRINT_BYTES).digest()


def layer_facts(alike: Mapping[tuple[str, str, str], Iterable[int]]) -> tuple[LayerFacts, ...]:
    """Facts of a rank's layers.

    Args:
        alike: numbers of layers by what they have in common: label, attention, and rotation as text, which is empty
            where there is none or it is not known.
    """
    return tuple(
        LayerFacts(
            layers=tuple(sorted(numbers)),
            label=label,
            attention=attention,
            rotation=_rotation_fingerprint(rotation) if rotation else b"",
            rotated=rotation[:MOST_TEXT],
        )
        for (label, attention, rotation), numbers in alike.items()
    )


def _rotation_fingerprint(text: str) -> bytes:
    return hashlib.blake2b(
        text.encode(), digest_size=FINGERPRINT_BYTES, person=b"pd-rotation"
    ).digest()


def unread_problem(producer: ModelFacts, consumer: ModelFacts) -> str:
    """Why it is not known yet whether two engines serve the same weights; empty if it is known, or can never be
    known."""
    for side, facts in (("producer", producer), ("consumer", consumer)):
        if facts.reading or (facts.samples and not facts.weights):
            return f"the {side} has not read all bytes of its weights yet"
    return ""


def model_problem(producer: ModelFacts, consumer: ModelFacts) -> str:
    """Why KV of the producer is not KV of the consumer's model, and what to do; empty if it is."""
    if producer.model_id and consumer.model_id and producer.model_id != consumer.model_id:
        return (
            f"model_id {producer.model_id!r} at the producer, {consumer.model_id!r} at the consumer: "
            "must be the same (config key model_id)"
        )
    if producer.config != consumer.config:
        return _config_problem(producer, consumer)
    return weights_problem(producer, consumer) or _layers_problem(producer, consumer)


def weights_problem(producer: ModelFacts, consumer: ModelFacts) -> str:
    """Why the weights of two engines are not known to be the same; empty if they are."""
    if producer.version != consumer.version:
        return (
            f"weights of version {producer.version!r} at the producer, {consumer.version!r} at the "
            "consumer: update both engines to the same version"
        )
    if producer.version:
        return ""
    same_part = producer.held == consumer.held
    if producer.updates or consumer.updates:
        if same_part and producer.loaded and producer.loaded == consumer.loaded:
            return ""
        return (
            f"weights have changed while the engines served ({producer.updates} times at the "
            f"producer, {consumer.updates} at the consumer), and are not known to be the same now: "
            "tell both engines the version of their weights (docs/configuration.md, weights that change)"
        )
    both = [(producer.weights, consumer.weights)]
    if same_part:
        both.append((producer.loaded, consumer.loaded))
    for ours, theirs in both:
        if not ours or not theirs:
            continue
        if ours == theirs:
            return ""
        return (
            f"weights differ{_sources(producer, consumer)}: both engines must serve the same weights "
            f"(fingerprint of all bytes: {_hex(ours)} at the producer, {_hex(theirs)} at the consumer)"
            f"{_older(producer, consumer)}"
        )
    if producer.model_id and producer.model_id == consumer.model_id:
        return ""
    lacking = "producer" if not producer.weights else "consumer"
    return (
        f"the weights of the {lacking} were not found on its disk, so that nothing shows that both "
        "serve the same: give both engines the same name of the model (config key model_id)"
    )


def spoken(facts: ModelFacts) -> ModelFacts:
    """The facts without what is there for messages only."""
    return msgspec.structs.replace(facts, source="", fields=())


def _config_problem(producer: ModelFacts, consumer: ModelFacts) -> str:
    unlike = fields_unlike(producer.fields, consumer.fields)
    if not unlike:  # an older version does not tell its fields
        prints = f"{_hex(producer.config)} at the producer, {_hex(consumer.config)} at the consumer"
        unlike = f"compare config.json and the flags (fingerprint {prints})"
    return (
        f"configs of the models differ{_sources(producer, consumer)}: {unlike}: both engines must serve the same "
        "config.json with the same --dtype, --quantization and overrides"
    )


def _sources(producer: ModelFacts, consumer: ModelFacts) -> str:
    """Both models' sources, for a message; empty unless both engines name a source and the two differ."""
    ours, theirs = producer.source, consumer.source
    if not ours or not theirs or ours == theirs:
        return ""
    return printable(f" (the producer serves {ours}, the consumer {theirs})")


def _older(producer: ModelFacts, consumer: ModelFacts) -> str:
    """Whether the difference may be one of versions."""
    older = [
        side for side, facts in (("producer", producer), ("consumer", consumer)) if facts.samples
    ]
    if len(older) != 1:
        return ""
    return (
        f"; or only their fingerprints differ: the {older[0]}'s pd-connector is older, and reads torch's archives, GGUF files "
        "and draft models in another way: upgrade it"
    )


def drafts_alike(producer: ModelFacts, consumer: ModelFacts) -> bool:
    """Whether KV of the draft model may pass, too."""
    return bool(producer.draft) and producer.draft == consumer.draft


def draft_problem(producer: ModelFacts, consumer: ModelFacts) -> str:
    """Why a consumer that drafts (speculative decoding) does not take this producer's KV; empty if it does. Without its
    draft model's KV of the prompt, nearly none of its drafts would be accepted, also in later turns."""
    if drafts_alike(producer, consumer):
        return ""
    if not consumer.draft:
        return (
            "the weights of the consumer's draft model were not found on its disk, or have changed while it served, so that "
            "nothing shows whose drafts are alike: give both engines the same name of the model (config key model_id), or "
            "restart it"
        )
    has = "another draft model" if producer.draft else "no draft model"
    return (
        f"the consumer drafts (--speculative-config; SGLang: --speculative-algorithm) and the producer has {has}: its KV would end the acceptance of drafts; "
        f"start both engines with the same draft model and settings{_older(producer, consumer)}"
    )


def model_digest(facts: ModelFacts) -> bytes:
    """Digest of all facts that a rank reports about its model."""
    text = msgspec.json.encode(spoken(facts))
    return hashlib.blake2b(text, digest_size=FINGERPRINT_BYTES, person=b"pd-facts").digest()


def described(facts: ModelFacts) -> str:
    """A model in a few words, by its source and fingerprints, for messages."""
    weights = facts.weights or facts.loaded
    named = f" model_id {facts.model_id!r}" if facts.model_id else ""
    version = f" version {facts.version!r}" if facts.version else ""
    source = f"{printable(facts.source)} " if facts.source else ""
    return f"{source}config {_hex(facts.config)} weights {_hex(weights)}{named}{version}"


def _layers_problem(producer: ModelFacts, consumer: ModelFacts) -> str:
    there = _by_layer(producer)
    for number, facts in _by_layer(consumer).items():
        other = there.get(number)
        if other is None or number >= DRAFT_LAYERS:
            continue
        if other.label != facts.label:
            return (
                f"layer {number} is {other.label!r} at the producer and {facts.label!r} at the "
                "consumer: both engines must cache the same parts of the model"
            )
        if other.attention != facts.attention:
            return (
                f"layer {number} attends with {other.attention} at the producer, with "
                f"{facts.attention} at the consumer"
            )
        if other.rotation != facts.rotation:
            return (
                f"layer {number} rotates keys by {other.rotated or 'nothing'} at the producer, by "
                f"{facts.rotated or 'nothing'} at the consumer: rotation may depend on the longest "
                "sequence (--max-model-len) and on overrides of the config"
            )
    return ""


def _by_layer(facts: ModelFacts) -> dict[int, LayerFacts]:
    return {number: each for each in facts.layers for number in each.layers}


def _hex(fingerprint: bytes) -> str:
    return fingerprint.hex() or "(none)"
