# frozen_string_literal: true

require 'fake_scheduler'
require 'timeout'

# A client that knows one scheduler learns of others, and uses them.
class LooksTest < FakeSchedulerTest
  WHOLE = FakeScheduler::WHOLE

  def test_a_stream_goes_on_at_a_scheduler_that_the_dead_one_knew
    other = fake
    given = fake(hang_after: 4, others: [entry(other.address)])
    client = client_of(given.address)
    text = +''
    events = 0
    client.generate(text: 'hello', timeout: PATIENCE) do |event|
      text << event.delta.text if event.delta
      next unless (events += 1) == 3

      wait_until('the other is known') { client.addresses.size == 2 }
      @made.delete(given).stop
    end
    assert_equal WHOLE, text
    assert_equal 1, other.requests.size
    assert_equal [0, 1, 2], other.requests.first.continuation.completions.first.token_ids.to_a
  end

  def test_calls_are_spread_over_learned_ones_which_are_asked_for_their_model_once
    other = fake
    given = fake(others: [entry(other.address)])
    [true, false].each do |unary|
      client = knowing(given.address, 1)
      24.times { |number| assert_equal WHOLE, text_of(client, number, unary: unary) }
    end
    assert_equal [0, 1], [given.infos, other.infos]
    assert_equal 48, given.requests.size + other.requests.size
    refute_includes [given.requests.size, other.requests.size], 0
  end

  def test_abort_asks_those_of_the_directory_too_which_is_looked_into_before
    other = fake(live: 'there')
    given = fake(others: [entry(other.address), entry('127.0.0.1:1')])
    assert_equal %w[there], client_of(given.address).abort('there', 'nowhere', timeout: PATIENCE)
  end

  def test_abort_raises_if_no_scheduler_answers
    assert_equal :UNAVAILABLE, assert_raises(Paceline::Error) { client_of('127.0.0.1:1').abort('x') }.code
  end

  def test_without_the_directory_nothing_is_asked_or_learned
    given = fake(others: [entry('127.0.0.1:1')])
    client = client_of(given.address, directory: :off)
    2.times { |number| assert_equal WHOLE, text_of(client, number) }
    assert_empty client.abort('x')
    assert_equal [0, [given.address]], [given.looks, client.addresses]
  end

  def test_the_directorys_use_is_one_of_three
    %i[off safe any].each { |use| client_of('127.0.0.1:1', directory: use) }
    ['safe', :all, nil].each do |use|
      assert_raises(ArgumentError) { Paceline::Client.new('127.0.0.1:1', directory: use) }
    end
  end

  def test_with_tls_an_authority_is_always_given
    assert_raises(ArgumentError) { Paceline::Client.new('127.0.0.1:1', tls: {}) }
  end

  def test_a_scheduler_without_a_directory_is_asked_once
    given = fake(answer: -> { raise GRPC::Unimplemented, 'no directory' })
    client = client_of(given.address)
    4.times do |number|
      assert_equal WHOLE, text_of(client, number)
      wait_until('the look has ended') { known(client).looked? }
    end
    assert_equal [1, [given.address]], [given.looks, client.addresses]
    refute known(client).time_to_look?(Paceline::Connections.now + 150, '')
  end

  def test_a_client_that_reads_a_long_stream_looks_meanwhile
    given = fake
    client = client_of(given.address)
    looks = 0
    client.generate(text: 'hello') do
      looks += 1
      wait_until('it looks') { given.looks == looks }
      looks_of(client).send(:wait, nil)
      known(client).instance_variable_set(:@next_look, 0.0)
      break if looks == 3
    end
    assert_equal 3, looks
  end

  def test_the_channel_to_one_that_is_known_no_more_is_closed_after_its_last_call
    other = fake(hang_after: 3)
    given = fake(others: [entry(other.address)])
    client = knowing(given.address, 1)
    assert_equal [given.address], open(client) # the other at its first use
    key = (0..).find { |number| first_of(client, number) == other.address }
    client.generate(text: 'hello', affinity_key: key.to_s) do
      given.others = []
      look(client)
      assert_equal [[given.address], [given.address, other.address]], [client.addresses, open(client)]
      break
    end
    assert_equal [given.address], open(client)
  end

  def test_a_call_does_not_go_to_one_that_is_known_no_more
    other = fake
    given = fake(others: [entry(other.address)])
    client = knowing(given.address, 1)
    key = (0..).find { |number| first_of(client, number) == other.address }
    stream = client.generate(text: 'hello', affinity_key: key.to_s)
    given.others = []
    look(client)
    assert_equal WHOLE, stream.completions.first.text
    assert_empty other.requests
  end

  # A stream's model was only there, and calls do not know yet that it is gone.
  def test_a_stream_whose_models_last_scheduler_has_just_gone_finds_another_one
    given = fake(others: [entry('127.0.0.1:1', model_fingerprint: 'new')])
    client = knowing(given.address, 1)
    attempts = connections(client).attempts(nil, nil, 0.0)
    attempts.instance_variable_set(:@wanted, { begun_with: 'new' })
    attempts.instance_variable_set(:@address, '127.0.0.1:1')
    known(client).distrust('127.0.0.1:1')
    found = Timeout.timeout(PATIENCE) { connections(client).at(attempts) { |address| address } }
    assert_equal given.address, found
  end

  def test_close_ends_a_look_and_leaves_no_thread
    given = fake(answer: -> { given.hanging([], 0) })
    looking(given, 1).close # what gRPC begins once
    before = Thread.list
    client = looking(given, 2)
    refute_empty Thread.list - before
    began = Paceline::Connections.now
    client.close
    assert_operator Paceline::Connections.now - began, :<, Paceline::Looks::TIMEOUT / 2
    assert_empty Thread.list.select(&:alive?) - before
    assert_raises(Paceline::Error) { text_of(client, 1) }
  end

  # A program that begins a look, and ends before it does, also in a process that it has forked.
  PROGRAM = <<~RUBY
    require 'paceline'
    client = Paceline::Client.new(ARGV.first)
    client.complete(text: 'hello')
    Process.wait(fork { exit(client.addresses == ARGV) })
    print client.complete(text: 'hello').first.text if $?.success?
  RUBY

  def test_a_program_ends_while_it_looks
    given = fake(answer: -> { given.hanging([], 0) })
    began = Paceline::Connections.now
    found = IO.popen(['ruby', "-I#{File.join(__dir__, '../lib')}", '-e', PROGRAM, given.address], &:read)
    assert_equal [WHOLE, 0], [found.force_encoding('UTF-8'), $?.exitstatus]
    assert_equal 1, given.looks
    assert_operator Paceline::Connections.now - began, :<, PATIENCE / 2
  end

  private

  # A client whose look, which so many make, is in progress.
  def looking(given, looks)
    client_of(given.address).tap do |client|
      text_of(client, 0)
      wait_until('it looks') { given.looks == looks }
    end
  end

  def connections(client)
    client.instance_variable_get(:@connections)
  end

  def known(client)
    connections(client).instance_variable_get(:@known)
  end

  def looks_of(client)
    connections(client).instance_variable_get(:@looks)
  end

  def open(client)
    connections(client).instance_variable_get(:@channels).addresses
  end

  # Where a call with this number as its key begins.
  def first_of(client, number)
    key = Paceline::Affinity.key(nil, number.to_s)
    connections(client).instance_variable_get(:@rotation).order(Paceline::Connections.now, key: key).first
  end
end
