"""Which answers are summaries, and which are refused (B03, B06, B15)."""

import re

from recapd.daemon.compaction.relevance import read_grades
from recapd.daemon.compaction.summarise.prompt import repeats
from recapd.daemon.compaction.summarise.provider import Answer, Prompt, ProviderFailed
from recapd.daemon.compaction.tokens import count_tokens

HALF_FROM_TOKENS = 4_000
"""Of a source: from there on a summary must be at most half as long as it."""

_TOKEN_CHARACTERS = 16  # more of them for each token, over a whole text, is no text
_THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)


def accepted(answer: Answer, prompt: Prompt, source_tokens: int) -> str:
    """The summary in an answer to `prompt`, which asked about `source_tokens` tokens.

    Local servers may put what a model thinks in front of the text, in `<think>` tags; it goes.

    Raises:
        ProviderFailed: `cut_off`, `tool_call`, `refusal`, `only_reasoning`, `empty`, `too_long` or
            `repeats_prompt`.
    """
    text = _text_of(answer)
    tokens_max = source_tokens // 2 if source_tokens > HALF_FROM_TOKENS else source_tokens
    if len(text) > _TOKEN_CHARACTERS * min(tokens_max, prompt.output_tokens_max):
        raise ProviderFailed("too_long", answered=True)
    if repeats(text, prompt):
        raise ProviderFailed("repeats_prompt", answered=True)
    # A token has a byte or more, so many an answer need not be counted.
    if len(text.encode()) > tokens_max and count_tokens(text).count > tokens_max:
        raise ProviderFailed("too_long", answered=True)
    return text


def graded(answer: Answer) -> dict[int, float]:
    """The grades in an answer.

    Raises:
        ProviderFailed: as above, or `no_grades`.
    """
    grades = read_grades(_text_of(answer))
    if not grades:
        raise ProviderFailed("no_grades", answered=True)
    return grades


def _text_of(answer: Answer) -> str:
    if answer.ending != "complete":
        raise ProviderFailed(answer.ending, answered=True)
    text = _THOUGHTS.sub("", answer.text).strip()
    if not text:
        thought = answer.reasoning or answer.text.strip()
        raise ProviderFailed("only_reasoning" if thought else "empty", answered=True)
    return text
