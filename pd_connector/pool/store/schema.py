# SPDX-License-Identifier: Apache-2.0
"""The tables of the catalog.

The catalog plans who may write what, what is evicted next, and what has changed. The folders say what is there, so a look-up
never opens the catalog, and a lost catalog is rebuilt from them. Triggers keep the sums, so no code can forget one.
"""

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
