// What an entry of a directory says of a scheduler: a claim of whoever wrote it.

#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "paceline/scheduler/v1/scheduler.pb.h"

namespace paceline {

namespace v1 = ::paceline::scheduler::v1;

// One start of the scheduler at an address: the address and the instance.
using StartAt = std::pair<std::string, std::string>;

struct Learned {
  explicit Learned(const v1::SchedulerEntry& entry);

  StartAt start;
  std::string tls_name;  // of its certificate; empty: it speaks without TLS
  std::string model;     // its fingerprint
  uint64_t load;         // running and waiting sequences
  bool drains;
  std::set<std::string> adapters;
};

// Whether an address is host:port. gRPC may take others for a socket, a list of addresses or another target.
bool is_host_port(const std::string& address);

// Whether a given address can't be reached from another machine.
bool is_local(const std::string& address);

// Whether the host of host:port is this machine.
bool is_loopback(const std::string& address);

}  // namespace paceline
