package com.paceline.client;

import com.paceline.scheduler.v1.Delta;
import com.paceline.scheduler.v1.GenerateRequest;
import com.paceline.scheduler.v1.Started;
import com.paceline.scheduler.v1.TokenLogprobs;
import java.util.List;
import java.util.stream.IntStream;

/** How much a stream may bring: a scheduler that sends more than it announced is wrong, or lies. */
final class Bounds {
  /** Bytes of text, reasoning and tool calls for each token of a completion, on average: see Delta. */
  private static final long TEXT_BYTES_PER_TOKEN = 4096;

  /** Tokens of a completion, where neither the request nor the scheduler says how many it may have. */
  private static final int UNANNOUNCED_TOKENS = 1 << 20;

  /** Likeliest tokens in each place, if the request asks for fewer. */
  private static final int UNASKED_TOP = 32;

  private final int maxTokens; // of a completion
  private final int top; // likeliest tokens in each place

  Bounds(GenerateRequest request, Started started) {
    maxTokens =
        IntStream.of(request.getStop().getMaxTokens(), started.getMaxTokens())
            .filter(tokens -> tokens > 0)
            .min()
            .orElse(UNANNOUNCED_TOKENS);
    top = Math.max(request.getSampling().getLogprobs(), UNASKED_TOP);
  }

  /** Throws if a delta, after which its completion has so many tokens and bytes of text, is more than may come. */
  void check(Delta delta, int tokens, long textBytes) {
    if (tokens > maxTokens) {
      throw PacelineException.incomplete(
          "a completion has more than the " + maxTokens + " tokens that were announced");
    }
    if (textBytes > TEXT_BYTES_PER_TOKEN * Math.max(tokens, 1)) {
      throw PacelineException.incomplete(
          "a completion has " + textBytes + " bytes of text in " + tokens + " tokens, more than "
              + TEXT_BYTES_PER_TOKEN + " a token");
    }
    if (delta.getLogprobsCount() > delta.getTokenIdsCount()) {
      throw PacelineException.incomplete(
          delta.getLogprobsCount() + " logprobs of " + delta.getTokenIdsCount() + " tokens");
    }
    for (TokenLogprobs one : delta.getLogprobsList()) {
      if (one.getTopIdsCount() > top || one.getTopIdsCount() != one.getTopLogprobsCount()) {
        throw PacelineException.incomplete(
            one.getTopIdsCount() + " likeliest tokens in one place, with " + one.getTopLogprobsCount() + " logprobs");
      }
    }
    checkNumbers(delta.getLogprobsList());
  }

  /** Throws unless all logprobs are numbers. */
  static void checkNumbers(List<TokenLogprobs> logprobs) {
    for (TokenLogprobs one : logprobs) {
      if (Float.isNaN(one.getLogprob()) || one.getTopLogprobsList().stream().anyMatch(value -> value.isNaN())) {
        throw PacelineException.incomplete("a token's logprob is not a number");
      }
    }
  }
}
