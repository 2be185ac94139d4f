"""What is said of errors by commands that work on the store themselves, without a daemon."""

from collections.abc import Generator
from contextlib import contextmanager

from recapd.daemon.cli import ExitCode, Failure
from recapd.storage.backup import BackupError, Faulty, StoreInUse
from recapd.storage.database import Damaged, NewerSchema
from recapd.storage.errors import StorageError, Unsafe
from recapd.storage.lock import Locked, UnsafeFolder

_FAULTS_MAX = 20  # told of


@contextmanager
def failures() -> Generator[None]:
    """Turns what the store raises into Failure; OSError stays as it is."""
    try:
        yield
    except Locked as error:
        raise Failure(
            "A daemon serves this store.", ExitCode.ALREADY_SERVED, hint="`recapd stop` ends it."
        ) from error
    except (Unsafe, UnsafeFolder) as error:
        raise Failure(
            "A folder or file is not private to this user.", ExitCode.CANNOT_SERVE
        ) from error
    except NewerSchema as error:
        raise Failure("It was made by a newer recapd.", ExitCode.CANNOT_SERVE) from error
    except Damaged as error:
        raise Failure("The database is damaged.", ExitCode.CANNOT_SERVE) from error
    except Faulty as error:
        some = [
            f"{fault.session_id} {'' if fault.revision is None else fault.revision} {fault.kind}"
            for fault in error.faults[:_FAULTS_MAX]
        ]
        told = {"message": f"{error}.", "data": {"reason": "faulty", "faults": some}}
        raise Failure(f"{error}.", hint="\n  ".join(some), error=told) from error
    except StoreInUse as error:
        raise Failure(
            f"{error}.".capitalize(), hint="With --replace they are lost for good."
        ) from error
    except (BackupError, StorageError) as error:
        raise Failure(f"{error}.".capitalize()) from error
