"""Every method, every error and every notification is met by a test over a real socket.

The tables say where. An id that has no test, a test that is not there, and one that never mentions
its id are faults of these tables.
"""

import ast
from pathlib import Path
from typing import Final

import pytest

from recapd.protocol.errors import ERRORS
from recapd.protocol.methods import CANCEL_REQUEST, METHODS, NOTIFICATIONS

METHOD_TESTS: Final = {
    "protocol.initialize": "test_server.py::test_a_client_may_introduce_itself",
    "protocol.ping": "test_server.py::test_a_ping_tells_the_time_and_waits_for_nothing",
    "rpc.discover": "test_server.py::test_the_protocol_describes_itself",
    "server.info": "test_server.py::test_info_counts_what_is_open",
    "server.health": "test_server.py::test_health_tells_how_database_disk_and_queues_are",
    "server.shutdown": "test_server.py::test_shutdown_is_answered_and_ends_the_daemon",
    "session.create": "test_sessions.py::test_a_new_session_is_at_revision_and_generation_zero",
    "session.list": "test_sessions.py::test_a_list_is_sorted_and_paged_by_its_keys",
    "session.get": "test_history.py::test_a_page_ends_before_max_bytes_and_has_one_entry_at_least",
    "session.revisions": "test_history.py::test_revisions_tell_what_is_archived_newest_first",
    "session.append": "test_sessions.py::test_an_append_is_one_revision_and_tells_the_new_ids",
    "session.compact": (
        "test_compact.py::test_a_compaction_replaces_the_history_and_says_what_it_did"
    ),
    "session.restore": "test_past.py::test_a_restore_brings_the_very_same_entries_back",
    "session.rewind": "test_past.py::test_a_rewind_drops_what_came_later",
    "session.fork": "test_past.py::test_a_fork_is_a_session_with_the_same_entries",
    "session.export": "test_export.py::test_a_cursor_of_another_export_is_invalid",
    "session.update": "test_sessions.py::test_an_update_changes_what_it_names_and_null_clears",
    "session.verify": "test_history.py::test_what_is_stored_is_verified_while_it_is_served",
    "session.delete": "test_sessions.py::test_a_deleted_session_is_gone_with_its_archives",
    "session.subscribe": (
        "test_events.py::test_a_subscription_begins_now_from_the_start_or_behind_an_event"
    ),
    "session.unsubscribe": "test_events.py::test_after_unsubscribing_nothing_more_is_told",
    "session.events": "test_events.py::test_events_can_be_pulled_in_pages",
    "operation.get": "test_compact.py::test_without_waiting_the_operation_is_named_at_once",
    "operation.cancel": "test_compact.py::test_a_compaction_can_be_cancelled_by_its_operation",
    "token.create": "test_tokens.py::test_a_token_gives_no_more_than_its_maker_has",
    "token.list": "test_tokens.py::test_a_token_ends_with_the_one_it_was_made_with",
    "token.revoke": "test_tokens.py::test_a_revoked_token_ends_what_waits",
    "$/cancelRequest": (
        "test_compact.py::test_a_cancelled_request_ends_its_compaction_and_has_one_answer"
    ),
}

ERROR_TESTS: Final = {
    "parse_error": (
        "test_wire.py::test_what_is_not_strict_json_is_a_parse_error_and_the_connection_goes_on"
    ),
    "invalid_request": "test_wire.py::test_json_that_is_no_request_is_an_invalid_request",
    "duplicate_request_id": "test_wire.py::test_an_id_in_flight_cannot_be_used_again",
    "batch_too_large": "test_wire.py::test_a_batch_over_the_limit_is_one_error_and_does_nothing",
    "too_deep": "test_wire.py::test_a_frame_may_be_nested_up_to_the_limit",
    "method_not_found": "test_wire.py::test_an_unknown_method_is_not_found",
    "invalid_params": "test_wire.py::test_a_wrong_parameter_is_named_by_its_path",
    "internal_error": "test_faults.py::test_an_unexpected_fault_has_an_incident_and_tells_nothing",
    "request_cancelled": (
        "test_compact.py::test_a_cancelled_request_ends_its_compaction_and_has_one_answer"
    ),
    "overloaded": "test_limits.py::test_one_request_too_many_is_refused_and_the_reader_waits",
    "shutting_down": "test_server.py::test_draining_lets_what_is_under_way_end",
    "unauthenticated": "test_tokens.py::test_a_token_that_is_not_good_is_refused_whatever_it_is",
    "unsupported_protocol": "test_server.py::test_another_protocol_or_a_token_is_refused",
    "frame_too_large": "test_limits.py::test_no_answer_is_longer_than_a_frame_may_be",
    "not_found": "test_sessions.py::test_a_deleted_session_is_gone_with_its_archives",
    "forbidden": "test_tokens.py::test_a_token_has_its_scopes_only",
    "conflict": (
        "test_exactly_once.py::test_what_expects_another_revision_or_generation_is_refused"
    ),
    "operation_id_reused": (
        "test_exactly_once.py::test_an_operation_id_stands_for_one_method_and_its_parameters"
    ),
    "already_exists": "test_sessions.py::test_an_id_that_is_taken_is_refused",
    "session_archived": "test_sessions.py::test_an_archived_session_takes_no_history",
    "compaction_running": (
        "test_compact.py::test_a_second_compaction_is_refused_and_told_which_one_runs"
    ),
    "compaction_failed": (
        "test_compact.py::test_a_summariser_that_fails_leaves_everything_as_it_was"
    ),
    "superseded": "test_past.py::test_a_running_compaction_ends_as_superseded",
    "result_too_large": (
        "test_compact.py::test_a_result_over_the_limit_leaves_everything_as_it_was"
    ),
    "nothing_to_compact": "test_compact.py::test_nothing_to_compact_is_said_and_can_be_forced",
    "no_gain": (
        "test_auto_compact.py::test_a_result_that_is_not_smaller_is_refused_before_its_commit"
    ),
    "breaker_open": (
        "test_auto_compact.py::test_a_summarizer_that_is_down_is_left_alone_by_every_session"
    ),
    "cancelled": "test_compact.py::test_a_compaction_can_be_cancelled_by_its_operation",
    "already_committed": "test_compact.py::test_cancelling_what_has_ended_says_so",
    "revision_not_found": "test_history.py::test_a_revision_that_is_not_there_is_not_found",
    "archive_missing": (
        "test_history.py::test_a_damaged_archive_is_an_error_and_the_session_goes_on"
    ),
    "archive_corrupt": (
        "test_history.py::test_a_damaged_archive_is_an_error_and_the_session_goes_on"
    ),
    "cursor_invalid": "test_history.py::test_a_cursor_of_another_request_is_invalid",
    "item_too_large": "test_limits.py::test_the_largest_item_goes_in_and_out_by_every_way",
    "invalid_item": (
        "test_sessions.py::test_an_item_that_is_no_object_is_named_and_nothing_is_appended"
    ),
    "storage_error": "test_faults.py::test_a_failing_disk_is_told_to_readers_too",
    "storage_full": "test_faults.py::test_a_failing_disk_is_told_and_the_session_is_as_it_was",
    "storage_readonly": "test_faults.py::test_a_failing_disk_is_told_and_the_session_is_as_it_was",
    "outcome_unknown": "test_faults.py::test_a_failing_disk_is_told_and_the_session_is_as_it_was",
    "unsupported_format": "test_export.py::test_an_unknown_format_is_told_what_there_is",
}

_EVERY_EVENT: Final = "test_events.py::test_each_change_is_told_with_its_revision_and_number"

NOTIFICATION_TESTS: Final = {
    "history.replaced": _EVERY_EVENT,
    "history.appended": _EVERY_EVENT,
    "session.created": _EVERY_EVENT,
    "session.updated": _EVERY_EVENT,
    "session.deleted": _EVERY_EVENT,
    "compaction.started": _EVERY_EVENT,
    "compaction.finished": _EVERY_EVENT,
    "compaction.progress": (
        "test_events.py::test_progress_is_told_to_those_who_are_there_and_is_in_no_log"
    ),
    "subscription.ended": "test_tokens.py::test_a_revoked_token_ends_what_waits",
    "server.draining": "test_server.py::test_draining_lets_what_is_under_way_end",
}

_CLASSES: Final = {error.reason: error.__name__ for error in ERRORS}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The text of each test of this folder, with its decorators."""
    found: dict[str, str] = {}
    for path in Path(__file__).parent.glob("test_*.py"):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                start = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                lines = text.splitlines()[start - 1 : node.end_lineno]
                found[f"{path.name}::{node.name}"] = "\n".join(lines)
    return found


def test_every_method_has_a_test() -> None:
    assert METHOD_TESTS.keys() == METHODS.keys() | {CANCEL_REQUEST}


def test_every_error_has_a_test() -> None:
    assert ERROR_TESTS.keys() == _CLASSES.keys()


def test_every_notification_has_a_test() -> None:
    assert NOTIFICATION_TESTS.keys() == {notification.name for notification in NOTIFICATIONS}


@pytest.mark.parametrize(
    ("id", "test"),
    [*METHOD_TESTS.items(), *ERROR_TESTS.items(), *NOTIFICATION_TESTS.items()],
)
def test_each_test_is_there_and_mentions_its_id(
    sources: dict[str, str], id: str, test: str
) -> None:
    text = sources[test]
    assert f'"{id}"' in text or _CLASSES.get(id, id) in text
