// The tests of learning_test that are in files of their own. A test throws if it fails.

#pragma once

// Directories that lead astray: nobody gets a token or a stream by a lie.
void an_entry_that_lies_about_its_model_serves_nobody();
void a_poisoned_entry_gets_no_byte_of_a_token();
void nothing_is_learned_over_tls_without_an_authority();
void a_token_stays_on_this_machine_without_tls();
void addresses_that_nobody_can_reach_end_no_call();

// The order in which calls try schedulers.
void those_that_drain_or_lack_the_adapter_come_last();
void loads_of_the_directory_count_and_a_lie_about_them_gets_no_more_than_a_share();
void a_few_learned_addresses_are_tried_before_a_given_one_and_not_all_of_thousands();
void another_model_gets_new_calls_once_the_present_one_takes_none_and_no_stream_that_began();
void what_a_learned_scheduler_does_not_let_in_a_given_one_decides();
