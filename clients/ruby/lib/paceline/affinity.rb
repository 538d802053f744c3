# frozen_string_literal: true

require 'digest'

module Paceline
  # Which of several schedulers gets a request: AFFINITY in scheduler.proto. Requests with the same beginning go to the
  # same scheduler, whose prefix cache then has it.
  module Affinity
    VERSION = 'paceline-affinity-1'
    MAX_TEXT_BYTES = 1024
    MAX_TOKEN_IDS = 256

    module_function

    # 32 bytes that requests with the same beginning share. `own`: the caller's key, in place of them.
    def key(request, own)
      return Digest::SHA256.digest(own) unless own.to_s.empty?

      parts = [VERSION, request.model, request.cache_salt].map { |text| string(text) }
      Digest::SHA256.digest(parts.join + prompt(request))
    end

    # The addresses, that of the scheduler with the highest weight first.
    def preference(key, addresses)
      addresses.sort_by { |one| [-Digest::SHA256.digest(key + one.b).unpack1('Q>'), one.b] }
    end

    # The first of the order whose load is within its share: by the client's live calls, and by the sequences of all
    # clients that the directory reports. If none is, by the former alone: one that says in vain that it has none gets no
    # more than its share. Both are by address.
    def choice(order, live, reported)
      least = share(live)
      most = share(reported)
      fewer = order.select { |one| live[one] < least }
      fewer.find { |one| reported[one] < most } || fewer.first
    end

    # 1.25 of the mean load with the new call, rounded up: who has as much gets no more.
    def share(loads)
      -(-5 * (loads.values.sum + 1) / (4 * loads.size))
    end

    def prompt(request)
      case request.prompt
      when :messages
        'm'.b + first_messages(request.messages.messages).flat_map { |one| [one.role, one.name, content(one)] }
                                                         .map { |text| string(text) }.join
      when :text then 't'.b + string(beginning(request.text))
      when :token_ids then 'i'.b + request.token_ids.ids.first(MAX_TOKEN_IDS).pack('V*')
      else ''.b
      end
    end

    def first_messages(messages)
      messages.to_a[0..messages.find_index { |message| message.role == 'user' }]
    end

    def content(message)
      message.content.empty? ? message.parts.map(&:text).join : message.content
    end

    def beginning(text)
      text.byteslice(0, MAX_TEXT_BYTES).scrub('')
    end

    def string(text)
      [text.bytesize].pack('V') + text.b
    end
  end
end
