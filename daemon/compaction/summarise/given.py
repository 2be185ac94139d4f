"""The summary that the client wrote: no model is asked."""

from dataclasses import dataclass

from recapd.daemon.compaction.summarise.base import Source, Summariser, Summary, accept


@dataclass(frozen=True, slots=True)
class GivenSummary(Summariser):
    """Hands over a summary that the client wrote."""

    text: str

    async def __call__(self, source: Source) -> Summary:
        return Summary(self.text, "client")


def given_summary(text: str) -> GivenSummary:
    """A summariser that hands over `text`.

    Raises:
        CompactionFailed: `text` cannot be a summary (stage `accept`).
    """
    return GivenSummary(accept(text))
