"""Evidence: what of a compacted history must not depend on how well a summary was written.

::

    entries ─ read ─► words, calls, outputs ─ deeds, outcomes, patterns ─► facts ─ write ─► block

Built by code, for every new reminder, beside its summary. Each fact names the entry that it comes
from, so that a client can fetch the original from the archived revision (PROTOCOL.md §3,
`session.get` with `revision`). The block of a reminder that falls out is read back, since its
format is our own, and what is most useful of it goes on in the new one.
"""
