"""The bridge to jsonrpcserver, and the one place where exceptions become errors on the wire.

jsonrpcserver 5.0.9 validates with jsonschema, loses ids and leaks exception text when it is given a
whole message. So it is given decoded requests one by one, through `dispatch_request`, and functions
that raise nothing.
"""

import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from recapd.daemon.jsonrpc import Error, Success, dispatch_request
from recapd.daemon.jsonrpc import Request as JsonRpcRequest
from recapd.protocol import errors
from recapd.protocol.messages import Params
from recapd.protocol.methods import METHODS, Method
from recapd.storage import errors as store_errors
from recapd.storage.database import Damaged
from recapd.storage.pending import Pending

T = TypeVar("T")

logger = logging.getLogger("recapd.dispatch")

Handler = Callable[[Any, Any], Awaitable[object]]
"""Takes a `Call` and the method's parameters; gives its result, or a `Later`."""


class Later:
    """A result that is made by `convert` when a change is durable; the request waits for it without
    a task.
    """

    __slots__ = ("convert", "pending")

    def __init__(self, pending: Pending[T], convert: Callable[[T], object]) -> None:
        self.pending: Pending[Any] = pending
        self.convert: Callable[[Any], object] = convert

    def result(self) -> object:
        """Of a done change. Raises RpcError."""
        try:
            return self.convert(self.pending.result())
        except Exception as error:
            raise rpc_error(error) from error


def rpc_error(error: Exception) -> errors.RpcError:
    """What any exception says on the wire; what nobody expected is logged under its incident."""
    match error:
        case errors.RpcError():
            return error
        case store_errors.UnknownSession():
            return errors.NotFound("session")
        case store_errors.OperationUnknown():
            return errors.NotFound("operation")
        case store_errors.SessionExists():
            return errors.AlreadyExists()
        case store_errors.SessionClosed():
            return errors.SessionArchived()
        case store_errors.Conflict():
            return errors.Conflict(revision=error.revision, generation=error.generation)
        case store_errors.OperationReused():
            return errors.OperationIdReused()
        case store_errors.CompactionRunning():
            return errors.CompactionRunning(operation_id=error.operation_id)
        case store_errors.Superseded():
            return errors.Superseded()
        case store_errors.RevisionUnknown():
            return errors.RevisionNotFound(revision=error.revision or 0)
        case store_errors.ArchiveMissing():
            return errors.ArchiveMissing(revision=error.revision)
        case store_errors.ArchiveCorrupt():
            return errors.ArchiveCorrupt(revision=error.revision)
        case store_errors.OutcomeUnknown():
            return errors.OutcomeUnknown()
        case store_errors.StorageFull():
            return errors.StorageFull()
        case store_errors.StorageReadonly():
            return errors.StorageReadonly()
        case store_errors.StoreClosed():
            return errors.ShuttingDown()
        case Damaged():
            return errors.StorageError(retryable=False, hint="The database is damaged.")
        case store_errors.StorageError():
            logger.error("storage error: %s", error)
            return errors.StorageError()
        case _:
            incident = secrets.token_hex(8)
            # The type and the place, never the text: it may hold what a client sent.
            logger.error("incident %s: %s at %s", incident, type(error).__name__, _place(error))
            return errors.InternalError(incident=incident)


def _place(error: BaseException) -> str:
    places: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(places[-6:])


_RIGHT: Final[type[Any]] = type(Success())  # jsonrpcserver's results are an Either of oslash


class _Fits(inspect.Signature):
    """jsonrpcserver binds the arguments of each call to the signature, for 9 µs.

    Here they always fit: a call and the parameters, which were decoded as the method's own type.
    """

    def bind(self, /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        return _BOUND


_FITS: Final = _Fits()
_BOUND: Final = inspect.Signature().bind()


def _guarded(method: Method, handler: Handler) -> Callable[..., Awaitable[Any]]:
    """What jsonrpcserver calls: asks whether the peer may, and lets no exception out but a
    cancellation.
    """
    shows = method.scope == "session.read"

    async def guarded(call: Any, params: Params) -> Any:
        try:
            call.principal.authorize(method, params)
            result = await handler(call, params)
            if shows:  # it may have waited
                call.principal.require_active()
            return Success(result)
        except Exception as error:
            said = rpc_error(error)
            return Error(said.code, said.message, said)

    guarded.__signature__ = _FITS  # type: ignore[attr-defined]  # functions may have one
    return guarded


class Dispatcher:
    """The handlers of all methods of the table."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        if handlers.keys() != METHODS.keys():
            raise ValueError(f"no handler or no method: {handlers.keys() ^ METHODS.keys()}")
        self._functions: dict[str, Any] = {
            name: _guarded(METHODS[name], handler) for name, handler in handlers.items()
        }

    async def __call__(self, call: object, method: str, params: Params) -> Any:
        """The method's result, or a Later of it.

        Raises RpcError. Does not suspend where the method is `inline`.
        """
        _, answer = await dispatch_request(
            self._functions, call, JsonRpcRequest(method, [params], None)
        )
        either: Any = answer  # an Either of oslash, which has no types
        if isinstance(either, _RIGHT):
            return either._value.result
        raise either._error.data


DECODERS: Final[dict[str, msgspec.json.Decoder[Params]]] = {
    name: msgspec.json.Decoder(method.params) for name, method in METHODS.items()
}
