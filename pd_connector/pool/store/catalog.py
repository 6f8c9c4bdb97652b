# SPDX-License-Identifier: Apache-2.0
"""The catalog of a store: an SQLite database in the memory folder, under a name that the link `books` gives.

With a rollback journal, not WAL: WAL maps a file into every process, and truncating that file would kill them all. A
transaction takes about 50 us and does no other I/O. If a process is stopped within one, the others' transactions fail after
`WAIT_S`; after `PATIENCE_S` they make a new catalog under a new name, from what the folders say, and go on. Later
commits of the stopped process go into the old catalog, which is no longer read.

The catalog plans which engine may write what, what is evicted next, and what has changed. The folders say what is there, so
a look-up never opens the catalog, and a lost catalog is rebuilt from them. Triggers keep the sums, so no code can forget one.
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

APPLICATION_ID = 0x70644B56

TABLES = f"""
PRAGMA application_id = {APPLICATION_ID};
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counters VALUES ('clock', 1), ('journal_floor', 0);
-- uncopied: bytes of chunks that the tier below does not have.
CREATE TABLE tiers (
  tier INTEGER PRIMARY KEY, path TEXT NOT NULL, budget INTEGER NOT NULL, chosen INTEGER NOT NULL,
  bytes INTEGER NOT NULL DEFAULT 0, chunks INTEGER NOT NULL DEFAULT 0, uncopied INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE usage (
  tier INTEGER, tenant TEXT, bytes INTEGER NOT NULL, PRIMARY KEY (tier, tenant)
) WITHOUT ROWID;
CREATE INDEX usage_by_bytes ON usage (tier, bytes);
-- Whole chunks. used: the clock's value at the last use. children: chunks of this tier that follow this one.
CREATE TABLE chunks (
  tier INTEGER, key BLOB, parent BLOB NOT NULL, tenant TEXT NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL,
  children INTEGER NOT NULL, copied INTEGER NOT NULL, entry TEXT NOT NULL, PRIMARY KEY (key, tier)
) WITHOUT ROWID;
CREATE INDEX chunks_by_parent ON chunks (tier, parent);
CREATE INDEX ends_by_use ON chunks (tier, used) WHERE children = 0;
CREATE INDEX ends_by_tenant ON chunks (tier, tenant, used) WHERE children = 0;
CREATE INDEX uncopied_by_use ON chunks (used) WHERE tier = 0 AND copied = 0;
-- Parts that are not part of a whole chunk. A row is there before its file, and after it.
CREATE TABLE files (
  tier INTEGER, name TEXT, key BLOB NOT NULL, part TEXT NOT NULL, parts INTEGER NOT NULL, writer TEXT NOT NULL,
  tenant TEXT NOT NULL, bytes INTEGER NOT NULL, size INTEGER NOT NULL, owner TEXT NOT NULL, whole INTEGER NOT NULL,
  since REAL NOT NULL, PRIMARY KEY (tier, name)
) WITHOUT ROWID;
CREATE INDEX files_by_key ON files (tier, key);
-- Evicted chunks whose files may still be there.
CREATE TABLE leaving (
  tier INTEGER, key BLOB, entry TEXT, owner TEXT NOT NULL, since REAL NOT NULL, PRIMARY KEY (tier, key, entry)
) WITHOUT ROWID;
CREATE TABLE pins (
  key BLOB, holder TEXT, named INTEGER NOT NULL, until REAL NOT NULL, bytes INTEGER NOT NULL, PRIMARY KEY (key, holder)
) WITHOUT ROWID;
CREATE INDEX pins_by_end ON pins (until);
-- tier: the fastest that has the chunk; -1 if none has it.
CREATE TABLE journal (number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE NOT NULL, tier INTEGER NOT NULL);
CREATE INDEX journal_of_gone ON journal (number) WHERE tier = -1;
"""

TRIGGERS = """
CREATE TRIGGER chunk_in AFTER INSERT ON chunks BEGIN
  UPDATE tiers SET bytes = bytes + new.bytes, chunks = chunks + 1,
    uncopied = uncopied + (1 - new.copied) * new.bytes WHERE tier = new.tier;
  INSERT INTO usage VALUES (new.tier, new.tenant, new.bytes)
    ON CONFLICT DO UPDATE SET bytes = bytes + new.bytes;
  UPDATE chunks SET children = children + 1 WHERE tier = new.tier AND key = new.parent;
END;
CREATE TRIGGER chunk_out AFTER DELETE ON chunks BEGIN
  UPDATE tiers SET bytes = bytes - old.bytes, chunks = chunks - 1,
    uncopied = uncopied - (1 - old.copied) * old.bytes WHERE tier = old.tier;
  UPDATE usage SET bytes = bytes - old.bytes WHERE tier = old.tier AND tenant = old.tenant;
  DELETE FROM usage WHERE tier = old.tier AND tenant = old.tenant AND bytes <= 0;
  -- What follows a chunk was used with it.
  UPDATE chunks SET children = children - 1, used = max(used, old.used) WHERE tier = old.tier AND key = old.parent;
END;
CREATE TRIGGER chunk_copied AFTER UPDATE OF copied ON chunks BEGIN
  UPDATE tiers SET uncopied = uncopied + (old.copied - new.copied) * new.bytes WHERE tier = new.tier;
END;
CREATE TRIGGER below_in AFTER INSERT ON chunks WHEN new.tier = 1 BEGIN
  UPDATE chunks SET copied = 1 WHERE tier = 0 AND key = new.key;
END;
CREATE TRIGGER below_out AFTER DELETE ON chunks WHEN old.tier = 1 BEGIN
  UPDATE chunks SET copied = 0 WHERE tier = 0 AND key = old.key;
END;
CREATE TRIGGER file_in AFTER INSERT ON files BEGIN
  UPDATE tiers SET bytes = bytes + new.bytes WHERE tier = new.tier;
  INSERT INTO usage VALUES (new.tier, new.tenant, new.bytes) ON CONFLICT DO UPDATE SET bytes = bytes + new.bytes;
END;
CREATE TRIGGER file_out AFTER DELETE ON files BEGIN
  UPDATE tiers SET bytes = bytes - old.bytes WHERE tier = old.tier;
  UPDATE usage SET bytes = bytes - old.bytes WHERE tier = old.tier AND tenant = old.tenant;
  DELETE FROM usage WHERE tier = old.tier AND tenant = old.tenant AND bytes <= 0;
END;
CREATE TRIGGER told_in AFTER INSERT ON chunks
WHEN NOT EXISTS (SELECT 1 FROM chunks WHERE key = new.key AND tier < new.tier) BEGIN
  INSERT OR REPLACE INTO journal (key, tier) VALUES (new.key, new.tier);
END;
CREATE TRIGGER told_out AFTER DELETE ON chunks
WHEN NOT EXISTS (SELECT 1 FROM chunks WHERE key = old.key AND tier < old.tier) BEGIN
  INSERT OR REPLACE INTO journal (key, tier)
    VALUES (old.key, coalesce((SELECT min(tier) FROM chunks WHERE key = old.key), -1));
END;
"""

SUMS = """
UPDATE chunks SET
  children = (SELECT count(*) FROM chunks c WHERE c.tier = chunks.tier AND c.parent = chunks.key),
  copied = tier = 0 AND EXISTS (SELECT 1 FROM chunks c WHERE c.key = chunks.key AND c.tier = 1);
INSERT INTO usage SELECT tier, tenant, sum(bytes) FROM
  (SELECT tier, tenant, bytes FROM chunks UNION ALL SELECT tier, tenant, bytes FROM files) GROUP BY tier, tenant;
UPDATE tiers SET
  bytes = (SELECT coalesce(sum(bytes), 0) FROM usage u WHERE u.tier = tiers.tier),
  chunks = (SELECT count(*) FROM chunks c WHERE c.tier = tiers.tier),
  uncopied = (SELECT coalesce(sum(bytes), 0) FROM chunks c WHERE c.tier = tiers.tier AND NOT copied);
INSERT INTO journal (key, tier) SELECT key, min(tier) FROM chunks GROUP BY key ORDER BY min(used);
"""
"""What the triggers would have kept, for tables that were filled without them."""


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
        """Called by SQLite now and then; returns whether it must abort the running statement."""
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
