# SPDX-License-Identifier: Apache-2.0
"""HTTP requests to an engine or router, with the standard library: one connection per request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from pd_connector.errors import PDConnectorError

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class HttpError(PDConnectorError):
    """An answer with a status other than 200."""

    def __init__(self, method: str, url: str, status: int, body: str) -> None:
        super().__init__(f"{method} {url} was answered with status {status}: {body[:2000]}")
        self.status = status
        self.body = body


class Samples(dict[tuple[str, frozenset[tuple[str, str]]], float]):
    """The values of `/metrics` at one moment, by name and labels."""

    @classmethod
    def parse(cls, text: str) -> Samples:
        """Read Prometheus' text format."""
        samples = cls()
        for line in text.splitlines():
            if match := _SAMPLE.match(line):
                name, labels, value = match.groups()
                samples[name, frozenset(_LABEL.findall(labels or ""))] = float(value)
        return samples

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples of this name that have these labels; 0 if there are none."""
        required = labels.items()
        return sum(v for (n, own_labels), v in self.items() if n == name and required <= own_labels)

    def has(self, name: str) -> bool:
        """Whether there is any sample of this name."""
        return any(sample == name for sample, _ in self)

    def since(self, before: Samples) -> Samples:
        """The growth of each value since an earlier moment."""
        return Samples({key: value - before.get(key, 0.0) for key, value in self.items()})


class Client:
    """Requests to one base URL. Used from any thread."""

    def __init__(self, base_url: str, timeout_s: float = 300.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s

    def get(self, path: str, timeout_s: float | None = None) -> str:
        """Body of a GET. Raises HttpError, or OSError if nothing answers."""
        with self._request("GET", path, None, timeout_s) as response:
            return response.read().decode()

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        """Decoded JSON answer to a POST. Raises HttpError, or OSError if nothing answers."""
        with self._request("POST", path, body, timeout_s) as response:
            return json.loads(response.read())

    def stream(
        self, path: str, body: Mapping[str, Any], timeout_s: float | None = None
    ) -> Iterator[Any]:
        """Decoded events of a streamed answer, as they come. Closing the iterator closes the connection."""
        with self._request("POST", path, {**body, "stream": True}, timeout_s) as response:
            while line := response.readline():
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield json.loads(data)
        raise ConnectionError(f"POST {self.base_url}{path}: the stream ended before [DONE]")

    def healthy(self, timeout_s: float = 2.0) -> bool:
        """Whether `/health` is answered with 200 in time."""
        try:
            self.get("/health", timeout_s)
        except (HttpError, OSError):
            return False
        return True

    def metrics(self) -> Samples:
        """All samples of `/metrics`."""
        return Samples.parse(self.get("/metrics", 10.0))

    def model(self) -> str:
        """Name of the served model."""
        return str(json.loads(self.get("/v1/models", 10.0))["data"][0]["id"])

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> HTTPResponse:
        address = urlsplit(self.base_url)
        connection = HTTPConnection(
            address.hostname or "", address.port, timeout=timeout_s or self.timeout_s
        )
        headers = {"Content-Type": "application/json", "Connection": "close"}
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body).encode(), headers
            )
            # With "Connection: close" the response owns the socket; closing the response closes the connection.
            response = connection.getresponse()
        except HTTPException as error:
            connection.close()
            raise ConnectionError(f"{method} {self.base_url}{path}: {error!r}") from error
        except BaseException:
            connection.close()
            raise
        if response.status != 200:
            with response:
                text = response.read().decode(errors="replace")
            raise HttpError(method, self.base_url + path, response.status, text)
        return response
