# SPDX-License-Identifier: Apache-2.0
"""An S3 store: AWS, MinIO, Ceph, and others that speak its protocol.

    s3://BUCKET[/PREFIX][?endpoint=https://HOST:PORT][&region=NAME]

Credentials come from where boto3 looks for them: variables, `~/.aws`, the instance's role. Let a lifecycle rule expire objects:
an S3 store does not evict.
"""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, parse_qs, urlsplit

from pd_connector.pool.far.base import FarStore

if TYPE_CHECKING:
    import boto3
    import botocore
else:
    try:
        import boto3
        import botocore.config
        import botocore.exceptions
    except ImportError:
        boto3 = None

_THREADS = 32
"""Requests at once: each takes a round trip."""
_KNOWN = ("endpoint", "region")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ABSENT = ("404", "NoSuchKey", "NotFound")
_Result = TypeVar("_Result")


class S3Store(FarStore):
    """Names become keys `PREFIX/NAME`. Calls: HeadObject, GetObject, PutObject, DeleteObjects."""

    package = "pd-connector[s3]"
    most_bytes = 5 << 30  # of one PutObject

    @classmethod
    def problem(cls, address: SplitResult) -> str:
        if boto3 is None:
            return f"needs the package boto3: pip install '{cls.package}'"
        if not _BUCKET.fullmatch(address.netloc):
            return f"{address.netloc!r}: must be the name of a bucket: s3://BUCKET/PREFIX"
        given = parse_qs(address.query, keep_blank_values=True)
        if unknown := [name for name in given if name not in _KNOWN]:
            return f"?{unknown[0]}=: is not known; there are {', '.join(_KNOWN)}"
        if "endpoint" in given:
            endpoint = urlsplit(given["endpoint"][0])
            if endpoint.scheme not in ("http", "https") or not endpoint.hostname:
                return f"?endpoint={given['endpoint'][0]}: must be a URL, such as https://minio.example:9000"
        return ""

    @classmethod
    def hosts(cls, address: SplitResult) -> list[str]:
        endpoint = parse_qs(address.query).get("endpoint")
        return [(endpoint and urlsplit(endpoint[0]).hostname) or "amazonaws.com"]

    def __init__(self, address: SplitResult, deadline_s: float) -> None:
        given = parse_qs(address.query)
        config = botocore.config.Config(
            connect_timeout=deadline_s,
            read_timeout=deadline_s,
            retries={"total_max_attempts": 1},
            max_pool_connections=_THREADS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self._client = boto3.client(
            "s3",
            endpoint_url=given.get("endpoint", [None])[0],
            region_name=given.get("region", [None])[0],
            config=config,
        )
        self._bucket = address.netloc
        self._prefix = f"{address.path.strip('/')}/".lstrip("/")
        self._threads = ThreadPoolExecutor(_THREADS)
        self._client.head_bucket(Bucket=self._bucket)

    def has(self, names: Sequence[str]) -> list[int]:
        return list(self._threads.map(self._size, names))

    def _size(self, name: str) -> int:
        head = self._unless_absent(self._client.head_object, Key=self._prefix + name)
        return int(head["ContentLength"]) if head else 0

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        return list(self._threads.map(self._read, names, buffers))

    def _read(self, name: str, buffer: memoryview) -> int:
        answer = self._unless_absent(self._client.get_object, Key=self._prefix + name)
        if not answer:
            return 0
        with answer["Body"] as body:
            if int(answer["ContentLength"]) > len(buffer):
                return 0
            read = 0
            while data := body.read(min(1 << 20, len(buffer) - read) or 1):
                if read + len(data) > len(buffer):
                    return 0
                buffer[read : read + len(data)] = data
                read += len(data)
        return read

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        # In this order: an object comes after those before it.
        return [self._kept(name, each) for name, each in zip(names, data, strict=True)]

    def _kept(self, name: str, data: memoryview) -> bool:
        try:
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=bytes(data))
        except botocore.exceptions.ClientError:  # a quota, or no permission
            return False
        return True

    def remove(self, names: Sequence[str]) -> None:
        keys = [{"Key": self._prefix + name} for name in names]
        self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _unless_absent(self, call: Callable[..., _Result], **given: Any) -> _Result | None:
        """What a call returns; None if its object is not there."""
        try:
            return call(Bucket=self._bucket, **given)
        except botocore.exceptions.ClientError as error:
            if error.response["Error"]["Code"] in _ABSENT:
                return None
            raise
