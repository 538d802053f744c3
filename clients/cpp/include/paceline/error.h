// The error of every call.

#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include <grpcpp/support/status.h>

namespace paceline {

// A call that failed, with the details that the service attached. what() names the field and the limit where a
// parameter is at fault.
class Error : public std::runtime_error {
 public:
  Error(grpc::StatusCode code, const std::string& message) : std::runtime_error(message), code(code) {}

  // The status. RESOURCE_EXHAUSTED and UNAVAILABLE mean, unless `lost`, that nothing was emitted. DATA_LOSS: the
  // service reports success, but the answer is incomplete.
  grpc::StatusCode code;
  // The service's name of the cause, such as QUEUE_FULL; empty if it gave none.
  std::string reason;
  // What the service added to the reason.
  std::map<std::string, std::string> metadata;
  // When the same request may succeed; none without a hint of the service.
  std::optional<std::chrono::milliseconds> retry_after;
  // A stream was interrupted after events had been received, and could not be continued. What was received is
  // valid but incomplete. The code is UNAVAILABLE.
  bool lost = false;

  // Whether the same request may succeed later: nothing was emitted for it.
  bool retryable() const {
    return !lost && (code == grpc::StatusCode::RESOURCE_EXHAUSTED || code == grpc::StatusCode::UNAVAILABLE);
  }
};

}  // namespace paceline
