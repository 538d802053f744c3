// Tests of a client that learns of schedulers from directories, with servers on loopback. Exits with 1 if one fails.

#include <chrono>
#include <future>
#include <iostream>
#include <stdexcept>
#include <thread>
#include <utility>

#include "calls.h"
#include "fake.h"
#include "tests.h"

namespace {

using paceline::Directory;

void a_stream_goes_on_at_a_scheduler_that_the_dead_one_knew() {
  Fake given, other;
  given.hang_after = 4;
  given.others = {entry_of(other.serve())};
  paceline::Client client({given.serve()});
  paceline::Stream stream = client.generate(prompt(), PATIENCE);
  paceline::Collector collector;
  v1::GenerateResponse event;
  for (int i = 0; i < 3 && stream.next(event); ++i) collector.add(event);
  until("the other is known", [&] { return client.addresses().size() == 2; });
  given.stop();
  while (stream.next(event)) collector.add(event);
  expect(collector.completions()[0].text() == WHOLE, collector.completions()[0].text());
  expect(other.requests.size() == 1 && other.requests[0].has_continuation(), "the other did not continue the stream");
}

void calls_are_spread_over_learned_ones_which_are_asked_for_their_model_once() {
  Fake given, other;
  given.others = {entry_of(other.serve())};
  given.serve();
  for (const bool unary : {true, false}) {
    paceline::Client client = knowing(given, 2);
    call_often(client, unary);
  }
  expect(given.infos == 0 && other.infos == 1, "the model was not asked for once");
  expect(!given.requests.empty() && !other.requests.empty(), "the calls were not spread");
  expect(given.requests.size() + other.requests.size() == 2 * CALLS, "calls were sent twice");
}

void abort_asks_those_of_the_directory_too_which_is_looked_into_before() {
  Fake given, other;
  other.live = "there";
  given.others = {entry_of(other.serve()), entry_of("127.0.0.1:1")};
  paceline::Client client({given.serve()});
  expect(client.abort({"there", "nowhere"}, PATIENCE) == std::vector<std::string>{"there"}, "another was aborted");
}

void without_the_directory_nothing_is_asked_or_learned() {
  Fake given;
  given.others = {entry_of("127.0.0.1:1")};
  paceline::Options options;
  options.directory = Directory::off;
  paceline::Client client({given.serve()}, options);
  call_often(client, true);
  client.abort({});
  expect(given.looks == 0 && client.addresses().size() == 1, "it has looked");
}

void a_scheduler_without_a_directory_is_asked_once() {
  Fake given;
  given.answer = [](grpc::ServerContext*, Fake::Watch*) {
    return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "no directory");
  };
  given.serve();
  paceline::Client client = knowing(given, 1);
  call_often(client, true);
  call_often(client, false);
  expect(given.looks == 1 && given.requests.size() == 2 * CALLS, "it was asked again");
}

void one_that_has_died_takes_no_call_along() {
  Fake given, other;
  given.others = {entry_of(other.serve())};
  given.serve();
  paceline::Client client = knowing(given, 2);
  other.stop();
  call_often(client, true);
  call_often(client, false);
  expect(given.requests.size() == 2 * CALLS, "calls failed");
}

void a_directory_that_never_ends_takes_no_call_along_and_ends_itself() {
  std::promise<int> sent;
  Fake given;
  given.answer = [&](grpc::ServerContext*, Fake::Watch* watch) {
    v1::WatchSchedulersResponse message;
    *message.add_entries() = entry_of("own:1");
    message.mutable_entries(0)->clear_written_by();
    int count = 0;
    for (; watch->Write(message); ++count) *message.mutable_entries(0) = entry_of("a:" + std::to_string(count));
    sent.set_value(count);
    return grpc::Status::OK;
  };
  given.serve();
  paceline::Client client = knowing(given, 1);
  call_often(client, false);
  expect(sent.get_future().get() < 20'000, "too many were read");  // 256, and some more are on their way
  expect(given.looks == 1, "it was asked again");
}

void a_message_of_very_many_entries_is_not_taken() {
  Fake given;
  given.answer = [&](grpc::ServerContext*, Fake::Watch* watch) {
    v1::WatchSchedulersResponse message;
    *message.add_entries() = entry_of("own:1");
    message.mutable_entries(0)->clear_written_by();
    for (int port = 2; port < 9'002; ++port) *message.add_entries() = entry_of("127.0.0.1:" + std::to_string(port));
    message.set_complete(true);
    watch->Write(message);
    return grpc::Status::OK;
  };
  given.serve();
  paceline::Client client = knowing(given, 1);
  expect(given.looks == 1, "it did not look");
}

void the_end_of_a_client_ends_its_look() {
  std::promise<void> asked, left;
  Fake silent;
  silent.answer = [&](grpc::ServerContext* context, Fake::Watch*) {
    asked.set_value();
    while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    left.set_value();
    return grpc::Status::OK;
  };
  silent.serve();
  auto client = std::make_unique<paceline::Client>(std::vector<std::string>{silent.address()});
  auto copy = std::make_unique<paceline::Client>(*client);
  paceline::Stream stream = client->generate(prompt(), PATIENCE);
  v1::GenerateResponse event;
  expect(stream.next(event), "no event came");
  asked.get_future().wait();
  auto ended = left.get_future();
  client.reset();
  expect(ended.wait_for(std::chrono::milliseconds(200)) == std::future_status::timeout, "a copy needs its look");
  const auto began = std::chrono::steady_clock::now();
  copy.reset();
  expect(std::chrono::steady_clock::now() - began < std::chrono::seconds(2), "the end took long");
  expect(ended.wait_for(std::chrono::seconds(2)) == std::future_status::ready, "its look goes on");
  while (stream.next(event)) {
  }
}

}  // namespace

int main() {
  const std::pair<const char*, void (*)()> tests[] = {
#define TEST(name) {#name, name}
      TEST(a_stream_goes_on_at_a_scheduler_that_the_dead_one_knew),
      TEST(calls_are_spread_over_learned_ones_which_are_asked_for_their_model_once),
      TEST(abort_asks_those_of_the_directory_too_which_is_looked_into_before),
      TEST(without_the_directory_nothing_is_asked_or_learned),
      TEST(a_scheduler_without_a_directory_is_asked_once),
      TEST(one_that_has_died_takes_no_call_along),
      TEST(a_directory_that_never_ends_takes_no_call_along_and_ends_itself),
      TEST(a_message_of_very_many_entries_is_not_taken),
      TEST(the_end_of_a_client_ends_its_look),
      TEST(an_entry_that_lies_about_its_model_serves_nobody),
      TEST(a_poisoned_entry_gets_no_byte_of_a_token),
      TEST(nothing_is_learned_over_tls_without_an_authority),
      TEST(a_token_stays_on_this_machine_without_tls),
      TEST(addresses_that_nobody_can_reach_end_no_call),
      TEST(those_that_drain_or_lack_the_adapter_come_last),
      TEST(loads_of_the_directory_count_and_a_lie_about_them_gets_no_more_than_a_share),
      TEST(a_few_learned_addresses_are_tried_before_a_given_one_and_not_all_of_thousands),
      TEST(another_model_gets_new_calls_once_the_present_one_takes_none_and_no_stream_that_began),
      TEST(what_a_learned_scheduler_does_not_let_in_a_given_one_decides),
  };
  int failed = 0;
  for (const auto& [name, test] : tests) {
    try {
      test();
    } catch (const std::exception& error) {
      ++failed;
      std::cerr << name << ": " << error.what() << "\n";
    }
  }
  std::cout << "learning: " << std::size(tests) << " tests, " << failed << " failed\n";
  return failed ? 1 : 0;
}
