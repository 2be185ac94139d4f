"""`token.create`, `.list`, `.revoke`: what its owner lets others do."""

import msgspec

from recapd.daemon.connection import Call
from recapd.protocol import messages as m
from recapd.protocol.errors import InvalidParams
from recapd.protocol.methods import SCOPES
from recapd.storage.entry import encode_time
from recapd.storage.store import AccessToken


async def create(call: Call, params: m.TokenCreateParams) -> m.TokenCreateResult:
    text, token = await call.service.authority.create(
        call.principal, params.label, params.scopes, params.sessions, params.ttl_s
    )
    return m.TokenCreateResult(token=text, **msgspec.structs.asdict(_wire_token(token)))


async def list_tokens(call: Call, params: m.Params) -> m.TokenListResult:
    tokens = await call.service.authority.tokens(call.principal)
    return m.TokenListResult([_wire_token(token) for token in tokens])


async def revoke(call: Call, params: m.TokenRevokeParams) -> m.TokenRevokeResult:
    if (params.token_id is None) == (params.token is None):
        raise InvalidParams.at("$.token_id", "either it or `token`")
    revoked = await call.service.authority.revoke(call.principal, params.token_id, params.token)
    return m.TokenRevokeResult(revoked)


def _wire_token(token: AccessToken) -> m.AccessToken:
    return m.AccessToken(
        token_id=token.token_id,
        label=token.label,
        scopes=tuple(scope for scope in SCOPES if scope in token.scopes),
        sessions=token.sessions,
        created_at=encode_time(token.created_at_ms),
        expires_at=None if token.expires_at_ms is None else encode_time(token.expires_at_ms),
    )
