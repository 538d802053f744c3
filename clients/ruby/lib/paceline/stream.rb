# frozen_string_literal: true

require 'paceline/collector'
require 'paceline/connections'
require 'paceline/errors'
require 'paceline/resume'

module Paceline
  # One Generate call, over as many schedulers as it takes: an Enumerable of GenerateResponses, each with a `delta` or
  # a `finished`. It can be read once. Leaving the block in any way cancels the request: the scheduler computes nothing
  # for it from its next step on.
  class Stream
    include Enumerable

    # Seconds to wait for the stream's end when all completions have finished.
    END_TIMEOUT = 1.0

    # Made by Client#generate.
    def initialize(connections, attempts, resumable)
      @connections = connections
      @attempts = attempts
      @resumable = resumable
      @call = nil
      @cancelled = false
      @read = false
    end

    # The request's id, drawn if the caller gave none: Client#abort takes it.
    def request_id
      @resumable.request_id
    end

    # The request with its defaults filled in; nil before the first event.
    def started
      @resumable.started
    end

    # Array of TokenLogprobs, of the prompt's tokens but the first, if the request asks for them (`prompt_logprobs`);
    # complete with the first event.
    def prompt_logprobs
      @resumable.prompt_logprobs
    end

    # Yields each event. Raises Error.
    def each(&block)
      return enum_for(:each) unless block
      raise ArgumentError, 'a stream can be read once' if @read

      @read = true
      again until attempt(&block)
      self
    end

    # Ends the stream from another thread: `each` raises Error with the code CANCELLED.
    def cancel
      @cancelled = true
      @call&.cancel
    end

    # Reads the stream to its end; what Client#complete gives.
    def completions
      collector = Collector.new
      each { |event| collector.add(event) }
      collector.completions
    end

    private

    # Reads one attempt; whether the stream has ended with it. Otherwise @failure is why the attempt ended.
    def attempt
      raise cancelled if @cancelled

      in_block = false
      limit = nil
      replies do |message|
        @connections.check_started(@attempts.address, message)
        @attempts.answered(message.started ? message.started.model_fingerprint : '')
        next unless (event = @resumable.see(message))

        in_block = true
        yield event
        in_block = false
        limit ||= ending if @resumable.complete?
      end
      @resumable.check_end
      true
    rescue GRPC::BadStatus, GRPC::Core::CallError, OtherModel => e
      raise if in_block # not of this stream

      return true if @resumable.complete?

      @attempts.timeout(Connections.now) # what gRPC raises of a call whose deadline passed is not always that
      @failure = Errors.from_rpc(e)
      false
    ensure
      limit&.kill
    end

    # Cancels the call of which nothing is missing but the end, unless it ends soon.
    def ending
      call = @call
      Thread.new do
        sleep END_TIMEOUT
        call.cancel
      end
    end

    def replies(&block)
      now = Connections.now
      request = @resumable.attempt(now)
      @connections.at(@attempts) do |address|
        @connections.call_to(address, :generate, request, @attempts.timeout(now), @attempts.metadata) do |call|
          @call = call
          raise cancelled if @cancelled

          call.execute.each(&block)
        end
      end
    end

    def again
      raise cancelled if @cancelled

      address = @attempts.address
      begin
        @connections.again(@attempts, @failure)
      rescue Error => e
        raise @resumable.final_error(e, address)
      end
    end

    def cancelled
      Error.new('the stream was cancelled', code: :CANCELLED)
    end
  end
end
