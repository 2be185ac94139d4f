"""`operation.get`, `operation.cancel`."""

import anyio

from recapd.daemon.connection import Call
from recapd.daemon.wire import wire_operation
from recapd.protocol import messages as m
from recapd.protocol.errors import AlreadyCommitted


async def get(call: Call, params: m.OperationGetParams) -> m.OperationResult:
    service = call.service
    running = service.compactions.find(params.operation_id)
    if running is not None and params.wait_ms:
        call.release()
        with anyio.move_on_after(params.wait_ms / 1000):
            await running.ended.settled()
    return m.OperationResult(wire_operation(await service.store.operation(params.operation_id)))


async def cancel(call: Call, params: m.OperationParams) -> m.CancelResult:
    service = call.service
    running = service.compactions.find(params.operation_id)
    if running is not None:
        running.scope.cancel()
        await running.ended.settled()
    operation = await service.store.operation(params.operation_id)
    if operation.status == "completed":
        raise AlreadyCommitted
    return m.CancelResult(wire_operation(operation), operation.status == "cancelled")
