# frozen_string_literal: true

require 'securerandom'

require 'paceline/bounds'
require 'paceline/errors'
require 'paceline/scheduler/v1/scheduler_pb'

module Paceline
  # Joins the attempts of one Generate call into one stream. No I/O.
  #
  # For each attempt, send the request that `attempt` returns, then pass each message to `see`; when the attempt is
  # lost, begin another. The events of all attempts together are those of a stream that was never interrupted. Times
  # in usage count from the first attempt on, and cached_tokens is its; preemptions, drafts and queue_ms are the last
  # attempt's, for a scheduler reports them only with the end.
  class ResumableStream
    # What was received of one completion. Lengths of text are in bytes of UTF-8.
    Received = Struct.new(
      :token_ids, :text_bytes, :reasoning_bytes, :argument_bytes, :named_bytes, :first_ms, :finished, keyword_init: true
    ) do
      # All text: the answer's, reasoning, tool calls with their ids and names.
      def sent_bytes
        text_bytes + reasoning_bytes + named_bytes + argument_bytes.sum
      end
    end

    # Attempts in a row that were begun and brought no token, after which the request is not sent again.
    MAX_FRUITLESS = 8

    # A copy of the request, with an id and a seed drawn if it has none: sent again, it is the same request.
    def self.identified(request)
      request = Google::Protobuf.deep_copy(request)
      request.request_id = drawn_id if request.request_id.empty?
      request.sampling ||= Scheduler::V1::SamplingParams.new
      request.sampling.seed = SecureRandom.random_number(1 << 64) unless request.sampling.has_seed?
      request
    end

    # An id for a request.
    def self.drawn_id
      SecureRandom.hex(16)
    end

    # Started of the attempt that brought the first event; before that event, of the current attempt.
    attr_reader :started
    # TokenLogprobs of the prompt's tokens but the first, if the request asks for them; complete with the first event.
    attr_reader :prompt_logprobs

    # `request` has an id and a seed; it is kept.
    def initialize(request)
      request.returns = :RETURNS_BOTH if request.returns == :RETURNS_TEXT # a continuation needs the token ids
      @request = request
      @bounds = Bounds.new(request)
      @completions = [request.n, 1].max
      @received = {} # by index: what has had anything
      @began_at = nil # when the attempt was sent that brought the first event
      @sent_at = nil
      @offset = 0.0 # seconds from @began_at to the current attempt
      @prompt_logprobs = []
      @attempt_started = false # the current attempt brought a Started
      @continued = nil # tokens in the current attempt's continuation
      @fruitless = 0 # attempts in a row that began and brought no token
    end

    def request_id
      @request.request_id
    end

    # All completions have finished: then nothing is missing, whatever the call's status is.
    def complete?
      finished == @completions
    end

    # The request to send now: the caller's, or its continuation.
    def attempt(now)
      tokens = @received.each_value.sum { |one| one.token_ids.size }
      count_fruitless(tokens)
      @attempt_started = false
      @sent_at = now
      unless @began_at
        @started = nil
        @prompt_logprobs = []
        return @request
      end
      raise lost('its scheduler is too old to say how') unless @started

      @offset = now - @began_at
      @continued = tokens
      continuation
    end

    # Takes the next message of the attempt; returns it if it is an event for the caller.
    def see(message)
      case message.event
      when :started then see_started(message.started)
      when :prompt_logprobs then see_prompt_logprobs(message.prompt_logprobs)
      when :delta, :finished then see_event(message)
      end
    end

    # The attempt has ended OK. Raises Error if something is missing.
    def check_end
      return if complete?

      raise Errors.incomplete("the stream ended when #{finished} of #{@completions} completions had finished")
    end

    # The error for the caller when the last attempt, at this address, ended with `error`.
    def final_error(error, address)
      # Of another prompt, model or sampler; or without the adapter.
      mismatch = %i[FAILED_PRECONDITION NOT_FOUND].include?(error.code) && @continued
      return error unless @began_at && (error.retryable? || error.code == :ALREADY_EXISTS || mismatch)

      lost = lost("#{error.message} (#{address})", reason: error.reason, metadata: error.metadata)
      return lost unless mismatch

      Error.new(lost.message, code: error.code, reason: error.reason, metadata: error.metadata)
    end

    private

    def count_fruitless(tokens)
      if tokens != (@continued || 0)
        @fruitless = 0
      elsif @attempt_started
        @fruitless += 1
      end
      raise lost("#{MAX_FRUITLESS} attempts in a row brought no token") if @fruitless >= MAX_FRUITLESS
    end

    def finished
      @received.each_value.count(&:finished)
    end

    def see_started(started)
      raise Errors.incomplete('the scheduler began the stream twice') if @attempt_started

      @attempt_started = true
      unless @started
        @started = started
        @bounds = Bounds.new(@request, started)
      end
      raise ignored(started.continued_tokens) if @continued && started.continued_tokens != @continued

      nil
    end

    def see_prompt_logprobs(part)
      return if @began_at || !@request.has_prompt_logprobs? # a continuation without tokens repeats them

      if part.first != 1 + @prompt_logprobs.size
        raise Errors.incomplete("logprobs of the prompt from token #{part.first} on, behind #{@prompt_logprobs.size}")
      end
      @prompt_logprobs.concat(part.logprobs.to_a)
      if @prompt_logprobs.size >= [@started&.prompt_tokens || 0, 1].max
        raise Errors.incomplete('more logprobs of the prompt came than it has tokens')
      end
      Bounds.check_numbers(part.logprobs)
    end

    # Before the first event, which comes after all of them.
    def check_prompt_logprobs
      return unless @started && @request.has_prompt_logprobs?

      found = @prompt_logprobs.size
      wanted = @started.prompt_tokens - 1
      return if found == wanted

      raise Errors.incomplete("#{found} logprobs of the prompt came before the first token, not #{wanted}")
    end

    def see_event(message)
      raise ignored(0) if @continued && !@attempt_started

      index = message.index
      if index >= @completions || @received[index]&.finished
        raise Errors.incomplete("an event of completion #{index}, which has finished or was not asked for")
      end

      one = @received[index] ||=
        Received.new(
          token_ids: [], text_bytes: 0, reasoning_bytes: 0, argument_bytes: [], named_bytes: 0, finished: false
        )
      check_prompt_logprobs unless @began_at
      @began_at ||= @sent_at
      message.event == :delta ? add(one, message.delta) : finish(one, message.finished)
      message
    end

    def add(one, delta)
      one.token_ids.concat(delta.token_ids.to_a)
      one.text_bytes += delta.text.bytesize
      one.reasoning_bytes += delta.reasoning.bytesize
      delta.tool_calls.each { |call| add_call(one, call) }
      @bounds.check(delta, one.token_ids.size, one.sent_bytes)
      delta.elapsed_us += (1e6 * @offset).round
      one.first_ms ||= delta.elapsed_us / 1000
    end

    def add_call(one, call)
      sizes = one.argument_bytes
      begins = call.index == sizes.size
      if call.index > sizes.size || call.name.empty? == begins
        raise Errors.incomplete("tool call #{call.index} does not begin with its name, and once")
      end

      sizes << 0 if begins
      sizes[call.index] += call.arguments.bytesize
      one.named_bytes += call.id.bytesize + call.name.bytesize
    end

    def finish(one, finished)
      one.finished = true
      usage = finished.usage
      return unless @continued && usage

      offset_ms = (1000 * @offset).round
      usage.cached_tokens = @started.cached_tokens
      usage.total_ms += offset_ms
      usage.first_token_ms = [usage.first_token_ms + offset_ms, one.first_ms].compact.min
    end

    def continuation
      request = Google::Protobuf.deep_copy(@request)
      request.sampling = @started.sampling
      request.stop ||= Scheduler::V1::StopConditions.new
      request.stop.max_tokens = @started.max_tokens
      request.continuation = Scheduler::V1::Continuation.new(
        completions: continued_completions, prompt_digest: @started.prompt_digest,
        model_fingerprint: @started.model_fingerprint, sampler: @started.sampler,
        adapter_fingerprint: @started.adapter_fingerprint
      )
      request
    end

    def continued_completions
      @received.map do |index, one|
        Scheduler::V1::ContinuedCompletion.new(index: index, **one.to_h.except(:first_ms, :named_bytes))
      end
    end

    def ignored(tokens)
      lost("the scheduler took over #{tokens} of #{@continued} tokens received (0: it knows no continuations)")
    end

    def lost(why, **details)
      StreamLost.new("the stream was interrupted, and could not be continued: #{why}", **details)
    end
  end
end
