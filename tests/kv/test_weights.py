# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's fingerprint sees every tensor, and nothing but the tensors."""

import errno
import fcntl
import io
import json
import os
import pwd
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from pd_connector.kv import weights as module
from pd_connector.kv.checkpoint_files import CheckpointFiles, Weights, weight_files

Tensors = Mapping[str, np.ndarray]


def read_weights(
    path: Path, *, full: bool = False, cache: Path | None = None, load_format: str = "auto"
) -> Weights | None:
    files = CheckpointFiles.open(path, load_format)
    if files is None:
        return None
    try:
        return module.read_weights([files], full=full, cache=cache)
    finally:
        files.close()


def tensors(layers: int = 12) -> dict[str, np.ndarray]:
    """A small model: large and small tensors of every layer."""
    chance = np.random.default_rng(0)
    made = {"embed": chance.random((1000, 64), np.float32)}
    for layer in range(layers):
        for name, shape in (("q_proj", (64, 64)), ("k_proj", (16, 64)), ("norm", (64,))):
            made[f"layers.{layer}.{name}"] = chance.random(shape, np.float32)
    return made


def safetensors(made: Tensors, metadata: bool = False) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if metadata else {}
    at = 0
    for name, tensor in made.items():
        span = [at, at + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(t.tobytes() for t in made.values())


def save(folder: Path, made: Tensors, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(safetensors(made))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "model", tensors())


def test_every_single_tensor_counts(tmp_path: Path, folder: Path) -> None:
    before = read_weights(folder)
    for name in tensors():
        changed = tensors()
        changed[name] = changed[name] * np.float32(1.5)
        assert read_weights(save(tmp_path / "other", changed)) != before, name


def test_all_k_projections_scaled_are_another_model(tmp_path: Path, folder: Path) -> None:
    changed = {
        name: tensor * np.float32(1.5) if "k_proj" in name else tensor
        for name, tensor in tensors().items()
    }
    assert read_weights(save(tmp_path / "other", changed)) != read_weights(folder)


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "missing"])
def test_what_the_header_says_counts(tmp_path: Path, folder: Path, change: str) -> None:
    made = tensors()
    if change == "name":
        made["layers.0.w"] = made.pop("layers.0.norm")
    elif change == "shape":
        made["layers.0.q_proj"] = made["layers.0.q_proj"].reshape(32, 128)
    elif change == "missing":
        del made["layers.0.norm"]
    other = save(tmp_path / "other", made)
    if change == "dtype":
        file = other / "model.safetensors"
        file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))
    assert read_weights(other) != read_weights(folder)


def test_names_and_number_of_the_files_do_not_count(tmp_path: Path, folder: Path) -> None:
    made = list(tensors().items())
    other = save(tmp_path / "other", dict(reversed(made[:10])), "b.safetensors")
    save(other, dict(made[10:]), "a.safetensors")
    for full in (False, True):
        assert read_weights(other, full=full) == read_weights(folder, full=full)


def test_copies_beside_the_indexed_files_do_not_count(tmp_path: Path, folder: Path) -> None:
    before = read_weights(folder)
    index = {"weight_map": dict.fromkeys(tensors(), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save(folder, tensors(1), "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"an older copy")
    assert read_weights(folder) == before


def test_a_bit_between_samples_counts_only_if_all_bytes_are_read(
    tmp_path: Path, folder: Path
) -> None:
    changed = {**tensors(), "embed": np.zeros((40_000, 64), np.float32)}
    save(folder, changed)
    changed["embed"][10, 3] += 1
    other = save(tmp_path / "other", changed)
    ours, theirs = read_weights(folder, full=True), read_weights(other, full=True)
    assert ours is not None
    assert theirs is not None
    assert ours._replace(full=b"") == theirs._replace(full=b""), (
        "samples are the same, so that the test tests what it says"
    )
    assert ours.full != theirs.full


def test_whole_files_are_read_once_for_as_long_as_they_stay_as_they_are(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "weights.json"
    first = read_weights(folder, full=True, cache=cache)
    read: list[str] = []
    whole = module._whole
    monkeypatch.setattr(
        module, "_whole", lambda file, *rest: (read.append(file.name), whole(file, *rest))[1]
    )
    assert read_weights(folder, full=True, cache=cache) == first
    assert read == []
    moved = folder.rename(tmp_path / "elsewhere")
    assert read_weights(moved, full=True, cache=cache) == first
    assert read == [], "it is still the same file"
    file = moved / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    before = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_weights(moved, full=True, cache=cache) != first
    assert read == [file.name], "although its time of modification was set back"


@pytest.mark.parametrize("content", ["", "not JSON", "[]", '{"a": 7}'])
def test_a_cache_that_cannot_be_read_is_written_anew(
    tmp_path: Path, folder: Path, content: str
) -> None:
    cache = tmp_path / "weights.json"
    cache.write_text(content)
    first = read_weights(folder, full=True, cache=cache)
    assert json.loads(cache.read_text())
    assert read_weights(folder, full=True, cache=cache) == first


def archive(entries: Mapping[str, bytes], name: str = "archive") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for entry, content in entries.items():
            file.writestr(zipfile.ZipInfo(f"{name}/{entry}"), content)
    return made.getvalue()


def test_every_byte_of_an_archive_of_torchs_counts(tmp_path: Path) -> None:
    entries = {"data.pkl": b"names", "data/0": bytes(1 << 20), "data/1": bytes(1 << 20)}
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(archive(entries))
    before = read_weights(tmp_path)
    file.write_bytes(archive(entries, "other name"))
    assert read_weights(tmp_path) == before
    changed = bytearray(1 << 20)
    changed[123_456] = 1
    file.write_bytes(archive({**entries, "data/1": bytes(changed)}))
    assert read_weights(tmp_path) != before


@pytest.mark.parametrize("place", [0, 3, (1 << 20) - 1])
def test_an_archive_without_checksums_is_told_by_its_bytes(tmp_path: Path, place: int) -> None:
    """As torch writes one if told to compute no CRC."""

    def written(changed: bytes, name: str) -> Path:
        entries = {"data.pkl": b"names", "data/0": bytes(1 << 20), "data/1": changed}
        plain = bytearray(archive(entries))
        with zipfile.ZipFile(io.BytesIO(plain)) as read:
            for entry in read.infolist():
                crc = entry.CRC.to_bytes(4, "little")
                for header, offset in ((b"PK\3\4", 14), (b"PK\1\2", 16)):
                    at = plain.find(header)
                    while at >= 0:
                        if plain[at + offset : at + offset + 4] == crc:
                            plain[at + offset : at + offset + 4] = bytes(4)
                        at = plain.find(header, at + 4)
        file = tmp_path / name
        file.write_bytes(plain)
        return file

    other = bytearray(1 << 20)
    other[place] = 1
    assert read_weights(written(bytes(1 << 20), "a.bin")) != read_weights(
        written(bytes(other), "b.bin")
    )


def test_the_files_that_the_engine_loads_are_those_that_count(tmp_path: Path, folder: Path) -> None:
    index = {"weight_map": dict.fromkeys(tensors(), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save(folder, tensors(1), "consolidated.safetensors")
    (folder / "model.pt").write_bytes(archive({"data/0": b"others"}))
    (folder / "pytorch_model.bin").write_bytes(archive({"data/0": b"more"}))
    names = {
        load_format: [file.name for file in weight_files(folder, load_format)]
        for load_format in ("auto", "safetensors", "mistral", "pt", "npcache")
    }
    assert names == {
        "auto": ["model.safetensors"],
        "safetensors": ["model.safetensors"],
        "mistral": ["consolidated.safetensors"],
        "pt": ["model.pt"],
        "npcache": ["pytorch_model.bin"],
    }
    assert len({read_weights(folder, load_format=each) for each in names}) == 4


def test_one_file_of_a_form_that_is_not_known_is_sampled(tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    data = bytearray(os.urandom(3 << 20))
    file.write_bytes(data)
    before = read_weights(file)
    assert before is not None
    moved = file.rename(tmp_path / "other.gguf")
    assert read_weights(moved) == before
    data[: 1 << 16] = os.urandom(1 << 16)
    moved.write_bytes(data)
    assert read_weights(moved) != before


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (32, 2), (71, 1), (48, 8)])
def test_keys_of_a_fused_projection_count(tmp_path: Path, heads: int, kv_heads: int) -> None:
    """The form of Falcon, GLM, Phi and DBRX."""
    made = tensors()
    fused = np.random.default_rng(1).random(((heads + 2 * kv_heads) * 64, 512), np.float32)
    before = read_weights(save(tmp_path / "model", {**made, "qkv_proj": fused}))
    fused[heads * 64 : (heads + kv_heads) * 64] *= np.float32(1.5)
    after = read_weights(save(tmp_path / "other", {**made, "qkv_proj": fused}))
    assert before is not None
    assert after is not None
    assert before.sampled != after.sampled


def test_columns_of_a_fused_projection_count(tmp_path: Path) -> None:
    """The form of GPT-2, with Q, K and V beside each other in every row."""
    made = {**tensors(), "c_attn": np.random.default_rng(1).random((768, 2304), np.float32)}
    before = read_weights(save(tmp_path / "model", made))
    made["c_attn"][:, 768:1536] *= np.float32(1.5)
    after = read_weights(save(tmp_path / "other", made))
    assert before is not None
    assert after is not None
    assert before.sampled != after.sampled


def test_every_single_expert_of_a_fused_tensor_counts(tmp_path: Path) -> None:
    made = {**tensors(), "experts.down_proj": np.zeros((64, 64, 256), np.float32)}
    before = read_weights(save(tmp_path / "model", made))
    for expert in range(64):
        made["experts.down_proj"][expert] = 1
        assert read_weights(save(tmp_path / "other", made)) != before, expert
        made["experts.down_proj"][expert] = 0


def gguf(made: Tensors) -> bytes:
    """A GGUF file with metadata of every kind."""

    def text(told: str) -> bytes:
        return struct.pack("<Q", len(told)) + told.encode()

    values = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("llama.rope.freq_base") + struct.pack("<If", 6, 10000.0),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("scores") + struct.pack("<IIQ2d", 9, 12, 2, 0.5, 1.5),
        text("flag") + struct.pack("<I?", 7, True),
    ]
    infos, at = [], 0
    for name, tensor in made.items():
        dims = struct.pack(f"<I{tensor.ndim}Q", tensor.ndim, *reversed(tensor.shape))
        infos.append(text(name) + dims + struct.pack("<IQ", 0, at))
        at += -(-tensor.nbytes // 64) * 64
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(values)) + b"".join((*values, *infos))
    data = b"".join(t.tobytes().ljust(-(-t.nbytes // 64) * 64, b"\0") for t in made.values())
    return head.ljust(-(-len(head) // 64) * 64, b"\0") + data


def test_every_tensor_of_a_gguf_file_counts(tmp_path: Path) -> None:
    big = {"embed": np.zeros((4096, 512), np.float32)}
    file = tmp_path / "model-Q4_K_M.gguf"

    def read(made: Tensors) -> module.Weights | None:
        file.write_bytes(gguf({**big, **made}))
        return read_weights(file)

    before = read(tensors())
    assert read(tensors()) == before
    for name in tensors():
        changed = tensors()
        changed[name] = changed[name] * np.float32(1.5)
        assert read(changed) != before, name
    renamed = tensors()
    renamed["layers.0.w"] = renamed.pop("layers.0.norm")
    assert read(renamed) != before


@pytest.mark.parametrize("kept", [4, 5, 30, 300, 1000, -1])
def test_a_gguf_file_that_is_cut_off_is_sampled_as_a_whole(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(tensors())[:kept])
    assert read_weights(file) is not None


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").write_bytes(b"x")
    assert read_weights(tmp_path) is None
    assert weight_files(tmp_path / "nowhere") == []


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_file_that_is_cut_off_is_an_error(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read_weights(folder)


def test_a_large_checkpoint_is_sampled_and_not_read(tmp_path: Path) -> None:
    header = {"w": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}
    text = json.dumps(header).encode()
    with (tmp_path / "huge.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + (1 << 40))  # sparse: a terabyte of zeros
    assert read_weights(tmp_path) is not None


def test_of_ranks_that_begin_together_one_reads_all_bytes(tmp_path: Path, folder: Path) -> None:
    cache = tmp_path / "cache" / "weights.json"
    code = (
        "import logging, sys; from pathlib import Path; from pd_connector.kv.weights import read_weights\n"
        "from pd_connector.kv.checkpoint_files import CheckpointFiles\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "files = CheckpointFiles.open(Path(sys.argv[1]))\n"
        "print(read_weights([files], full=True, cache=Path(sys.argv[2])).full.hex())"
    )
    command = [sys.executable, "-c", code, str(folder), str(cache)]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [rank.communicate() for rank in ranks]
    assert len({found for found, _ in said}) == 1
    assert sum(log.count("hashing") for _, log in said) == 1, said


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is taken where the user's own cannot be written."""
    module._complain.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"pd-connector-{os.geteuid()}"


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A cache that cannot be written."""
    (tmp_path / "a file").write_text("")
    return tmp_path / "a file" / "pd-connector" / "weights.json"


def test_where_the_cache_cannot_be_written_ranks_share_a_temporary_one_and_say_so_once(
    temporary: Path,
    blocked: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = read_weights(folder, full=True, cache=blocked)
    assert first == read_weights(folder, full=True)
    assert temporary.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(module, "_whole", lambda *_: pytest.fail("it was read before"))
    assert read_weights(folder, full=True, cache=blocked) == first
    (said,) = caplog.messages
    assert f"{blocked.parent} (Not a directory): they are kept in {temporary}" in said
    assert "Set XDG_CACHE_HOME" in said


@pytest.mark.parametrize("made", ["a link", "open to others"])
def test_a_temporary_folder_that_others_could_write_is_not_believed(
    temporary: Path,
    blocked: Path,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    made: str,
) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    if made == "a link":
        temporary.symlink_to(tmp_path / "theirs")
    else:
        temporary.mkdir()
        temporary.chmod(0o777)
    assert read_weights(folder, full=True, cache=blocked) == read_weights(folder, full=True)
    assert not list(temporary.iterdir())
    (said,) = caplog.messages
    assert f"{temporary} is not a folder of this user alone): each rank reads all" in said


def test_a_full_disk_is_told_and_leaves_no_draft(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module._complain.cache_clear()
    monkeypatch.setattr(json, "dump", full)
    cache = tmp_path / "cache" / "weights.json"
    assert read_weights(folder, full=True, cache=cache) == read_weights(folder, full=True)
    assert [file.name for file in cache.parent.iterdir()] == ["weights.lock"]
    (said,) = caplog.messages
    assert f"{cache.parent} (No space left on device)" in said


def test_a_file_system_without_locks_costs_time_and_no_fingerprint(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a home on Lustre that is mounted without `flock`."""

    def lacks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    wanted = read_weights(folder, full=True)
    monkeypatch.setattr(fcntl, "flock", lacks)
    cache = tmp_path / "cache" / "weights.json"
    assert read_weights(folder, full=True, cache=cache) == wanted
    assert cache.is_file(), "later starts find it"


def test_a_user_without_a_home_has_a_temporary_cache(
    monkeypatch: pytest.MonkeyPatch, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that is started with a number for its user."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    for _ in range(2):
        assert module.cache_file() == temporary / "weights.json"
    (said,) = caplog.messages
    assert "this user has no home" in said


@pytest.mark.parametrize("kind", ["a token's embedding", "a row of a fused expert"])
def test_one_row_that_differs_is_seen_by_all_bytes_and_not_by_samples(
    tmp_path: Path, kind: str
) -> None:
    made = {**tensors(), "embed": np.zeros((40_000, 64), np.float32)}
    made["experts.gate_up_proj"] = np.zeros((64, 2048, 64), np.float32)
    ours = read_weights(save(tmp_path / "model", made), full=True)
    row = (
        made["embed"][10] if kind == "a token's embedding" else made["experts.gate_up_proj"][3, 701]
    )
    row += 1
    theirs = read_weights(save(tmp_path / "other", made), full=True)
    assert ours is not None
    assert theirs is not None
    assert ours._replace(full=b"") == theirs._replace(full=b""), "samples are the same"
    assert ours.full != theirs.full


def test_all_bytes_of_an_archive_or_of_gguf_are_those_of_its_tensors(tmp_path: Path) -> None:
    entries = {"data.pkl": b"names", "data/0": os.urandom(1 << 16)}
    found = []
    for name, content in (
        ("a.bin", archive(entries)),
        ("b.bin", archive(entries, "other name")),
        ("c.bin", archive({**entries, "data/0": bytes(1 << 16)})),
    ):
        (tmp_path / name).write_bytes(content)
        found.append(read_weights(tmp_path / name, full=True))
    assert found[0] == found[1], "the archive's own name says nothing"
    assert found[0] is not None
    assert found[2] is not None
    assert found[0].full != found[2].full


def test_reading_all_bytes_can_be_stopped(folder: Path, tmp_path: Path) -> None:
    files = CheckpointFiles.open(folder)
    assert files is not None
    cache = tmp_path / "weights.json"
    assert module.full_fingerprint(files.files, cache, lambda: True) == b""
    assert not cache.exists()
