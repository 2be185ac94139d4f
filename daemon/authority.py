"""Who is asking, and what that allows (PROTOCOL.md §7).

A peer has the user id that the kernel vouches for. As the daemon's own user it may do everything,
unless it presents a token: then it has the token's scopes, on the token's sessions, until the token
expires or is revoked. Other sessions do not exist for it.

A token is 256 random bits, and known here and in the store by its SHA-256 only: it needs no slow
hash, nobody guesses it, and how long a digest takes to be looked up tells nothing of the token.
"""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Final

import anyio

from recapd.protocol.errors import Forbidden, NotFound, Unauthenticated
from recapd.protocol.messages import Params
from recapd.protocol.methods import SCOPES, Method, Scope
from recapd.storage.pending import Pending
from recapd.storage.store import AccessToken, Store

PREFIX: Final = "recapd_"
"""What every token begins with, so that scanners for secrets can know one."""

_TOKEN_BYTES: Final = 32
_LOOK_S: Final = 60.0  # between looks at the clock


class Principal:
    """A peer. `token` None: the daemon's own user, without one."""

    __slots__ = ("_now_ms", "revoked", "scopes", "sessions", "token", "uid")

    def __init__(
        self,
        uid: int,
        scopes: frozenset[Scope],
        sessions: frozenset[str] | None = None,  # None: all
        token: AccessToken | None = None,
        now_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self.uid = uid
        self.scopes = scopes
        self.sessions = sessions
        self.token = token
        self.revoked = False
        self._now_ms = now_ms

    @property
    def active(self) -> bool:
        """False once its token has expired or was revoked."""
        if self.token is None or self.revoked:
            return not self.revoked
        expires_at_ms = self.token.expires_at_ms
        return expires_at_ms is None or self._now_ms() < expires_at_ms

    async def expiry(self) -> None:
        """Wait until its token has expired, by the clock that is set, which may jump."""
        assert self.token is not None
        while self.token.expires_at_ms is None or self._now_ms() < self.token.expires_at_ms:
            left_s = _LOOK_S
            if self.token.expires_at_ms is not None:
                left_s = (self.token.expires_at_ms - self._now_ms()) / 1000
            await anyio.sleep(min(max(left_s, 0), _LOOK_S))

    def require_active(self) -> None:
        """Raises Unauthenticated."""
        if not self.active:
            raise Unauthenticated

    def require(self, scope: Scope | None) -> None:
        """Raises Forbidden, which names the scope."""
        if scope is not None and scope not in self.scopes:
            raise Forbidden(scope=scope)

    def sees(self, session_id: str) -> bool:
        """Whether that session exists for it, if it exists."""
        return self.sessions is None or session_id in self.sessions

    @property
    def only(self) -> tuple[str, ...] | None:
        """The sessions that exist for it; None: all."""
        return None if self.sessions is None else tuple(self.sessions)

    def authorize(self, method: Method, params: Params) -> None:
        """May it make this call?

        Raises Unauthenticated; Forbidden; NotFound for a session that is not there for it, which
        nobody looks for.
        """
        self.require_active()
        self.require(method.scope)
        if self.sessions is None:
            return
        if method.makes is not None and getattr(params, method.makes) not in self.sessions:
            raise Forbidden(hint="This token is for other sessions, and may make none but those.")
        session_id: str | None = getattr(params, "session_id", None)
        if session_id is not None and session_id not in self.sessions:
            raise NotFound("session")


def owner(uid: int) -> Principal:
    """The daemon's own user, who may do everything."""
    return Principal(uid, frozenset(SCOPES))


class Authority:
    """The tokens of a store. They are changed one after the other, and here only."""

    def __init__(
        self,
        store: Store,
        uid: int,
        *,
        now_ms: Callable[[], int],
        new_id: Callable[[], str],
        on_revoked: Callable[[], None],
    ) -> None:
        """`on_revoked` is called as soon as principals have been revoked."""
        self.nobody: Final = Principal(uid, frozenset(), frozenset())
        self.nobody.revoked = True
        self._store = store
        self._uid = uid
        self._now_ms = now_ms
        self._new_id = new_id
        self._on_revoked = on_revoked
        self._principals: dict[bytes, Principal] = {}  # by the digest of their token
        self._changing = anyio.Lock()

    async def load(self) -> None:
        """Read what tokens there are; before anybody presents one. Raises StorageError."""
        for token in await self._store.tokens():
            self._admit(token)

    def _admit(self, token: AccessToken) -> None:
        scopes: set[Scope] = {scope for scope in SCOPES if scope in token.scopes}
        if "history.full" in scopes:
            scopes.add("session.read")
        sessions = None if token.sessions is None else frozenset(token.sessions)
        self._principals[token.digest] = Principal(
            self._uid, frozenset(scopes), sessions, token, self._now_ms
        )

    def authenticate(self, token: str) -> Principal:
        """Whom a token makes of its bearer: the same Principal for all of them.

        Raises Unauthenticated.
        """
        principal = self._principals.get(_digest(token), self.nobody)
        principal.require_active()
        return principal

    async def create(
        self,
        maker: Principal,
        label: str,
        scopes: Sequence[Scope],
        sessions: Sequence[str] | None,
        ttl_s: int | None,
    ) -> tuple[str, AccessToken]:
        """A new token, and what is kept of it. It ends with its maker's at the latest.

        Raises Unauthenticated, Forbidden, StorageError.
        """
        for scope in scopes:
            maker.require(scope)
        if maker.sessions is not None and (sessions is None or not maker.sessions >= set(sessions)):
            raise Forbidden(hint="This token may give others only the sessions that it has.")
        text = PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
        now_ms = self._now_ms()
        ends_ms = [] if ttl_s is None else [now_ms + 1000 * ttl_s]
        if maker.token is not None and maker.token.expires_at_ms is not None:
            ends_ms.append(maker.token.expires_at_ms)
        token = AccessToken(
            self._new_id(),
            _digest(text),
            label,
            tuple(scope for scope in SCOPES if scope in scopes),
            None if sessions is None else tuple(sorted(set(sessions))),
            None if maker.token is None else maker.token.token_id,
            now_ms,
            min(ends_ms, default=None),
        )
        async with self._changing:
            maker.require_active()  # what it makes must not outlive it
            await _settled(self._store.add_token(token))
            self._admit(token)
        return text, token

    async def tokens(self, asker: Principal) -> list[AccessToken]:
        """Those that have not expired; for who has a token, those made with it. Raises
        StorageError.
        """
        now_ms = self._now_ms()
        return [
            token
            for token in _made_with(asker.token, await self._store.tokens())
            if token.expires_at_ms is None or now_ms < token.expires_at_ms
        ]

    async def revoke(self, asker: Principal, token_id: str | None, text: str | None) -> bool:
        """Revoke a token, by its id or its text, and those made with it; False when `asker` has
        none such.

        It is good for nothing from this moment on, whatever becomes of the store: on an error it
        has to be revoked again, or a later start will take it. Raises StorageError.
        """
        digest = None if text is None else _digest(text)
        async with self._changing:
            tokens = await self._store.tokens()
            for token in _made_with(asker.token, tokens):
                if token_id == token.token_id or digest == token.digest:
                    break
            else:
                return False
            ended = [token, *_made_with(token, tokens)]
            for one in ended:
                principal = self._principals.pop(one.digest, None)
                if principal is not None:
                    principal.revoked = True
            self._on_revoked()
            await _settled(self._store.remove_tokens([one.token_id for one in ended]))
        return True


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


async def _settled(change: Pending[None]) -> None:
    """Wait for a change that was handed over; a cancel comes behind it. Raises StorageError."""
    with anyio.CancelScope(shield=True):
        await change.settled()
    change.result()


def _made_with(maker: AccessToken | None, tokens: Sequence[AccessToken]) -> list[AccessToken]:
    """The tokens that were made with a token, and with those; all of them for None."""
    if maker is None:
        return [*tokens]
    found = [one for one in tokens if one.parent == maker.token_id]
    return found + [other for one in found for other in _made_with(one, tokens)]
