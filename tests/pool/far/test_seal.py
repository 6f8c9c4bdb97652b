# SPDX-License-Identifier: Apache-2.0
"""What is sealed opens only as what was put under that name, and to nobody without the key."""

import random
import secrets
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connector.errors import ConfigError, Miss, PoolError
from pd_connector.pool.far.seal import BLOCK_BYTES, HEADER, Seal, read_keys

KEY, OTHER = b"\1" * 32, b"\2" * 32
CHUNK = b"c" * 32


def sealed_as(seal: Seal, contents: bytes, key: bytes = CHUNK) -> tuple[str, bytearray]:
    name, out = seal.names(key)[0], bytearray(seal.sealed_bytes(len(contents)))

    def read(buffer: memoryview, offset: int) -> None:
        buffer[:] = contents[offset : offset + len(buffer)]

    seal.seal(name, len(contents), read, memoryview(out))
    return name, out


def refused(seal: Seal, name: str, data: bytes | bytearray) -> bool:
    try:
        seal.open(name, memoryview(data))
    except PoolError as error:
        return error.cause is Miss.DAMAGED
    return False


@pytest.mark.parametrize(
    "nbytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 7]
)
@pytest.mark.parametrize("keys", [(), (KEY,), (OTHER, KEY)], ids=["plain", "sealed", "two keys"])
def test_what_was_sealed_opens(keys: tuple[bytes, ...], nbytes: int) -> None:
    contents = random.Random(nbytes).randbytes(nbytes)
    seal = Seal(keys)
    assert seal.open(*_viewed(sealed_as(seal, contents))) == contents


def _viewed(named: tuple[str, bytearray]) -> tuple[str, memoryview]:
    return named[0], memoryview(named[1])


def test_two_seals_of_the_same_have_nothing_in_common() -> None:
    seal, contents = Seal((KEY,)), bytes(BLOCK_BYTES + 100)
    (_, first), (_, second) = (sealed_as(seal, contents) for _ in range(2))
    alike = sum(a == b for a, b in zip(first[HEADER.size :], second[HEADER.size :], strict=True))
    assert alike < len(first) / 100
    assert contents[:64] not in first


@given(place=st.integers(0, HEADER.size + 5000 + 15), bit=st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_no_bit_can_be_changed(place: int, bit: int) -> None:
    seal = Seal((KEY,))
    name, data = sealed_as(seal, bytes(range(250)) * 20)
    data[place] ^= 1 << bit
    assert refused(seal, name, data)


def test_without_a_key_a_changed_byte_opens() -> None:
    """The control: it is the seal that finds the change."""
    name, data = sealed_as(Seal(), b"right" * 100)
    data[-1] ^= 1
    assert Seal().open(name, memoryview(data)) != b"right" * 100


@given(cut=st.integers(0, HEADER.size + 2 * (BLOCK_BYTES + 16) + 25))
@settings(max_examples=30, deadline=None)
def test_a_cut_object_does_not_open(cut: int) -> None:
    seal = Seal((KEY,))
    name, data = sealed_as(seal, bytes(2 * BLOCK_BYTES + 10))
    assert refused(seal, name, data[: min(cut, len(data) - 1)])
    assert refused(seal, name, data + b"\0")


def test_objects_and_blocks_cannot_change_places() -> None:
    seal = Seal((KEY,))
    name, data = sealed_as(seal, secrets.token_bytes(2 * BLOCK_BYTES))
    other, there = sealed_as(seal, secrets.token_bytes(2 * BLOCK_BYTES), b"d" * 32)
    assert refused(seal, name, there), "another chunk's object"
    assert refused(seal, other, data)
    size = BLOCK_BYTES + 16
    first, second = data[HEADER.size : HEADER.size + size], data[HEADER.size + size :]
    assert refused(seal, name, data[: HEADER.size] + second + first), "blocks swapped"
    assert refused(seal, name, there[: HEADER.size] + data[HEADER.size :]), "another head"
    assert refused(seal, name, data[: HEADER.size + size] + there[HEADER.size + size :])


def test_an_old_object_of_the_same_chunk_opens_because_it_has_the_same_kv() -> None:
    """A replay of what hosts with the key have put under this name is what they have put."""
    seal = Seal((KEY,))
    name, old = sealed_as(seal, b"kv")
    sealed_as(seal, b"kv")
    assert seal.open(name, memoryview(old)) == b"kv"


def test_lengths_of_a_forged_head_allocate_nothing() -> None:
    seal = Seal((KEY,))
    name, data = sealed_as(seal, b"kv")
    fields = list(HEADER.unpack(data[: HEADER.size]))
    fields[2], fields[3] = (1 << 60) // BLOCK_BYTES % (1 << 32), 1 << 60
    assert refused(seal, name, HEADER.pack(*fields) + data[HEADER.size :])


def test_one_key_writes_and_two_read() -> None:
    old, both, new = Seal((KEY,)), Seal((OTHER, KEY)), Seal((OTHER,))
    name, data = sealed_as(old, b"kv")
    assert both.names(CHUNK) == [new.names(CHUNK)[0], name]
    assert both.open(name, memoryview(data)) == b"kv"
    assert refused(new, name, data)
    name, data = sealed_as(both, b"kv")
    assert new.open(name, memoryview(data)) == b"kv"
    assert refused(old, name, data)


def test_names_say_nothing_about_keys_of_chunks() -> None:
    names = {
        seal.names(CHUNK)[0]
        for seal in (
            Seal(),
            Seal((KEY,)),
            Seal((OTHER,)),
        )
    }
    assert len(names) == 3
    assert all(len(name) == 64 and CHUNK.hex() not in name for name in names)


def test_sealed_and_plain_are_not_taken_for_each_other() -> None:
    name, plain = sealed_as(Seal(), b"kv")
    assert refused(Seal((KEY,)), name, plain)
    name, data = sealed_as(Seal((KEY,)), b"kv")
    assert refused(Seal(), name, data)


def test_each_byte_of_an_object_is_read_once() -> None:
    """Somebody may write into the object while it is opened: what was authenticated must be what is decrypted."""
    seal = Seal((KEY,))
    contents = secrets.token_bytes(4 * BLOCK_BYTES)
    name, data = sealed_as(seal, contents)
    import threading

    stop = threading.Event()
    genuine = bytes(data)

    def stranger() -> None:
        rng = random.Random(3)
        while not stop.is_set():
            place = rng.randrange(HEADER.size, len(data))
            data[place] ^= 255
            data[place] = genuine[place]

    thread = threading.Thread(target=stranger)
    thread.start()
    try:
        for _ in range(20):
            try:
                assert seal.open(name, memoryview(data)) == contents
            except PoolError:
                continue
    finally:
        stop.set()
        thread.join()


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_file_has_one_key_or_two(tmp_path: Path) -> None:
    one, two = "1" * 64, "2" * 64
    assert read_keys(key_file(tmp_path, f"{one}\n")) == (bytes.fromhex(one),)
    assert read_keys(key_file(tmp_path, f"{one}\n{two}\n")) == tuple(map(bytes.fromhex, (one, two)))


@pytest.mark.parametrize(
    ("text", "mode", "found"),
    [
        ("1" * 64, 0o640, "mode 640"),
        ("1" * 64, 0o604, "mode 604"),
        ("", 0o600, "has 0 keys"),
        ("1" * 63, 0o600, "line 1 is not a key"),
        ("secret phrase", 0o600, "line 1 is not a key"),
        (f"{'1' * 64}\n{'1' * 64}", 0o600, "the same"),
        (f"{'1' * 64}\n{'2' * 64}\n{'3' * 64}", 0o600, "has 3 keys"),
    ],
)
def test_another_key_file_is_refused_and_never_shown(
    tmp_path: Path, text: str, mode: int, found: str
) -> None:
    with pytest.raises(ConfigError, match=found) as raised:
        read_keys(key_file(tmp_path, text, mode))
    assert "--key-file" in str(raised.value)
    assert "1" * 20 not in str(raised.value)
    assert "phrase" not in str(raised.value)


def test_a_key_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match="--key-file"):
            read_keys(path)
