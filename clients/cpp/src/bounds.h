// How much a stream may bring: a scheduler that sends more than it announced is wrong, or lies.

#pragma once

#include <cstdint>

#include "paceline/client.h"

namespace paceline {

class Bounds {
 public:
  // By the request and its Started, which may be empty.
  Bounds(const v1::GenerateRequest& request, const v1::Started& started);

  // Throws Error if a delta, after which its completion has so many tokens and bytes of text, is more than may come.
  void check(const v1::Delta& delta, uint64_t tokens, uint64_t text_bytes) const;

 private:
  uint32_t max_tokens_;  // of a completion
  int top_;              // likeliest tokens in each place
};

// Throws Error unless all logprobs are numbers.
void check_numbers(const google::protobuf::RepeatedPtrField<v1::TokenLogprobs>& logprobs);

}  // namespace paceline
