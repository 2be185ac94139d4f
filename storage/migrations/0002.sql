-- Schema 2: forks.

-- The session and revision that a session was forked from, as a JSON object; NULL: it was not forked. The session may
-- be gone, and another may have its id by now.
ALTER TABLE sessions ADD COLUMN parent TEXT;
