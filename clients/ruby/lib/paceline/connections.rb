# frozen_string_literal: true

require 'grpc'
require 'set'

require 'paceline/channels'
require 'paceline/errors'
require 'paceline/failover'
require 'paceline/known_schedulers'
require 'paceline/looks'

module Paceline
  # The connections of a client to its schedulers, and the way of a call through them. Those to given schedulers are open
  # from the beginning, those to learned ones from their first use until they are known no more and no call is there.
  class Connections
    # Seconds of a clock that nobody sets.
    def self.now
      Process.clock_gettime(Process::CLOCK_MONOTONIC)
    end

    # `load_wait`: how long a call waits for a model that is loading, in seconds.
    def initialize(addresses, token:, tls:, directory: :off, load_wait: 0.0)
      @load_wait = load_wait
      @metadata = token.empty? ? {} : { 'authorization' => "Bearer #{token}" }
      @known = KnownSchedulers.new(addresses, tls: !tls.nil?, use: directory)
      @rotation = Rotation.new(addresses)
      @looks = Looks.new(self, @known, @rotation, token) { use_known }
      @channels = Channels.new(tls)
      addresses.each { |address| @channels.open(address) }
      @mutex = Mutex.new # of the channels: none is closed between its choice and the count of its call
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
      @looks.finish
      @mutex.synchronize { @channels.addresses.each { |address| @channels.close(address) } }
    end

    # Of the schedulers that are used now: the given ones, then the learned ones.
    def addresses
      @known.present.addresses
    end

    # The attempts of a call that begins now. `key`: of `affinity`.
    def attempts(request, timeout, failover_timeout, key = nil)
      @looks.in_time
      Failover::Attempts.new(@rotation, Connections.now, timeout: timeout, failover_timeout: failover_timeout,
                                                         load_wait: @load_wait, key: key, model: model_of(request))
    end

    # The request's key among several schedulers. `own`: the caller's.
    def affinity(request, own)
      Affinity.key(request, own) if @rotation.several?
    end

    # Yields the address of the current attempt, whose scheduler is still known; while the block runs, the attempt counts
    # as a call there.
    def at(attempts)
      address = @mutex.synchronize do
        until @known.tls_name(attempts.address)
          @rotation.use(@known.present)
          attempts.skip(Connections.now)
        end
        begin_at(attempts.address)
      end
      yield address
    ensure
      end_at(address) if address
    end

    # Yields a call that `execute` begins; it has ended when the block has.
    def call_to(address, method, request, timeout, metadata = {})
      deadline = timeout && (Time.now + timeout)
      call = @mutex.synchronize do
        stub_of(address).public_send(method, request, metadata: @metadata.merge(metadata), deadline: deadline,
                                                      return_op: true)
                        .tap { |begun| @calls << begun }
      end
      yield call
    ensure
      @mutex.synchronize { @calls.delete(call) }
      call&.cancel
    end

    # Checks a stream's message: what begins at a learned address is of the model that its entry says. Raises OtherModel.
    def check_started(address, message)
      @looks.in_time # a client that begins no calls meanwhile looks too
      check_model(address, message.started.model_fingerprint) if message.started
    end

    # The reply to a unary call, from the first scheduler that gives one. Raises Error.
    def call(method, request, timeout, failover_timeout = 0.0, key = nil)
      attempts = attempts(request, timeout, failover_timeout, key)
      begin
        at(attempts) do |address|
          check(address, attempts) unless @known.checked?(address)
          reply = call_to(address, method, request, attempts.timeout(Connections.now), attempts.metadata, &:execute)
          attempts.answered
          reply
        end
      rescue GRPC::BadStatus, GRPC::Core::CallError, OtherModel => e
        again(attempts, Errors.from_rpc(e))
        retry
      end
    end

    # The replies of all schedulers that give one, which are asked at once. Raises Error if none does.
    def call_all(method, request, timeout)
      timeout = @looks.first(timeout)
      outcomes = at_all do |address|
        call_to(address, method, request, timeout, &:execute)
      rescue GRPC::BadStatus, GRPC::Core::CallError => e
        Errors.from_rpc(e)
      end
      failures, replies = outcomes.partition { |one| one.is_a?(Error) }
      raise failures.first if replies.empty?

      replies
    end

    # Waits until the attempt after the failed one. Raises the error for the caller if there is none.
    def again(attempts, failure)
      wait = attempts.failed(failure, Connections.now)
      raise failure if @closed

      sleep(wait) if wait.positive?
    end

    private

    # Asks a learned scheduler for its model before its first unary call: replies do not say which model answered.
    def check(address, attempts)
      request = Scheduler::V1::GetModelInfoRequest.new
      timeout = attempts.timeout(Connections.now)
      served = call_to(address, :get_model_info, request, timeout, attempts.metadata, &:execute)
      check_model(address, served.model_fingerprint)
    end

    def check_model(address, fingerprint)
      return if @known.what_it_says?(address, fingerprint)

      @known.distrust(address)
      use_known
      raise OtherModel, address
    end

    # Lets calls use the schedulers that are known now, and closes the channels of others that no call uses.
    def use_known
      @mutex.synchronize do
        @rotation.use(@known.present)
        @channels.addresses.each { |address| close_unused(address) }
      end
    end

    def model_of(request)
      request = request.request if request.respond_to?(:request)
      request.respond_to?(:model) ? request.model : ''
    end

    # What the block gives for each known address, in a thread of its own; a call counts at all of them meanwhile.
    def at_all
      counted = @mutex.synchronize do
        @known.present.addresses.select { |address| @known.tls_name(address) && begin_at(address) }
      end
      threads = counted.map do |address|
        Thread.new do
          Thread.current.report_on_exception = false # `value` raises it
          yield address
        end
      end
      threads.map(&:value)
    ensure
      threads&.each(&:kill)
      counted&.each { |address| end_at(address) }
    end

    # What follows up to end_at is called with the mutex held.

    def begin_at(address)
      stub_of(address)
      @rotation.began(address)
      address
    end

    # The channel is opened if it is not.
    def stub_of(address)
      raise Error.new('the client is closed', code: :UNAVAILABLE) if @closed

      unless @channels.open?(address)
        name = @known.tls_name(address)
        raise Error.new("#{address} is known no more", code: :UNAVAILABLE) unless name

        # No part of an address of a directory is a scheme.
        @channels.open(address, target: "dns:///#{address}", name: name)
      end
      @channels.stub(address)
    end

    def close_unused(address)
      @channels.close(address) if @channels.open?(address) && @rotation.unused?(address)
    end

    def end_at(address)
      @mutex.synchronize do
        @rotation.ended(address)
        close_unused(address)
      end
    end
  end
end
