# SPDX-License-Identifier: Apache-2.0
"""The S3 store against moto: the protocol, as a carrier uses it."""

import secrets
from collections.abc import Iterator
from urllib.parse import SplitResult

import pytest

from pd_connector.errors import ConfigError
from pd_connector.pool.far.registry import far_address
from pd_connector.pool.far.s3 import S3Store

boto3 = pytest.importorskip("boto3")
moto_server = pytest.importorskip("moto.server", reason="needs moto[server]")


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[SplitResult]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket="pool")
    _, address = far_address(f"s3://pool/kv?endpoint={url}&region=us-east-1", sealed=False)
    yield address
    server.stop()


def test_objects_are_put_found_read_and_removed(address: SplitResult) -> None:
    store = S3Store(address, 10.0)
    names = [secrets.token_hex(32) for _ in range(3)]
    data = [secrets.token_bytes(size) for size in (10, 3 << 20, 0)]
    assert store.put(names, list(map(memoryview, data))) == [True] * 3
    absent = secrets.token_hex(32)
    assert store.has([*names, absent]) == [10, 3 << 20, 0, 0]
    buffers = [bytearray(size) for size in (10, 3 << 20, 5, 5)]
    assert store.get([*names, absent], list(map(memoryview, buffers))) == [10, 3 << 20, 0, 0]
    assert [bytes(each) for each in buffers[:2]] == data[:2]
    assert store.get(names[1:2], [memoryview(bytearray(100))]) == [0], "longer than it was"
    store.remove([*names, absent])
    assert store.has(names) == [0, 0, 0]
    store.close()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("s3://", "must be the name of a bucket"),
        ("s3://UPPER", "must be the name of a bucket"),
        ("s3://pool?url=x", r"\?url=: is not known"),
        ("s3://pool?endpoint=minio:9000", "must be a URL"),
    ],
)
def test_a_wrong_address_is_refused(text: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        far_address(text, sealed=True)


def test_without_a_key_only_an_endpoint_of_loopback_is_accepted() -> None:
    for text in ("s3://pool", "s3://pool?endpoint=https://minio.example:9000"):
        with pytest.raises(ConfigError, match="--key-file"):
            far_address(text, sealed=False)
    far_address("s3://pool?endpoint=http://127.0.0.1:9000", sealed=False)
