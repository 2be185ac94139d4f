"""Each archive belongs to exactly one share, whatever the store holds (PROMISES.md R7)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recapd.daemon.handlers.verify import _chosen  # pyright: ignore[reportPrivateUsage]
from recapd.protocol.messages import Share, VerifyParams

REVISIONS = st.sets(st.integers(1, 2**40), max_size=20)
LAYOUTS = st.dictionaries(st.text("abcXYZ019._-", min_size=1, max_size=20), REVISIONS, max_size=20)


@pytest.mark.promise("R7")
@given(LAYOUTS, st.integers(1, 50))
@settings(max_examples=200)
def test_each_archive_is_read_by_exactly_one_share(layout: dict[str, set[int]], of: int) -> None:
    for session_id, revisions in layout.items():
        shares = [
            _chosen(session_id, VerifyParams(share=Share(part, of))) for part in range(1, of + 1)
        ]
        for revision in revisions:
            assert [chosen(revision) for chosen in shares].count(True) == 1
