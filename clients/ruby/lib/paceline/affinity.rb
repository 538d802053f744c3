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

    # The indexes of the addresses, that of the scheduler with the highest weight first.
    def preference(key, addresses)
      addresses.each_index.sort_by do |index|
        address = addresses[index].b
        [-Digest::SHA256.digest(key + address).unpack1('Q>'), address]
      end
    end

    # The first of the order whose load is within its share. `loads`: the client's live calls, by address.
    def choice(order, loads)
      bound = -(-5 * (loads.sum + 1) / (4 * loads.size)) # rounded up
      order.find { |index| loads[index] < bound }
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
