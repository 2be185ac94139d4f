"""Who is asking, and what that allows (PROTOCOL.md §7)."""

from dataclasses import dataclass

from recapd.protocol.errors import Forbidden
from recapd.protocol.methods import SCOPES, Scope


@dataclass(frozen=True, slots=True)
class Principal:
    """A peer: the user id that the kernel vouches for, and the scopes that it has."""

    uid: int
    scopes: frozenset[Scope]

    def require(self, scope: Scope | None) -> None:
        """Raises Forbidden, which names the scope."""
        if scope is not None and scope not in self.scopes:
            raise Forbidden(scope=scope)


def owner(uid: int) -> Principal:
    """The daemon's own user, who may do everything."""
    return Principal(uid, frozenset(SCOPES))
