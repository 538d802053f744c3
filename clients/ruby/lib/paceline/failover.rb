# frozen_string_literal: true

require 'paceline/affinity'
require 'paceline/errors'

module Paceline
  # Which scheduler a call goes to, and where next when one refuses it or dies. No I/O: time is passed in, in seconds.
  module Failover
    # Default of how long a call that lost its scheduler is sent again.
    TIMEOUT = 30.0
    # How long an address that could not be reached is tried last; doubles with each further failure.
    MIN_DOWN = 1.0
    MAX_DOWN = 8.0
    # Metadata of a call: milliseconds for which it waits at the scheduler while a model is loading.
    WAIT_KEY = 'paceline-wait-ms'
    # Between two rounds through all addresses; doubles each round, unless a scheduler gives a hint.
    MIN_WAIT = 0.1
    MAX_WAIT = 1.0
    # Losses in a row, with nothing received between them, that end a call: the call may be their cause.
    MAX_LOSSES = 4
    NEVER_REACHED = /failed to connect|DNS resolution failed/

    # The order in which the calls of a client try its addresses, which are indexes. A call with a key begins where that
    # key's prompts are cached, unless the client has too many live calls there (AFFINITY in scheduler.proto); one
    # without begins with the next address in turn. Those that are down come last. Safe for concurrent use.
    class Rotation
      def initialize(addresses)
        @addresses = addresses
        @live = addresses.map { 0 } # calls
        @next = 0
        @down = {} # by address: the end of its down time, and its length
        @mutex = Mutex.new
      end

      # All addresses. `key`: of Affinity.key, or nil.
      def order(now, key)
        @mutex.synchronize do
          (key ? with_key(key) : in_turn).partition { |address| !down?(address, now) }.flatten
        end
      end

      # Counts a call at an address while the block runs.
      def live(address)
        @mutex.synchronize { @live[address] += 1 }
        yield
      ensure
        @mutex.synchronize { @live[address] -= 1 }
      end

      # It has answered.
      def up(address)
        @mutex.synchronize { @down.delete(address) }
      end

      # It could not be reached, or takes no requests. Of several calls that find out, the first counts.
      def down(address, now)
        @mutex.synchronize do
          return if down?(address, now)

          _, last = @down.fetch(address, [0.0, 0.0])
          length = (2 * last).clamp(MIN_DOWN, MAX_DOWN)
          @down[address] = [now + length, length]
        end
      end

      private

      def with_key(key)
        order = Affinity.preference(key, @addresses)
        [Affinity.choice(order, @live)] | order
      end

      def in_turn
        turn = @addresses.each_index.to_a.rotate(@next)
        @next = (@next + 1) % @addresses.size
        turn
      end

      def down?(address, now)
        @down.fetch(address, [now, 0.0]).first > now
      end
    end

    # One call's attempts; `address` is the current one's.
    #
    # A refused attempt (by the scheduler, or because it can't be reached) moves on to the next address; when all have
    # refused, the error is the caller's. But if one of them has no executor yet, because a model is loading, the call
    # is sent there once more and waits there for up to `load_wait`: `metadata` says so. A lost attempt (the connection
    # broke, or the scheduler ended the call UNAVAILABLE in mid-stream) is repeated at once on each other address, then
    # on all of them for up to `failover_timeout`.
    class Attempts
      attr_reader :address, :metadata

      # `key`: of Affinity.key, or nil: the call begins with the next address in turn.
      def initialize(rotation, now, timeout:, failover_timeout:, load_wait: 0.0, key: nil)
        @rotation = rotation
        @key = key
        @deadline = timeout && (now + timeout)
        @failover_timeout = failover_timeout
        @load_wait = load_wait
        @loads = nil # address of a scheduler that had no executor yet
        @metadata = {} # of the current attempt
        @address, *@untried = rotation.order(now, @key)
        @answered = false # the current attempt has received a message
        @refusals = [] # in this round through the addresses
        @lost_at = nil
        @losses = 0 # in a row, since the last message
        @wait = MIN_WAIT
      end

      # The rest of the caller's timeout; nil without one. Raises Error at its end.
      def timeout(now)
        return nil unless @deadline
        raise Error.new('timeout passed', code: :DEADLINE_EXCEEDED) if now >= @deadline

        @deadline - now
      end

      # The current attempt has received a message.
      def answered
        return if @answered

        @answered = true
        @rotation.up(@address)
      end

      # The current attempt has failed: moves `address` on, and returns the seconds to wait before that attempt.
      # Raises the error for the caller if there is to be none.
      def failed(error, now)
        @rotation.down(@address, now) if error.code == :UNAVAILABLE
        if lost?(error)
          lose(error, now)
        elsif @lost_at && error.code == :ALREADY_EXISTS
          # The lost attempt: its scheduler has not noticed yet that we are gone.
        elsif error.retryable? && !@answered
          @refusals << error
          @loads ||= @address if error.reason == 'NOT_READY'
        else
          raise error
        end
        @answered = false
        return next_round(error, now) if @untried.empty?

        @address = @untried.shift
        0.0
      end

      private

      # Whether the connection broke, or the scheduler ended, when it may have taken the call.
      def lost?(error)
        return false unless error.code == :UNAVAILABLE

        by_grpc = error.reason.empty? && error.retry_after.nil?
        @answered || (by_grpc && !NEVER_REACHED.match?(error.message))
      end

      def lose(error, now)
        @losses = @answered ? 1 : @losses + 1
        raise error if @losses >= MAX_LOSSES
        return unless @answered || @lost_at.nil?

        @lost_at = now
        @wait = MIN_WAIT
        @refusals = []
        @untried = @rotation.order(now, @key) - [@address]
      end

      def next_round(error, now)
        for_caller = @refusals.min_by { |one| one.retry_after || Float::INFINITY } || error
        return wait_for_model if @lost_at.nil? && @loads && @metadata.empty? && @load_wait.positive?

        left = @lost_at ? @lost_at + @failover_timeout - now : 0.0
        raise for_caller if left <= 0

        @address, *@untried = @rotation.order(now, @key)
        hint = @refusals.empty? ? nil : for_caller.retry_after
        wait = [hint ? [hint, MIN_WAIT].max : @wait, left].min
        wait = [wait, [@deadline - now, 0.0].max].min if @deadline
        @wait = [2 * @wait, MAX_WAIT].min
        @refusals = []
        wait
      end

      def wait_for_model
        @address = @loads
        @refusals = []
        @metadata = { WAIT_KEY => (@load_wait * 1000).round.to_s }
        0.0
      end
    end
  end
end
