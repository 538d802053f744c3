#include "errors.h"

#include "paceline/client/status_details.pb.h"

namespace paceline {
namespace {

constexpr int64_t MAX_SECONDS = int64_t{1} << 32;  // of a hint that is taken

bool is(const google::protobuf::Any& detail, const std::string& name) {
  const std::string& url = detail.type_url();
  return url.size() > name.size() && url.compare(url.size() - name.size(), name.size(), name) == 0 &&
         url[url.size() - name.size() - 1] == '/';
}

void read_details(const std::string& bytes, Error& error) {
  client::Status status;
  if (!status.ParseFromString(bytes)) return;  // a peer that writes nonsense there still gave a code and a message
  for (const google::protobuf::Any& detail : status.details()) {
    client::ErrorInfo info;
    client::RetryInfo retry;
    if (is(detail, "google.rpc.ErrorInfo") && info.ParseFromString(detail.value())) {
      error.reason = info.reason();
      error.metadata = {info.metadata().begin(), info.metadata().end()};
    } else if (is(detail, "google.rpc.RetryInfo") && retry.ParseFromString(detail.value())) {
      const auto& delay = retry.retry_delay();
      if (delay.seconds() < 0 || delay.seconds() > MAX_SECONDS || delay.nanos() < 0) continue;
      error.retry_after = std::chrono::milliseconds(1000 * delay.seconds() + delay.nanos() / 1'000'000);
    }
  }
}

}  // namespace

Error error_of(const grpc::Status& status) {
  Error error(status.error_code(), status.error_message());
  read_details(status.error_details(), error);
  if (error.code == grpc::StatusCode::CANCELLED && error.reason.empty()) {
    // Paceline's services always give a reason. gRPC gives none when a server that stops cancels calls that it has
    // not begun.
    error.code = grpc::StatusCode::UNAVAILABLE;
  } else if (error.code == grpc::StatusCode::RESOURCE_EXHAUSTED &&
             status.error_message().find("larger than max") != std::string::npos) {
    error.code = grpc::StatusCode::INVALID_ARGUMENT;  // gRPC itself refuses such a message: waiting doesn't help
  }
  return error;
}

Error incomplete(const std::string& message) { return Error(grpc::StatusCode::DATA_LOSS, message); }

}  // namespace paceline
