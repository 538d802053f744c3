#include "paceline/client.h"

#include <algorithm>
#include <deque>
#include <stdexcept>

#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_unary_call.h>

#include "connections.h"
#include "resume.h"
#include "stream.h"

namespace paceline {
namespace {

void check_count(const std::string& what, size_t found, size_t wanted) {
  if (found == wanted) return;
  throw incomplete("the reply has " + std::to_string(found) + " " + what + ", not " + std::to_string(wanted));
}

// The reply to a request that gets an id if it has none: sent again, it is the same request.
template <typename Method, typename Request>
auto evaluate(Connections& connections, Method method, Request request, Timeout timeout) {
  if (request.request_id().empty()) request.set_request_id(drawn_id());
  return connections.call(method, request, timeout, connections.failover_timeout(), {{}, request.model(), {}});
}

}  // namespace

Client::Client(const std::vector<std::string>& addresses, Options options) {
  std::vector<std::string> given;  // each once
  for (const std::string& one : addresses) {
    if (std::find(given.begin(), given.end(), one) == given.end()) given.push_back(one);
  }
  if (given.empty()) throw std::invalid_argument("no address is given");
  const auto made = std::make_shared<Connections>(given, options);
  // Streams may outlive the client and its copies; looks don't.
  connections_ = std::shared_ptr<Connections>(made.get(), [made](Connections*) { made->end_looks(); });
}

Client::~Client() = default;

std::vector<std::string> Client::addresses() const { return connections_->addresses(); }

Stream Client::generate(const v1::GenerateRequest& request, Timeout timeout, const std::string& affinity_key) {
  Attempts attempts = connections_->attempts(timeout, connections_->failover_timeout(),
                                             {connections_->affinity(request, affinity_key), request.model(), {}});
  return Stream(std::make_unique<Stream::State>(connections_->shared_from_this(), std::move(attempts),
                                                ResumableStream(identified(request))));
}

std::vector<v1::Completion> Client::complete(const v1::GenerateRequest& request, Timeout timeout,
                                             const std::string& affinity_key) {
  v1::GenerateUnaryRequest wrapped;
  *wrapped.mutable_request() = identified(request);
  const v1::GenerateUnaryResponse reply =
      connections_->call(&Stub::GenerateUnary, wrapped, timeout, connections_->failover_timeout(),
                         {connections_->affinity(request, affinity_key), request.model(), {}});
  bool whole = reply.completions_size() == static_cast<int>(std::max(request.n(), 1u));
  for (int index = 0; index < reply.completions_size(); ++index) {
    const v1::Completion& one = reply.completions(index);
    whole = whole && static_cast<int>(one.index()) == index && one.has_finished();
  }
  if (!whole) throw incomplete("the reply has not all completions");
  return {reply.completions().begin(), reply.completions().end()};
}

v1::ScoreResponse Client::score(const v1::ScoreRequest& request, Timeout timeout) {
  v1::ScoreResponse reply = evaluate(*connections_, &Stub::Score, request, timeout);
  check_count("scores", reply.scores_size(), request.inputs_size());
  for (const v1::Score& one : reply.scores()) check_count("logprobs", one.logprobs_size(), one.token_ids_size());
  return reply;
}

v1::EmbedResponse Client::embed(const v1::EmbedRequest& request, Timeout timeout) {
  v1::EmbedResponse reply = evaluate(*connections_, &Stub::Embed, request, timeout);
  check_count("vectors", reply.embeddings_size(), request.inputs_size());
  for (const v1::Embedding& one : reply.embeddings()) {
    if (one.values().empty()) throw incomplete("the reply has an empty vector");
    check_count("values of a vector", one.values_size(), reply.embeddings(0).values_size());
  }
  return reply;
}

v1::RerankResponse Client::rerank(const v1::RerankRequest& request, Timeout timeout) {
  v1::RerankResponse reply = evaluate(*connections_, &Stub::Rerank, request, timeout);
  const uint32_t count = request.documents_size();
  check_count("results", reply.results_size(), request.top_n() == 0 ? count : std::min(request.top_n(), count));
  std::vector<bool> ranked(count);
  for (const v1::RankedDocument& one : reply.results()) {
    if (one.index() >= count || ranked[one.index()]) {
      throw incomplete("the reply ranks document " + std::to_string(one.index()) + " of " + std::to_string(count) +
                       ", or twice");
    }
    ranked[one.index()] = true;
  }
  return reply;
}

std::vector<uint32_t> Client::tokenize(const v1::TokenizeRequest& request, Timeout timeout) {
  const v1::TokenizeResponse reply =
      connections_->call(&Stub::Tokenize, request, timeout, Milliseconds{0}, {{}, request.model(), {}});
  return {reply.token_ids().begin(), reply.token_ids().end()};
}

std::string Client::detokenize(const std::vector<uint32_t>& token_ids, Timeout timeout) {
  v1::DetokenizeRequest request;
  request.mutable_token_ids()->Add(token_ids.begin(), token_ids.end());
  return connections_->call(&Stub::Detokenize, request, timeout).text();
}

std::vector<std::string> Client::abort(const std::vector<std::string>& request_ids, Timeout timeout) {
  v1::AbortRequest request;
  request.mutable_request_ids()->Add(request_ids.begin(), request_ids.end());
  struct Asked {
    grpc::ClientContext context;
    v1::AbortResponse reply;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<v1::AbortResponse>> reader;
  };
  timeout = connections_->look_first(timeout);
  const auto calls = connections_->all();
  std::deque<Asked> all(calls.size());
  grpc::CompletionQueue queue;
  for (size_t i = 0; i < all.size(); ++i) {
    connections_->prepare(all[i].context, timeout);
    all[i].reader = calls[i]->stub->AsyncAbort(&all[i].context, request, &queue);
    all[i].reader->Finish(&all[i].reply, &all[i].status, nullptr);
  }
  void* tag;
  bool ok;
  for (size_t i = 0; i < all.size(); ++i) queue.Next(&tag, &ok);
  queue.Shutdown();
  queue.Next(&tag, &ok);  // it is empty
  std::vector<std::string> aborted;
  bool answered = false;
  for (const Asked& one : all) {
    answered = answered || one.status.ok();
    aborted.insert(aborted.end(), one.reply.aborted().begin(), one.reply.aborted().end());
  }
  if (!answered) throw error_of(all.front().status);
  return aborted;
}

v1::GetModelInfoResponse Client::model_info(Timeout timeout) {
  return connections_->call(&Stub::GetModelInfo, v1::GetModelInfoRequest(), timeout);
}

v1::GetStatusResponse Client::status(Timeout timeout) {
  return connections_->call(&Stub::GetStatus, v1::GetStatusRequest(), timeout);
}

v1::GenerateRequest chat(const std::vector<std::pair<std::string, std::string>>& messages) {
  v1::GenerateRequest request;
  for (const auto& [role, content] : messages) {
    v1::Message& message = *request.mutable_messages()->add_messages();
    message.set_role(role);
    message.set_content(content);
  }
  return request;
}

}  // namespace paceline
