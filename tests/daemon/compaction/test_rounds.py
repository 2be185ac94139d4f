"""A session that is compacted again and again (B09, B14): what stays, and how large it gets."""

import json
from typing import Any

import pytest

from recapd.daemon.compaction.allowance import (
    allowance_tokens,
    evidence_tokens,
    summary_characters,
)
from recapd.daemon.compaction.pipeline import Settings, divide, prepare
from recapd.daemon.compaction.summarise.offline import OfflineSummariser
from recapd.daemon.compaction.tokens import count_tokens_of
from recapd.protocol.items import Role, item_facts
from recapd.storage.entry import Entry, Reminder

CONTEXT_LIMIT = 20_000
ROUNDS = 15


def of_round(number: int) -> list[dict[str, Any]]:
    """Some 30 000 tokens of work, unlike that of any other round."""
    items: list[dict[str, Any]] = [{"role": "user", "content": f"Begin part {number}."}]
    for step in range(12):
        call_id = f"call-{number}-{step}"
        command = f"make part-{number}-{step}"
        output = f"compiling unit {step}\n" * 400 + f"Command exited with code {step % 3}"
        items += [
            {
                "type": "function_call",
                "call_id": call_id,
                "name": "bash",
                "arguments": json.dumps({"command": command}),
            },
            {"type": "function_call_output", "call_id": call_id, "output": output},
        ]
    for step in range(4):
        call_id = f"write-{number}-{step}"
        arguments = {"path": f"src/part{number}/unit{step}.c", "content": "int x;\n" * 300}
        items += [
            {
                "type": "function_call",
                "call_id": call_id,
                "name": "write",
                "arguments": json.dumps(arguments),
            },
            {"type": "function_call_output", "call_id": call_id, "output": "written"},
        ]
    return [
        *items,
        {"role": "user", "content": f"Now finish part {number},\nand «leave» the rest."},
    ]


async def test_fifteen_compactions_stay_within_the_limit_and_lose_little() -> None:
    """PROTOCOL.md §5.3 and §5.4: the size, eleven reminders at most, instructions once each."""
    rules = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Use C."}]
    history = [
        Entry(number, 0, json.dumps(rule).encode()) for number, rule in enumerate(rules, start=1)
    ]
    instructions = list(history)
    next_id = 3
    settings = Settings(context_limit=CONTEXT_LIMIT)
    for number in range(ROUNDS):
        for item in of_round(number):
            history.append(Entry(next_id, next_id, json.dumps(item).encode()))
            next_id += 1
        plan = await prepare(
            await divide(history, settings), summarise=OfflineSummariser(), settings=settings
        )
        history = plan.build(next_id, 0, Reminder(number + 1, f"op-{number}", number))
        next_id += 1

        roles = [item_facts(entry.item).role for entry in history]
        assert history[:2] == instructions
        assert roles == [Role.INSTRUCTION] * 2 + [Role.REMINDER] * min(number + 1, 11)
        assert (await count_tokens_of([entry.item for entry in history])).count <= CONTEXT_LIMIT
        assert f"Now finish part {number},\n  and «leave» the rest." in plan.evidence
        written = [f"src/part{number}/unit{step}.c" in plan.evidence for step in range(4)]
        states = [
            f"exit {step % 3}: make part-{number}-{step}\n" in plan.evidence for step in range(12)
        ]
        assert all(written)
        assert sum(states) >= 10

    text = b"".join(entry.item for entry in history).decode()
    for number in range(ROUNDS):  # also what only evidence of evidence can know by now
        assert all(f"src/part{number}/unit{step}.c" in text for step in range(4))


@pytest.mark.parametrize("limit_tokens", [1_000, 20_000, 1_000_000])
@pytest.mark.parametrize("small", [0, 5, 8, 10])
def test_there_is_always_room_for_the_next_one(limit_tokens: int, small: int) -> None:
    """However small the first ones were, and though all others take whatever they may."""
    retained = [limit_tokens // 1_000] * small
    for _ in range(40):
        room = limit_tokens - sum(retained)
        given = allowance_tokens(room, len(retained), retained[0] if retained else 0)
        assert limit_tokens * 0.004 <= given <= limit_tokens * 0.34
        retained = [*retained, given][-10:]


def test_the_first_are_the_largest() -> None:
    left = 20_000
    given: list[int] = []
    for earlier in range(10):
        given.append(allowance_tokens(left, earlier, given[0] if given else 0))
        left -= given[-1]
    assert given[:3] == [6622, 3311, 2207]
    assert given == sorted(given, reverse=True)
    assert given[-1] > 600
    assert allowance_tokens(20_000, 25) == 6622
    assert allowance_tokens(-5, 0) == 0


def test_summary_and_evidence_divide_the_allowance() -> None:
    assert summary_characters(6_600, 8_000, 10**6) == 8_000
    assert summary_characters(900, 8_000, 10**6) == 1_200
    assert summary_characters(0, 8_000, 10**6) == 200
    assert summary_characters(0, 50, 10**6) == 50
    assert summary_characters(6_600, 8_000, 8_000) == 6_000
    assert summary_characters(6_600, 8_000, 10) == 3_000
    assert evidence_tokens(900, 20_000) == 600
    assert evidence_tokens(6_600, 20_000) == 2_500
    assert evidence_tokens(-5, 20_000) == 0
