# frozen_string_literal: true

# Streams the answer to a question: ruby -Ilib example/chat.rb "Why is the sky blue?"
#
# PACELINE_ADDRESS has the schedulers' addresses, with commas; default: 127.0.0.1:50051. PACELINE_TOKEN is sent if it is
# set. Ctrl-C cancels the request.

require 'paceline'

abort 'usage: chat.rb QUESTION' unless ARGV.size == 1
client = Paceline::Client.new(
  ENV.fetch('PACELINE_ADDRESS', '127.0.0.1:50051'), token: ENV.fetch('PACELINE_TOKEN', '')
)
begin
  messages = { messages: [{ role: 'user', content: ARGV.first }] }
  client.generate(messages: messages, stop: { max_tokens: 256 }, timeout: 300) do |event|
    print event.delta.text if event.delta
    usage = event.finished&.usage
    puts "\n#{usage.completion_tokens} tokens in #{usage.total_ms} ms" if usage
    $stdout.flush
  end
rescue Paceline::Error => e
  hint = e.retryable? && e.retry_after ? "; try again in #{e.retry_after} s" : ''
  abort "#{e.code}: #{e.message}#{hint}"
rescue Interrupt
  abort
ensure
  client.close
end
