"""`operation.get`, `operation.cancel`."""

import anyio

from recapd.daemon.connection import Call
from recapd.daemon.wire import wire_operation
from recapd.protocol import messages as m
from recapd.protocol.errors import AlreadyCommitted, NotFound
from recapd.storage.store import Operation


async def get(call: Call, params: m.OperationGetParams) -> m.OperationResult:
    service = call.service
    running = service.compactions.find(params.operation_id)
    if running is not None and params.wait_ms and call.principal.sees(running.session_id):
        call.release()
        with anyio.move_on_after(params.wait_ms / 1000):
            await running.ended.settled()
    return m.OperationResult(wire_operation(await _operation(call, params.operation_id)))


async def cancel(call: Call, params: m.OperationParams) -> m.CancelResult:
    service = call.service
    running = service.compactions.find(params.operation_id)
    if running is not None and call.principal.sees(running.session_id):
        running.scope.cancel()
        await running.ended.settled()
    operation = await _operation(call, params.operation_id)
    if operation.status == "completed":
        raise AlreadyCommitted
    return m.CancelResult(wire_operation(operation), operation.status == "cancelled")


async def _operation(call: Call, operation_id: str) -> Operation:
    """Raises NotFound also for that of a session which is not there for the caller."""
    operation = await call.service.store.operation(operation_id)
    if not call.principal.sees(operation.session_id):
        raise NotFound("operation")
    settling = call.service.compactions.settle(operation.session_id)
    if settling is None:
        return operation
    await settling.settled()
    return await call.service.store.operation(operation_id)
