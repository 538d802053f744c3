#include "bounds.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "errors.h"

namespace paceline {
namespace {

// Bytes of text, reasoning and tool calls for each token of a completion, on average: see Delta.
constexpr uint64_t TEXT_BYTES_PER_TOKEN = 4096;
// Tokens of a completion, where neither the request nor the scheduler says how many it may have.
constexpr uint32_t UNANNOUNCED_TOKENS = 1 << 20;
// Likeliest tokens in each place, if the request asks for fewer.
constexpr uint32_t UNASKED_TOP = 32;

}  // namespace

Bounds::Bounds(const v1::GenerateRequest& request, const v1::Started& started)
    : max_tokens_(UNANNOUNCED_TOKENS), top_(std::max(request.sampling().logprobs(), UNASKED_TOP)) {
  const uint32_t asked = request.stop().max_tokens();
  const uint32_t announced = started.max_tokens();
  if (asked && announced) {
    max_tokens_ = std::min(asked, announced);
  } else if (asked || announced) {
    max_tokens_ = asked + announced;
  }
}

void Bounds::check(const v1::Delta& delta, uint64_t tokens, uint64_t text_bytes) const {
  if (tokens > max_tokens_) {
    throw incomplete("a completion has more than the " + std::to_string(max_tokens_) +
                     " tokens that were announced");
  }
  if (text_bytes > TEXT_BYTES_PER_TOKEN * std::max<uint64_t>(tokens, 1)) {
    throw incomplete("a completion has " + std::to_string(text_bytes) + " bytes of text in " +
                     std::to_string(tokens) + " tokens, more than " + std::to_string(TEXT_BYTES_PER_TOKEN) +
                     " a token");
  }
  if (delta.logprobs_size() > delta.token_ids_size()) {
    throw incomplete(std::to_string(delta.logprobs_size()) + " logprobs of " +
                     std::to_string(delta.token_ids_size()) + " tokens");
  }
  for (const v1::TokenLogprobs& one : delta.logprobs()) {
    if (one.top_ids_size() > top_ || one.top_ids_size() != one.top_logprobs_size()) {
      throw incomplete(std::to_string(one.top_ids_size()) + " likeliest tokens in one place, with " +
                       std::to_string(one.top_logprobs_size()) + " logprobs");
    }
  }
  check_numbers(delta.logprobs());
}

void check_numbers(const google::protobuf::RepeatedPtrField<v1::TokenLogprobs>& logprobs) {
  for (const v1::TokenLogprobs& one : logprobs) {
    const auto& top = one.top_logprobs();
    if (std::isnan(one.logprob()) || std::any_of(top.begin(), top.end(), [](float value) { return std::isnan(value); })) {
      throw incomplete("a token's logprob is not a number");
    }
  }
}

}  // namespace paceline
