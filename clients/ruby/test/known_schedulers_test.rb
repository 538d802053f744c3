# frozen_string_literal: true

require 'json'
require 'minitest/autorun'

require 'paceline/known_schedulers'

# Plays tests/scenario/directory.json, whose steps tests/scenario describes.
class KnownSchedulersTest < Minitest::Test
  CASES = JSON.parse(File.read(File.join(__dir__, '../../../tests/scenario/directory.json')))
  # As many looks as there are schedulers that are asked in turn, and more.
  TURNS = 6

  CASES.each do |one|
    define_method("test_#{one['name']}") do
      known = Paceline::KnownSchedulers.new(one['given'], tls: one['tls'], use: one['use'].to_sym)
      refute_empty one['steps']
      one['steps'].each { |step| play(known, step) }
    end
  end

  def test_there_are_cases
    assert_operator CASES.size, :>, 40
  end

  def test_a_step_that_nobody_knows_fails
    error = assert_raises(Minitest::Assertion) { play(unknowing, { 'sings' => '127.0.0.1:1' }) }
    assert_equal 'no such step: sings', error.message
  end

  # Entries come, liars are found and calls begin in several threads.
  def test_several_threads_may_use_it
    known = unknowing
    threads = (2..9).map do |port|
      Thread.new do
        # Its own: google-protobuf crashes where threads read the same message.
        entries = [entry('own' => true, 'address' => '127.0.0.1:1')] +
                  (2..50).map { |other| entry('address' => "127.0.0.1:#{other}") }
        20.times do |round|
          known.saw('127.0.0.1:1', entries, round)
          known.distrust("127.0.0.1:#{port}")
          known.teller(round) { false }
          known.present
        end
      end
    end
    threads.each(&:value)
    assert_equal 50 - threads.size, known.present.addresses.size
  end

  private

  def unknowing
    Paceline::KnownSchedulers.new(['127.0.0.1:1'], tls: false, use: :safe)
  end

  def play(known, step)
    kind, value = step.first
    case kind
    when 'saw', 'lost', 'has_none', 'refused', 'distrust' then tell(known, step)
    when 'reports' then assert_equal step['is'], known.what_it_says?(value, step['fingerprint']), step
    when 'checked' then assert_equal step['is'], known.checked?(value), step
    when 'tls_name'
      found = known.tls_name(value.first)
      value.last.nil? ? assert_nil(found, step) : assert_equal(value.last, found, step)
    when 'asks'
      asked = Array.new(TURNS) { known.teller(step['at_s']) { |one| step.fetch('down', []).include?(one) } }
      assert_equal value.sort, asked.uniq.sort, step
    when 'time_to_look_s'
      assert_equal step['is'], known.time_to_look?(value, step.fetch('caller', 'good')), step
    else assert_equal sorted(value), sorted(present(kind, known.present)), step
    end
  end

  def sorted(found)
    found.is_a?(Array) ? found.sort : found
  end

  def tell(known, step)
    kind, value = step.first
    case kind
    when 'saw'
      ports = Range.new(*step.fetch('ports', [0, 0]), true).map { |port| { 'address' => "127.0.0.1:#{port}" } }
      known.saw(value, (step['entries'] + ports).map { |told| entry(told) }, step['at_s'])
    when 'has_none' then known.none(value, step['at_s'])
    when 'distrust' then known.distrust(value)
    else known.public_send(kind, value, step['at_s'])
    end
  end

  # What is known of those that are used, as the table writes it.
  def present(kind, found)
    case kind
    when 'addresses' then found.addresses
    when 'count' then found.addresses.size
    when 'draining' then found.entries.select { |_, one| one.drains }.keys
    when 'foreign' then found.foreign.to_a
    when 'loads' then found.entries.transform_values(&:load)
    when 'adapters' then found.entries.transform_values { |one| one.adapters.to_a }
    else flunk "no such step: #{kind}"
    end
  end

  def entry(told)
    Paceline::Scheduler::V1::SchedulerEntry.new(
      address: told['address'], model: told.fetch('model', 'm'), tls_name: told.fetch('tls_name', ''),
      model_fingerprint: told.fetch('fingerprint', 'print'),
      instance: told.fetch('instance', "of #{told['address']}"), written_by: told['own'] ? '' : 'somebody',
      state: "SCHEDULER_STATE_#{told.fetch('state', 'SERVING')}".to_sym, adapters: told.fetch('adapters', []),
      load: { running: told.fetch('running', 0), waiting: told.fetch('waiting', 0) }
    )
  end
end
