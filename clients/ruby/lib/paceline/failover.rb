# frozen_string_literal: true

require 'paceline/errors'
require 'paceline/rotation'

module Paceline
  # Which scheduler a call goes to, and where next when one refuses it or dies. No I/O: time is passed in, in seconds.
  module Failover
    # Default of how long a call that lost its scheduler is sent again.
    TIMEOUT = 30.0
    # Metadata of a call: milliseconds for which it waits at the scheduler while a model is loading.
    WAIT_KEY = 'paceline-wait-ms'
    # Between two rounds through all addresses; doubles each round, unless a scheduler gives a hint.
    MIN_WAIT = 0.1
    MAX_WAIT = 1.0
    # Losses in a row, with nothing received between them, that end a call: the call may be their cause.
    MAX_LOSSES = 4
    # What a learned scheduler does not know or let in, a given one decides.
    NO_LAST_WORD = %i[NOT_FOUND UNAUTHENTICATED PERMISSION_DENIED UNIMPLEMENTED].freeze
    NEVER_REACHED = /failed to connect|DNS resolution failed|errors resolving/

    # One call's attempts; `address` is the current one's.
    #
    # A refused attempt (by the scheduler, or because it can't be reached) moves on to the next address; when all have
    # refused, the error is the caller's. But if one of them has no executor yet, because a model is loading, the call
    # is sent there once more and waits there for up to `load_wait`: `metadata` says so. A lost attempt (the connection
    # broke, or the scheduler ended the call UNAVAILABLE in mid-stream) is repeated at once on each other address, then
    # on all of them for up to `failover_timeout`.
    class Attempts
      attr_reader :address, :metadata

      # `key`: of Affinity.key, or nil: the call begins with the next address in turn. `model`: what the request names.
      def initialize(rotation, now, timeout:, failover_timeout:, load_wait: 0.0, key: nil, model: '')
        @rotation = rotation
        @wanted = { key: key, model: model, begun_with: '' } # begun_with: the fingerprint of what has sent something
        @deadline = timeout && (now + timeout)
        @failover_timeout = failover_timeout
        @load_wait = load_wait
        @loads = nil # address of a scheduler that had no executor yet
        @metadata = {} # of the current attempt
        @gone_over = false # foreign ones were tried
        try(order(now))
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

      # The current attempt has received a message. `model`: the fingerprint that it tells.
      def answered(model = '')
        return if @answered

        @answered = true
        @rotation.up(@address)
        @wanted[:begun_with] = model.empty? ? @rotation.model_at(@address) : model
      end

      # Moves on from an address that is known no more.
      def skip(now)
        forget_unknown
        try(@untried.empty? ? order(now) : @untried)
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
        elsif no_last_word?(error)
          @untried = @untried.partition { |one| @rotation.given?(one) }.flatten
        else
          raise error
        end
        @answered = false
        forget_unknown
        go_over(now) if @untried.empty? && !@gone_over
        return next_round(error, now) if @untried.empty?

        try(@untried)
        0.0
      end

      private

      def order(now)
        @rotation.order(now, **@wanted)
      end

      # Moves on to the first of these addresses, with the others behind it.
      def try(addresses)
        @address, *@untried = addresses
      end

      def forget_unknown
        @untried = @untried.select { |one| @rotation.has?(one) }
      end

      # All others are down or drain.
      def go_over(now)
        @gone_over = true
        @untried = order(now).select { |one| @rotation.foreign?(one) }
      end

      # Whether a learned scheduler refused what a given one may take.
      def no_last_word?(error)
        !@answered && !@rotation.given?(@address) && NO_LAST_WORD.include?(error.code)
      end

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
        @untried = order(now) - [@address]
      end

      def next_round(error, now)
        for_caller = @refusals.min_by { |one| one.retry_after || Float::INFINITY } || error
        return wait_for_model if @lost_at.nil? && @metadata.empty? && @load_wait.positive? && @rotation.has?(@loads)

        left = @lost_at ? @lost_at + @failover_timeout - now : 0.0
        raise for_caller if left <= 0

        try(order(now))
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
