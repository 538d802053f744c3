#include "connections.h"

#include <iterator>
#include <thread>

#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

namespace paceline {
namespace {

grpc::ChannelArguments channel_arguments() {
  constexpr int MAX_MESSAGE_BYTES = 4 << 20;
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(MAX_MESSAGE_BYTES);
  arguments.SetMaxSendMessageSize(MAX_MESSAGE_BYTES);
  arguments.SetInt("grpc.max_metadata_size", 16 << 10);  // of an error; above 8 KiB gRPC would report one of its own
  // A frozen scheduler keeps its sockets open: pings notice it within four seconds.
  arguments.SetInt("grpc.keepalive_time_ms", 2'000);
  arguments.SetInt("grpc.keepalive_timeout_ms", 1'500);
  arguments.SetInt("grpc.http2.ping_timeout_ms", 1'500);
  arguments.SetInt("grpc.http2.max_pings_without_data", 0);
  arguments.SetInt("grpc.initial_reconnect_backoff_ms", 100);
  arguments.SetInt("grpc.min_reconnect_backoff_ms", 3'000);  // how long connecting may take
  arguments.SetInt("grpc.max_reconnect_backoff_ms", 500);
  arguments.SetInt("grpc.use_local_subchannel_pool", 1);
  arguments.SetUserAgentPrefix("paceline-cpp");
  return arguments;
}

}  // namespace

Connections::Connections(const std::vector<std::string>& given, const Options& options)
    : authorization_(options.token.empty() ? "" : "Bearer " + options.token),
      failover_timeout_(options.failover_timeout),
      credentials_(options.credentials ? options.credentials : grpc::InsecureChannelCredentials()),
      known_(given, options.credentials != nullptr, Directory::off),
      rotation_(given) {
  for (const std::string& address : given) at(address);
}

std::unique_ptr<Call> Connections::begin(Attempts& attempts) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (;;) {
    if (auto stub = at(attempts.address())) return std::make_unique<Call>(stub, rotation_, attempts.address());
    use_known();
    attempts.skip(Clock::now());
  }
}

std::vector<std::unique_ptr<Call>> Connections::all() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::unique_ptr<Call>> found;
  for (const std::string& address : known_.present().addresses) {
    if (auto stub = at(address)) found.push_back(std::make_unique<Call>(stub, rotation_, address));
  }
  return found;
}

// The stub of an address; null: it is known no more. Called with the mutex held.
std::shared_ptr<Stub> Connections::at(const std::string& address) {
  if (!known_.is_given(address) && !known_.tls_name(address)) return nullptr;
  std::shared_ptr<Stub>& found = open_[address];
  if (!found) {
    found = v1::SchedulerService::NewStub(grpc::CreateCustomChannel(address, credentials_, channel_arguments()));
  }
  return found;
}

// Lets calls use the schedulers that are known now. Called with the mutex held.
void Connections::use_known() {
  rotation_.use(known_.present());
  for (auto one = open_.begin(); one != open_.end();) {
    one = rotation_.has(one->first) ? std::next(one) : open_.erase(one);
  }
}

void Connections::prepare(grpc::ClientContext& context, Timeout timeout, Milliseconds load_wait) const {
  if (timeout) context.set_deadline(std::chrono::system_clock::now() + *timeout);
  // Plain metadata instead of gRPC's call credentials, which refuse plaintext: a token is useful on loopback too.
  if (!authorization_.empty()) context.AddMetadata("authorization", authorization_);
  if (load_wait > Milliseconds{0}) context.AddMetadata("paceline-wait-ms", std::to_string(load_wait.count()));
}

void Connections::sleep(Milliseconds time) { std::this_thread::sleep_for(time); }

}  // namespace paceline
