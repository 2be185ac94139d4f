"""`protocol.*`, `rpc.discover` and `server.*`."""

import os

import recapd
from recapd.daemon.connection import Call
from recapd.protocol import messages as m
from recapd.protocol.errors import InvalidRequest, UnsupportedProtocol
from recapd.protocol.schema import openrpc_document, schema_sha256
from recapd.storage.entry import encode_time

_FREE_BYTES_LOW = 256 << 20
_LOG_BYTES_HIGH = 256 << 20


def _server(call: Call) -> m.ServerInfo:
    service = call.service
    return m.ServerInfo(
        "recapd", recapd.__version__, service.instance_id, service.store.store_id, os.getpid()
    )


async def initialize(call: Call, params: m.InitializeParams) -> m.InitializeResult:
    if not call.connection.fresh:
        raise InvalidRequest(hint="protocol.initialize is the first request or none.")
    call.connection.fresh = False
    if params.token is not None:
        call.connection.present(params.token)
    if params.protocol not in (None, m.PROTOCOL_VERSION):
        raise UnsupportedProtocol(supported=[m.PROTOCOL_VERSION])
    principal = call.connection.principal
    return m.InitializeResult(
        m.PROTOCOL_VERSION,
        _server(call),
        call.service.limits,
        m.Principal(principal.uid, tuple(sorted(principal.scopes))),
        schema_sha256(),
    )


async def ping(call: Call, params: m.Params) -> m.PingResult:
    return m.PingResult(encode_time(call.service.now_ms()))


async def discover(call: Call, params: m.Params) -> object:
    return openrpc_document()


async def info(call: Call, params: m.Params) -> m.InfoResult:
    service = call.service
    return m.InfoResult(
        m.PROTOCOL_VERSION,
        _server(call),
        service.limits,
        encode_time(service.started_at_ms),
        len(service.connections),
        len(service.actors),
    )


async def health(call: Call, params: m.Params) -> m.HealthResult:
    store = await call.service.store.health()
    warnings: list[m.HealthWarning] = []
    if store.damaged:
        warnings.append(
            m.HealthWarning(
                "database_damaged", "Stop the server and restore a backup of the store."
            )
        )
    elif store.moved:
        warnings.append(
            m.HealthWarning(
                "store_moved", "Put the folder of the store back in its place, or stop the server."
            )
        )
    elif not store.writable:
        warnings.append(
            m.HealthWarning("database_unavailable", "The next change opens the database anew.")
        )
    if store.disk_free_bytes < _FREE_BYTES_LOW and not store.moved:
        warnings.append(
            m.HealthWarning("disk_almost_full", "Free space on the disk that holds the store.")
        )
    if store.log_bytes > _LOG_BYTES_HIGH:
        warnings.append(
            m.HealthWarning("log_large", "Another process reads the database: let it end.")
        )
    if not call.service.settings.socket.is_socket():
        warnings.append(
            m.HealthWarning("socket_gone", "Nobody else can connect: stop the server, start anew.")
        )
    warnings += call.service.automatic.warnings()
    return m.HealthResult(
        not warnings,
        m.DatabaseHealth(store.writable, store.database_bytes, store.log_bytes),
        m.DiskHealth(store.disk_free_bytes),
        m.QueueHealth(store.waiting_changes, len(call.service.compactions)),
        m.EventLoopHealth(call.service.stalls.longest_ms),
        tuple(warnings),
    )


async def shutdown(call: Call, params: m.ShutdownParams) -> m.ShutdownResult:
    call.service.stopping.ask(params.mode, params.deadline_ms)
    return m.ShutdownResult(True)
