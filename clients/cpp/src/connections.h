#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/client_context.h>

#include "affinity.h"
#include "errors.h"
#include "failover.h"
#include "paceline/client.h"
#include "paceline/scheduler/v1/scheduler.grpc.pb.h"

namespace paceline {

using Stub = v1::SchedulerService::Stub;

// The channels to a client's schedulers, and the way of a unary call through them.
class Connections {
 public:
  Connections(const std::vector<std::string>& addresses, const Options& options);

  const std::string& address(size_t index) const { return addresses_[index]; }
  Stub& stub(size_t index) { return *stubs_[index]; }
  size_t size() const { return stubs_.size(); }

  // `key`: of `affinity`.
  Attempts attempts(Timeout timeout, Milliseconds failover_timeout, std::string key = {}) {
    return Attempts(rotation_, Clock::now(), timeout, failover_timeout, failover_timeout_, std::move(key));
  }

  // The request's key among several schedulers. `own`: the caller's.
  std::string affinity(const v1::GenerateRequest& request, const std::string& own) const {
    return size() > 1 ? affinity_key(request, own) : std::string();
  }

  // An attempt at an address begins; it ends when the result is destroyed.
  std::unique_ptr<Rotation::Live> begin(size_t address) {
    return std::make_unique<Rotation::Live>(rotation_, address);
  }

  Milliseconds failover_timeout() const { return failover_timeout_; }

  // Sets deadline and token of a call, and how long it waits for a model that is loading.
  void prepare(grpc::ClientContext& context, Timeout timeout, Milliseconds load_wait = Milliseconds{0}) const;

  // Sends a unary call until a scheduler answers it. Throws Error.
  template <typename Reply, typename Request>
  Reply call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
             Timeout timeout, Milliseconds failover_timeout = Milliseconds{0}, std::string key = {}) {
    Attempts attempts = this->attempts(timeout, failover_timeout, std::move(key));
    for (;;) {
      grpc::ClientContext context;
      prepare(context, attempts.timeout(Clock::now()), attempts.load_wait());
      Reply reply;
      auto live = begin(attempts.address());
      const grpc::Status status = (stub(attempts.address()).*method)(&context, request, &reply);
      live.reset();
      if (status.ok()) {
        attempts.answered();
        return reply;
      }
      sleep(attempts.failed(error_of(status), Clock::now()));
    }
  }

 private:
  static void sleep(Milliseconds time);

  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<Stub>> stubs_;
  std::string authorization_;
  Milliseconds failover_timeout_;
  Rotation rotation_;
};

}  // namespace paceline
