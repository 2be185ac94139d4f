"""What a Store can refuse or fail with.

::

    StoreError
    ├── UnknownSession          no session has that id
    ├── SessionExists           create: the id is in use
    ├── SessionClosed           the session is archived: it takes no more changes
    ├── Conflict                expected_revision or expected_generation is not the present one
    ├── OperationReused         the operation id stands for something else
    ├── OperationUnknown        no operation has that id
    ├── CompactionRunning       another compaction of the session has not ended
    ├── Superseded              the history was replaced since the work on it began
    ├── RevisionUnknown         the session has no archived revision of that number
    ├── ArchiveMissing          its file is not there
    ├── ArchiveCorrupt          its file is not what was written
    └── StorageError            the disk or the database failed; the change was not made
        ├── Unsafe              a file is a link, no plain file, or another user's
        ├── StorageFull
        ├── StorageReadonly
        ├── StoreClosed         the store was closed first
        └── OutcomeUnknown      it could not be established whether the change was made

A refusal leaves everything as it was, and so does every StorageError but OutcomeUnknown.
"""


class StoreError(Exception):
    """Base of everything a Store raises on purpose."""


class UnknownSession(StoreError):
    """No session has that id."""


class SessionExists(StoreError):
    """The id is in use."""


class SessionClosed(StoreError):
    """The session's state is `archived`."""


class Conflict(StoreError):
    """The caller expected another revision or generation than these, the present ones."""

    def __init__(self, revision: int, generation: int) -> None:
        super().__init__(f"at revision {revision}, generation {generation}")
        self.revision = revision
        self.generation = generation


class OperationReused(StoreError):
    """The operation id was used before with another method or other parameters."""


class OperationUnknown(StoreError):
    """No operation has that id."""


class CompactionRunning(StoreError):
    """One compaction of a session at a time; `operation_id` names the one that runs."""

    def __init__(self, operation_id: str) -> None:
        super().__init__(operation_id)
        self.operation_id = operation_id


class Superseded(StoreError):
    """The history was replaced since the work on it began."""


class RevisionUnknown(StoreError):
    """The session has no archived revision of that number, or of that generation."""

    def __init__(self, revision: int | None = None) -> None:
        super().__init__(f"revision {revision}")
        self.revision = revision


class ArchiveMissing(StoreError):
    """The archive file of `revision` is not there, or is no plain file of ours."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"revision {revision}")
        self.revision = revision


class ArchiveCorrupt(StoreError):
    """The archive file of `revision` is not what was written; `fault` says in what."""

    def __init__(self, revision: int, fault: str) -> None:
        super().__init__(f"revision {revision}: {fault}")
        self.revision = revision
        self.fault = fault


class StorageError(StoreError):
    """The disk or the database failed; the change was not made."""


class Unsafe(StorageError):
    """A file of the store is not what it must be: a link, no plain file, or another's."""


class StorageFull(StorageError):
    """No space, no inode, no quota left, or a file-size limit."""


class StorageReadonly(StorageError):
    """The store cannot be written to."""


class StoreClosed(StorageError):
    """The store was closed before the change was begun."""


class OutcomeUnknown(StorageError):
    """Whether it was made could not be established: ask for the operation, or repeat it."""
