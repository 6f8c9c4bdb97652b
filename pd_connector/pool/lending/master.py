# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of a Mooncake master: which segments there are, and jobs that move objects off some of them."""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import TypeVar

import msgspec

from pd_connector.errors import ConfigError, PDConnectorError

_AT_ONCE = 64
"""Objects that a drain job moves at once. A round of it takes about a second, however few they are."""
_MOST_ANSWER = 256 << 20
_Kind = TypeVar("_Kind")
_OVER = ("SUCCEEDED", "FAILED", "CANCELED")


class SilentMasterError(PDConnectorError):
    """The master does not answer, or refuses."""


class LateMasterError(SilentMasterError):
    """The master did not answer in time. It may answer later."""


class Segment(msgspec.Struct, frozen=True):
    """Lent memory. All segments of one client have one name."""

    segment_name: str
    te_endpoint: str
    status: str
    allocator_used_bytes: int
    allocator_capacity_bytes: int

    @property
    def free_bytes(self) -> int:
        """Bytes that no object has."""
        return self.allocator_capacity_bytes - self.allocator_used_bytes


class DrainJob(msgspec.Struct, frozen=True):
    """How far a drain job is. Its units are objects."""

    status_name: str
    succeeded_units: int
    active_units: int
    message: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it moves nothing any more."""
        return self.status_name in _OVER


class _Segments(msgspec.Struct):
    segments: list[Segment]


class _Created(msgspec.Struct):
    job_id: str


class Master:
    """Args:
    host: host of the master.
    port: port of its HTTP server.
    deadline_s: longest duration of a call.
    """

    def __init__(self, host: str, port: int, deadline_s: float) -> None:
        literal = f"[{host}]" if ":" in host else host
        self.url = f"http://{literal}:{port}"
        self._deadline_s = deadline_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def check(self) -> None:
        """Raises ConfigError: this is not a master's HTTP server."""
        try:
            self.segments()
        except SilentMasterError as error:
            raise ConfigError(
                f"{error}: must be the HTTP server of Mooncake's master, through which memory is recalled. It is started with "
                f"the master (--metrics_port, 9003 unless given); name another port in the address: ?admin=PORT"
            ) from None

    def segments(self) -> list[Segment]:
        """All segments. Raises SilentMasterError."""
        return self._decoded(self._answer("/get_segments_detail"), _Segments).segments

    def keys(self) -> list[str]:
        """The keys of all objects. Raises SilentMasterError."""
        return self._answer("/get_all_keys").decode().split("\n")

    def start_drain(self, names: list[str]) -> str:
        """Have objects moved off the segments with these names: nothing new is put there. Returns the job's id.

        Raises:
            SilentMasterError: the master does not answer, or refuses.
        """
        body = {"segments": names, "target_segments": [], "max_concurrency": _AT_ONCE}
        return self._decoded(self._answer("/api/v1/drain_jobs", body), _Created).job_id

    def drain(self, job: str) -> DrainJob:
        """How far a job is. Raises SilentMasterError."""
        query = urllib.parse.urlencode({"job_id": job})
        return self._decoded(self._answer(f"/api/v1/drain_jobs/query?{query}"), DrainJob)

    def _decoded(self, answer: bytes, kind: type[_Kind]) -> _Kind:
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise SilentMasterError(f"{self.url} answers something else: {error}") from None

    def _answer(self, path: str, body: object = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._opener.open(self.url + path, data, self._deadline_s) as answer:
                return bytes(answer.read(_MOST_ANSWER))
        except urllib.error.HTTPError as error:
            text = error.read(1000).decode(errors="replace")
            raise SilentMasterError(
                f"{self.url}{path} answers {error.code}: {text.strip()}"
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            kind = LateMasterError if isinstance(reason, TimeoutError) else SilentMasterError
            raise kind(f"{self.url} does not answer ({reason})") from None
