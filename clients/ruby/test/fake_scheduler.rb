# frozen_string_literal: true

require 'minitest/autorun'
require 'socket'

ENV['GRPC_VERBOSITY'] ||= 'NONE' # of handshakes that fail
require 'paceline'

# A scheduler with a directory, on loopback, which generates six tokens for each request.
class FakeScheduler < Paceline::Scheduler::V1::SchedulerService::Service
  V1 = Paceline::Scheduler::V1
  TEXTS = (0...6).map { |token| "é#{token}" }.freeze
  # What all deltas make.
  WHOLE = TEXTS.join

  # An entry of another scheduler than the one that lists it.
  def self.entry(address, **fields)
    V1::SchedulerEntry.new(
      address: address, model: 'm', model_fingerprint: 'print', instance: "of #{address}", written_by: 'somebody', **fields
    )
  end

  attr_reader :address, :looks, :infos, :requests, :callers
  attr_accessor :others

  # `model`: its fingerprint. `text`: instead of each delta's own. `hang_after`: so many messages of a stream. `live`: the
  # id of a request that Abort ends. `answer`: an Enumerable, instead of the directory. `credentials`: of the server.
  def initialize(model: 'print', text: nil, hang_after: nil, live: nil, answer: nil, others: [],
                 credentials: :this_port_is_insecure)
    super()
    @model = model
    @text = text
    @hang_after = hang_after
    @live = live
    @answer = answer
    @others = others
    @looks = @infos = 0
    @requests = []
    @callers = [] # what calls had as authorization
    @mutex = Mutex.new
    @stopped = Queue.new
    serve(credentials)
  end

  # Ends all calls, too.
  def stop
    @server.stop
    @stopped.close
    @thread.join
  end

  def generate(request, call)
    hanging(messages(request, call), @hang_after)
  end

  def generate_unary(request, call)
    collector = Paceline::Collector.new
    messages(request.request, call).each { |message| collector.add(message) unless message.started }
    V1::GenerateUnaryResponse.new(completions: collector.completions)
  end

  def get_model_info(_request, call)
    seen(call) { @infos += 1 }
    V1::GetModelInfoResponse.new(model_fingerprint: @model)
  end

  def watch_schedulers(_request, call)
    seen(call) { @looks += 1 }
    return @answer.call if @answer

    own = V1::SchedulerEntry.new(address: 'own:1', model: 'm', model_fingerprint: @model, instance: 'own')
    told = [{ entries: [own] }, { entries: @others, complete: true }]
    hanging(told.map { |one| V1::WatchSchedulersResponse.new(**one) }, told.size)
  end

  def abort(request, call)
    seen(call)
    V1::AbortResponse.new(aborted: request.request_ids.to_a & [@live])
  end

  # Messages, of which so many are sent until the scheduler stops.
  def hanging(messages, after)
    Enumerator.new do |sent|
      messages.each_with_index do |message, number|
        @stopped.pop if number == after
        sent << message
      end
      @stopped.pop if after == messages.size
    end
  end

  private

  def serve(credentials)
    @server = GRPC::RpcServer.new(pool_size: 30, poll_period: 0.1, pool_keep_alive: 0.1)
    @address = "127.0.0.1:#{@server.add_http2_port('127.0.0.1:0', credentials)}"
    @server.handle(self)
    @thread = Thread.new { @server.run }
    @server.wait_till_running
  end

  def seen(call)
    @mutex.synchronize do
      @callers |= [call.metadata['authorization']]
      yield if block_given?
    end
  end

  def messages(request, call)
    seen(call) { @requests << request }
    begun = request.continuation&.completions&.first&.token_ids&.size || 0
    started = V1::Started.new(
      sampling: request.sampling, max_tokens: 6, model_fingerprint: @model, continued_tokens: begun, prompt_tokens: 4
    )
    [V1::GenerateResponse.new(started: started), *deltas(begun), V1::GenerateResponse.new(finished: finished)]
  end

  def deltas(begun)
    TEXTS.each_with_index.drop(begun).map do |text, token|
      V1::GenerateResponse.new(delta: { token_ids: [token], text: @text || text, elapsed_us: 1000 })
    end
  end

  def finished
    V1::Finished.new(reason: :FINISH_REASON_LENGTH, usage: { completion_tokens: 6 })
  end
end

# What tests with fake schedulers share.
class FakeSchedulerTest < Minitest::Test
  PATIENCE = 20.0

  def setup
    @made = [] # clients and schedulers
  end

  def teardown
    @made.reverse_each { |one| one.is_a?(FakeScheduler) ? one.stop : one.close }
  end

  private

  def fake(**options)
    FakeScheduler.new(**options).tap { |one| @made << one }
  end

  def client_of(address, **options)
    Paceline::Client.new(address, **options).tap { |one| @made << one }
  end

  # A client that has looked into the directory at the address, which lists so many others.
  def knowing(address, others, **options)
    client_of(address, **options).tap do |client|
      look(client)
      assert_equal 1 + others, client.addresses.size
    end
  end

  # Looks in any case, and waits for the look.
  def look(client)
    connections = client.instance_variable_get(:@connections)
    connections.instance_variable_get(:@known).instance_variable_set(:@next_look, 0.0)
    looks = connections.instance_variable_get(:@looks)
    looks.in_time
    looks.send(:wait, nil)
  end

  # The text of a call whose key is this number, as a stream or not.
  def text_of(client, number, unary: number.even?)
    arguments = { text: 'hello', affinity_key: number.to_s, timeout: PATIENCE }
    found = unary ? client.complete(**arguments) : client.generate(**arguments).completions
    found.first.text
  end

  def entry(address, **fields)
    FakeScheduler.entry(address, **fields)
  end

  def wait_until(what)
    ends = Paceline::Connections.now + PATIENCE
    until yield
      flunk "waited in vain until #{what}" if Paceline::Connections.now > ends
      sleep 0.005
    end
  end
end
