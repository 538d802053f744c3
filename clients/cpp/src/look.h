// A look into the directory of a scheduler, beside the calls.

#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <grpcpp/client_context.h>

#include "clock.h"
#include "paceline/scheduler/v1/scheduler.grpc.pb.h"

namespace paceline {

constexpr Milliseconds LOOK_TIMEOUT{5'000};

// Of one message of a look's answer, which has 128 KiB at most. Many small entries take far more memory than bytes.
constexpr int MAX_LOOK_MESSAGE = 256 << 10;

// All entries of a scheduler's directory; none if it does not end. Throws Error.
std::vector<scheduler::v1::SchedulerEntry> listed_at(scheduler::v1::SchedulerService::Stub& scheduler,
                                                     grpc::ClientContext& context);

// Looks, one at a time, in a thread that ends with each of them. Safe for concurrent use.
class Looks {
 public:
  ~Looks() { end(); }

  // Begins a look with a context for its call, unless one is in progress.
  void begin(std::function<void(grpc::ClientContext&)> look);

  // Waits until no look is in progress, for at most so long.
  void wait(Milliseconds limit);

  // Cancels the look in progress, and waits until its thread has ended. No further one begins.
  void end();

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  std::thread thread_;
  std::unique_ptr<grpc::ClientContext> context_;  // of the look in progress
  bool closed_ = false;
};

}  // namespace paceline
