# frozen_string_literal: true

require 'grpc'
require 'set'

require 'paceline/errors'
require 'paceline/failover'
require 'paceline/scheduler/v1/scheduler_services_pb'

module Paceline
  # The channels to a client's schedulers, and the way of a call through them.
  class Connections
    OPTIONS = {
      'grpc.max_receive_message_length' => 4 << 20,
      'grpc.max_send_message_length' => 4 << 20,
      'grpc.max_metadata_size' => 16 << 10, # of an error; above 8 KiB gRPC would report one of its own
      # A frozen scheduler keeps its sockets open: pings notice it within four seconds.
      'grpc.keepalive_time_ms' => 2_000,
      'grpc.keepalive_timeout_ms' => 1_500,
      'grpc.http2.ping_timeout_ms' => 1_500,
      'grpc.http2.max_pings_without_data' => 0,
      'grpc.initial_reconnect_backoff_ms' => 100,
      'grpc.min_reconnect_backoff_ms' => 3_000, # how long connecting may take
      'grpc.max_reconnect_backoff_ms' => 500,
      'grpc.use_local_subchannel_pool' => 1,
      'grpc.primary_user_agent' => 'paceline-ruby'
    }.freeze

    # Seconds of a clock that nobody sets.
    def self.now
      Process.clock_gettime(Process::CLOCK_MONOTONIC)
    end

    attr_reader :addresses

    # `load_wait`: how long a call waits for a model that is loading, in seconds.
    def initialize(addresses, token:, tls:, load_wait: 0.0)
      @addresses = addresses
      @load_wait = load_wait
      @metadata = token.empty? ? {} : { 'authorization' => "Bearer #{token}" }
      credentials = tls ? GRPC::Core::ChannelCredentials.new(tls[:ca], tls[:key], tls[:cert]) : :this_channel_is_insecure
      @channels = addresses.map { |address| GRPC::Core::Channel.new(address, OPTIONS, credentials) }
      @stubs = addresses.zip(@channels).map do |address, channel|
        Scheduler::V1::SchedulerService::Stub.new(address, credentials, channel_override: channel)
      end
      @rotation = Failover::Rotation.new(addresses)
      @mutex = Mutex.new
      @calls = Set.new # under way
      @closed = false
    end

    # Ends the calls under way, too: a channel that is closed lets them go on.
    def close
      calls = @mutex.synchronize do
        @closed = true
        @calls.to_a
      end
      calls.each(&:cancel)
      @channels.each(&:close)
    end

    # `key`: of `affinity`.
    def attempts(timeout, failover_timeout, key = nil)
      Failover::Attempts.new(@rotation, Connections.now, timeout: timeout, failover_timeout: failover_timeout,
                                                         load_wait: @load_wait, key: key)
    end

    # The request's key among several schedulers. `own`: the caller's.
    def affinity(request, own)
      Affinity.key(request, own) if @addresses.size > 1
    end

    # Yields a call that `execute` begins; it has ended when the block has.
    def call_to(address, method, request, timeout, metadata = {})
      deadline = timeout && (Time.now + timeout)
      call = @mutex.synchronize do
        raise Error.new('the client is closed', code: :UNAVAILABLE) if @closed

        @stubs[address].public_send(method, request, metadata: @metadata.merge(metadata), deadline: deadline,
                                                    return_op: true)
                       .tap { |begun| @calls << begun }
      end
      @rotation.live(address) { yield call }
    ensure
      @mutex.synchronize { @calls.delete(call) }
      call&.cancel
    end

    # The reply to a unary call, from the first scheduler that gives one. Raises Error.
    def call(method, request, timeout, failover_timeout = 0.0, key = nil)
      attempts = attempts(timeout, failover_timeout, key)
      begin
        reply = call_to(attempts.address, method, request, attempts.timeout(Connections.now), attempts.metadata,
                        &:execute)
        attempts.answered
        reply
      rescue GRPC::BadStatus, GRPC::Core::CallError => e
        again(attempts, Errors.from_rpc(e))
        retry
      end
    end

    # The replies of all schedulers that give one. Raises Error if none does.
    def call_all(method, request, timeout)
      failure = nil
      replies = @addresses.each_index.filter_map do |address|
        call_to(address, method, request, timeout, &:execute)
      rescue GRPC::BadStatus, GRPC::Core::CallError => e
        failure = Errors.from_rpc(e)
        nil
      end
      raise failure if failure && replies.empty?

      replies
    end

    # Waits until the attempt after the failed one. Raises the error for the caller if there is none.
    def again(attempts, failure)
      wait = attempts.failed(failure, Connections.now)
      raise failure if @closed

      sleep(wait) if wait.positive?
    end
  end
end
