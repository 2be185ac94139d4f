"""What a client can rely on when a call fails: PROTOCOL.md §6."""

import json
from collections.abc import Iterator

import pytest

from recapd.protocol import errors
from recapd.protocol.errors import ERRORS, RpcError, error_for, from_wire

REASONS = {
    -32700: ["parse_error"],
    -32600: ["invalid_request", "duplicate_request_id", "batch_too_large", "too_deep"],
    -32601: ["method_not_found"],
    -32602: ["invalid_params"],
    -32603: ["internal_error"],
    -32800: ["request_cancelled"],
    -32001: ["overloaded"],
    -32003: ["shutting_down"],
    -32004: ["unauthenticated"],
    -32005: ["unsupported_protocol"],
    -32007: ["frame_too_large"],
    1001: ["not_found"],
    1002: ["forbidden"],
    1003: ["conflict"],
    1004: ["operation_id_reused"],
    1005: ["already_exists"],
    1006: ["session_archived"],
    1007: ["compaction_running"],
    1008: [
        "compaction_failed",
        "superseded",
        "result_too_large",
        "nothing_to_compact",
        "no_gain",
        "breaker_open",
        "cancelled",
        "already_committed",
    ],
    1009: ["revision_not_found", "archive_missing", "archive_corrupt"],
    1010: ["cursor_invalid"],
    1011: ["item_too_large"],
    1012: ["invalid_item"],
    1013: ["storage_full", "storage_error", "storage_readonly", "outcome_unknown"],
    1014: ["unsupported_format"],
}
"""The table of PROTOCOL.md §6, and how automatic compactions end."""

PLACE: errors.Expectation = {"path": "$.limit", "expected": "integer"}

EXAMPLES: list[RpcError] = [
    errors.ParseError(),
    errors.InvalidRequest(hint="An id is a string or an integer."),
    errors.DuplicateRequestId(),
    errors.BatchTooLarge(limit=128),
    errors.TooDeep(limit=128),
    errors.MethodNotFound(),
    errors.InvalidParams(errors=[PLACE]),
    errors.InternalError(incident="f00d"),
    errors.RequestCancelled(),
    errors.Overloaded(retry_after_ms=50),
    errors.ShuttingDown(),
    errors.Unauthenticated(),
    errors.UnsupportedProtocol(supported=[1]),
    errors.FrameTooLarge(limit_bytes=1024),
    errors.NotFound("operation"),
    errors.Forbidden(scope="admin"),
    errors.Conflict(revision=7, generation=2),
    errors.OperationIdReused(),
    errors.AlreadyExists(),
    errors.SessionArchived(),
    errors.CompactionRunning(operation_id="op-1"),
    errors.CompactionFailed(stage="summarise", provider_status=503, retryable=True),
    errors.Superseded(),
    errors.ResultTooLarge(tokens=30_000, context_limit=20_000, parts={"tail": 30_000}),
    errors.NothingToCompact(),
    errors.NoGain(),
    errors.BreakerOpen(retry_after_ms=600_000),
    errors.Cancelled(),
    errors.AlreadyCommitted(),
    errors.RevisionNotFound(revision=3),
    errors.ArchiveMissing(revision=3),
    errors.ArchiveCorrupt(revision=3),
    errors.CursorInvalid(),
    errors.ItemTooLarge(index=4, limit_bytes=1024),
    errors.InvalidItem(errors=[PLACE]),
    errors.StorageError(),
    errors.StorageFull(),
    errors.StorageReadonly(),
    errors.OutcomeUnknown(),
    errors.UnsupportedFormat(supported=["jsonl"]),
]


def test_every_reason_of_the_protocol_has_one_class_with_its_code() -> None:
    """PROTOCOL.md §6, the table."""
    assert sorted((kind.code, kind.reason) for kind in ERRORS) == sorted(
        (code, reason) for code, reasons in REASONS.items() for reason in reasons
    )


def test_every_class_is_named_after_its_reason_and_explains_itself() -> None:
    """The reference page is generated from these classes."""
    for kind in ERRORS:
        assert kind.__name__ == "".join(word.capitalize() for word in kind.reason.split("_"))
        assert kind.__doc__
        assert kind.text.endswith(".")


def test_the_tree_in_the_documentation_is_the_tree_in_the_code() -> None:
    """The module docstring shows the tree to whoever catches a family of errors."""

    def lines(parent: type[RpcError], indent: str) -> Iterator[str]:
        kinds = [kind for kind in parent.__subclasses__() if kind.__module__ == errors.__name__]
        for number, kind in enumerate(kinds, start=1):
            last = number == len(kinds)
            name = f"{indent}{'└──' if last else '├──'} {kind.__name__}"
            reason = vars(kind).get("reason", "")
            yield f"{name:<33}{kind.code:>7}  {reason}".rstrip()
            yield from lines(kind, indent + ("    " if last else "│   "))

    assert errors.__doc__ is not None
    printed = [line for line in errors.__doc__.splitlines() if "──" in line]
    assert printed == list(lines(RpcError, "    "))


def test_there_is_an_example_of_every_class() -> None:
    """What follows is tried with each of them."""
    assert {type(error) for error in EXAMPLES} == set(ERRORS)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.reason)
def test_an_error_on_the_wire_has_code_message_reason_and_retryable(error: RpcError) -> None:
    """PROTOCOL.md §6; JSON-RPC 2.0, section 5.1."""
    wire = error.to_wire()
    assert set(wire) == {"code", "message", "data"}
    assert wire["code"] == error.code
    assert wire["data"]["reason"] == error.reason
    assert wire["data"]["retryable"] is error.retryable


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.reason)
def test_a_client_raises_the_same_error_again(error: RpcError) -> None:
    """PROTOCOL.md §6: what went over the wire comes out as the same class with the same data."""
    again = from_wire(json.loads(json.dumps(error.to_wire())))
    assert type(again) is type(error)
    assert again.to_wire() == error.to_wire()


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.reason)
def test_a_message_is_the_text_of_its_class_whatever_the_data_is(error: RpcError) -> None:
    """PROTOCOL.md §6: messages never echo input, paths or exception text."""
    assert str(error) == error.message == type(error).text


def test_data_that_is_not_known_is_left_out() -> None:
    """PROTOCOL.md §6: `provider_status?` is absent where no model was asked."""
    wire = errors.CompactionFailed(stage="archive").to_wire()
    assert wire["data"] == {"reason": "compaction_failed", "retryable": False, "stage": "archive"}


def test_a_failure_can_be_retryable_or_not() -> None:
    """PROTOCOL.md §6: a provider's 503 may pass, a 401 will not."""
    for retryable in (True, False):
        error = errors.CompactionFailed(stage="summarise", retryable=retryable)
        assert error.to_wire()["data"]["retryable"] is retryable


def test_a_bad_parameter_is_named_by_its_path() -> None:
    """PROTOCOL.md §6: `errors[{path, expected}]`."""
    error = errors.InvalidParams.at("$.limit", "integer")
    assert error.to_wire()["data"]["errors"] == [PLACE]


def test_all_storage_errors_can_be_caught_together() -> None:
    """The tree: code 1013 is one family; so are 1008, 1009 and -32600."""
    for kind in ERRORS:
        for family in (
            errors.StorageError,
            errors.CompactionError,
            errors.ArchiveError,
            errors.InvalidRequest,
        ):
            assert issubclass(kind, family) == (kind.code == family.code)


def test_a_reason_from_a_newer_server_is_kept_with_its_data() -> None:
    """PROTOCOL.md §6: clients switch on `reason`, also on one that their library does not know."""
    wire = {
        "code": 1099,
        "message": "The moon is full.",
        "data": {"reason": "full_moon", "retryable": True, "hint": "Wait.", "self": 1},
    }
    error = from_wire(wire)
    assert type(error) is RpcError
    assert error.to_wire() == wire


@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"code": "x", "message": 1, "data": "text"},
        {"code": -32000, "message": "No data."},
        {"code": None, "message": None, "data": {"reason": 5, "hint": 5, "retryable": "yes"}},
        {"data": {"reason": "conflict"}},
        {"data": ["conflict"]},
    ],
)
def test_whatever_a_server_sends_as_an_error_is_one(wire: dict[str, object]) -> None:
    """JSON-RPC 2.0, section 5.1: `data` may be anything, and servers are not always right."""
    error = from_wire(wire)
    assert isinstance(error, RpcError)
    assert isinstance(error.to_wire()["data"]["retryable"], bool)


def test_an_error_is_made_from_its_recorded_reason_and_data() -> None:
    """PROTOCOL.md §3, `operation.get`: how an operation ended is told again after a restart."""
    error = error_for("archive_missing", {"revision": 3})
    assert isinstance(error, errors.ArchiveMissing)
    assert error.to_wire() == errors.ArchiveMissing(revision=3).to_wire()
