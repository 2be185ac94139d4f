"""Secrets in text (redaction.py): what each shape is, and what it is not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recapd.daemon.redaction import Redactor

WORD = "aB3" * 40

FOUND = [  # what stands before a secret, the secret, what stands behind it, and its kind
    ("", f"glrt-{WORD[:20]}", "", "gitlab_token"),
    ("Authorization: Basic ", f"{WORD[:24]}==", "", "basic_auth"),
    ("redis://", f":{WORD[:9]}", "@host/1", "url_password"),
    ("DB_PASSWORD='", WORD[:16], "'", "assigned_secret"),
    ('{"api_key": "', WORD[:16], '"}', "assigned_secret"),
    ("?access_token=", WORD[:30], "&x=1", "assigned_secret"),
    ("https://hooks.slack.com/services/", f"T0/B0/{WORD[:24]}", "", "webhook"),
    ("", f"1234567890:AA{WORD[:33]}", "", "telegram_token"),
    ("", f"recapd_{WORD[:43]}", "", "recapd_token"),
]

NOT_FOUND = [
    "password=changeme",
    "password: the-name-of-my-first-pet-and-a-cat",
    "the secret=os.environ['SECRET_KEY_NUMBER_1']",
    "api_key = load_api_key_from_file_2(path)",
    "PASSWORD=$DATABASE_PASSWORD_1_OF_THEM",
    "password=${DATABASE_PASSWORD_1_OF_THEM}",
    "Basic internationalization of 2 programs",
    "Basic understanding",
    "a task-list-item-that-is-rather-long, a disk-usage-report-for-the-whole-machine",
    "http://host:8080/path?mail=somebody@example.com",
    "at 12345678:AAA",
    "SG.short.short",
]


@pytest.mark.parametrize(("before", "secret", "after", "kind"), FOUND)
def test_a_secret_is_replaced_and_what_stands_around_it_stays(
    before: str, secret: str, after: str, kind: str
) -> None:
    redactor = Redactor()
    shown = f"{before}[redacted {kind}]{after}"
    assert redactor.text(before + secret + after) == shown
    assert redactor.counts == {kind: 1}
    assert Redactor().text(shown) == shown


@pytest.mark.parametrize("text", NOT_FOUND)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    redactor = Redactor()
    assert redactor.text(text) is text
    assert not redactor.counts


@pytest.mark.parametrize(
    "piece",
    [
        *("eyJ", "eyJ-", "eyJa.", "xsk-", "sk-", "://", "://a:", "secret=", "secret=a1", "1:AA"),
        *("-----BEGIN PRIVATE KEY-----", "Basic a", "Bearer ", "SG.", "a1-", "xoxb-", "_TOKEN="),
        *("hooks.slack.com/services/A/", "AKIA", "password: ", "\\n"),
    ],
)
def test_no_text_takes_longer_than_its_length(piece: str) -> None:
    """Each begins a shape again and again; a pattern that went back each time would need hours."""
    text = piece * (2_000_000 // len(piece)) + " @ sk- eyJ :AA :// secret="
    assert len(Redactor().text(text)) > 20


@given(st.text(), st.sampled_from(FOUND), st.text())
def test_a_secret_is_found_in_any_text_of_any_json(
    left: str, found: tuple[str, str, str, str], right: str
) -> None:
    before, secret, after, kind = found
    item = {"content": [{"text": f"{left} {before}{secret}{after} {right}"}], "n": 1}
    redactor = Redactor()
    shown = json.loads(redactor.item(json.dumps(item).encode()))
    assert shown == {
        "content": [{"text": f"{left} {before}[redacted {kind}]{after} {right}"}],
        "n": 1,
    }
    assert redactor.counts == {kind: 1}
