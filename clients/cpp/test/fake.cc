#include "fake.h"

#include <chrono>
#include <stdexcept>
#include <thread>

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include "paceline/client.h"

namespace {

constexpr uint32_t TOKENS = 6;

void wait_for_end(const grpc::ServerContext& context) {
  while (!context.IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

}  // namespace

const char* const WHOLE = "t0t1t2t3t4t5";

v1::SchedulerEntry entry_of(const std::string& address, const std::string& tls_name) {
  v1::SchedulerEntry entry;
  entry.set_address(address);
  entry.set_tls_name(tls_name);
  entry.set_model("m");
  entry.set_model_fingerprint("print");
  entry.set_instance("of " + address);
  entry.set_written_by("somebody");
  return entry;
}

const std::string& Fake::serve(std::shared_ptr<grpc::ServerCredentials> credentials) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", credentials ? credentials : grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  if (!server_) throw std::runtime_error("no server could be started");
  return address_ = (credentials ? "localhost:" : "127.0.0.1:") + std::to_string(port);
}

void Fake::stop() {
  if (server_) server_->Shutdown(std::chrono::system_clock::now());
  server_.reset();
}

int Fake::seen_looks() {
  std::lock_guard<std::mutex> lock(mutex);
  return looks;
}

void Fake::called(const grpc::ServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("authorization");
  callers.insert(found == metadata.end() ? "" : std::string(found->second.data(), found->second.size()));
}

std::vector<v1::GenerateResponse> Fake::messages(const grpc::ServerContext& context,
                                                 const v1::GenerateRequest& request) {
  std::lock_guard<std::mutex> lock(mutex);
  called(context);
  requests.push_back(request);
  uint32_t received = 0;
  for (const v1::ContinuedCompletion& one : request.continuation().completions()) received += one.token_ids_size();
  std::vector<v1::GenerateResponse> found(1);
  v1::Started& started = *found[0].mutable_started();
  *started.mutable_sampling() = request.sampling();
  started.set_max_tokens(TOKENS);
  started.set_prompt_tokens(4);
  started.set_prompt_digest("digest");
  started.set_model_fingerprint(model);
  started.set_continued_tokens(received);
  for (uint32_t token = received; token < TOKENS; ++token) {
    v1::Delta& delta = *found.emplace_back().mutable_delta();
    delta.add_token_ids(token);
    delta.set_text(text.empty() ? "t" + std::to_string(token) : text);
  }
  found.emplace_back().mutable_finished()->mutable_usage()->set_completion_tokens(TOKENS);
  return found;
}

grpc::Status Fake::Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                            grpc::ServerWriter<v1::GenerateResponse>* writer) {
  int sent = 0;
  for (const v1::GenerateResponse& message : messages(*context, *request)) {
    if (sent == hang_after && sent > 0) wait_for_end(*context);
    if (!writer->Write(message)) break;
    ++sent;
  }
  return grpc::Status::OK;
}

grpc::Status Fake::GenerateUnary(grpc::ServerContext* context, const v1::GenerateUnaryRequest* request,
                                 v1::GenerateUnaryResponse* reply) {
  paceline::Collector collector;
  for (const v1::GenerateResponse& message : messages(*context, request->request())) {
    if (!message.has_started()) collector.add(message);
  }
  for (const v1::Completion& one : collector.completions()) *reply->add_completions() = one;
  return grpc::Status::OK;
}

grpc::Status Fake::GetModelInfo(grpc::ServerContext* context, const v1::GetModelInfoRequest*,
                                v1::GetModelInfoResponse* reply) {
  std::lock_guard<std::mutex> lock(mutex);
  called(*context);
  ++infos;
  reply->set_model_fingerprint(model);
  return grpc::Status::OK;
}

grpc::Status Fake::WatchSchedulers(grpc::ServerContext* context, const v1::WatchSchedulersRequest*, Watch* watch) {
  v1::WatchSchedulersResponse message;
  {
    std::lock_guard<std::mutex> lock(mutex);
    called(*context);
    ++looks;
    v1::SchedulerEntry& own = *message.add_entries() = entry_of("own:1");
    own.clear_written_by();
    own.set_model_fingerprint(model);
    for (const v1::SchedulerEntry& one : others) *message.add_entries() = one;
    message.set_complete(true);
  }
  if (answer) return answer(context, watch);
  watch->Write(message);
  wait_for_end(*context);
  return grpc::Status::OK;
}

grpc::Status Fake::Abort(grpc::ServerContext* context, const v1::AbortRequest* request, v1::AbortResponse* reply) {
  std::lock_guard<std::mutex> lock(mutex);
  called(*context);
  for (const std::string& id : request->request_ids()) {
    if (id == live) reply->add_aborted(id);
  }
  return grpc::Status::OK;
}
