# frozen_string_literal: true

require 'openssl'

require 'fake_scheduler'

# Directories and their entries that lie, and what they get.
class HostileTest < FakeSchedulerTest
  WHOLE = FakeScheduler::WHOLE
  SECRET = 'a-token-of-many-bytes'
  V1 = Paceline::Scheduler::V1

  # Issues certificates.
  class Authority
    def initialize
      @key, @certificate = issue('authority', 'basicConstraints' => 'CA:TRUE')
    end

    def pem
      @certificate.to_pem
    end

    # Key and certificate of a server or client of this name.
    def pair(name)
      issue(name, 'subjectAltName' => "DNS:#{name}").map(&:to_pem)
    end

    # Of a server whose clients have a certificate of this authority. `by`: who issued its own.
    def server(name, by: self)
      key, chain = by.pair(name)
      GRPC::Core::ServerCredentials.new(pem, [{ private_key: key, cert_chain: chain }], true)
    end

    private

    def issue(name, extensions)
      key = OpenSSL::PKey::EC.generate('prime256v1')
      made = OpenSSL::X509::Certificate.new
      made.version = 2
      made.serial = rand(1 << 60)
      made.subject = OpenSSL::X509::Name.parse("/CN=#{name}")
      made.issuer = (@certificate || made).subject
      made.public_key = key
      made.not_before = Time.now - 3600
      made.not_after = Time.now + 3600
      factory = OpenSSL::X509::ExtensionFactory.new
      extensions.each { |kind, value| made.add_extension(factory.create_extension(kind, value)) }
      made.sign(@key || key, 'SHA256')
      [key, made]
    end
  end

  # A port that is no scheduler's, and what came there.
  class Listener
    attr_reader :received

    def initialize
      @server = TCPServer.new('127.0.0.1', 0)
      @received = ''.b
      @thread = Thread.new { loop { keep(@server.accept) } }
    end

    def address
      "127.0.0.1:#{@server.addr[1]}"
    end

    def close
      @thread.kill
      @server.close
    end

    private

    def keep(socket)
      ends = Time.now + 0.1
      @received << socket.readpartial(4096) while socket.wait_readable([ends - Time.now, 0].max)
    rescue SystemCallError, EOFError
      nil
    ensure
      socket.close
    end
  end

  def test_a_poisoned_entry_gets_no_byte_of_a_token
    ours = Authority.new
    honest = fake(credentials: ours.server('good.test'))
    stranger = fake(credentials: ours.server('good.test', by: Authority.new))
    other_name = fake(credentials: ours.server('localhost'))
    plain = fake
    bare = Listener.new.tap { |one| @made << one }
    named = [honest, stranger, other_name, plain, bare].map { |one| entry(one.address, tls_name: 'good.test') }
    clear = entry(plain.address.sub('127.0.0.1', 'localhost')) # would be sent in the clear
    given = fake(credentials: ours.server('localhost'), others: [clear, *named])
    key, cert = ours.pair('a client')
    %i[safe any].each do |use|
      client = knowing(given.address.sub('127.0.0.1', 'localhost'), 5, token: SECRET, directory: use,
                                                                       tls: { ca: ours.pem, key: key, cert: cert })
      24.times { |number| assert_equal WHOLE, text_of(client, number) }
    end
    [given, honest].each { |one| assert_equal ["Bearer #{SECRET}"], one.callers }
    [stranger, other_name, plain].each { |one| assert_empty one.callers }
    assert_equal 0x16, bare.received.getbyte(0) # a TLS handshake, which nobody answers
    refute_includes bare.received, SECRET
  end

  def test_a_token_stays_on_this_machine_without_tls
    given = fake(others: [entry('10.0.0.2:1'), entry('unix:1'), entry('localhost:1', tls_name: 'name')])
    knowing(given.address, 0, token: SECRET)
    assert_equal ["Bearer #{SECRET}"], given.callers
  end

  def test_an_entry_that_lies_about_its_model_serves_nobody
    [true, false].each do |unary|
      liar = fake(model: 'another', text: 'a lie')
      given = fake(others: [entry(liar.address)])
      client = knowing(given.address, 1)
      24.times { |number| assert_equal WHOLE, text_of(client, number, unary: unary) }
      assert_equal [given.address], client.addresses
      assert_equal(unary ? [1, 0] : [0, 1], [liar.infos, liar.requests.size])
    end
  end

  def test_what_has_another_model_than_its_entry_is_unavailable
    given = fake(others: [entry('127.0.0.1:1')])
    client = knowing(given.address, 1)
    connections = client.instance_variable_get(:@connections)
    started = ->(model) { V1::GenerateResponse.new(started: { model_fingerprint: model }) }
    connections.check_started('127.0.0.1:1', started.call('print'))
    connections.check_started(given.address, started.call('whatever'))
    error = assert_raises(Paceline::Error) { connections.check_started('127.0.0.1:1', started.call('another')) }
    assert_equal [:UNAVAILABLE, 'OTHER_MODEL', true], [error.code, error.reason, error.retryable?]
    assert_equal [given.address], client.addresses
  end

  def test_a_directory_that_never_ends_takes_no_call_along_and_ends_itself
    sent = 0
    own = V1::SchedulerEntry.new(address: 'own:1', model: 'm', model_fingerprint: 'print', instance: 'own')
    endless = Enumerator.new do |messages|
      messages << V1::WatchSchedulersResponse.new(entries: [own])
      loop { messages << V1::WatchSchedulersResponse.new(entries: [entry("127.0.0.1:#{2 + (sent += 1) % 60_000}")]) }
    end
    given = fake(answer: -> { endless })
    client = client_of(given.address)
    assert_equal WHOLE, text_of(client, 1)
    began = Paceline::Connections.now
    look(client)
    assert_operator Paceline::Connections.now - began, :<, Paceline::Looks::TIMEOUT / 2
    assert_operator sent, :<, 20_000 # 512 are read, and some more are on their way
    assert_equal WHOLE, text_of(client, 2)
    assert_equal [given.address], client.addresses
  end

  def test_a_message_that_is_too_large_is_not_read
    own = V1::SchedulerEntry.new(address: 'own:1', model: 'm', model_fingerprint: 'print', instance: 'own')
    answers = { 1_000 => 2, 10_000 => 1 }.map do |small, known|
      entries = [own, entry('127.0.0.1:2')] + Array.new(small) { V1::SchedulerEntry.new(detail: 'x' * 30) }
      [[V1::WatchSchedulersResponse.new(entries: entries, complete: true)], known]
    end
    answers.each do |messages, known|
      client = knowing(fake(answer: -> { messages }).address, known - 1)
      assert_equal WHOLE, text_of(client, 1)
    end
  end

  # A scheduler's name, with bytes that are no message.
  class Nonsense
    include GRPC::GenericService
    Bytes = Struct.new(:bytes) do
      def self.encode(bytes)
        bytes
      end

      def self.decode(bytes)
        bytes
      end
    end
    self.marshal_class_method = :encode
    self.unmarshal_class_method = :decode
    self.service_name = 'paceline.scheduler.v1.SchedulerService'
    rpc :WatchSchedulers, Bytes, stream(Bytes)

    def watch_schedulers(_request, _call)
      ["\xff" * 100].each
    end
  end

  def test_an_answer_that_is_no_message_is_a_look_that_was_refused
    server = GRPC::RpcServer.new(pool_size: 2, poll_period: 0.1, pool_keep_alive: 0.1)
    address = "127.0.0.1:#{server.add_http2_port('127.0.0.1:0', :this_port_is_insecure)}"
    server.handle(Nonsense.new)
    thread = Thread.new { server.run }
    server.wait_till_running
    knowing(address, 0)
  ensure
    server.stop
    thread.join
  end
end
