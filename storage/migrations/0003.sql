-- Schema 3: access tokens.

-- Each is kept as its SHA-256 only. `scopes` and `sessions` are JSON arrays, `sessions` NULL: all of them. `parent` is the token that it was
-- made with, NULL: none, but by the store's owner.
CREATE TABLE access_tokens (
  token_id TEXT PRIMARY KEY,
  digest BLOB NOT NULL UNIQUE,
  label TEXT NOT NULL,
  scopes TEXT NOT NULL,
  sessions TEXT,
  parent TEXT,
  created_at_ms INTEGER NOT NULL,
  expires_at_ms INTEGER
) STRICT, WITHOUT ROWID;
