# SPDX-License-Identifier: Apache-2.0
"""A rank of the previous wire schema, in a process of its own: `python previous_schema.py ROOT OPTIONS`.

`schema2.tar.xz` is the package as it was when it last spoke schema 2 alone (commit 6d6942d), with the helper that its
tests made ranks with; without its engines' doors, commands and benchmarks. ROOT is where it was unpacked. Methods of the
rank are called by lines of JSON on standard input, and answered so on standard output.
"""

import base64
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).with_name("schema2.tar.xz")


def unpack(folder: Path) -> Path:
    """Unpack the previous version; returns its root."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


class PreviousRank:
    """A rank of the previous version.

    Args:
        root: where the version was unpacked.
        settings: of its `Config`.
        geometry: what differs from `support.agents.geometry_of()`; `shard` as four numbers.
        options: of its `Rank`.
    """

    def __init__(
        self, root: Path, settings: dict[str, Any], geometry: dict[str, Any], **options: Any
    ) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        arguments = json.dumps([settings, geometry, options])
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(root), arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        version = self.call("schema")
        assert version == 2, f"the previous version speaks schema {version}"

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the rank; bytes come back as bytes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, args, kwargs]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the previous version has died in {method}"
        answer = json.loads(line)
        is_bytes = isinstance(answer, dict) and "base64" in answer
        return base64.b64decode(answer["base64"]) if is_bytes else answer

    def close(self) -> None:
        """End the process; it must end by itself, and well."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(120) == 0
        self._process.stdout.close()


def _serve(root: str, arguments: str) -> None:
    sys.path[:] = [root, f"{root}/tests", *sys.path[1:]]
    import pd_connector

    assert Path(pd_connector.__file__).is_relative_to(root), pd_connector.__file__
    from pd_connector.geometry import Shard  # type: ignore[import-not-found]
    from pd_connector.incoming import Peer, Source  # type: ignore[import-not-found]
    from support.agents import Rank, geometry_of

    from pd_connector import wire  # type: ignore[attr-defined]
    from pd_connector.config import Config

    settings, changes, options = json.loads(arguments)
    shard = changes.pop("shard", None)
    geometry = geometry_of(Shard(*shard), **changes) if shard else geometry_of(**changes)
    settings = {name: value for name, value in settings.items() if name in Config.__struct_fields__}
    settings["transports"] = tuple(settings["transports"])
    rank = Rank(settings, geometry=geometry, **options)
    for line in sys.stdin:
        method, args, kwargs = json.loads(line)
        if method == "schema":
            answer: Any = wire.SCHEMA
        elif method == "load":
            peers = [Peer(Source(*source), Shard(*held)) for source, held in args[0]]
            answer = rank.load(peers, *args[1:], **kwargs)
        else:
            found = getattr(rank, method)
            answer = found(*args, **kwargs) if callable(found) else found
        if isinstance(answer, bytes):
            answer = {"base64": base64.b64encode(answer).decode()}
        print(json.dumps(answer), flush=True)
    rank.agent.close()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
