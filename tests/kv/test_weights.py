# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's fingerprint sees every tensor, and nothing but the tensors."""

import errno
import fcntl
import io
import json
import os
import pwd
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from pd_connector.kv import weights as module
from pd_connector.kv.checkpoint_files import CheckpointFiles, OpenFile, weight_files

Tensors = Mapping[str, np.ndarray]


def read_weights(
    path: Path, *, cache: Path | None = None, load_format: str = "auto"
) -> bytes | None:
    files = CheckpointFiles.open(path, load_format)
    if files is None:
        return None
    try:
        return module.fingerprint(files.files, cache)
    finally:
        files.close()


def print_of(parts: Sequence[CheckpointFiles]) -> bytes:
    """The fingerprint of a model that is loaded from these checkpoints, as they are open."""
    return module.combined([module.fingerprint(part.files) for part in parts])


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
    assert read_weights(other) == read_weights(folder)


def test_copies_beside_the_indexed_files_do_not_count(tmp_path: Path, folder: Path) -> None:
    before = read_weights(folder)
    index = {"weight_map": dict.fromkeys(tensors(), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save(folder, tensors(1), "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"an older copy")
    assert read_weights(folder) == before


def test_whole_files_are_read_once_for_as_long_as_they_stay_as_they_are(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "weights.json"
    first = read_weights(folder, cache=cache)
    read: list[str] = []
    whole = module._sum
    monkeypatch.setattr(
        module, "_sum", lambda file, *rest: (read.append(file.name), whole(file, *rest))[1]
    )
    assert read_weights(folder, cache=cache) == first
    assert read == []
    moved = folder.rename(tmp_path / "elsewhere")
    assert read_weights(moved, cache=cache) == first
    assert read == [], "it is still the same file"
    file = moved / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    before = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_weights(moved, cache=cache) != first
    assert read == [file.name], "although its time of modification was set back"


@pytest.mark.parametrize("content", ["", "not JSON", "[]", '{"a": 7}'])
def test_a_cache_that_cannot_be_read_is_written_anew(
    tmp_path: Path, folder: Path, content: str
) -> None:
    cache = tmp_path / "weights.json"
    cache.write_text(content)
    first = read_weights(folder, cache=cache)
    assert json.loads(cache.read_text())
    assert read_weights(folder, cache=cache) == first


def archive(entries: Mapping[str, bytes], name: str = "archive") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for entry, content in entries.items():
            file.writestr(zipfile.ZipInfo(f"{name}/{entry}"), content)
    return made.getvalue()


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


@pytest.mark.parametrize("name", ["model-Q4_K_M.gguf", "pytorch_model.bin", "model.pt", "a.pth"])
@pytest.mark.parametrize("place", [0, 70_000, -1])
def test_every_byte_of_a_file_that_lists_no_tensors_counts(
    tmp_path: Path, name: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 1 << 16)  # several pieces
    file = tmp_path / name
    data = bytearray(os.urandom(100_000))
    file.write_bytes(data)
    before = read_weights(file)
    assert before
    moved = file.rename(file.with_stem("other"))
    assert read_weights(moved) == before
    data[place] ^= 1
    moved.write_bytes(data)
    assert read_weights(moved) != before
    moved.write_bytes(data[1 << 16 :] + data[: 1 << 16])
    assert read_weights(moved) != before, "the order of the pieces counts, too"


def test_an_empty_file_is_not_the_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"weights")
    before = read_weights(tmp_path)
    (tmp_path / "b.bin").write_bytes(b"")
    assert read_weights(tmp_path) != before


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


def test_of_ranks_that_begin_together_one_reads_all_bytes(tmp_path: Path, folder: Path) -> None:
    cache = tmp_path / "cache" / "weights.json"
    code = (
        "import logging, sys; from pathlib import Path; from pd_connector.kv.weights import fingerprint\n"
        "from pd_connector.kv.checkpoint_files import CheckpointFiles\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "files = CheckpointFiles.open(Path(sys.argv[1]))\n"
        "print(fingerprint(files.files, Path(sys.argv[2])).hex())"
    )
    command = [sys.executable, "-c", code, str(folder), str(cache)]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [rank.communicate() for rank in ranks]
    assert len({found for found, _ in said}) == 1
    assert sum(log.count("reading all") for _, log in said) == 1, said


@pytest.fixture
def hung(tmp_path: Path, folder: Path) -> Iterator[Path]:
    """The cache of another process, which hangs while it reads `folder`."""
    cache = tmp_path / "cache" / "weights.json"
    code = (
        "import sys, time; from pathlib import Path; from pd_connector.kv import weights\n"
        "from pd_connector.kv.checkpoint_files import CheckpointFiles\n"
        "weights._sum = lambda *_: (print('reads', flush=True), time.sleep(600))\n"
        "weights.fingerprint(CheckpointFiles.open(Path(sys.argv[1])).files, Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(folder), str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        yield cache
        reader.kill()


def test_a_reader_that_hangs_holds_up_readers_of_its_file_only_and_those_not_for_ever(
    hung: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(module.time, "sleep", waited.append)
    other = save(tmp_path / "other", tensors(1))
    assert read_weights(other, cache=hung) == read_weights(other)
    assert waited == []
    monkeypatch.setattr(module, "_SPARE_S", 0.2)
    assert read_weights(folder, cache=hung) == read_weights(folder)
    assert waited
    assert len(json.loads(hung.read_text())) == 2


def test_what_another_process_has_written_meanwhile_is_kept(tmp_path: Path) -> None:
    cache = tmp_path / "weights.json"
    for key in ("theirs", "ours"):
        module._write_cache(cache, {key: 1})
    assert module._read_cache(cache).keys() == {"theirs", "ours"}


@pytest.mark.parametrize(
    ("told", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("", 8)]
)
def test_no_more_threads_read_than_a_container_has_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(told)
    monkeypatch.setattr(module, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert module._cores() == cores


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
    first = read_weights(folder, cache=blocked)
    assert first == read_weights(folder)
    assert temporary.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(module, "_sum", lambda *_: pytest.fail("it was read before"))
    assert read_weights(folder, cache=blocked) == first
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
    assert read_weights(folder, cache=blocked) == read_weights(folder)
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
    assert read_weights(folder, cache=cache) == read_weights(folder)
    assert [file.name for file in cache.parent.iterdir()] == ["weights.lock"]
    (said,) = caplog.messages
    assert f"{cache.parent} (No space left on device)" in said


def test_a_file_system_without_locks_costs_time_and_no_fingerprint(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a home on Lustre that is mounted without locks."""

    def lacks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    wanted = read_weights(folder)
    monkeypatch.setattr(fcntl, "lockf", lacks)
    cache = tmp_path / "cache" / "weights.json"
    assert read_weights(folder, cache=cache) == wanted
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
def test_one_row_that_differs_is_seen(tmp_path: Path, kind: str) -> None:
    made = {**tensors(), "embed": np.zeros((40_000, 64), np.float32)}
    made["experts.gate_up_proj"] = np.zeros((64, 2048, 64), np.float32)
    ours = read_weights(save(tmp_path / "model", made))
    row = (
        made["embed"][10] if kind == "a token's embedding" else made["experts.gate_up_proj"][3, 701]
    )
    row += 1
    assert read_weights(save(tmp_path / "other", made)) != ours


def test_the_fingerprint_of_safetensors_is_the_first_releases(tmp_path: Path) -> None:
    """Engines of both versions must be able to find that their weights are the same."""
    made = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(3, np.float32)}
    found = read_weights(save(tmp_path, made))
    assert found == bytes.fromhex("6a22e46fe57f5752d62e3e56f691cb06")


def test_what_is_known_is_told_as_it_is_read(folder: Path, tmp_path: Path) -> None:
    files = CheckpointFiles.open(folder)
    assert files is not None
    cache = tmp_path / "weights.json"
    told: list[int] = []
    assert module.known_fingerprint(files.files, cache) == b""
    first = module.fingerprint(files.files, cache, told.append)
    assert sum(told) == sum(tensor.nbytes for tensor in tensors().values())
    assert module.known_fingerprint(files.files, cache) == first
    told.clear()
    assert module.fingerprint(files.files, cache, told.append) == first
    assert told == [files.nbytes], "what was read before is known at once"


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = module.safetensors

    def cut_off(file: OpenFile) -> object:
        found = listed(file)
        os.truncate(folder / "model.safetensors", file.size - 1)
        return found

    monkeypatch.setattr(module, "safetensors", cut_off)
    with pytest.raises(OSError, match="cut off while it was read"):
        read_weights(folder)


def test_forms_are_of_names_dtypes_and_shapes(tmp_path: Path, folder: Path) -> None:
    def forms(path: Path) -> bytes:
        files = CheckpointFiles.open(path)
        assert files is not None
        return module.tensor_forms(files.files)

    trained = {name: tensor + 1 for name, tensor in tensors().items()}
    assert forms(save(tmp_path / "trained", trained)) == forms(folder)
    del trained["layers.3.norm"]
    assert forms(save(tmp_path / "part", trained)) != forms(folder)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert forms(tmp_path / "model.gguf") == b"", "it lists none"


def test_several_checkpoints_count_in_their_order() -> None:
    one, two = bytes(16), bytes([1] * 16)
    assert module.combined([one]) == one
    assert len({module.combined(found) for found in ([one, two], [two, one], [one])}) == 3
    assert module.combined([one, b""]) == b"", "one is not known"
