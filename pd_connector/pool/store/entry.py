# SPDX-License-Identifier: Apache-2.0
"""A chunk's entry in a folder: the text of a symbolic link under the chunk's key. The link leads nowhere.

A link is made, replaced and read in one system call each, so a look-up never waits and never sees half of an entry. The text
is `1|bytes|part,part|parent|tenant|stamp:bytes,stamp:bytes`. A part lies in the file `KEY.PART.STAMP`.
"""

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

_FORMAT = "1"
_PART = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_STAMP = re.compile(r"[a-z0-9-]{1,64}")
MOST_TENANT = 256
LINK = "="
"""In the name of an entry that is being made, in the place of a part's name."""
MOST_PARTS = 256
_MOST_KEY = 64
_MOST_BYTES = 1 << 60


class Head(NamedTuple):
    """What a look-up needs of an entry."""

    nbytes: int
    parts: tuple[str, ...]


class Entry(NamedTuple):
    """A chunk of a folder."""

    parent: bytes
    tenant: str
    parts: tuple[str, ...]
    """Names, ascending."""
    stamps: tuple[str, ...]
    """What makes the file of each part unique."""
    sizes: tuple[int, ...]
    """Bytes of each part."""

    def files(self, key: bytes) -> list[str]:
        """Names of the files."""
        return [file_name(key, *names) for names in zip(self.parts, self.stamps, strict=True)]

    def text(self) -> str:
        """The text of the link."""
        files = ",".join(map("{}:{}".format, self.stamps, self.sizes))
        head = f"{_FORMAT}|{sum(self.sizes)}|{','.join(self.parts)}"
        return f"{head}|{self.parent.hex()}|{quote(self.tenant, safe='')}|{files}"


def head_of(text: str) -> Head | None:
    """The part of an entry that look-ups need; None if the text is not an entry."""
    try:
        form, size, parts, _ = text.split("|", 3)
        nbytes = int(size)
    except ValueError:
        return None
    # Engines divide by it.
    sane = form == _FORMAT and 0 < nbytes <= _MOST_BYTES
    return Head(nbytes, tuple(parts.split(","))) if sane else None


def entry_of(text: str) -> Entry | None:
    """The whole entry; None unless the text is exactly what `Entry.text` writes, because it goes into the catalog."""
    try:
        _, _, names, parent, tenant, files = text.split("|")
        stamps, sizes = zip(*(file.split(":") for file in files.split(",")), strict=True)
        parts = tuple(names.split(","))
        entry = Entry(bytes.fromhex(parent), unquote(tenant), parts, stamps, tuple(map(int, sizes)))
        altered = entry.text() != text
    except ValueError:
        return None
    sane = all(map(_PART.fullmatch, parts)) and all(map(_STAMP.fullmatch, stamps))
    return entry if sane and not altered and len(parts) == len(stamps) else None


def file_name(key: bytes, part: str, stamp: str) -> str:
    """Name of the file of a part."""
    return f"{key.hex()}.{part}.{stamp}"


class FileName(NamedTuple):
    """What the name of a file says."""

    key: bytes
    part: str
    owner: str
    """The process that made it (`process_lock.py`)."""


def file_of(name: str) -> FileName | None:
    """Key, part and stamp from the name of a file; None if the file is not the pool's."""
    key, _, rest = name.partition(".")
    part, _, stamp = rest.rpartition(".")
    try:
        return FileName(bytes.fromhex(key), part, stamp.rpartition("-")[0]) if stamp else None
    except ValueError:
        return None


def check_part(key: bytes, part: str, parts: int, nbytes: int, tenant: str) -> None:
    """Raises ValueError if a part cannot be named so."""
    if not 0 < len(key) <= _MOST_KEY:
        raise ValueError(f"key of {len(key)} bytes: must have 1 to {_MOST_KEY}")
    if not _PART.fullmatch(part):
        raise ValueError(f"part {part!r}: must be 1 to 32 letters, digits, `.`, `_` and `-`")
    if not 0 < parts <= MOST_PARTS:
        raise ValueError(f"parts {parts}: must be from 1 to {MOST_PARTS}")
    if nbytes <= 0:
        raise ValueError(f"nbytes {nbytes}: must be 1 or more")
    if len(tenant) > MOST_TENANT:
        raise ValueError(f"tenant of {len(tenant)} characters: {MOST_TENANT} at most")
