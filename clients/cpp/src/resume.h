#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bounds.h"
#include "failover.h"
#include "paceline/client.h"

namespace paceline {

// An id for a request.
std::string drawn_id();

// The request, with an id and a seed drawn if it has none: sent again, it is the same request.
v1::GenerateRequest identified(v1::GenerateRequest request);

// Joins the attempts of one Generate call into one stream. No I/O.
//
// For each attempt, send the request that `attempt` returns, then pass each message to `see`; when the attempt is
// lost, begin another. The events of all attempts together are those of a stream that was never interrupted. Times in
// usage count from the first attempt on, and cached_tokens is its; preemptions, drafts and queue_ms are the last
// attempt's, for a scheduler reports them only with the end.
class ResumableStream {
 public:
  // `request` has an id and a seed.
  explicit ResumableStream(v1::GenerateRequest request);

  const std::string& request_id() const { return request_.request_id(); }
  const v1::Started* started() const { return first_ ? &*first_ : nullptr; }
  const std::vector<v1::TokenLogprobs>& prompt_logprobs() const { return prompt_logprobs_; }

  // All completions have finished: then nothing is missing, whatever the call's status is.
  bool is_complete() const { return finished_ == completions_; }

  // The request to send now: the caller's, or its continuation.
  v1::GenerateRequest attempt(Clock::time_point now);

  // Takes the next message of the attempt; true if it is an event for the caller. Throws Error.
  bool see(v1::GenerateResponse& message);

  // The attempt has ended OK. Throws Error if something is missing.
  void check_end() const;

  // The error for the caller when the last attempt, at this address, ended with `error`.
  Error final_error(const Error& error, const std::string& address) const;

 private:
  struct Received {
    v1::ContinuedCompletion continued;
    uint64_t text_bytes = 0;           // of text, reasoning and tool calls
    std::optional<uint32_t> first_ms;  // from the request's arrival to its first tokens

    void add(v1::Delta& delta, uint32_t offset_ms);
  };

  void see_started(const v1::Started& started);
  void see_prompt_logprobs(const v1::PromptLogprobs& part);
  void check_prompt_logprobs() const;
  void join(v1::Usage& usage, const Received& one) const;
  Error ignored(uint32_t tokens) const;
  static Error lost(const std::string& why);

  v1::GenerateRequest request_;
  uint32_t completions_;
  Bounds bounds_;
  std::map<uint32_t, Received> received_;  // by index: what has had anything
  uint32_t finished_ = 0;                  // completions
  std::optional<Clock::time_point> began_at_;  // when the attempt was sent that brought the first event
  Clock::time_point sent_at_;
  uint32_t offset_ms_ = 0;            // from began_at_ to the current attempt
  std::optional<v1::Started> first_;  // of the attempt that brought the first event
  std::vector<v1::TokenLogprobs> prompt_logprobs_;
  bool attempt_started_ = false;      // the current attempt brought a Started
  uint32_t fruitless_ = 0;            // attempts in a row that began and brought no token
  std::optional<uint32_t> continued_;  // tokens in the current attempt's continuation
};

}  // namespace paceline
