-- Schema 1. `PRAGMA user_version` says which migrations a database has had; each runs in one transaction.

-- The store itself.
CREATE TABLE store (
  store_id TEXT NOT NULL
) STRICT;

-- `base` is the position (below) of the first entry of the present history, `entries` its length.
-- AUTOINCREMENT: a key is never used again, so rows that wait for the sweeper cannot be taken for another session's.
CREATE TABLE sessions (
  key INTEGER PRIMARY KEY AUTOINCREMENT,
  session_id TEXT NOT NULL UNIQUE,
  title TEXT,
  cwd TEXT,
  labels TEXT NOT NULL,
  auto_compact TEXT,  -- when and how it is compacted unasked, as a JSON object; NULL: it is not
  created_at_ms INTEGER NOT NULL,
  updated_at_ms INTEGER NOT NULL,
  durability TEXT NOT NULL,
  state TEXT NOT NULL,
  revision INTEGER NOT NULL,
  generation INTEGER NOT NULL,
  base INTEGER NOT NULL,
  entries INTEGER NOT NULL,
  tokens_counted INTEGER NOT NULL,
  tokens_estimated INTEGER NOT NULL,
  next_entry_id INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  running TEXT  -- the operation id of its compaction that has not ended
) STRICT;
CREATE INDEX sessions_updated ON sessions (updated_at_ms, session_id);
CREATE INDEX sessions_created ON sessions (created_at_ms, session_id);

-- Entries of present histories, each as its line. position = session key << 32 | n, so that one B-tree keeps every
-- history together and in order. A replacement writes the new history behind the old one and moves `base`; the
-- sweeper then removes the old rows a few at a time.
CREATE TABLE entries (
  position INTEGER PRIMARY KEY,
  line BLOB NOT NULL
) STRICT;

-- Ranges of positions that no history holds any more. `erase`: their text is to be overwritten, since its session
-- was deleted; what a replacement left behind lives on in its archive.
CREATE TABLE garbage (
  first INTEGER PRIMARY KEY,
  last INTEGER NOT NULL,
  erase INTEGER NOT NULL
) STRICT;

-- Ids of the calls that the history of one generation makes.
CREATE TABLE calls (
  key INTEGER NOT NULL,
  generation INTEGER NOT NULL,
  call_id TEXT NOT NULL,
  PRIMARY KEY (key, generation, call_id)
) STRICT, WITHOUT ROWID;

-- The event log. Every change writes at its end, so the highest ordinal also tells whether a commit was made.
-- It is never removed: what a deletion leaves is its own event, which is the newest.
CREATE TABLE events (
  ordinal INTEGER PRIMARY KEY,
  key INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  method TEXT NOT NULL,
  body BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX events_seq ON events (key, seq);

-- Deleted sessions: whose last event it is, and where a later session of the same id goes on.
CREATE TABLE tombstones (
  session_id TEXT PRIMARY KEY,
  key INTEGER NOT NULL UNIQUE,
  seq INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Histories that were replaced; the file is at archive.archive_path(session_id, revision).
CREATE TABLE archives (
  key INTEGER NOT NULL,
  revision INTEGER NOT NULL,
  generation INTEGER NOT NULL,
  kind TEXT NOT NULL,
  operation_id TEXT NOT NULL,
  archived_at_ms INTEGER NOT NULL,
  entries INTEGER NOT NULL,
  tokens_counted INTEGER NOT NULL,
  tokens_estimated INTEGER NOT NULL,
  bytes INTEGER NOT NULL,
  sha256 TEXT NOT NULL,
  PRIMARY KEY (key, revision)
) STRICT, WITHOUT ROWID;

-- What was done under an operation id, and how it ended.
CREATE TABLE operations (
  operation_id TEXT PRIMARY KEY,
  method TEXT NOT NULL,
  digest BLOB NOT NULL,
  session_id TEXT NOT NULL,
  status TEXT NOT NULL,
  started_at_ms INTEGER NOT NULL,
  ended_at_ms INTEGER,
  outcome BLOB
) STRICT, WITHOUT ROWID;
CREATE INDEX operations_running ON operations (operation_id) WHERE status = 'running';
