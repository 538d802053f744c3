# frozen_string_literal: true

require 'paceline/errors'
require 'paceline/known_schedulers'

module Paceline
  # Looks into the directories of a client's schedulers, one at a time, in a thread that ends with the look.
  class Looks
    # Seconds that a look has.
    TIMEOUT = 5.0
    # Bytes of one look's answer, each message counted as MESSAGE_BYTES more than it has.
    MAX_BYTES = 16 << 20
    MESSAGE_BYTES = 64 << 10

    # `caller` names whose looks they are. When a look has ended, `learned` is called.
    def initialize(connections, known, rotation, caller, &learned)
      @connections = connections
      @known = known
      @rotation = rotation
      @caller = caller
      @learned = learned
      @mutex = Mutex.new
      @thread = nil
      @ended = false
    end

    # Looks beside the calls, if it is time and no look is in progress.
    def in_time
      return unless @known.time_to_look?(now, @caller)

      @mutex.synchronize { @thread = Thread.new { look } unless @ended || @thread&.alive? }
    end

    # Looks before a call to all schedulers, if none has, for at most half of its `timeout`; what is left of that.
    def first(timeout)
      began = now
      in_time
      return timeout if @known.looked?

      wait([TIMEOUT, timeout && (timeout / 2.0)].compact.min)
      timeout && [timeout / 2.0, timeout - (now - began)].max
    end

    # No further look begins; the last one ends with its call.
    def finish
      @mutex.synchronize { @ended = true }
      wait(nil)
    end

    private

    def now
      @connections.class.now
    end

    def wait(limit)
      @thread&.join(limit)
    end

    # Looks into the directory of one scheduler. Whatever it answers, the calls go on.
    def look
      began = now
      teller = @known.teller(began) { |address| @rotation.down_at?(address, began) }
      begin
        @known.saw(teller, listed(teller), began)
      rescue StandardError, GRPC::Core::CallError => e
        failed(teller, Errors.from_rpc(e), began)
      end
      @learned.call
    end

    def failed(teller, error, began)
      case error.code
      when :UNIMPLEMENTED then @known.none(teller, began)
      when :UNAVAILABLE, :DEADLINE_EXCEEDED
        @known.lost(teller, began)
        @rotation.down(teller, now)
      else @known.refused(@caller, began)
      end
    end

    # All entries of a scheduler's directory; none if it does not end.
    def listed(teller)
      entries = []
      size = 0
      @connections.call_to(teller, :watch_schedulers, Scheduler::V1::WatchSchedulersRequest.new, TIMEOUT) do |call|
        call.execute.each do |message|
          entries.concat(message.entries.first(KnownSchedulers::MAX_ENTRIES - entries.size))
          return entries if message.complete

          size += MESSAGE_BYTES + message.to_proto.bytesize
          break if size >= MAX_BYTES
        end
      end
      []
    end
  end
end
