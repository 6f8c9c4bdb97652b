# SPDX-License-Identifier: Apache-2.0
"""The catalog of a store: an SQLite database in the memory folder, under a name that the link `books` gives.

With a rollback journal, not WAL: WAL maps a file into every process, and truncating that file would kill them all. A
transaction takes about 50 us and does no other I/O. If a process is stopped within one, the others' transactions fail after
`WAIT_S`; after `PATIENCE_S` they make a new catalog under a new name, from what the folders say, and go on. What the stopped
process then commits goes into the old catalog, which is no longer read.
"""

import contextlib
import fcntl
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote

from pd_connector.pool.store.folder import Folder
from pd_connector.pool.store.schema import SUMS, TABLES, TRIGGERS

WAIT_S = 0.05
"""The longest wait for another process's transaction. It takes 0.1 ms, unless the machine is so busy that the process loses
its processor meanwhile."""
PATIENCE_S = 3.0
_TRY_AGAIN_S = 0.0003
LONGEST_S = 10.0
"""The longest transaction. In a damaged catalog SQLite can follow links between pages for ever."""
_OPERATIONS = 100_000
"""SQLite's operations between two looks at the time: some milliseconds."""
_LINK = "books"
_NAME = re.compile(r"books\.(\d+)-[0-9a-f]+")
_JOURNAL_STEP = 1 << 40
"""How many journal numbers each generation of the catalog has."""
_GENERATIONS = 1 << 22
"""The number after which a name of a catalog was altered. SQLite has 63 bits for a number of the journal."""
_PRAGMAS = ("journal_mode = TRUNCATE", "synchronous = OFF", "mmap_size = 0", "temp_store = MEMORY")
"""Nothing is mapped, and nothing waits for a disk: the catalog need not survive the machine."""
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_NO_ROOM = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
_DAMAGES = (sqlite3.Error, ValueError, TypeError, ArithmeticError, LookupError, AttributeError)
"""What a damaged catalog raises. A flipped byte can make SQLite's message, or a number, unreadable for Python, and can give a
value another type or no meaning."""


class CatalogError(Exception):
    """A transaction did not happen."""


class Catalog:
    """One process's connection to the catalog.

    Attributes:
        damaged: why the catalog must be rebuilt; empty if it need not.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._name = ""
        self._blocked_since: float | None = None
        self._ends = 0.0  # when the transaction under way has taken too long
        self.damaged = "" if self.name else "there is none yet"

    @property
    def problem(self) -> str:
        """Why nothing can be written at the moment; empty if it can."""
        blocked = "another process holds the catalog" if self._blocked_since is not None else ""
        return self.damaged or blocked

    @contextlib.contextmanager
    def transaction(
        self, *, reading: bool = False, wait_s: float = WAIT_S
    ) -> Iterator[sqlite3.Connection]:
        """One transaction. It is undone if the block raises.

        Raises:
            CatalogError: it did not happen. The text says why.
        """
        if not self._lock.acquire(timeout=wait_s):
            raise CatalogError("another thread holds the catalog")
        try:
            connection = self._begun(reading, wait_s)
            try:
                yield connection
                connection.execute("COMMIT")
                if self._name != self.name:
                    raise CatalogError("the catalog was rebuilt meanwhile")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise
        except _DAMAGES as error:
            raise self._explained(error) from error
        finally:
            self._lock.release()

    def _begun(self, reading: bool, wait_s: float) -> sqlite3.Connection:
        until = time.monotonic() + wait_s
        self._ends = until + LONGEST_S
        while True:
            try:
                connection = self._connected()
                connection.execute("BEGIN" if reading else "BEGIN EXCLUSIVE")
                if reading:  # SQLite locks with the first statement
                    connection.execute("SELECT 1 FROM tiers").fetchone()
            except sqlite3.OperationalError as error:
                if self._connection is not None and self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                if _code(error) not in _BUSY or time.monotonic() >= until:
                    raise
                time.sleep(_TRY_AGAIN_S)
                continue
            self._blocked_since = None
            if self._name == self.name:
                return connection
            connection.execute(
                "ROLLBACK"
            )  # a new catalog was made while this waited for the old one

    def _connected(self) -> sqlite3.Connection:
        name = self.name
        if not name:
            raise CatalogError(self._damage("the catalog is gone"))
        if self._connection is None or name != self._name:
            self._disconnect()
            self._connection = _opened(f"{self._folder.path}/{name}")
            self._connection.set_progress_handler(self._overdue, _OPERATIONS)
            if name != self._name:  # else a damaged one may open
                self._name, self.damaged = name, ""
        return self._connection

    @property
    def name(self) -> str:
        """The name of the catalog that is in force; empty if there is none."""
        try:
            name = os.readlink(_LINK, dir_fd=self._folder.root)
        except OSError:
            return ""
        return name if _NAME.fullmatch(name) else ""

    def _damage(self, text: str) -> str:
        self.damaged = self.damaged or text
        return text

    def _explained(self, error: Exception) -> CatalogError:
        """What a failed transaction means."""
        code = _code(error)
        if code in _BUSY:
            now = time.monotonic()
            self._blocked_since = self._blocked_since or now
            if now - self._blocked_since > PATIENCE_S:
                self._damage("another process holds the catalog, and does not go on")
            return CatalogError("another process holds the catalog")
        self._disconnect()
        if code in _NO_ROOM:
            return CatalogError(f"the catalog cannot be written: {error}")
        return CatalogError(self._damage(f"the catalog is damaged: {error}"))

    def _overdue(self) -> bool:
        """Asked by SQLite now and then: whether it must end what it does."""
        return time.monotonic() > self._ends

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def rebuild(self, fill: Callable[[sqlite3.Connection], None]) -> bool:
        """Replace a damaged catalog. Returns False if another process does.

        Args:
            fill: writes what the folders hold into a new, empty catalog.
        """
        old = self.name
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        try:
            lock = os.open("books.lock", flags, 0o600, dir_fd=self._folder.root)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.name == old:
                self._replace(old, fill)
        except (OSError, *_DAMAGES):
            return False
        finally:
            os.close(lock)
        self.damaged, self._blocked_since = "", None
        return True

    def _replace(self, old: str, fill: Callable[[sqlite3.Connection], None]) -> None:
        root = self._folder.root
        match = _NAME.fullmatch(old)
        before = int(match[1]) if match else _GENERATIONS
        generation = 1 + (before if before < _GENERATIONS else time.monotonic_ns() % (1 << 20))
        name = f"books.{generation}-{secrets.token_hex(4)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        os.close(os.open(name, flags, 0o600, dir_fd=root))
        try:
            with contextlib.closing(_opened(f"{self._folder.path}/{name}")) as connection:
                connection.executescript(TABLES)
                first = generation * _JOURNAL_STEP
                connection.execute("INSERT INTO sqlite_sequence VALUES ('journal', ?)", (first,))
                connection.execute(
                    "UPDATE counters SET value = ? WHERE name = 'journal_floor'", (first,)
                )
                connection.execute("BEGIN EXCLUSIVE")
                fill(connection)
                connection.execute("COMMIT")
                connection.executescript(f"BEGIN EXCLUSIVE; {SUMS} {TRIGGERS} COMMIT;")
            link = f"{name}.link"
            os.symlink(name, link, dir_fd=root)
            with contextlib.suppress(OSError):
                os.rmdir(_LINK, dir_fd=root)  # somebody has made a folder of its name
            os.rename(link, _LINK, src_dir_fd=root, dst_dir_fd=root)
        finally:
            current = self.name
            for other in self._folder.names(root):
                if (
                    other.startswith("books.")
                    and other != "books.lock"
                    and not other.startswith(current or name)
                ):
                    with contextlib.suppress(OSError):
                        os.unlink(other, dir_fd=root)

    def close(self) -> None:
        with self._lock:
            self._disconnect()


def _opened(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(path)}?mode=rw",
        uri=True,
        timeout=0,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
