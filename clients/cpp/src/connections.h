#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/client_context.h>

#include "affinity.h"
#include "errors.h"
#include "failover.h"
#include "known.h"
#include "look.h"
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
class Connections : public std::enable_shared_from_this<Connections> {
 public:
  Connections(const std::vector<std::string>& given, const Options& options);

  std::vector<std::string> addresses() const { return known_.present().addresses; }

  // The attempts of a call that begins now.
  Attempts attempts(Timeout timeout, Milliseconds failover_timeout, Wanted call = {}) {
    look_in_time();
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

  // Looks before a call to all schedulers, if none has; what is left of `timeout`, at least half of it.
  Timeout look_first(Timeout timeout);

  // Ends the look in progress; there is no further one.
  void end_looks() { looks_.end(); }

  // A message of a stream at this address came. Returns the error that ends the attempt if it tells of another model
  // than the directory does.
  std::optional<Error> check_started(const std::string& address, const v1::GenerateResponse& message);

  Milliseconds failover_timeout() const { return failover_timeout_; }

  // Sets deadline and token of a call, and how long it waits for a model that is loading.
  void prepare(grpc::ClientContext& context, Timeout timeout, Milliseconds load_wait = Milliseconds{0}) const;

  // Sends a unary call until a scheduler answers it. Throws Error.
  template <typename Reply, typename Request>
  Reply call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
             Timeout timeout, Milliseconds failover_timeout = Milliseconds{0}, Wanted wanted = {}) {
    Attempts attempts = this->attempts(timeout, failover_timeout, std::move(wanted));
    for (;;) {
      Milliseconds wait;
      try {
        const std::unique_ptr<Call> call = begin(attempts);
        check(*call->stub, attempts);
        grpc::ClientContext context;
        prepare(context, attempts.timeout(Clock::now()), attempts.load_wait());
        Reply reply;
        const grpc::Status status = (*call->stub.*method)(&context, request, &reply);
        if (!status.ok()) throw error_of(status);
        attempts.answered();
        return reply;
      } catch (const Error& error) {
        wait = attempts.failed(error, Clock::now());
      }
      sleep(wait);
    }
  }

 private:
  static void sleep(Milliseconds time);

  // A channel, and the name that its certificate has.
  struct Open {
    std::string tls_name;
    std::shared_ptr<Stub> stub;
  };

  std::shared_ptr<Stub> at(const std::string& address);
  void use_known();
  void look_in_time();
  void look(grpc::ClientContext& context);
  void check(Stub& scheduler, const Attempts& attempts);
  std::optional<Error> check_model(const std::string& address, const std::string& fingerprint);

  const std::string authorization_;
  const Milliseconds failover_timeout_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  KnownSchedulers known_;
  Rotation rotation_;
  std::mutex mutex_;
  std::map<std::string, Open> open_;  // by address; calls hold their stubs
  Looks looks_;                       // the last member: a look uses the others
};

}  // namespace paceline
