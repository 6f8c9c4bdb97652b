# SPDX-License-Identifier: Apache-2.0
"""Adapters and images count by content, not by name or path."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from pd_connector.vllm import adapter_loads, inputs
from pd_connector.vllm.inputs import RequestIdentity, adapter_settings, processor_settings

LoRAConfig = pytest.importorskip("vllm.config.lora").LoRAConfig
safetensors = pytest.importorskip("safetensors.torch")


def adapter(folder, scale=1.0, rank=8):
    """A LoRA adapter as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    weights = {f"layers.{i}.lora_{side}": torch.randn(8, 16) for i in range(2) for side in "AB"}
    weights["layers.1.lora_B"] *= scale
    safetensors.save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    return folder


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


def request(folder=None, name="sql", number=1, features=(), **options):
    lora = folder and SimpleNamespace(
        lora_name=name, lora_int_id=number, lora_path=str(folder), load_inplace=False
    )
    if lora:
        vars(lora).update(options)
    return SimpleNamespace(
        prompt_token_ids=[1, 2, 3], cache_salt=None, lora_request=lora, mm_features=list(features)
    )


def of(*arguments, **options):
    return RequestIdentity().of(request(*arguments, **options))


def test_an_adapter_is_the_same_wherever_it_lies(tmp_path):
    ours, theirs = adapter(tmp_path / "a"), adapter(tmp_path / "elsewhere" / "b")
    assert of(ours) == of(theirs, number=7)
    assert of(ours) != of()


def test_an_adapter_of_the_same_name_and_other_content_is_another(tmp_path):
    before = of(adapter(tmp_path / "a"))
    assert of(adapter(tmp_path / "b", scale=1.5)) != before, "one tensor of it"
    assert of(adapter(tmp_path / "c", rank=16)) != before, "its config"
    assert of(adapter(tmp_path / "d"), name="other") != before


def changed(folder, scale):
    """Other content under the same names, some time later."""
    adapter(folder, scale)
    for file in folder.iterdir():
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))


def test_an_adapters_files_are_read_once_and_again_if_it_is_loaded_again(tmp_path):
    identity, folder = RequestIdentity(), adapter(tmp_path / "a")
    before = identity.of(request(folder))
    assert identity.of(request(folder)) == before
    changed(folder, scale=2.0)
    after = identity.of(request(folder, load_inplace=True))
    assert after != before
    assert identity.of(request(folder)) == after
    assert identity.of(request(folder, number=2)) == after


def test_an_adapter_whose_files_have_changed_is_not_believed(tmp_path):
    """vLLM reads an adapter again that it had no room for: it may have either content."""
    identity, folder = RequestIdentity(), adapter(tmp_path / "a")
    before = identity.of(request(folder))
    changed(folder, scale=2.0)
    with pytest.raises(OSError, match="has changed since the adapter was loaded"):
        identity.of(request(folder))
    assert identity.of(request(folder, number=2)) != before, "loaded again, as another"


def test_an_adapter_counts_as_it_was_when_vllm_was_told_to_load_it(tmp_path):
    """Between that and the first request its files may be replaced."""
    core = pytest.importorskip("vllm.v1.engine.core")
    identity, folder, loaded = RequestIdentity(), adapter(tmp_path / "a"), []
    adapter_loads.watch_loads(identity)
    adapter_loads.watch_loads(RequestIdentity())
    engine = SimpleNamespace(
        model_executor=SimpleNamespace(add_lora=lambda lora: loaded.append(lora) or True)
    )
    asked = request(folder)
    assert core.EngineCore.add_lora(engine, asked.lora_request)
    assert loaded == [asked.lora_request], "once, however many watch"
    changed(folder, scale=2.0)
    with pytest.raises(OSError, match="has changed since the adapter was loaded"):
        identity.of(asked)
    nowhere = request(tmp_path / "nowhere", number=3).lora_request
    assert core.EngineCore.add_lora(engine, nowhere), "what vLLM says of it is not ours"


def test_an_adapter_that_was_changed_in_place_is_not_believed(tmp_path):
    identity, folder = RequestIdentity(), adapter(tmp_path / "a")
    identity.of(request(folder))
    file = folder / "adapter_model.safetensors"
    before, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(OSError, match="has changed since the adapter was loaded"):
        identity.of(request(folder))


def test_the_files_of_an_adapter_that_has_changed_are_not_read_for_every_request(
    tmp_path, monkeypatch
):
    identity, folder = RequestIdentity(), adapter(tmp_path / "a")
    identity.of(request(folder))
    changed(folder, scale=2.0)
    read = []
    fingerprint = inputs.adapter_fingerprint
    monkeypatch.setattr(
        inputs, "adapter_fingerprint", lambda path: (read.append(path), fingerprint(path))[1]
    )
    for _ in range(3):
        with pytest.raises(OSError, match="has changed since the adapter was loaded"):
            identity.of(request(folder))
    assert read == [folder]


def test_an_adapter_whose_files_were_only_touched_is_what_it_was(tmp_path):
    identity, folder = RequestIdentity(), adapter(tmp_path / "a")
    before = identity.of(request(folder))
    for file in folder.iterdir():
        file.touch()
        file.chmod(0o600)
    assert identity.of(request(folder)) == before


def test_an_adapter_whose_files_are_gone_is_what_it_was(tmp_path):
    identity, folder = RequestIdentity(), adapter(tmp_path / "a")
    before = identity.of(request(folder))
    shutil.rmtree(folder)
    assert identity.of(request(folder)) == before


def test_what_the_engine_does_with_an_adapter_counts(tmp_path):
    """As in `--lora-target-modules`."""

    def settings(**told):
        config = LoRAConfig(**told)
        model = SimpleNamespace(dtype=torch.bfloat16)
        return adapter_settings(SimpleNamespace(lora_config=config, model_config=model))

    assert adapter_settings(SimpleNamespace(lora_config=None)) == ""
    plain = settings()
    assert plain == settings(lora_dtype=torch.bfloat16) == settings(max_loras=4, max_lora_rank=64)
    folder = adapter(tmp_path / "a")
    others = [
        {"target_modules": ["o_proj"]},
        {"target_modules": ["o_proj", "qkv_proj"]},
        {"lora_dtype": torch.float32},
        {"enable_tower_connector_lora": True},
    ]
    found = [
        RequestIdentity(each).of(request(folder))
        for each in (plain, *(settings(**o) for o in others))
    ]
    assert len(set(found)) == 1 + len(others)
    assert settings(target_modules=["a", "b"]) == settings(target_modules=["b", "a"])
    assert RequestIdentity(settings(**others[0])).of(request()) == of(), "of requests with one"


def test_an_adapter_whose_files_are_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="no adapter's weights"):
        of(tmp_path / "nowhere")


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
