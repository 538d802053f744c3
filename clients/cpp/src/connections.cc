#include "connections.h"

#include <algorithm>
#include <iterator>
#include <thread>

#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

namespace paceline {
namespace {

// The reason of the client's own error for a learned scheduler that serves another model than its entry says.
constexpr char OTHER_MODEL[] = "OTHER_MODEL";

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
  arguments.SetServiceConfigJSON(R"({"methodConfig": [{
      "name": [{"service": "paceline.scheduler.v1.SchedulerService", "method": "WatchSchedulers"}],
      "maxResponseMessageBytes": )" + std::to_string(MAX_LOOK_MESSAGE) + "}]}");
  return arguments;
}

std::shared_ptr<grpc::ChannelCredentials> credentials_of(const Options& options) {
  if (options.credentials) return options.credentials;
  return options.tls ? grpc::SslCredentials(*options.tls) : grpc::InsecureChannelCredentials();
}

Directory use_of(const Options& options) {
  const bool is_unknown = options.credentials || (options.tls && options.tls->pem_root_certs.empty());
  return is_unknown ? Directory::off : options.directory;
}

}  // namespace

Connections::Connections(const std::vector<std::string>& given, const Options& options)
    : authorization_(options.token.empty() ? "" : "Bearer " + options.token),
      failover_timeout_(options.failover_timeout),
      credentials_(credentials_of(options)),
      known_(given, options.tls.has_value(), use_of(options)),
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
  const bool is_given = known_.is_given(address);
  const std::optional<std::string> tls_name = is_given ? std::string() : known_.tls_name(address);
  if (!tls_name) return nullptr;
  Open& found = open_[address];
  if (!found.stub || found.tls_name != *tls_name) {
    grpc::ChannelArguments arguments = channel_arguments();
    if (!tls_name->empty()) arguments.SetSslTargetNameOverride(*tls_name);
    const std::string target = is_given ? address : "dns:///" + address;  // no part of it is a scheme
    found = {*tls_name, v1::SchedulerService::NewStub(grpc::CreateCustomChannel(target, credentials_, arguments))};
  }
  return found.stub;
}

// Lets calls use the schedulers that are known now. Called with the mutex held.
void Connections::use_known() {
  rotation_.use(known_.present());
  for (auto one = open_.begin(); one != open_.end();) {
    one = rotation_.has(one->first) ? std::next(one) : open_.erase(one);
  }
}

void Connections::look_in_time() {
  if (!known_.is_time_to_look(Clock::now(), authorization_)) return;
  looks_.begin([this](grpc::ClientContext& context) { look(context); });
}

Timeout Connections::look_first(Timeout timeout) {
  const Clock::time_point began = Clock::now();
  look_in_time();
  if (known_.has_looked()) return timeout;
  looks_.wait(timeout ? std::min(LOOK_TIMEOUT, *timeout / 2) : LOOK_TIMEOUT);
  if (!timeout) return {};
  return std::max(*timeout / 2, *timeout - std::chrono::duration_cast<Milliseconds>(Clock::now() - began));
}

// Looks into the directory of one scheduler.
void Connections::look(grpc::ClientContext& context) {
  const Clock::time_point now = Clock::now();
  const std::string teller = known_.teller(now, [&](const std::string& one) { return rotation_.is_down(one, now); });
  std::unique_lock<std::mutex> lock(mutex_);
  const std::shared_ptr<Stub> scheduler = at(teller);
  lock.unlock();
  if (!scheduler) return;
  prepare(context, LOOK_TIMEOUT);
  try {
    known_.saw(teller, listed_at(*scheduler, context), now);
  } catch (const Error& error) {
    if (error.code == grpc::StatusCode::UNIMPLEMENTED) {
      known_.has_none(teller, now);
    } else if (error.code == grpc::StatusCode::UNAVAILABLE || error.code == grpc::StatusCode::DEADLINE_EXCEEDED) {
      known_.lost(teller, now);
      rotation_.down(teller, Clock::now());
    } else {
      known_.refused(authorization_, now);
    }
  }
  lock.lock();
  use_known();
}

std::optional<Error> Connections::check_started(const std::string& address, const v1::GenerateResponse& message) {
  look_in_time();  // a client that begins no calls meanwhile looks too
  if (!message.has_started()) return {};
  return check_model(address, message.started().model_fingerprint());
}

// Asks a learned scheduler for its model before its first unary call: replies do not say which model answered. Throws
// Error.
void Connections::check(Stub& scheduler, const Attempts& attempts) {
  if (known_.is_checked(attempts.address())) return;
  grpc::ClientContext context;
  prepare(context, attempts.timeout(Clock::now()), attempts.load_wait());
  v1::GetModelInfoResponse served;
  const grpc::Status status = scheduler.GetModelInfo(&context, v1::GetModelInfoRequest(), &served);
  if (!status.ok()) throw error_of(status);
  if (const auto other = check_model(attempts.address(), served.model_fingerprint())) throw Error(*other);
}

std::optional<Error> Connections::check_model(const std::string& address, const std::string& fingerprint) {
  if (known_.is_what_it_says(address, fingerprint)) return {};
  known_.distrust(address);
  std::lock_guard<std::mutex> lock(mutex_);
  use_known();
  Error other(grpc::StatusCode::UNAVAILABLE, address + " is not what a directory says of it");
  other.reason = OTHER_MODEL;
  return other;
}

void Connections::prepare(grpc::ClientContext& context, Timeout timeout, Milliseconds load_wait) const {
  if (timeout) context.set_deadline(std::chrono::system_clock::now() + *timeout);
  // Plain metadata instead of gRPC's call credentials, which refuse plaintext: a token is useful on loopback too.
  if (!authorization_.empty()) context.AddMetadata("authorization", authorization_);
  if (load_wait > Milliseconds{0}) context.AddMetadata("paceline-wait-ms", std::to_string(load_wait.count()));
}

void Connections::sleep(Milliseconds time) { std::this_thread::sleep_for(time); }

}  // namespace paceline
