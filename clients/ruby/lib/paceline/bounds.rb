# frozen_string_literal: true

require 'paceline/errors'

module Paceline
  # How much a stream may bring: a scheduler that sends more than it announced is wrong, or lies.
  class Bounds
    # Bytes of text, reasoning and tool calls for each token of a completion, on average: see Delta.
    TEXT_BYTES_PER_TOKEN = 4096
    # Tokens of a completion, where neither the request nor the scheduler says how many it may have.
    UNANNOUNCED_TOKENS = 1 << 20
    # Likeliest tokens in each place, if the request asks for fewer.
    UNASKED_TOP = 32

    # Raises Error unless all logprobs are numbers.
    def self.check_numbers(logprobs)
      return if logprobs.all? { |one| !one.logprob.nan? && one.top_logprobs.none?(&:nan?) }

      raise Errors.incomplete("a token's logprob is not a number")
    end

    def initialize(request, started = nil)
      told = [request.stop&.max_tokens, started&.max_tokens].compact.select(&:positive?)
      @max_tokens = told.min || UNANNOUNCED_TOKENS
      @top = [request.sampling&.logprobs || 0, UNASKED_TOP].max
    end

    # Raises Error if a delta, after which its completion has so many tokens and bytes of text, is more than may come.
    def check(delta, tokens, text_bytes)
      if tokens > @max_tokens
        raise Errors.incomplete("a completion has more than the #{@max_tokens} tokens that were announced")
      end
      if text_bytes > TEXT_BYTES_PER_TOKEN * [tokens, 1].max
        raise Errors.incomplete("a completion has #{text_bytes} bytes of text in #{tokens} tokens, " \
                                "more than #{TEXT_BYTES_PER_TOKEN} a token")
      end
      check_logprobs(delta)
    end

    private

    def check_logprobs(delta)
      return if delta.logprobs.empty?

      most = delta.logprobs.map { |one| [one.top_ids.size, one.top_logprobs.size].max }.max
      if delta.logprobs.size > delta.token_ids.size || most > @top
        raise Errors.incomplete("#{delta.logprobs.size} logprobs of #{delta.token_ids.size} tokens, with up to #{most} " \
                                'likeliest tokens in one place')
      end
      Bounds.check_numbers(delta.logprobs)
    end
  end
end
