// Runs the steps that tests/scenario gives to all clients: JSON lines in, outcomes out.

#include <fstream>
#include <future>
#include <iostream>
#include <sstream>
#include <stdexcept>

#include <google/protobuf/util/json_util.h>
#include <nlohmann/json.hpp>

#include "paceline/client.h"

using nlohmann::json;

namespace {

const char* const CODES[] = {"OK",
                             "CANCELLED",
                             "UNKNOWN",
                             "INVALID_ARGUMENT",
                             "DEADLINE_EXCEEDED",
                             "NOT_FOUND",
                             "ALREADY_EXISTS",
                             "PERMISSION_DENIED",
                             "RESOURCE_EXHAUSTED",
                             "FAILED_PRECONDITION",
                             "ABORTED",
                             "OUT_OF_RANGE",
                             "UNIMPLEMENTED",
                             "INTERNAL",
                             "UNAVAILABLE",
                             "DATA_LOSS",
                             "UNAUTHENTICATED"};

void write(const json& outcome) { std::cout << outcome.dump() << std::endl; }

paceline::Client client_of(const json& step) {
  paceline::Options options;
  options.token = step.value("token", "");
  if (step.contains("failover_timeout_ms")) {
    options.failover_timeout = std::chrono::milliseconds(step["failover_timeout_ms"].get<int>());
  }
  if (step.contains("ca")) {
    std::ostringstream pem;
    pem << std::ifstream(step["ca"].get<std::string>()).rdbuf();
    options.tls.emplace().pem_root_certs = pem.str();
  }
  return paceline::Client(step["addresses"].get<std::vector<std::string>>(), options);
}

template <typename Request = paceline::v1::GenerateRequest>
Request request_of(const json& step) {
  Request request;
  const auto status = google::protobuf::util::JsonStringToMessage(step["request"].dump(), &request);
  if (!status.ok()) throw std::runtime_error(status.ToString());
  return request;
}

json describe(const std::vector<paceline::v1::Completion>& completions) {
  json described = json::array();
  for (const paceline::v1::Completion& one : completions) {
    const paceline::v1::Finished& finished = one.finished();
    described.push_back({{"text", one.text()},
                         {"token_ids", std::vector<uint32_t>(one.token_ids().begin(), one.token_ids().end())},
                         {"reason", finished.reason() == paceline::v1::FINISH_REASON_STOP ? "stop" : "length"},
                         {"stop_string", finished.stop_string()},
                         {"prompt_tokens", finished.usage().prompt_tokens()},
                         {"completion_tokens", finished.usage().completion_tokens()}});
  }
  return {{"completions", described}};
}

json describe(const paceline::v1::ScoreResponse& reply) {
  json scores = json::array();
  for (const paceline::v1::Score& one : reply.scores()) {
    const std::vector<uint32_t> token_ids(one.token_ids().begin(), one.token_ids().end());
    scores.push_back({{"token_ids", token_ids}, {"logprob", one.logprob()}});
  }
  return {{"scores", scores}};
}

json describe(const paceline::v1::EmbedResponse& reply) {
  json vectors = json::array();
  for (const paceline::v1::Embedding& one : reply.embeddings()) {
    vectors.push_back(std::vector<float>(one.values().begin(), one.values().end()));
  }
  return {{"vectors", vectors}};
}

json describe(const paceline::v1::RerankResponse& reply) {
  json results = json::array();
  for (const paceline::v1::RankedDocument& one : reply.results()) {
    results.push_back({{"index", one.index()}, {"score", one.score()}});
  }
  return {{"results", results}};
}

json generate(paceline::Client& client, const json& step, paceline::Timeout timeout) {
  paceline::Stream stream = client.generate(request_of(step), timeout, step.value("affinity_key", ""));
  paceline::Collector collector;
  int before = 0;
  for (paceline::v1::GenerateResponse event; stream.next(event);) {
    collector.add(event);
    const int tokens = before + event.delta().token_ids_size();
    const auto reached = [&](const char* name) {
      const int mark = step.value(name, 0);
      return before < mark && mark <= tokens;
    };
    if (reached("leave_after_tokens")) return {{"left", true}};
    if (reached("abort_after_tokens")) client.abort({stream.request_id()});
    if (reached("report_after_tokens")) write({{"received", tokens}});
    before = tokens;
  }
  json outcome = describe(collector.completions());
  outcome["prompt_logprobs"] = json::array();
  for (const paceline::v1::TokenLogprobs& one : stream.prompt_logprobs()) {
    outcome["prompt_logprobs"].push_back(one.logprob());
  }
  return outcome;
}

// As many streams at once; only the first one reports.
json parallel(paceline::Client& client, const json& step, paceline::Timeout timeout) {
  json other = step;
  other.erase("report_after_tokens");
  std::vector<std::future<json>> streams;
  for (int i = 0; i < step["parallel"].get<int>(); ++i) {
    const json& own = i == 0 ? step : other;
    streams.push_back(std::async(std::launch::async, [&client, &own, timeout] { return generate(client, own, timeout); }));
  }
  json first = streams.front().get();
  int different = 0;
  for (size_t i = 1; i < streams.size(); ++i) different += streams[i].get() != first;
  first["different"] = different;
  return first;
}

json run(const json& step) {
  paceline::Client client = client_of(step);
  paceline::Timeout timeout;
  if (step.contains("timeout_ms")) timeout = std::chrono::milliseconds(step["timeout_ms"].get<int>());
  const std::string call = step["call"];
  if (call == "model_info") {
    const auto info = client.model_info();
    return {{"name", info.name()}, {"has_chat_template", info.has_chat_template()}};
  }
  if (call == "tokenize") {
    paceline::v1::TokenizeRequest request;
    request.set_text(step["text"].get<std::string>());
    return {{"token_ids", client.tokenize(request)}};
  }
  if (call == "detokenize") return {{"text", client.detokenize(step["token_ids"].get<std::vector<uint32_t>>())}};
  if (call == "complete") return describe(client.complete(request_of(step), timeout, step.value("affinity_key", "")));
  if (call == "generate") return (step.contains("parallel") ? parallel : generate)(client, step, timeout);
  if (call == "score") return describe(client.score(request_of<paceline::v1::ScoreRequest>(step), timeout));
  if (call == "embed") return describe(client.embed(request_of<paceline::v1::EmbedRequest>(step), timeout));
  if (call == "rerank") return describe(client.rerank(request_of<paceline::v1::RerankRequest>(step), timeout));
  throw std::runtime_error("unknown call " + call);
}

json describe(const paceline::Error& error) {
  json described = {{"code", CODES[error.code]},
                    {"reason", error.reason},
                    {"message", error.what()},
                    {"retryable", error.retryable()},
                    {"retry_after_ms", nullptr},
                    {"lost", error.lost}};
  if (error.retry_after) described["retry_after_ms"] = error.retry_after->count();
  return {{"error", described}};
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      write(run(json::parse(line)));
    } catch (const paceline::Error& error) {
      write(describe(error));
    }
  }
}
