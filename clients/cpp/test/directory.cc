// Plays the cases of tests/scenario/directory.json: which schedulers of a directory a client uses, and which of them
// get its token. Exits with 1 at a difference.

#include <fstream>
#include <iostream>
#include <stdexcept>

#include <nlohmann/json.hpp>

#include "known.h"

using json = nlohmann::ordered_json;  // the first key of a step says what it is
using paceline::Clock;
using paceline::KnownSchedulers;

namespace {

constexpr int LOOKS = 6;  // as many as the schedulers that are asked in turn, and more

Clock::time_point at(double seconds) {
  return Clock::time_point() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

paceline::Directory use_of(const std::string& name) {
  if (name == "off") return paceline::Directory::off;
  if (name == "safe") return paceline::Directory::safe;
  if (name == "any") return paceline::Directory::any;
  throw std::runtime_error("no such use: " + name);
}

// An entry, with the defaults that the Python test of these cases has.
paceline::v1::SchedulerEntry entry_of(const json& told) {
  paceline::v1::SchedulerEntry entry;
  const std::string address = told["address"];
  entry.set_address(address);
  entry.set_model(told.value("model", "m"));
  entry.set_model_fingerprint(told.value("fingerprint", "print"));
  entry.set_instance(told.value("instance", "of " + address));
  entry.set_written_by(told.value("own", false) ? "" : "somebody");
  entry.set_tls_name(told.value("tls_name", ""));
  paceline::v1::SchedulerState state;
  if (!paceline::v1::SchedulerState_Parse("SCHEDULER_STATE_" + told.value("state", "SERVING"), &state)) {
    throw std::runtime_error("no such state");
  }
  entry.set_state(state);
  entry.mutable_load()->set_running(told.value("running", 0));
  entry.mutable_load()->set_waiting(told.value("waiting", 0));
  for (const std::string one : told.value("adapters", json::array())) entry.add_adapters(one);
  return entry;
}

std::vector<paceline::v1::SchedulerEntry> entries_of(const json& step) {
  std::vector<paceline::v1::SchedulerEntry> entries;
  for (const json& one : step["entries"]) entries.push_back(entry_of(one));
  if (!step.contains("ports")) return entries;
  for (int port = step["ports"][0]; port < step["ports"][1]; ++port) {
    entries.push_back(entry_of({{"address", "127.0.0.1:" + std::to_string(port)}}));
  }
  return entries;
}

using Names = std::set<std::string>;

struct Outcome {
  nlohmann::json found, expected;  // both null for a step that only tells something
};

Outcome play(KnownSchedulers& known, const json& step) {
  const std::string kind = step.begin().key();
  const json& value = step.begin().value();
  const Clock::time_point now = at(step.value("at_s", 0.0));
  const paceline::Present present = known.present();
  if (kind == "saw") {
    known.saw(value, entries_of(step), now);
  } else if (kind == "lost") {
    known.lost(value, now);
  } else if (kind == "has_none") {
    known.has_none(value, now);
  } else if (kind == "refused") {
    known.refused(value, now);
  } else if (kind == "distrust") {
    known.distrust(value);
  } else if (kind == "addresses") {
    return {Names(present.addresses.begin(), present.addresses.end()), value.get<Names>()};
  } else if (kind == "foreign") {
    return {present.foreign, value.get<Names>()};
  } else if (kind == "count") {
    return {present.addresses.size(), value};
  } else if (kind == "draining") {
    Names drain;
    for (const auto& [address, one] : present.entries) {
      if (one.drains) drain.insert(address);
    }
    return {drain, value.get<Names>()};
  } else if (kind == "loads") {
    std::map<std::string, uint64_t> loads;
    for (const auto& [address, one] : present.entries) loads[address] = one.load;
    return {loads, value};
  } else if (kind == "adapters") {
    std::map<std::string, Names> adapters;
    for (const auto& [address, one] : present.entries) adapters[address] = one.adapters;
    return {adapters, value.get<std::map<std::string, Names>>()};
  } else if (kind == "tls_name") {
    const auto name = known.tls_name(value[0]);
    return {name ? nlohmann::json(*name) : nlohmann::json(), value[1]};
  } else if (kind == "reports") {
    return {known.is_what_it_says(value, step["fingerprint"]), step["is"]};
  } else if (kind == "checked") {
    return {known.is_checked(value), step["is"]};
  } else if (kind == "asks") {
    const Names down = step.value("down", json::array()).get<Names>();
    Names asked;
    for (int look = 0; look < LOOKS; ++look) {
      asked.insert(known.teller(now, [&](const std::string& one) { return down.count(one) > 0; }));
    }
    return {asked, value.get<Names>()};
  } else if (kind == "time_to_look_s") {
    return {known.is_time_to_look(at(value), step.value("caller", "good")), step["is"]};
  } else {
    throw std::runtime_error("no such step: " + kind);
  }
  return {};
}

// The differences of a case.
int differences(const json& one) {
  KnownSchedulers known(one["given"].get<std::vector<std::string>>(), one["tls"], use_of(one["use"]));
  for (const json& step : one["steps"]) {
    const Outcome outcome = play(known, step);
    if (outcome.found == outcome.expected) continue;
    std::cerr << one["name"] << ": " << step << " found " << outcome.found << "\n";
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: directory CASES\n";
    return 2;
  }
  try {
    const json cases = json::parse(std::ifstream(argv[1]));
    int different = 0;
    for (const json& one : cases) different += differences(one);
    std::cout << "directory: " << cases.size() << " cases, " << different << " different\n";
    return different || cases.empty() ? 1 : 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
