"""What the settings say about a compaction: who summarises, and how."""

from recapd.daemon.compaction import pipeline
from recapd.daemon.compaction.summarise.base import Summariser
from recapd.daemon.compaction.summarise.offline import OfflineSummariser
from recapd.daemon.compaction.summarise.online import OnlineSummariser
from recapd.daemon.config import Settings
from recapd.daemon.redaction import Redactor
from recapd.protocol.errors import CompactionFailed


def summariser_for(
    kind: str, settings: Settings, instructions: str | None, threshold: float | None = None
) -> Summariser:
    """The summarizer of this name; `threshold` is of relevance, where a model is asked.

    Raises CompactionFailed for one that is not configured.
    """
    if kind == "offline":
        return OfflineSummariser(instructions or "")
    configured = next((one for one in settings.summarizers if one.kind == kind), None)
    if configured is None:
        raise CompactionFailed(
            stage="configure", hint=f"The configuration has no table [summarizers.{kind}]."
        )
    return OnlineSummariser(configured.checked(), instructions or "", threshold)


def pipeline_settings(
    settings: Settings, keep_recent_tokens: int, *, fold_reminders: bool = False
) -> pipeline.Settings:
    return pipeline.Settings(
        context_limit=settings.context_limit,
        keep_recent_tokens=keep_recent_tokens,
        reminders=settings.reminders,
        fold_reminders=fold_reminders,
        summary_characters_max=settings.summary_characters_max,
    )


def source_redactor(settings: Settings) -> Redactor | None:
    """Takes secrets out of what is summarised, unless that is configured away."""
    return Redactor(each_once=True) if settings.redact_summary_source else None
