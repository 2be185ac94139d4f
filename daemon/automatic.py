"""Compactions that nobody asks for: begun behind the commit that takes a session over its line.

::

    commit ─► over `at_tokens`? ─► nothing running, gain to expect, breakers closed? ─► Compactions
                                                  │ no: said once, as `skipped`

From there on it is a compaction like any other (`compactions.py`), but for one thing: it is refused
where it would not make the history smaller. There is at most one for each commit that adds items.
Two things end its repetition, and both are remembered in memory alone, for a restart begins none:

- *No gain*: what could not be got below the line is not tried again in the same generation, unless
  the setting changes.
- *Breakers*: one for each summarizer, which counts the faults of its provider in whatever session,
  so that one that is down is left alone by all; and one for each session, which counts all other
  failures, so that a history that no summary can be made of holds up nobody else.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from recapd.daemon.breaker import Breaker
from recapd.daemon.compaction.summarise.base import Source, Summariser, Summary
from recapd.daemon.compactions import Compaction, Compactions
from recapd.daemon.config import Settings
from recapd.daemon.summarizers import pipeline_settings, source_redactor, summariser_for
from recapd.protocol.errors import (
    BreakerOpen,
    Cancelled,
    CompactionFailed,
    NoGain,
    NotFound,
    NothingToCompact,
    Overloaded,
    ResultTooLarge,
    RpcError,
    ShuttingDown,
    Superseded,
)
from recapd.protocol.messages import HealthWarning
from recapd.storage.entry import encode_time
from recapd.storage.pending import Pending
from recapd.storage.store import Appended, AutoCompact, Expect, Receipt, Replayed, Session

logger = logging.getLogger("recapd.automatic")

_MEMORIES_MAX: Final = 1000  # sessions; of one that is forgotten, one more try is made

_PROVIDER_STAGES: Final = ("configure", "summarise")  # of CompactionFailed


@dataclass(slots=True, eq=False)
class _Memory:
    """What is known of a session that was over its line."""

    created_at_ms: int  # a session that is deleted may be followed by one of the same id
    breaker: Breaker
    under_way: bool = False
    no_gain: tuple[int, AutoCompact] | None = None  # in that generation, with that setting
    said: object = None  # why it was skipped, so that this is said once


@dataclass(frozen=True, slots=True, eq=False)
class _Try:
    """A compaction that was begun, and where its end is to be noted."""

    compaction: Compaction
    setting: AutoCompact
    generation: int
    memory: _Memory
    summarizer: str


@dataclass(frozen=True, slots=True)
class _Unconfigured(Summariser):
    """Fails within the compaction, so that whoever looks sees why there is none."""

    failure: CompactionFailed

    async def __call__(self, source: Source) -> Summary:
        raise self.failure


class Automatic:
    """Begins compactions of sessions that have `auto_compact`; the others cost nothing."""

    def __init__(
        self,
        compactions: Compactions,
        settings: Settings,
        *,
        now_ms: Callable[[], int],
        elapsed_ms: Callable[[], int],
        new_id: Callable[[], str],
    ) -> None:
        self._compactions = compactions
        self._settings = settings
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_ms
        self._new_id = new_id
        self._memories: dict[str, _Memory] = {}  # by session id
        self._breakers: dict[str, Breaker] = {}  # by summarizer
        self._stopped = False

    def watch(self, change: Pending[Appended | Replayed] | Pending[Session | Replayed]) -> None:
        """Begin a compaction behind the change if one is due then; its answer waits for nothing."""
        change.on_done(self._committed)

    def heed(self, compaction: Compaction, summarizer: str | None) -> None:
        """Let the success of a client's own compaction close the breakers.

        `summarizer` None: the client made the summary, which tells nothing of any summarizer.
        """

        def ended(outcome: Pending[bytes]) -> None:
            if not outcome.failed:
                if summarizer in self._breakers:
                    self._breakers[summarizer].succeed()
                if compaction.session_id in self._memories:
                    self._memories[compaction.session_id].breaker.succeed()

        compaction.ended.on_done(ended)

    def stop(self) -> None:
        """Begin no more; those that run are for `Compactions` to end."""
        self._stopped = True

    def warnings(self) -> list[HealthWarning]:
        """Of breakers that are open."""
        waiting = [(f"the summarizer {name}", one) for name, one in self._breakers.items()]
        sessions = [one.breaker for one in self._memories.values() if one.breaker.left_ms]
        if sessions:
            count = f"{len(sessions)} session{'s' if len(sessions) > 1 else ''}"
            waiting.append((count, min(sessions, key=lambda one: one.left_ms)))
        return [
            HealthWarning(
                "automatic_compaction_waits",
                f"Automatic compaction failed again and again with {what}, and waits until"
                f" {encode_time(self._now_ms() + breaker.left_ms)}. session.compact tells why,"
                " and resumes it by its success.",
            )
            for what, breaker in waiting
            if breaker.left_ms
        ]

    def _committed(
        self, change: Pending[Appended | Replayed] | Pending[Session | Replayed]
    ) -> None:
        if change.failed:
            return
        done = change.result()
        session = done.session if isinstance(done, Appended) else done
        if isinstance(session, Replayed) or session.auto_compact is None:
            return
        if session.tokens.counted + session.tokens.estimated >= session.auto_compact.at_tokens:
            self._consider(session, session.auto_compact)

    def _consider(self, session: Session, setting: AutoCompact) -> None:
        memory = self._memory_of(session)
        if self._stopped or memory.under_way:
            return
        if session.running is not None:
            self._compactions.settle(session.session_id)  # should it only seem to run
            return
        if memory.no_gain == (session.generation, setting):
            self._skip(session, memory, memory.no_gain, NoGain())
            return
        summarizer = setting.summarizer or self._settings.default_summarizer
        breakers = (self._breakers.setdefault(summarizer, self._new_breaker()), memory.breaker)
        for breaker in breakers:
            if not breaker.admits:
                failure = BreakerOpen(retry_after_ms=breaker.left_ms)
                self._skip(session, memory, (breaker, breaker.openings), failure)
                return
        try:
            compaction = self._compactions.start(
                session.session_id,
                self._receipt(),
                # Whoever replaces the history first has settled the matter.
                Expect(generation=session.generation),
                summarise=self._summariser(summarizer, setting),
                settings=pipeline_settings(self._settings, setting.keep_recent_tokens),
                force=False,
                redactor=source_redactor(self._settings),
                must_shrink=True,
            )
        except Overloaded:
            return  # the next append decides
        one = _Try(compaction, setting, session.generation, memory, summarizer)
        memory.under_way = True
        for breaker in breakers:
            breaker.enter()
        compaction.begun.on_done(partial(self._begun, one))
        compaction.ended.on_done(partial(self._ended, one))

    def _begun(self, one: _Try, begun: Pending[Session | Replayed]) -> None:
        if begun.failed:  # another runs, or the session has changed or gone: nothing was started
            one.memory.under_way = False
            one.memory.breaker.leave()
            self._breakers[one.summarizer].leave()

    def _ended(self, one: _Try, ended: Pending[bytes]) -> None:
        memory, provider = one.memory, self._breakers[one.summarizer]
        memory.under_way = False
        failure = _failure(ended)
        match failure:
            case None | NoGain() | ResultTooLarge():
                provider.succeed()  # there was a summary
                memory.breaker.succeed()
            case Cancelled() | Superseded() | NothingToCompact() | NotFound() | ShuttingDown():
                provider.leave()
                memory.breaker.leave()
            case CompactionFailed() if failure.data.get("stage") in _PROVIDER_STAGES:
                memory.breaker.leave()
                self._fail(provider, f"the summarizer {one.summarizer}")
            case _:
                provider.leave()
                self._fail(memory.breaker, "a session")
        if isinstance(failure, NoGain | ResultTooLarge | NothingToCompact):
            memory.no_gain = memory.said = one.generation, one.setting
        elif failure is None and one.compaction.tokens_after >= one.setting.at_tokens:
            memory.no_gain = one.generation + 1, one.setting

    def _fail(self, breaker: Breaker, what: str) -> None:
        if breaker.fail():
            logger.warning(
                "automatic compaction with %s failed %d times in a row and waits %d s",
                what,
                self._settings.breaker_failures,
                self._settings.breaker_wait_s,
            )

    def _skip(self, session: Session, memory: _Memory, why: object, failure: RpcError) -> None:
        if memory.said == why:
            return
        memory.said = why

        def begun(outcome: Pending[Session | Replayed]) -> None:
            if outcome.failed:
                memory.said = None

        try:
            self._compactions.skip(
                session.session_id,
                self._receipt(),
                Expect(generation=session.generation),
                failure,
            ).on_done(begun)
        except Overloaded:
            memory.said = None

    def _receipt(self) -> Receipt:
        # No client's parameters have an empty digest, so nobody gets this outcome for a result.
        return Receipt(self._new_id(), "session.compact", b"")

    def _summariser(self, summarizer: str, setting: AutoCompact) -> Summariser:
        try:
            return summariser_for(summarizer, self._settings, setting.instructions)
        except CompactionFailed as error:
            return _Unconfigured(error)

    def _memory_of(self, session: Session) -> _Memory:
        memory = self._memories.get(session.session_id)
        if memory is None or memory.created_at_ms != session.created_at_ms:
            memory = _Memory(session.created_at_ms, self._new_breaker())
            self._memories[session.session_id] = memory
            if len(self._memories) > _MEMORIES_MAX:
                self._memories.pop(next(iter(self._memories)))
        return memory

    def _new_breaker(self) -> Breaker:
        settings = self._settings
        return Breaker(settings.breaker_failures, 1000 * settings.breaker_wait_s, self._elapsed_ms)


def _failure(ended: Pending[bytes]) -> RpcError | None:
    try:
        ended.result()
    except RpcError as failure:
        return failure
    return None
