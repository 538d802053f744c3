# frozen_string_literal: true

require 'set'

require 'paceline/affinity'
require 'paceline/known_schedulers'

module Paceline
  # The order in which the calls of a client try its addresses. A call with a key begins where that key's prompts are
  # cached, unless there are too many calls there (AFFINITY in scheduler.proto); one without begins with the next address
  # in turn. Those that are down come last. No I/O: time is passed in, in seconds. Safe for concurrent use.
  class Rotation
    # How long an address that could not be reached is tried last; doubles with each further failure.
    MIN_DOWN = 1.0
    MAX_DOWN = 8.0
    # Addresses that a call tries in one round, the first ones of its order.
    MAX_TRIED = 64
    # Learned addresses that a call tries before a given one, at most: many dead entries hold nobody up.
    TRIED_BEFORE_GIVEN = 8

    def initialize(given)
      @given = given.to_set
      @live = Hash.new(0) # the client's own calls, by address
      @next = 0
      @down = {} # by address: the end of its down time, and its length
      @mutex = Mutex.new
      use(KnownSchedulers::Present.new(given, {}, Set.new))
    end

    # Calls that begin from now on try these. `present`: of KnownSchedulers.
    def use(present)
      @mutex.synchronize do
        @addresses, @entries, @foreign = *present
        @known = @addresses.to_set
        @down.select! { |address, _| @known.include?(address) }
      end
    end

    # The addresses that a call should try: all, up to MAX_TRIED. `key`: of Affinity.key, or nil. `model`: what the request
    # names; those that have an adapter of this name come before those that have not. `begun_with`: the fingerprint of a
    # stream's model, which alone can continue it; other calls try foreign addresses where all others are down or drain.
    def order(now, key: nil, model: '', begun_with: '')
      @mutex.synchronize do
        addresses = begun_with.empty? ? beginning(now) : continuing(begun_with)
        holders = addresses.select { |one| @entries[one]&.adapters&.include?(model) }.to_set
        holders = @known if holders.empty?
        turn = key && addresses.size > 1 ? with_key(key, addresses, holders) : in_turn(addresses)
        turn = turn.sort_by.with_index do |one, i|
          [down?(one, now), drains?(one), !holders.include?(one)].map { |last| last ? 1 : 0 } << i
        end
        given_soon(turn).first(MAX_TRIED)
      end
    end

    def given?(address)
      @given.include?(address)
    end

    # Whether an address is still one of them.
    def has?(address)
      @mutex.synchronize { @known.include?(address) }
    end

    def several?
      @mutex.synchronize { @addresses.size > 1 }
    end

    # Whether an address has another model than the present one.
    def foreign?(address)
      @mutex.synchronize { @foreign.include?(address) }
    end

    # The fingerprint of the model at an address; '': not known.
    def model_at(address)
      @mutex.synchronize { @entries[address]&.model_fingerprint || '' }
    end

    # Counts a call at an address.
    def began(address)
      @mutex.synchronize { @live[address] += 1 }
    end

    # Counts it no more.
    def ended(address)
      @mutex.synchronize { @live.delete(address) if (@live[address] -= 1).zero? }
    end

    # Whether an address is none of them any more and no call is there.
    def unused?(address)
      @mutex.synchronize { !@known.include?(address) && !@live.key?(address) }
    end

    # It has answered.
    def up(address)
      @mutex.synchronize { @down.delete(address) }
    end

    # It could not be reached, or takes no requests. Of several calls that find out, the first counts.
    def down(address, now)
      @mutex.synchronize do
        return if down?(address, now)

        _, last = @down.fetch(address, [0.0, 0.0])
        length = (2 * last).clamp(MIN_DOWN, MAX_DOWN)
        @down[address] = [now + length, length]
      end
    end

    # Whether it could not be reached a short while ago.
    def down_at?(address, now)
      @mutex.synchronize { down?(address, now) }
    end

    private

    # Those that a call which has not begun may go to.
    def beginning(now)
      return @addresses if @foreign.empty?

      present = @addresses.reject { |one| @foreign.include?(one) }
      present.all? { |one| down?(one, now) || drains?(one) } ? @addresses : present
    end

    # Those that may have a stream's model.
    def continuing(model)
      same = @addresses.select { |one| [nil, model].include?(@entries[one]&.model_fingerprint) }
      same.empty? ? @addresses : same
    end

    def with_key(key, addresses, holders)
      preferred = Affinity.preference(key, addresses)
      takers = preferred.select { |one| holders.include?(one) && !drains?(one) }
      takers = preferred if takers.empty?
      reported = takers.to_h { |one| [one, @entries[one]&.load || 0] }
      [Affinity.choice(takers, takers.to_h { |one| [one, @live.fetch(one, 0)] }, reported)] | preferred
    end

    def in_turn(addresses)
      first = @next % addresses.size
      @next = first + 1
      addresses.rotate(first)
    end

    # At most TRIED_BEFORE_GIVEN learned addresses come before a given one.
    def given_soon(turn)
      place = turn.find_index { |one| given?(one) }
      return turn if place.nil? || place <= TRIED_BEFORE_GIVEN

      turn.insert(TRIED_BEFORE_GIVEN, turn.delete_at(place))
    end

    def drains?(address)
      @entries[address]&.drains
    end

    def down?(address, now)
      @down.fetch(address, [now, 0.0]).first > now
    end
  end
end
