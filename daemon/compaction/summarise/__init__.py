"""Summarisers: from what a compaction takes away to the text in its place (PROTOCOL.md §5.2)."""
