# frozen_string_literal: true

require 'paceline/client'
require 'paceline/version'

# The client of Paceline's schedulers: a language model behind gRPC, as streams of tokens.
#
#   client = Paceline::Client.new('127.0.0.1:50051')
#   client.generate(messages: { messages: [{ role: 'user', content: 'Why is the sky blue?' }] }) do |event|
#     print event.delta.text if event.delta
#   end
#
# Requests and events are the messages of scheduler.proto, in Paceline::Scheduler::V1.
module Paceline
end
