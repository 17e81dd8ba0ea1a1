"""Every line of the decision table and of the store's rules, and the tests that show it.

A test names its line with ``@pytest.mark.guarantee("row 3")``; docs/reference/guarantees.md is made from this table and
a run. ``test_contract_guarantees.py`` holds the two together.
"""

from __future__ import annotations

from typing import NamedTuple


class Guarantee(NamedTuple):
    """One line: what it says, and the names of the test functions marked with it."""

    text: str
    tests: tuple[str, ...]


ROWS: dict[str, Guarantee] = {
    "row 1": Guarantee(
        "The record is of a newer record_version: NEWER; no verb touches it.",
        ("test_row_01_a_newer_record_is_left_alone",),
    ),
    "row 2": Guarantee(
        "The record is absent or expired: ACQUIRED.",
        (
            "test_row_02_nothing_there_is_acquired",
            "test_row_02_an_expired_record_leaves_only_its_fence",
            "test_row_02_a_completion_expires_at_completion_plus_ttl",
        ),
    ),
    "row 3": Guarantee(
        "The claim, or the right to continue, is held by the caller's own token: the reply was lost, the same answer.",
        (
            "test_s6_a_claim_whose_reply_was_lost_may_be_asked_for_again",
            "test_row_03_own_token_gets_the_same_answer",
            "test_row_03_own_token_hears_of_its_reclaim_again",
            "test_row_03_own_token_keeps_its_right_to_continue",
        ),
    ),
    "row 4": Guarantee(
        "The caller's generation is at or below this message's `over`: OVER.",
        (
            "test_row_04_what_is_over_stays_over",
            "test_row_04_over_is_remembered_per_message",
        ),
    ),
    "row 5": Guarantee(
        "CLAIMED or COMPLETED by another message, both have a fingerprint, and they differ: MISMATCH.",
        (
            "test_row_05_another_message_with_another_fingerprint_is_a_mismatch",
            "test_row_05_compares_only_where_both_messages_have_one",
            "test_row_05_a_released_key_takes_another_fingerprint",
        ),
    ),
    "row 6": Guarantee(
        "CLAIMED, the lease is alive and `dead_fence` is not its fence: HELD, for a higher generation too.",
        (
            "test_row_06_a_live_lease_holds_against_everybody",
            "test_row_06_another_fence_proves_nobody_dead",
            "test_row_06_a_held_copy_hears_how_far_its_parking_went",
        ),
    ),
    "row 7": Guarantee(
        "CLAIMED, the lease lapsed or its holder is proved dead: RECLAIMED, attempts + 1, unknown set.",
        (
            "test_row_07_a_lapsed_claim_is_reclaimed",
            "test_row_07_a_claim_proved_dead_is_reclaimed_at_once",
        ),
    ),
    "row 8": Guarantee(
        "RELEASED, this message announced a successor above the caller's generation, and now < due + 60 s: NOT_DUE.",
        (
            "test_row_08_a_stale_copy_waits_for_the_announced_retry",
            "test_row_08_stops_neither_the_retry_nor_another_message",
            "test_row_08_the_retry_ends_its_predecessors",
            "test_row_08_a_stale_copy_that_took_over_leaves_the_retry_its_turn",
        ),
    ),
    "row 9": Guarantee(
        "RELEASED: RECLAIMED where unknown is set, else ACQUIRED; attempts = 1. Only complete and forget "
        "clear unknown.",
        (
            "test_row_09_a_released_key_is_free",
            "test_row_09_only_completing_or_forgetting_ends_doubt",
            "test_row_09_completing_ends_doubt",
        ),
    ),
    "row 10": Guarantee(
        "COMPLETED, this message continues nothing, or is settled: COMPLETED.",
        (
            "test_row_10_completed_answers_with_the_outcome",
            "test_row_10_a_settled_message_is_not_continued_again",
        ),
    ),
    "row 11": Guarantee(
        "COMPLETED, another token's right to continue this message is alive and `dead_fence` is not its fence: HELD.",
        (
            "test_row_11_a_message_is_continued_by_one_copy_at_a_time",
            "test_row_11_names_the_holder_of_this_messages_right",
        ),
    ),
    "row 12": Guarantee(
        "COMPLETED: the right to continue is leased to the caller under a fence of its own.",
        (
            "test_row_12_the_right_to_continue_is_granted",
            "test_row_12_a_right_outlives_the_records_expiry",
            "test_row_12_the_completers_right_outlives_a_short_ttl",
        ),
    ),
    "rows": Guarantee(
        "The first row that fits answers.",
        (
            "test_rows_a_token_of_its_own_comes_before_over",
            "test_rows_over_comes_before_mismatch_and_completed",
            "test_rows_mismatch_comes_before_reclaim",
            "test_rows_a_higher_generation_waits_for_a_live_holder",
            "test_rows_any_message_id_keeps_its_own_note",
            "test_rows_a_decision_carries_the_callers_note",
        ),
    ),
    "table": Guarantee(
        "Random histories: every store gives the answers and keeps the records of the decision functions.",
        ("test_sequences_every_store_does_what_the_decision_functions_say",),
    ),
    "race": Guarantee(
        "Of any number of callers at one instant, one gets the key, the lapsed lease, the right; the "
        "others are told so.",
        (
            "test_race_fifty_callers_of_one_key_and_one_acquires",
            "test_race_the_winner_completes_and_forty_nine_replay",
            "test_race_for_a_lapsed_lease_has_one_winner",
            "test_race_of_two_who_saw_the_same_death_has_one_winner",
            "test_race_for_the_right_to_continue_has_one_holder",
            "test_race_on_ten_keys_has_one_winner_each",
            "test_race_for_a_released_key_has_one_winner",
            "test_race_of_one_token_with_itself_is_one_claim",
            "test_race_between_renewing_and_reclaiming_a_lapsed_lease",
            "test_race_between_completing_and_a_false_death",
            "test_race_of_notes_loses_none",
        ),
    ),
    "complete": Guarantee(
        "CLAIMED becomes COMPLETED for the current token only; a repeat by the same token succeeds; SQL "
        "joins the caller's transaction.",
        (
            "test_s6_a_completion_whose_reply_was_lost_may_be_repeated",
            "test_complete_records_the_outcome",
            "test_complete_keeps_every_byte",
            "test_complete_without_a_value",
            "test_complete_again_by_the_same_token_succeeds",
            "test_complete_of_a_lapsed_claim_nobody_took",
            "test_complete_after_somebody_noted_on_the_record",
            "test_complete_after_a_renewal",
            "test_complete_keeps_the_right_to_continue",
            "test_complete_of_a_record_that_vanished_is_remembered",
            "test_complete_joins_the_callers_transaction",
            "test_complete_in_a_transaction_is_lost_to_a_newer_token",
            "test_complete_refuses_a_connection_it_cannot_join",
        ),
    ),
    "release": Guarantee(
        "CLAIMED becomes RELEASED for the current token only, and keeps what its reason says; a token "
        "that completed is told so.",
        (
            "test_s6_a_release_whose_reply_was_lost_may_be_repeated",
            "test_release_leaves_what_its_reason_says",
            "test_release_tells_what_this_token_did_before",
            "test_release_of_a_lapsed_claim_nobody_took",
            "test_release_keeps_its_tombstone_a_day_at_least",
        ),
    ),
    "renew": Guarantee(
        "Many leases at once; each renewed, busy or lost; a claim that vanished is restored, a right "
        "never makes a record.",
        (
            "test_s8_one_locked_row_starves_no_other_claim",
            "test_renew_moves_lease_and_expiry",
            "test_renew_answers_each_claim_of_a_batch",
            "test_renew_of_nothing",
            "test_renew_restores_a_claim_with_its_doubt_and_attempts",
            "test_renew_of_a_right_never_makes_a_record",
            "test_renew_tells_whose_right_was_taken",
        ),
    ),
    "settle": Guarantee(
        "Ends the right to continue a message, for good.",
        (
            "test_settle_ends_the_right_for_good",
            "test_settle_needs_a_completion",
        ),
    ),
    "note_parked": Guarantee(
        "Keeps the highest count of a parked copy; a higher generation starts anew; never makes a record.",
        (
            "test_note_parked_keeps_the_highest_count_of_the_highest_generation",
            "test_note_parked_makes_no_record",
        ),
    ),
    "notes": Guarantee(
        "The notes of the 64 youngest messages stay, live ones always.",
        ("test_notes_the_sixty_four_youngest_stay_and_live_ones_beyond",),
    ),
    "get": Guarantee(
        "The whole record until it expires.",
        ("test_get_answers_until_the_record_expires",),
    ),
    "find": Guarantee(
        "Records by task, scope, state and age, up to a limit.",
        (
            "test_find_matches_every_condition",
            "test_find_stops_at_its_limit",
            "test_find_may_be_left_early_and_used_while_it_runs",
        ),
    ),
    "forget": Guarantee(
        "Leaves a tombstone without value or doubt; needs the fence it saw.",
        (
            "test_forget_leaves_a_tombstone_without_value_or_doubt",
            "test_forget_keeps_over",
            "test_forget_keeps_an_announced_retry_announced",
            "test_forget_needs_the_fence_it_saw",
        ),
    ),
    "purge": Guarantee(
        "Deletes expired records only, in batches, waits for no lock, and claims go on meanwhile.",
        (
            "test_purge_clears_a_backlog_while_claims_go_on",
            "test_purge_waits_for_no_lock",
            "test_purge_deletes_expired_records_only",
        ),
    ),
    "set-up": Guarantee(
        "The schema can be made twice, and a closed store opens again.",
        (
            "test_setup_can_be_done_twice",
            "test_setup_a_closed_store_opens_again",
        ),
    ),
    "S1": Guarantee(
        "The store's clock, read when the record is held, judges leases and expiry; a worker's clock judges nothing.",
        (
            "test_s1_a_worker_whose_clock_is_wrong_steals_nothing",
            "test_s1_a_lease_lapses_by_the_stores_clock",
            "test_s1_the_answer_tells_the_stores_time",
            "test_s1_the_time_is_read_when_the_row_is_held",
        ),
    ),
    "S2": Guarantee(
        "A fence is max(previous + 1, the store's clock in µs): it grows per key, also after expiry, "
        "purge or a clock set back.",
        (
            "test_s2_fences_grow_through_everything_that_can_happen_to_a_key",
            "test_s2_fences_grow_by_the_stores_own_clock",
            "test_s2_a_right_has_a_fence_of_its_own",
        ),
    ),
    "S3": Guarantee(
        "An old token changes nothing and is told so.",
        (
            "test_s3_an_old_token_changes_nothing_and_is_told_so",
            "test_s3_the_current_token_is_not_disturbed_by_an_old_one",
        ),
    ),
    "S4": Guarantee(
        "A body that fails its checksum still proves completion; a record of a newer version is never overwritten.",
        (
            "test_s4_a_body_that_fails_its_checksum_still_proves_completion",
            "test_s6_a_record_that_cannot_be_read_is_corrupt_and_left_alone",
            "test_s4_a_record_of_a_newer_release_is_never_overwritten",
        ),
    ),
    "S5": Guarantee(
        "`expires_at` moves with every renewal; a live claim never expires; a tombstone stays at least a day.",
        (
            "test_s5_a_live_claim_never_expires",
            "test_s5_a_live_claim_never_expires_by_the_stores_own_clock",
            "test_s5_a_tombstone_and_a_record_under_ttl_zero_stay_a_day",
            "test_s5_redis_drops_a_record_when_it_expires_and_not_before",
        ),
    ),
    "S6": Guarantee(
        "No verb outlives its timeout; `may_have_landed` is False only where nothing was written; a "
        "locked record is HELD; an unreadable one is RecordCorrupt.",
        (
            "test_s6_a_claim_whose_reply_was_lost_may_be_asked_for_again",
            "test_s6_a_reclaim_whose_reply_was_lost_may_be_asked_for_again",
            "test_s6_a_completion_whose_reply_was_lost_may_be_repeated",
            "test_s6_a_release_whose_reply_was_lost_may_be_repeated",
            "test_s6_no_verb_outlives_its_timeout_on_a_silent_server",
            "test_s6_nothing_landed_where_nobody_listens",
            "test_s6_a_store_recovers_when_its_server_is_back",
            "test_s6_an_error_tells_no_credentials",
            "test_s8_one_locked_row_starves_no_other_claim",
            "test_s6_a_lapsed_claim_in_somebodys_transaction_is_held",
            "test_s6_a_locked_completion_is_replayed_all_the_same",
            "test_s6_ending_a_locked_claim_waits_no_longer_than_the_timeout",
            "test_s6_a_record_being_inserted_by_a_transaction_that_hangs",
            "test_s6_sqlite_a_file_somebody_writes_to_is_read_and_waited_for_in_time",
            "test_s6_a_record_that_cannot_be_read_is_corrupt_and_left_alone",
            "test_s6_forget_removes_what_cannot_be_read_and_only_that",
        ),
    ),
    "S7": Guarantee(
        "Every verb works in a child forked after the parent used the store.",
        ("test_s7_works_in_a_child_forked_while_the_parent_is_using_it",),
    ),
    "S8": Guarantee(
        "Every verb is thread-safe; one locked record delays no other.",
        (
            "test_s8_one_locked_row_starves_no_other_claim",
            "test_s8_one_store_serves_many_threads",
        ),
    ),
    "S9": Guarantee(
        "Releases N and N-1 share one store.",
        (
            "test_s9_what_the_next_release_adds_to_a_note_does_not_stop_this_one",
            "test_s9_two_releases_take_turns_on_one_key",
            "test_s9_a_failure_kept_by_one_process_is_read_by_another",
        ),
    ),
}
