# frozen_string_literal: true

require 'grpc'
require 'json'

require 'paceline/scheduler/v1/scheduler_services_pb'

module Paceline
  # The open channels of a client, by address. Who uses them sees to it that one thread at a time does.
  class Channels
    # Bytes of a directory's message, which has 128 KiB at most. Many small entries take far more memory than bytes.
    MAX_LOOK_MESSAGE = 256 << 10
    LOOKS = {
      name: [{ service: 'paceline.scheduler.v1.SchedulerService', method: 'WatchSchedulers' }],
      maxResponseMessageBytes: MAX_LOOK_MESSAGE
    }.freeze
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
      'grpc.service_config' => { methodConfig: [LOOKS] }.to_json,
      'grpc.use_local_subchannel_pool' => 1,
      'grpc.primary_user_agent' => 'paceline-ruby'
    }.freeze

    # `tls`: as Client.new takes it.
    def initialize(tls)
      @credentials = tls ? GRPC::Core::ChannelCredentials.new(tls[:ca], tls[:key], tls[:cert]) : :this_channel_is_insecure
      @open = {} # channel and stub
    end

    def addresses
      @open.keys
    end

    def open?(address)
      @open.key?(address)
    end

    # The stub of an open channel.
    def stub(address)
      @open.fetch(address).last
    end

    # `target`: the address as gRPC takes it. `name`: that of the certificate; '': that of the address, or without TLS.
    def open(address, target: address, name: '')
      named = name.empty? ? {} : { 'grpc.ssl_target_name_override' => name, 'grpc.default_authority' => name }
      channel = GRPC::Core::Channel.new(target, OPTIONS.merge(named), @credentials)
      stub = Scheduler::V1::SchedulerService::Stub.new(address, @credentials, channel_override: channel)
      @open[address] = [channel, stub]
    end

    # Calls that have begun go on.
    def close(address)
      @open.delete(address).first.close
    end
  end
end
