#include "resume.h"

#include <algorithm>
#include <random>

#include "errors.h"

namespace paceline {

namespace {

// Attempts in a row that were begun and brought no token, after which the request is not sent again.
constexpr uint32_t MAX_FRUITLESS = 8;

uint64_t drawn() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace

std::string drawn_id() {
  static const char digits[] = "0123456789abcdef";
  std::string id;
  for (const uint64_t word : {drawn(), drawn()}) {
    for (int shift = 60; shift >= 0; shift -= 4) id.push_back(digits[word >> shift & 15]);
  }
  return id;
}

v1::GenerateRequest identified(v1::GenerateRequest request) {
  if (request.request_id().empty()) request.set_request_id(drawn_id());
  if (!request.sampling().has_seed()) request.mutable_sampling()->set_seed(drawn());
  return request;
}

ResumableStream::ResumableStream(v1::GenerateRequest request)
    : request_(std::move(request)), completions_(std::max(request_.n(), 1u)), bounds_(request_, v1::Started()) {
  if (request_.returns() == v1::RETURNS_TEXT) request_.set_returns(v1::RETURNS_BOTH);  // a continuation needs the ids
}

v1::GenerateRequest ResumableStream::attempt(Clock::time_point now) {
  uint32_t tokens = 0;
  for (const auto& [index, one] : received_) tokens += one.continued.token_ids_size();
  if (tokens != continued_.value_or(0)) {
    fruitless_ = 0;
  } else if (attempt_started_) {
    ++fruitless_;
  }
  if (fruitless_ >= MAX_FRUITLESS) throw lost(std::to_string(MAX_FRUITLESS) + " attempts in a row brought no token");
  attempt_started_ = false;
  sent_at_ = now;
  if (!began_at_) {
    first_.reset();
    prompt_logprobs_.clear();
    return request_;
  }
  if (!first_) throw lost("its scheduler is too old to say how");
  offset_ms_ = std::chrono::duration_cast<Milliseconds>(now - *began_at_).count();
  v1::GenerateRequest request = request_;
  *request.mutable_sampling() = first_->sampling();
  request.mutable_stop()->set_max_tokens(first_->max_tokens());
  v1::Continuation& continuation = *request.mutable_continuation();
  continuation.set_prompt_digest(first_->prompt_digest());
  continuation.set_model_fingerprint(first_->model_fingerprint());
  continuation.set_sampler(first_->sampler());
  continuation.set_adapter_fingerprint(first_->adapter_fingerprint());
  continued_ = tokens;
  for (const auto& [index, one] : received_) *continuation.add_completions() = one.continued;
  return request;
}

bool ResumableStream::see(v1::GenerateResponse& message) {
  if (message.has_started()) see_started(message.started());
  if (message.has_prompt_logprobs()) see_prompt_logprobs(message.prompt_logprobs());
  if (!message.has_delta() && !message.has_finished()) return false;  // none for the caller, or of a later revision
  if (continued_ && !attempt_started_) throw ignored(0);
  const uint32_t index = message.index();
  const auto known = received_.find(index);
  if (index >= completions_ || (known != received_.end() && known->second.continued.finished())) {
    throw incomplete("an event of completion " + std::to_string(index) + ", which has finished or was not asked for");
  }
  if (!began_at_) {
    check_prompt_logprobs();
    began_at_ = sent_at_;
  }
  Received& one = received_[index];
  one.continued.set_index(index);
  if (message.has_delta()) {
    one.add(*message.mutable_delta(), offset_ms_);
    bounds_.check(message.delta(), one.continued.token_ids_size(), one.text_bytes);
  } else {
    one.continued.set_finished(true);
    ++finished_;
    if (continued_) join(*message.mutable_finished()->mutable_usage(), one);
  }
  return true;
}

void ResumableStream::check_end() const {
  if (is_complete()) return;
  throw incomplete("the stream ended when " + std::to_string(finished_) + " of " + std::to_string(completions_) +
                   " completions had finished");
}

Error ResumableStream::final_error(const Error& error, const std::string& address) const {
  // Of another prompt, model or sampler; or without the adapter.
  const bool mismatch = continued_ && (error.code == grpc::StatusCode::FAILED_PRECONDITION ||
                                       error.code == grpc::StatusCode::NOT_FOUND);
  const bool duplicate = error.code == grpc::StatusCode::ALREADY_EXISTS;
  if (!began_at_ || !(error.retryable() || duplicate || mismatch)) return error;
  Error found = lost(error.what() + (" (" + address + ")"));
  found.reason = error.reason;
  found.metadata = error.metadata;
  if (mismatch) {
    found.code = error.code;
    found.lost = false;
  }
  return found;
}

void ResumableStream::see_started(const v1::Started& started) {
  if (attempt_started_) throw incomplete("the scheduler began the stream twice");
  attempt_started_ = true;
  if (!first_) {
    first_ = started;
    bounds_ = Bounds(request_, started);
  }
  if (continued_ && started.continued_tokens() != *continued_) throw ignored(started.continued_tokens());
}

void ResumableStream::see_prompt_logprobs(const v1::PromptLogprobs& part) {
  if (began_at_ || !request_.has_prompt_logprobs()) return;  // a continuation without tokens repeats them
  if (part.first() != 1 + prompt_logprobs_.size()) {
    throw incomplete("logprobs of the prompt from token " + std::to_string(part.first()) + " on, behind " +
                     std::to_string(prompt_logprobs_.size()));
  }
  prompt_logprobs_.insert(prompt_logprobs_.end(), part.logprobs().begin(), part.logprobs().end());
  if (prompt_logprobs_.size() >= std::max(first_ ? first_->prompt_tokens() : 0u, 1u)) {
    throw incomplete("more logprobs of the prompt came than it has tokens");
  }
  check_numbers(part.logprobs());
}

// Before the first event, which comes after all of them.
void ResumableStream::check_prompt_logprobs() const {
  if (!first_ || !request_.has_prompt_logprobs()) return;
  if (prompt_logprobs_.size() + 1 != first_->prompt_tokens()) {
    throw incomplete(std::to_string(prompt_logprobs_.size()) + " logprobs of the prompt came before the first token, of " +
                     std::to_string(first_->prompt_tokens()) + " tokens");
  }
}

void ResumableStream::join(v1::Usage& usage, const Received& one) const {
  usage.set_cached_tokens(first_->cached_tokens());
  usage.set_total_ms(usage.total_ms() + offset_ms_);
  const uint32_t first_token_ms = usage.first_token_ms() + offset_ms_;
  usage.set_first_token_ms(std::min(first_token_ms, one.first_ms.value_or(first_token_ms)));
}

Error ResumableStream::ignored(uint32_t tokens) const {
  return lost("the scheduler took over " + std::to_string(tokens) + " of " + std::to_string(continued_.value_or(0)) +
              " tokens received (0: it knows no continuations)");
}

Error ResumableStream::lost(const std::string& why) {
  Error error(grpc::StatusCode::UNAVAILABLE, "the stream was interrupted, and could not be continued: " + why);
  error.lost = true;
  return error;
}

void ResumableStream::Received::add(v1::Delta& delta, uint32_t offset_ms) {
  continued.mutable_token_ids()->MergeFrom(delta.token_ids());
  continued.set_text_bytes(continued.text_bytes() + delta.text().size());
  continued.set_reasoning_bytes(continued.reasoning_bytes() + delta.reasoning().size());
  text_bytes += delta.text().size() + delta.reasoning().size();
  for (const v1::ToolCallDelta& call : delta.tool_calls()) {
    const uint32_t begun = continued.argument_bytes_size();
    if (call.index() > begun || call.name().empty() == (call.index() == begun)) {
      throw incomplete("tool call " + std::to_string(call.index()) + " does not begin with its name, and once");
    }
    if (call.index() == begun) continued.add_argument_bytes(0);
    continued.set_argument_bytes(call.index(), continued.argument_bytes(call.index()) + call.arguments().size());
    text_bytes += call.id().size() + call.name().size() + call.arguments().size();
  }
  delta.set_elapsed_us(delta.elapsed_us() + uint64_t{1000} * offset_ms);
  if (!first_ms) first_ms = delta.elapsed_us() / 1000;
}

}  // namespace paceline
