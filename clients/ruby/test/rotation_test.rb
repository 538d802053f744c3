# frozen_string_literal: true

require 'minitest/autorun'

require 'paceline/failover'

# Where calls begin, and where they go next.
class RotationTest < Minitest::Test
  Rotation = Paceline::Rotation
  V1 = Paceline::Scheduler::V1
  THREE = %w[10.0.0.1:50051 10.0.0.2:50051 10.0.0.3:50051].freeze
  MANY = (0...20).map { |number| { key: number.to_s } }.freeze

  def test_an_address_that_is_down_comes_last_for_a_while_and_longer_each_time
    rotation = Rotation.new(%w[a:1 b:1])
    rotation.down('a:1', 0.0)
    rotation.down('a:1', 0.5) # another call has found out too
    assert_equal %w[b:1], firsts(rotation, [{}, {}], 0.999)
    assert_equal %w[a:1 b:1], firsts(rotation, [{}, {}], 1.0)
    rotation.down('a:1', 1.0)
    assert_equal %w[b:1], firsts(rotation, [{}, {}], 2.999)
    rotation.up('a:1')
    assert_equal %w[a:1 b:1], firsts(rotation, [{}, {}], 2.999)
  end

  def test_a_calls_key_decides_where_it_begins_unless_too_many_of_the_clients_calls_are_there
    key = Paceline::Affinity.key(V1::GenerateRequest.new(text: 'hello'), nil)
    rotation = Rotation.new(THREE)
    order = -> { rotation.order(0.0, key: key).map { |address| THREE.index(address) + 1 } }
    assert_equal [2, 3, 1], order.call
    rotation.began(THREE[1]) # of 2 calls with the next one: at most 1 each
    assert_equal [3, 2, 1], order.call
    rotation.down(THREE[2], 0.0)
    assert_equal [2, 1, 3], order.call
  end

  def test_calls_go_by_the_load_that_the_directory_tells_and_last_to_those_that_drain
    rotation = using(%w[a:1 b:1 c:1], 'b:1' => { load: 3 }, 'c:1' => { drains: true })
    3.times { assert_equal 'c:1', rotation.order(0.0).last }
    assert_equal %w[a:1], firsts(rotation, MANY) # b has more than its share
    rotation.began('b:1')
    rotation.use(present(%w[a:1]))
    refute rotation.unused?('b:1')
    rotation.ended('b:1')
    assert rotation.unused?('b:1')
    refute rotation.unused?('a:1')
  end

  def test_who_claims_that_nobody_is_there_gets_no_more_than_a_share_of_the_clients_calls
    rotation = using(%w[a:1 liar:1], 'a:1' => { load: 1000 }, 'liar:1' => {})
    taken = MANY.map { |call| rotation.order(0.0, **call).first.tap { |address| rotation.began(address) } }
    assert_operator taken.count('liar:1'), :<=, 13
  end

  def test_those_with_the_adapter_come_first
    rotation = using(%w[a:1 b:1], 'a:1' => { load: 3 }, 'b:1' => { adapters: %w[poet] })
    assert_equal %w[b:1], firsts(rotation, (MANY + [{}, {}]).map { |call| { **call, model: 'poet' } })
    assert_equal %w[a:1 b:1], firsts(rotation, [{}, {}])
  end

  def test_a_few_learned_addresses_are_tried_before_a_given_one_and_not_all_of_thousands
    all = ['given:1'] + (0...1000).map { |number| "learned:#{number}" }
    rotation = using(all)
    (MANY + [{}] * 100).each do |call|
      order = rotation.order(0.0, **call)
      assert_equal Rotation::MAX_TRIED, order.uniq.size
      assert_operator order.index('given:1'), :<=, Rotation::TRIED_BEFORE_GIVEN
    end
  end

  def test_another_model_gets_new_calls_once_the_present_one_takes_none_and_no_stream_that_began
    old, new = [{ model_fingerprint: 'old' }, { model_fingerprint: 'new' }]
    rotation = using(%w[given:1 old:1 new:1], { 'given:1' => old, 'old:1' => old, 'new:1' => new }, %w[new:1])
    drains = Paceline::Error.new('drains', code: :UNAVAILABLE, reason: 'DRAINING', retry_after: 1.0)
    broken = Paceline::Error.new('connection reset', code: :UNAVAILABLE)
    assert_equal %w[given:1 old:1], firsts(rotation, MANY)
    stream = attempts(rotation)
    call = attempts(rotation)
    stream.answered
    assert_equal([false, true], Array.new(2) { call.failed(drains, 0.0) && call.address == 'new:1' })
    assert_equal 'new:1', attempts(rotation).address # at once, as long as the others take none
    3.times do
      stream.failed(broken, 0.0)
      refute_equal 'new:1', stream.address
    end
  end

  def test_what_a_learned_scheduler_does_not_know_or_let_in_a_given_one_decides
    rotation = using(%w[given:1 b:1 c:1])
    refused = Paceline::Error.new('no', code: :PERMISSION_DENIED)
    elsewhere = MANY.find { |call| rotation.order(0.0, **call).first != 'given:1' }
    attempt = attempts(rotation, elsewhere[:key])
    attempt.failed(refused, 0.0)
    assert_equal 'given:1', attempt.address
    assert_raises(Paceline::Error) { attempt.failed(refused, 0.0) }
  end

  def test_an_attempt_skips_what_is_known_no_more
    rotation = using(%w[given:1 b:1])
    attempt = attempts(rotation)
    rotation.use(present(%w[given:1]))
    attempt.skip(0.0)
    assert_equal 'given:1', attempt.address
  end

  private

  # The addresses with which calls begin.
  def firsts(rotation, calls, now = 0.0)
    calls.map { |call| rotation.order(now, **call).first }.uniq.sort
  end

  # A rotation whose first address is given.
  def using(addresses, entries = {}, foreign = [])
    Rotation.new(addresses.first(1)).tap { |rotation| rotation.use(present(addresses, entries, foreign)) }
  end

  def present(addresses, entries = {}, foreign = [])
    plain = { model_fingerprint: '', load: 0, drains: false, adapters: [] }
    told = entries.transform_values { |one| Paceline::Learned.new(**plain, **one) }
    Paceline::KnownSchedulers::Present.new(addresses, told, foreign.to_set)
  end

  def attempts(rotation, key = 'k')
    Paceline::Failover::Attempts.new(rotation, 0.0, timeout: nil, failover_timeout: 60.0, key: key)
  end
end
