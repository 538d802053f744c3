# frozen_string_literal: true

# Runs the steps that tests/scenario gives to all clients: JSON lines in, outcomes out.

require 'json'
require 'paceline'

# One step, as tests/scenario describes it.
class Step
  V1 = Paceline::Scheduler::V1

  def initialize(given)
    @given = given
  end

  def outcome
    run(client)
  rescue Paceline::Error => e
    { error: { code: e.code, reason: e.reason, message: e.message, retryable: e.retryable?,
               retry_after_ms: e.retry_after && (1000 * e.retry_after), lost: e.is_a?(Paceline::StreamLost) } }
  end

  # One stream.
  def generate(client)
    stream = client.generate(request(V1::GenerateRequest), timeout: timeout, affinity_key: @given['affinity_key'])
    collected = Paceline::Collector.new
    before = 0
    stream.each do |event|
      collected.add(event)
      tokens = before + (event.delta ? event.delta.token_ids.size : 0)
      reached = before...tokens
      return { left: true } if reached.include?(@given.fetch('leave_after_tokens', 0) - 1)

      client.abort(stream.request_id) if reached.include?(@given.fetch('abort_after_tokens', 0) - 1)
      write({ received: tokens }) if reached.include?(@given.fetch('report_after_tokens', 0) - 1)
      before = tokens
    end
    { completions: collected.completions.map { |one| describe(one) },
      prompt_logprobs: stream.prompt_logprobs.map(&:logprob) }
  end

  private

  def client
    timeout_ms = @given.fetch('failover_timeout_ms', 1000 * Paceline::Failover::TIMEOUT)
    Paceline::Client.new(
      @given['addresses'],
      token: @given.fetch('token', ''), tls: @given['ca'] && { ca: File.read(@given['ca']) },
      failover_timeout: timeout_ms / 1000.0
    )
  end

  def run(client)
    case @given['call']
    when 'model_info'
      info = client.model_info
      { name: info.name, has_chat_template: info.has_chat_template }
    when 'tokenize' then { token_ids: client.tokenize(@given['text']) }
    when 'detokenize' then { text: client.detokenize(@given['token_ids']) }
    when 'complete'
      found = client.complete(request(V1::GenerateRequest), timeout: timeout, affinity_key: @given['affinity_key'])
      { completions: found.map { |one| describe(one) } }
    when 'generate' then @given['parallel'] ? parallel(client) : generate(client)
    when 'score' then score(client.score(request(V1::ScoreRequest)))
    when 'embed' then { vectors: client.embed(request(V1::EmbedRequest)).embeddings.map { |one| one.values.to_a } }
    when 'rerank'
      { results: client.rerank(request(V1::RerankRequest)).results.map { |one| { index: one.index, score: one.score } } }
    else raise ArgumentError, "unknown call #{@given['call']}"
    end
  ensure
    client.close
  end

  # As many streams at once; only the first one reports.
  def parallel(client)
    other = Step.new(@given.except('report_after_tokens'))
    threads = Array.new(@given['parallel']) { |i| Thread.new { (i.zero? ? self : other).generate(client) } }
    first, *rest = threads.map(&:value)
    { **first, different: rest.count { |one| one != first } }
  end

  def score(reply)
    { scores: reply.scores.map { |one| { token_ids: one.token_ids.to_a, logprob: one.logprob } } }
  end

  def request(kind)
    kind.decode_json(@given['request'].to_json)
  end

  def timeout
    @given['timeout_ms'] && (@given['timeout_ms'] / 1000.0)
  end

  def describe(one)
    finished = one.finished
    { text: one.text, token_ids: one.token_ids.to_a,
      reason: finished.reason.to_s.delete_prefix('FINISH_REASON_').downcase, stop_string: finished.stop_string,
      prompt_tokens: finished.usage.prompt_tokens, completion_tokens: finished.usage.completion_tokens }
  end
end

def write(outcome)
  puts outcome.to_json
  $stdout.flush
end

$stdin.each_line { |line| write(Step.new(JSON.parse(line)).outcome) }
