# SPDX-License-Identifier: Apache-2.0
"""Large fields of a body that keep their JSON, so engines get it without a new encoding."""

from typing import Any


class RawField:
    """A large field of the body, with its JSON for the engines. The value is never changed."""

    raw: memoryview


class RawText(RawField, str): ...


class RawList(RawField, list[Any]): ...


class RawObject(RawField, dict[str, Any]): ...


WITH_RAW: dict[type, type[RawField]] = {str: RawText, list: RawList, dict: RawObject}
