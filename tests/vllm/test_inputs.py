# SPDX-License-Identifier: Apache-2.0
"""Images count by content, not by name or path."""

from collections import UserDict
from types import SimpleNamespace

import torch

from pd_connector.vllm.identity import inputs
from pd_connector.vllm.identity.inputs import AmbiguousInputs, RequestIdentity, processor_settings


def image(content, identifier, modality="image", offset=3):
    data = None
    if content is not None:
        data = {
            "pixel_values": SimpleNamespace(data=content),
            "image_grid_thw": SimpleNamespace(data=torch.tensor([1, 2, 2])),
        }
    position = SimpleNamespace(offset=offset)
    return SimpleNamespace(
        data=data, modality=modality, identifier=identifier, mm_position=position
    )


def request(features):
    return SimpleNamespace(
        prompt_token_ids=[1, 2, 3, 4, 5],
        cache_salt=None,
        lora_request=None,
        mm_features=list(features),
    )


def of(features):
    return RequestIdentity().of(request(features))


def test_an_image_counts_by_what_the_model_is_given():
    pixels = torch.arange(768.0).view(3, 256)
    before = of(features=[image(pixels, "hash with /models/a in it")])
    assert of(features=[image(pixels.clone(), "hash with /elsewhere in it")]) == before
    others = [
        image(pixels + 1, "x"),
        image(pixels.view(256, 3), "x"),
        image(pixels.bfloat16(), "x"),
        image([pixels], "x"),
        image(pixels, "x", modality="video"),
        image(pixels, "x", offset=4),
    ]
    assert len({of(features=[other]) for other in others} - {before}) == len(others)


def test_an_image_behind_the_end_does_not_count():
    """The prefill engine leaves the last token of some prompts, and an image may begin there."""
    known, pixels = RequestIdentity(), torch.arange(768.0).view(3, 256)
    whole = request([image(pixels, "x"), image(pixels + 1, "y", offset=4)])
    shorter = request(whole.mm_features)
    shorter.prompt_token_ids = whole.prompt_token_ids[:4]
    assert known.of(shorter) == known.of(whole, 4) == known.of(shorter, 4)
    assert known.of(shorter) != known.of(whole)
    within = request([image(pixels, "x"), image(pixels + 1, "y", offset=3)])
    assert known.of(within, 4) != known.of(whole, 4)


def test_a_name_that_a_client_gives_two_images_finds_no_kv_of_either_image_under_another_name():
    """Chunks of the pool outlive the request, and other clients find them by their images."""
    identity = RequestIdentity()
    first, second = torch.zeros(1, 256), torch.ones(1, 256)
    known = [
        identity.inputs(request([image(pixels, name)]))
        for pixels, name in ((first, "hash of the first"), (second, "hash of the second"))
    ]
    named = [identity.inputs(request([image(pixels, "mine")])) for pixels in (first, second)]
    assert not set(known) & set(named)
    assert known[0] == RequestIdentity().inputs(request([image(first, "hash of the first")]))
    assert known[0] != known[1]


def test_kv_is_not_exact_if_its_image_has_an_identifier_under_which_another_one_came():
    """A client can choose it. vLLM then has the encoder's output, or pages, of either image."""
    identity = RequestIdentity()
    theirs, ours = torch.zeros(1, 256), torch.ones(1, 256)
    first = request([image(theirs, "hash of ours"), image(theirs, "theirs")])
    identity.note(first)
    same = request([image(theirs.clone(), "hash of ours")])
    identity.note(same)
    assert identity.exact(first)
    assert not AmbiguousInputs(identity).holds(same)
    second = request([image(ours, "hash of ours")])
    assert identity.of(second) == RequestIdentity().of(second), "counts by its own content"
    for each in (first, same, second):
        assert not identity.exact(each)
        assert AmbiguousInputs(identity).holds(each)
    assert identity.exact(request([image(theirs, "theirs")]))


def test_an_image_that_vllm_keeps_is_hashed_once(monkeypatch):
    hashed, content = [], inputs._content
    monkeypatch.setattr(inputs, "_content", lambda data: (hashed.append(1), content(data))[1])
    identity, kept = RequestIdentity(), image(torch.ones(1, 256), "a")
    kept.data = UserDict(kept.data)  # as vLLM's is
    for _ in range(3):
        identity.note(request([kept]))
    assert hashed == [1]


def test_an_image_that_is_not_sent_again_is_known_by_its_identifier():
    identity = RequestIdentity()
    before = identity.of(request(features=[image(torch.ones(4), "a")]))
    assert identity.of(request(features=[image(None, "a")])) == before
    assert identity.of(request(features=[image(None, "b")])) != before


def test_an_image_in_shared_memory_is_known_by_its_identifier_and_not_by_its_place_there():
    """`--mm-processor-cache-type shm`: what an engine has instead of the image is its own."""

    def of_place(address, identifier, processor=""):
        data = {
            name: SimpleNamespace(data=value)
            for name, value in (("address", address), ("monotonic_id", 0), ("signature", [1, 2]))
        }
        position = SimpleNamespace(offset=3)
        feature = SimpleNamespace(
            data=data, modality="image", identifier=identifier, mm_position=position
        )
        return RequestIdentity(processor=processor).of(request(features=[feature]))

    assert of_place(0, "a") == of_place(4096, "a")
    assert of_place(0, "a") != of_place(0, "b")
    assert of_place(0, "a") != of_place(0, "a", "other settings"), "which it does not tell"


def test_an_image_of_which_the_engine_has_the_size_only_counts_by_its_identifier_too():
    """Where an encode engine has the rest, images of one size would all be the same."""

    def of_size(identifier):
        data = {"image_grid_thw": SimpleNamespace(data=torch.tensor([1, 16, 16]))}
        feature = image(None, identifier)
        feature.data = data
        return of(features=[feature])

    assert of_size("a") == of_size("a")
    assert of_size("a") != of_size("b")


def test_how_an_engine_processes_images_counts(tmp_path):
    def settings(**told):
        known = {"mm_processor_kwargs": None, "media_io_kwargs": {}} | told
        model = SimpleNamespace(
            multimodal_config=SimpleNamespace(**known), model=str(tmp_path), revision=None
        )
        return processor_settings(SimpleNamespace(model_config=model))

    text_only = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None))
    assert processor_settings(text_only) == ""
    before = settings()
    assert settings() == before
    assert settings(mm_processor_kwargs={"do_normalize": False}) != before
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    assert settings() != before


def test_tensors_within_mappings_count_in_every_element():
    """Their text would leave most of them out."""
    tensors = [torch.zeros(10_000), torch.zeros(10_000)]
    tensors[1][5_000] = 1
    digests = {inputs._content({"audio": {"features": tensor}}) for tensor in tensors}
    assert len(digests) == 2
