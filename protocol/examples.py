"""One call of each method: parameters, and the result they get. A day in the life of a session."""

from typing import Final

import msgspec
from msgspec import Raw

from recapd.protocol import messages as m

_SESSION: Final = m.Session(
    session_id="talk",
    title="A talk",
    cwd="/project",
    labels={"agent": "demo"},
    created_at="2026-12-01T10:00:00.000Z",
    updated_at="2026-12-01T10:00:02.500Z",
    revision=1,
    generation=0,
    entries=2,
    tokens=m.Tokens(21, "bytes/4", exact=False),
    archived_revisions=(),
    durability="durable",
    state="active",
    parent=None,
    busy=False,
)
_EMPTY: Final = msgspec.structs.replace(
    _SESSION,
    updated_at=_SESSION.created_at,
    revision=0,
    entries=0,
    tokens=m.Tokens(0, "o200k_base", exact=True),
)
_COMPACTED: Final = msgspec.structs.replace(
    _SESSION,
    updated_at="2026-12-01T10:05:00.000Z",
    revision=2,
    generation=1,
    tokens=m.Tokens(74, "o200k_base", exact=True),
    archived_revisions=(1,),
)
_RENAMED: Final = msgspec.structs.replace(
    _COMPACTED,
    title="A short talk",
    updated_at="2026-12-01T10:06:00.000Z",
    auto_compact=m.AutoCompact(at_tokens=100_000),
)
_RESTORED: Final = msgspec.structs.replace(
    _SESSION,
    title=_RENAMED.title,
    updated_at="2026-12-01T10:07:00.000Z",
    revision=3,
    generation=2,
    archived_revisions=(2, 1),
)
_REWOUND: Final = msgspec.structs.replace(
    _RESTORED,
    updated_at="2026-12-01T10:08:00.000Z",
    revision=4,
    generation=3,
    entries=1,
    tokens=m.Tokens(11, "bytes/4", exact=False),
    archived_revisions=(3, 2, 1),
)
_FORK: Final = msgspec.structs.replace(
    _SESSION,
    session_id="other",
    title="Another talk",
    created_at="2026-12-01T10:09:00.000Z",
    updated_at="2026-12-01T10:09:00.000Z",
    revision=0,
    parent=m.Parent("talk", 1),
)
_ITEMS: Final = (
    Raw(b'{"role":"developer","content":"Be brief."}'),
    Raw(b'{"role":"user","content":"Hi!"}'),
)
_ARCHIVE: Final = m.ArchiveInfo(
    sha256="7847a19895aac477a6d2943ae34b63fed0ea8b81d87dbee647bd268cd1f843e6", bytes=297, entries=2
)
_SERVER: Final = m.ServerInfo(
    name="recapd",
    version="0.1.0",
    instance_id="0f9a61c64d7e4c2c9b58e0c0b6f6b9a1",
    store_id="5b1c52c3f7f94d1f8a9d3c1b7a2e4d60",
    pid=4711,
)
_LIMITS: Final = m.Limits(
    frame_bytes=16_777_216,
    batch=128,
    in_flight=64,
    depth=128,
    connections=256,
    subscriptions=256,
    items_per_append=1000,
    item_bytes=16_515_072,
)
_TOKEN: Final = m.AccessToken(
    token_id="8c1f6c1c5ad94b6fb0a8f1f2f3f2a7d4",
    label="an editor",
    scopes=("session.read",),
    sessions=("talk",),
    created_at="2026-12-01T10:00:00.000Z",
    expires_at="2026-12-01T11:00:00.000Z",
)
_COMPACTION: Final = m.CompactResult(
    "compact-1",
    "completed",
    _COMPACTED,
    archived_revision=1,
    archive=_ARCHIVE,
    entries_before=2,
    entries_after=2,
    tokens_before=_SESSION.tokens,
    tokens_after=_COMPACTED.tokens,
    carried_over=0,
    reminder_entry_id=3,
    quality="offline",
    attempts=0,
    attempt_log=[],
    redactions={},
)
_OPERATION: Final = m.Operation(
    operation_id="compact-1",
    method="session.compact",
    session_id="talk",
    status="completed",
    started_at="2026-12-01T10:04:59.900Z",
    ended_at="2026-12-01T10:05:00.000Z",
    result=Raw(msgspec.json.encode(_COMPACTION)),
)
_CANCELLED: Final = m.Operation(
    operation_id="compact-2",
    method="session.compact",
    session_id="talk",
    status="cancelled",
    started_at="2026-12-01T10:10:00.000Z",
    ended_at="2026-12-01T10:10:00.250Z",
    error=Raw(
        b'{"code":1008,"message":"The operation was cancelled; the history is unchanged.",'
        b'"data":{"reason":"cancelled","retryable":false}}'
    ),
)
_EXPORTED: Final = "".join(f"{bytes(item).decode()}\n" for item in _ITEMS)

EXAMPLES: Final[dict[str, tuple[m.Params, msgspec.Struct]]] = {
    "protocol.initialize": (
        m.InitializeParams(protocol=1, client=m.ClientInfo("demo", "1.0")),
        m.InitializeResult(
            protocol=m.PROTOCOL_VERSION,
            server=_SERVER,
            limits=_LIMITS,
            principal=m.Principal(1000, ("session.read", "session.write")),
            schema_sha256="9d5b7f1e3c2a4b6d8f0e1c3a5b7d9f1e3c5a7b9d1f3e5c7a9b1d3f5e7c9a1b3d",
        ),
    ),
    "protocol.ping": (m.Params(), m.PingResult("2026-12-01T10:00:00.000Z")),
    "rpc.discover": (
        m.Params(),
        m.DiscoverResult(
            openrpc="1.3.2",
            info={"title": "recapd", "version": str(m.PROTOCOL_VERSION)},
            methods=[],
            notifications=[],
            client_notifications=[],
            common_reasons=[],
            reasons={},
            components={},
        ),
    ),
    "server.info": (
        m.Params(),
        m.InfoResult(
            protocol=m.PROTOCOL_VERSION,
            server=_SERVER,
            limits=_LIMITS,
            started_at="2026-12-01T09:00:00.000Z",
            connections=2,
            sessions_loaded=1,
        ),
    ),
    "server.health": (
        m.Params(),
        m.HealthResult(
            ok=False,
            database=m.DatabaseHealth(writable=True, bytes=1_048_576, log_bytes=32_992),
            disk=m.DiskHealth(free_bytes=104_857_600),
            queues=m.QueueHealth(waiting_changes=0, running_compactions=0),
            event_loop=m.EventLoopHealth(longest_stall_ms=1.5),
            warnings=(
                m.HealthWarning("disk_almost_full", "Free space on the disk that holds the store."),
            ),
        ),
    ),
    "server.shutdown": (m.ShutdownParams(deadline_ms=2000), m.ShutdownResult(stopping=True)),
    "session.create": (
        m.CreateParams(
            session_id="talk",
            title="A talk",
            cwd="/project",
            labels={"agent": "demo"},
        ),
        m.CreateResult("talk", _EMPTY),
    ),
    "session.list": (
        m.ListParams(filter=m.ListFilter(labels={"agent": "demo"}), limit=10),
        m.ListResult([_SESSION], next_cursor=None),
    ),
    "session.get": (
        m.GetParams(session_id="talk", limit=2),
        m.GetResult(
            _SESSION,
            1,
            None,
            m.Redaction("none", {}),
            [
                m.Entry(1, _SESSION.updated_at, _ITEMS[0]),
                m.Entry(2, _SESSION.updated_at, _ITEMS[1]),
            ],
        ),
    ),
    "session.revisions": (
        m.SessionParams(session_id="talk"),
        m.RevisionsResult(
            [
                m.Revision(
                    revision=1,
                    kind="compaction",
                    operation_id="compact-1",
                    archived_at="2026-12-01T10:05:00.000Z",
                    entries=2,
                    tokens=_SESSION.tokens,
                    bytes=_ARCHIVE.bytes,
                    sha256=_ARCHIVE.sha256,
                )
            ]
        ),
    ),
    "session.verify": (
        m.VerifyParams(session_id="talk"),
        m.VerifyResult(checked=4, bytes=1893, faults=[], faults_total=0),
    ),
    "session.append": (
        m.AppendParams(session_id="talk", items=list(_ITEMS), expected_revision=0),
        m.AppendResult(_SESSION, [1, 2], []),
    ),
    "session.compact": (
        m.CompactParams(session_id="talk", operation_id="compact-1"),
        _COMPACTION,
    ),
    "session.restore": (
        m.RestoreParams(session_id="talk", revision=1, operation_id="restore-1"),
        m.ReplaceResult(
            "restore-1",
            _RESTORED,
            archived_revision=2,
            entries_before=2,
            entries_after=2,
            tokens_before=_COMPACTED.tokens,
            tokens_after=_RESTORED.tokens,
        ),
    ),
    "session.rewind": (
        m.RewindParams(session_id="talk", after_entry_id=1, operation_id="rewind-1"),
        m.ReplaceResult(
            "rewind-1",
            _REWOUND,
            archived_revision=3,
            entries_before=2,
            entries_after=1,
            tokens_before=_RESTORED.tokens,
            tokens_after=_REWOUND.tokens,
        ),
    ),
    "session.fork": (
        m.ForkParams(session_id="talk", revision=1, new_session_id="other", title="Another talk"),
        m.SessionResult(_FORK),
    ),
    "session.export": (
        m.ExportParams(session_id="talk", revision=1, redact="none"),
        m.ExportResult(
            _EXPORTED,
            next_cursor=None,
            done=True,
            manifest=m.Manifest(
                "talk",
                "jsonl",
                [m.ManifestRevision(1, current=False, entries=2)],
                len(_EXPORTED),
                m.Redaction("none", {}),
            ),
        ),
    ),
    "session.update": (
        m.UpdateParams(
            session_id="talk",
            title="A short talk",
            auto_compact=m.NewAutoCompact(at_tokens=100_000),
        ),
        m.SessionResult(_RENAMED),
    ),
    "session.delete": (m.DeleteParams(session_id="talk"), m.DeleteResult(deleted=True)),
    "session.subscribe": (
        m.SubscribeParams(session_id="talk", since=1, events=["history.replaced"]),
        m.SubscribeResult("d1f8c3a2b4e59607", from_seq=1, resume="exact"),
    ),
    "session.unsubscribe": (
        m.UnsubscribeParams(subscription_id="d1f8c3a2b4e59607"),
        m.UnsubscribeResult(unsubscribed=True),
    ),
    "session.events": (
        m.EventsParams(session_id="talk", since=1, wait_ms=1000),
        m.EventsResult(
            [
                Raw(
                    b'{"method":"history.appended","session_id":"talk","seq":2,"prev_seq":1,'
                    b'"revision":1,"generation":0,"at":"2026-12-01T10:00:02.500Z",'
                    b'"first_entry_id":1,"last_entry_id":2}'
                )
            ],
            next_seq=2,
            resume="exact",
        ),
    ),
    "operation.get": (
        m.OperationGetParams(operation_id="compact-1", wait_ms=1000),
        m.OperationResult(_OPERATION),
    ),
    "operation.cancel": (
        m.OperationParams(operation_id="compact-2"),
        m.CancelResult(_CANCELLED, cancelled=True),
    ),
    "token.create": (
        m.TokenCreateParams(
            label="an editor", scopes=["session.read"], sessions=["talk"], ttl_s=3600
        ),
        m.TokenCreateResult(token="recapd_" + "x" * 43, **msgspec.structs.asdict(_TOKEN)),
    ),
    "token.list": (m.Params(), m.TokenListResult([_TOKEN])),
    "token.revoke": (
        m.TokenRevokeParams(token="recapd_" + "x" * 43),
        m.TokenRevokeResult(revoked=True),
    ),
}
