-- Schema 2: forks, and sessions that are compacted unasked.

-- The session and revision that a session was forked from, as a JSON object; NULL: it was not forked. The session may
-- be gone, and another may have its id by now.
ALTER TABLE sessions ADD COLUMN parent TEXT;

-- When and how the session is compacted unasked, as a JSON object; NULL: it is not.
ALTER TABLE sessions ADD COLUMN auto_compact TEXT;
