// Tests of the order in which calls try schedulers, without any I/O.

#include "rotation.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "calls.h"
#include "failover.h"
#include "tests.h"

namespace {

using paceline::Attempts;
using paceline::Clock;
using paceline::Present;
using paceline::Rotation;
using paceline::Wanted;

using Names = std::set<std::string>;

const Clock::time_point START{};

// As a directory tells them.
struct Told {
  std::string model;
  uint32_t load;
  bool drains;
  std::string adapter;
};

const Told IDLE{"m", 0, false, ""};

Present present(const std::map<std::string, Told>& told, const Names& foreign = {}) {
  Present found;
  for (const auto& [address, one] : told) {
    v1::SchedulerEntry entry = entry_of(address);
    entry.set_model_fingerprint(one.model);
    entry.mutable_load()->set_running(one.load);
    if (one.drains) entry.set_state(v1::SCHEDULER_STATE_DRAINING);
    if (!one.adapter.empty()) entry.add_adapters(one.adapter);
    found.addresses.push_back(address);
    found.entries.emplace(address, entry);
  }
  found.foreign = foreign;
  return found;
}

// Calls with different keys, then some without.
std::vector<Wanted> calls(const std::string& model = "") {
  std::vector<Wanted> found;
  for (int i = 0; i < CALLS; ++i) found.push_back({std::to_string(i), model, {}});
  for (int i = 0; i < CALLS; ++i) found.push_back({{}, model, {}});
  return found;
}

// With which addresses such calls begin.
Names firsts(Rotation& rotation, const std::vector<Wanted>& calls) {
  Names found;
  for (const Wanted& one : calls) found.insert(rotation.order(START, one).front());
  return found;
}

}  // namespace

void those_that_drain_or_lack_the_adapter_come_last() {
  Rotation rotation({"a:1"});
  rotation.use(present({{"a:1", IDLE}, {"b:1", {"m", 0, true, ""}}, {"c:1", {"m", 0, false, "poet"}}}));
  expect(firsts(rotation, calls()) == Names{"a:1", "c:1"}, "one that drains gets calls");
  expect(firsts(rotation, calls("poet")) == Names{"c:1"}, "one without the adapter gets calls");
  rotation.down("c:1", START);
  expect(firsts(rotation, calls("poet")) == Names{"a:1"}, "one that is down gets calls");
}

void loads_of_the_directory_count_and_a_lie_about_them_gets_no_more_than_a_share() {
  Rotation rotation({"a:1"});
  rotation.use(present({{"a:1", {"m", 1000, false, ""}}, {"b:1", IDLE}}));
  std::vector<std::unique_ptr<Rotation::Live>> live;
  int at_b = 0;
  for (int i = 0; i < 20; ++i) {
    const std::string address = rotation.order(START, {std::to_string(i), {}, {}}).front();
    expect(i > 0 || address == "b:1", "the load does not count");
    live.push_back(std::make_unique<Rotation::Live>(rotation, address));
    at_b += address == "b:1";
  }
  expect(at_b <= 13, "it got " + std::to_string(at_b));
}

void a_few_learned_addresses_are_tried_before_a_given_one_and_not_all_of_thousands() {
  std::map<std::string, Told> all{{"given:1", IDLE}};
  for (int i = 0; i < 1000; ++i) all["learned:" + std::to_string(i)] = IDLE;
  Rotation rotation({"given:1"});
  rotation.use(present(all));
  for (const Wanted& call : calls()) {
    const auto order = rotation.order(START, call);
    const auto place = std::find(order.begin(), order.end(), "given:1") - order.begin();
    expect(order.size() == 64 && place <= 8, "the given one is at " + std::to_string(place));
    expect(Names(order.begin(), order.end()).size() == order.size(), "one is there twice");
  }
}

void another_model_gets_new_calls_once_the_present_one_takes_none_and_no_stream_that_began() {
  Rotation rotation({"given:1"});
  rotation.use(present({{"given:1", IDLE}, {"old:1", IDLE}, {"young:1", {"young", 0, false, ""}}}, {"young:1"}));
  const auto begun = [&] { return Attempts(rotation, START, {}, PATIENCE, PATIENCE, {"k", {}, {}}); };
  expect(firsts(rotation, calls()) == Names{"given:1", "old:1"}, "another model gets calls");
  paceline::Error drains(grpc::StatusCode::UNAVAILABLE, "");
  drains.reason = "DRAINING";
  Attempts stream = begun(), call = begun();
  stream.answered();
  call.failed(drains, START);
  expect(call.address() != "young:1", "another model gets a call too soon");
  call.failed(drains, START);
  expect(call.address() == "young:1" && begun().address() == "young:1", "another model gets no call");
  for (int i = 0; i < 3; ++i) {
    stream.failed(paceline::Error(grpc::StatusCode::UNAVAILABLE, "broken"), START);
    expect(stream.address() != "young:1", "another model gets a stream that began");
  }
}

void what_a_learned_scheduler_does_not_let_in_a_given_one_decides() {
  Rotation rotation({"given:1"});
  rotation.use(present({{"given:1", {"m", 9, false, ""}}, {"b:1", IDLE}, {"c:1", IDLE}}));
  Attempts call(rotation, START, {}, PATIENCE, PATIENCE, {"k", {}, {}});
  expect(call.address() != "given:1", "the load does not count");
  const paceline::Error denied(grpc::StatusCode::UNAUTHENTICATED, "who?");
  call.failed(denied, START);
  expect(call.address() == "given:1", "another learned one is asked");
  try {
    call.failed(denied, START);
    expect(false, "a given one does not decide");
  } catch (const paceline::Error& error) {
    expect(error.code == denied.code, error.what());
  }
}
