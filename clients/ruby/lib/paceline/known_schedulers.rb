# frozen_string_literal: true

require 'set'

require 'paceline/learned'

module Paceline
  # The addresses given by the user, which stay, and those learned from the directories of schedulers. No I/O: time is
  # passed in, in seconds. Safe for concurrent use.
  #
  # Entries are claims of whoever wrote them: here is decided which get a token (DIRECTORY in scheduler.proto). A learned
  # address is used only for a model of the same name as that of the scheduler which listed it, and for another
  # fingerprint only once none of the present one takes calls (`foreign`). With :safe it is used over TLS, by the
  # authority that the client trusts already and under the name that the entry gives; or without TLS on loopback, if the
  # scheduler which listed it is on this machine too. With :any also without TLS elsewhere, if the client has no
  # authority. A scheduler is known once, however many addresses it has.
  class KnownSchedulers
    USES = %i[off safe any].freeze
    # Between two looks into a directory, while calls begin or streams run.
    LOOK_EVERY = 10.0
    # From a look that failed to the next one, at another scheduler.
    LOOK_AGAIN = 1.0
    # How long a scheduler that has said that it has no directory is not asked again.
    NO_DIRECTORY = 300.0
    # Rounds of looks, one at each given scheduler, after which older words are dropped for newer ones.
    VIEW_ROUNDS = 3
    # Schedulers that a client learns of, at most.
    MAX_LEARNED = 1024
    # Entries of one look that are read: as many as a directory has at most.
    MAX_ENTRIES = 10_000
    # Liars, and callers whose looks were refused.
    MAX_REMEMBERED = 1024

    # What one scheduler listed of others.
    View = Struct.new(:at, :entries)
    # The schedulers that calls use at one time: the given `addresses`, then the learned ones; `entries` by address, of
    # those that a directory has; `foreign`: learned ones with another model of the same name, as in the middle of an
    # update.
    Present = Struct.new(:addresses, :entries, :foreign)

    attr_reader :given

    # `tls`: whether the client has an authority.
    def initialize(given, tls:, use:)
      @given = given.dup.freeze
      @tls = tls
      @use = use
      @mutex = Mutex.new
      @views = {} # by the address of the scheduler that listed them
      @own = {} # by given address: what it says of itself
      @learned = {}
      @liars = {} # Learned#start => true
      @checked = Set.new # Learned#start of those that serve the model
      @next_look = use == :off ? Float::INFINITY : 0.0
      @without = {} # address => until when it is not asked for a directory
      @refused = {} # caller => until when it does not look
      @turn = 0
      @model = '' # the fingerprint that new calls get
      @silent = Set.new # those at which looks failed since the last one that did not
      @looked = use == :off
    end

    # The schedulers that are known now.
    def present
      @mutex.synchronize do
        foreign = @learned.each_key.select { |address| foreign?(address) }
        Present.new(all, @own.merge(@learned), foreign.to_set)
      end
    end

    # Whether a look has ended, well or not.
    def looked?
      @mutex.synchronize { @looked }
    end

    # Whether it is time for a look into a directory; if so, the time of the next one is set.
    def time_to_look?(now, caller)
      @mutex.synchronize do
        return false if now < @next_look || now < @refused.fetch(caller, 0.0)

        @next_look = now + LOOK_EVERY
        true
      end
    end

    # Whom to ask: a given one that is up, in turn; else a learned one; else one that is down, as the block says. One at
    # which a look has just failed comes last, though it may count as up again by now.
    def teller(now)
      @mutex.synchronize do
        @turn += 1
        asked = all.select { |one| @without.fetch(one, 0.0) <= now }
        asked = @given if asked.empty?
        asked.rotate(@turn % asked.size).min_by do |one|
          [@silent.include?(one), yield(one), foreign?(one), !@given.include?(one)].map { |last| last ? 1 : 0 }
        end
      end
    end

    # Records all entries of the directory of the scheduler at `teller`.
    def saw(teller, entries, now)
      entries = entries.first(MAX_ENTRIES)
      own = entries.find { |entry| entry.written_by.empty? }
      listed = own ? usable(entries, own, teller) : []
      @mutex.synchronize do
        @looked = true
        @silent.clear
        next unless own && believed?(teller, own) && !own.model_fingerprint.empty? # loading: what it listed stays

        @model = own.model_fingerprint
        @views[teller] = View.new(now, listed)
        age(now)
        join
      end
    end

    # Records that the directory of `teller` could not be had: what it listed is kept if it is all.
    def lost(teller, now)
      @mutex.synchronize do
        @looked = true
        @silent << teller
        all_silent = @silent.superset?(all.to_set)
        @silent.clear if all_silent
        @next_look = now + (all_silent ? LOOK_EVERY : LOOK_AGAIN)
        drop(teller, now) if @views.size > 1
      end
    end

    # Records that a scheduler did not let this caller look: others may look at once.
    def refused(caller, now)
      @mutex.synchronize do
        @looked = true
        @next_look = [@next_look, now].min
        remember(@refused, caller, now + LOOK_EVERY)
      end
    end

    # Records that the scheduler at `teller` has no directory.
    def none(teller, now)
      @mutex.synchronize do
        @looked = true
        drop(teller, now)
        @without = @without.slice(*all)
        @without[teller] = now + NO_DIRECTORY
        @next_look = @without.size < all.size ? now : @without.values.min
      end
    end

    # Records that what is at a learned address is not what its entry says: it is used no more, until it is another start
    # of a scheduler.
    def distrust(address)
      @mutex.synchronize { leave(address) }
    end

    # The name that the certificate of a scheduler has, '' if it is that of its address, or without TLS; nil: the address
    # is not known, or no more.
    def tls_name(address)
      return '' if @given.include?(address)

      @mutex.synchronize { @learned[address]&.tls_name }
    end

    # Whether a scheduler that reports this model may be the one of the entry; given ones always are.
    def what_it_says?(address, model_fingerprint)
      @mutex.synchronize { @given.include?(address) || serves?(address, model_fingerprint) }
    end

    # Whether it has reported the model of its entry since its start, or is a given one.
    def checked?(address)
      return true if @given.include?(address)

      @mutex.synchronize { @checked.include?(@learned[address]&.start) }
    end

    private

    # The entries of what one lists that may get calls.
    def usable(entries, own, teller)
      entries.select do |entry|
        entry.model == own.model && !entry.model_fingerprint.empty? && !entry.instance.empty? &&
          (entry.instance != own.instance || entry.address == teller) && may_get_a_token?(entry, teller)
      end.map { |entry| Learned.of(entry) }
    end

    def may_get_a_token?(entry, teller)
      return false unless Address.host_port?(entry.address)
      return !entry.tls_name.empty? if @tls
      return false unless entry.tls_name.empty? # it speaks TLS, and the client knows no authority
      return Address.loopback?(teller) if Address.loopback?(entry.address)

      @use == :any
    end

    # What follows is called with the mutex held.

    def all
      @given + @learned.keys
    end

    def foreign?(address)
      one = @learned[address]
      !one.nil? && one.model_fingerprint != @model
    end

    # Whether the model is that of the learned scheduler's entry, which then counts as checked.
    def serves?(address, model_fingerprint)
      one = @learned[address]
      return false unless one && one.model_fingerprint == model_fingerprint

      @checked << one.start
      true
    end

    # Takes what a teller says of itself. False: it is a learned one that is not what its entry says, and is left.
    def believed?(teller, own)
      if @given.include?(teller)
        @own[teller] = Learned.of(own)
      elsif !own.model_fingerprint.empty? && !serves?(teller, own.model_fingerprint)
        leave(teller)
        return false
      end
      true
    end

    def leave(address)
      return unless (one = @learned[address])

      remember(@liars, one.start, true)
      join
    end

    # Forgets the oldest above MAX_REMEMBERED.
    def remember(what, key, value)
      what[key] = value
      what.shift while what.size > MAX_REMEMBERED
    end

    def drop(teller, now)
      @views.delete(teller)
      age(now)
      join
    end

    # Drops what was told long ago, once somebody has told more since.
    def age(now)
      newest = @views.each_value.map(&:at).max
      return unless newest

      oldest = [newest, now - (VIEW_ROUNDS * LOOK_EVERY * @given.size)].min
      @views.select! { |_, view| view.at >= oldest }
    end

    # Joins what all have listed: a scheduler is known while one of them lists it. The word of a given scheduler counts
    # more than that of a learned one, and a newer more than an older.
    def join
      seen = @own.each_value.to_set(&:instance)
      @learned = {}
      listed.each do |one|
        next if @given.include?(one.address) || @liars.key?(one.start) || seen.include?(one.instance)
        break if @learned.size == MAX_LEARNED

        @learned[one.address] = one
        seen << one.instance
      end
      @checked &= @learned.each_value.map(&:start)
    end

    # One entry for each address, those of the present model first.
    def listed
      views = @views.sort_by.with_index { |(teller, view), i| [@given.include?(teller) ? 1 : 0, view.at, i] }
      found = {}
      views.each { |_, view| view.entries.each { |one| found[one.address] = one } }
      found.values.sort_by { |one| [one.model_fingerprint == @model ? 0 : 1, one.address] }
    end
  end
end
