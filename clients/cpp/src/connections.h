#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/client_context.h>

#include "affinity.h"
#include "errors.h"
#include "failover.h"
#include "known.h"
#include "paceline/client.h"
#include "paceline/scheduler/v1/scheduler.grpc.pb.h"
#include "rotation.h"

namespace paceline {

using Stub = v1::SchedulerService::Stub;

// A call at a scheduler, counted as live until this is destroyed.
struct Call {
  Call(std::shared_ptr<Stub> stub, Rotation& rotation, const std::string& address)
      : stub(std::move(stub)), live(rotation, address) {}

  std::shared_ptr<Stub> stub;
  Rotation::Live live;
};

// The channels to a client's schedulers, and the way of a unary call through them. Channels to given addresses are made
// at once, to learned ones at their first use; they are closed when the address is known no more and no call is there.
// Safe for concurrent use.
class Connections {
 public:
  Connections(const std::vector<std::string>& given, const Options& options);

  Attempts attempts(Timeout timeout, Milliseconds failover_timeout, Wanted call = {}) {
    return Attempts(rotation_, Clock::now(), timeout, failover_timeout, failover_timeout_, std::move(call));
  }

  // The request's key among several schedulers. `own`: the caller's.
  std::string affinity(const v1::GenerateRequest& request, const std::string& own) const {
    return rotation_.count() > 1 ? affinity_key(request, own) : std::string();
  }

  // The current attempt begins, at a scheduler that is still known.
  std::unique_ptr<Call> begin(Attempts& attempts);

  // A call at each of all schedulers that are known.
  std::vector<std::unique_ptr<Call>> all();

  Milliseconds failover_timeout() const { return failover_timeout_; }

  // Sets deadline and token of a call, and how long it waits for a model that is loading.
  void prepare(grpc::ClientContext& context, Timeout timeout, Milliseconds load_wait = Milliseconds{0}) const;

  // Sends a unary call until a scheduler answers it. Throws Error.
  template <typename Reply, typename Request>
  Reply call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
             Timeout timeout, Milliseconds failover_timeout = Milliseconds{0}, Wanted wanted = {}) {
    Attempts attempts = this->attempts(timeout, failover_timeout, std::move(wanted));
    for (;;) {
      grpc::ClientContext context;
      prepare(context, attempts.timeout(Clock::now()), attempts.load_wait());
      Reply reply;
      std::unique_ptr<Call> call = begin(attempts);
      const grpc::Status status = (*call->stub.*method)(&context, request, &reply);
      call.reset();
      if (status.ok()) {
        attempts.answered();
        return reply;
      }
      sleep(attempts.failed(error_of(status), Clock::now()));
    }
  }

 private:
  static void sleep(Milliseconds time);

  std::shared_ptr<Stub> at(const std::string& address);
  void use_known();

  const std::string authorization_;
  const Milliseconds failover_timeout_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  KnownSchedulers known_;
  Rotation rotation_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Stub>> open_;  // by address; calls hold theirs
};

}  // namespace paceline
