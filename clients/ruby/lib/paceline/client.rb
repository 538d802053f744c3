# frozen_string_literal: true

require 'paceline/connections'
require 'paceline/errors'
require 'paceline/failover'
require 'paceline/resume'
require 'paceline/stream'

module Paceline
  # Calls one scheduler, or several that serve the same model. Calls are spread over them, and those that one refuses
  # are tried on the others. A stream whose scheduler dies goes on exactly on another one, or on the same one after its
  # restart; it raises StreamLost if that does not succeed within `failover_timeout` seconds. Where the schedulers have a
  # directory, the client learns of others with the same model, and uses them too. Safe for concurrent use.
  #
  # `timeout` is a call's deadline in seconds, which the scheduler honours too. Every call raises Error.
  class Client
    # `addresses`: host:port, or several as an array or with commas. `token` is sent as `authorization: Bearer ...`.
    # `tls`: the contents of PEM files, { ca: } or { ca:, cert:, key: }; without it the connections are plaintext,
    # which a scheduler accepts on loopback only. `directory` says which schedulers of a directory are used: :safe, over
    # TLS by the authority of `tls` and under the name that the directory has for each, or on loopback; :any, also
    # without TLS elsewhere if `tls` is nil; :off, none.
    def initialize(addresses = '127.0.0.1:50051', token: '', tls: nil, failover_timeout: Failover::TIMEOUT,
                   directory: :safe)
      found = (addresses.is_a?(String) ? addresses.split(',') : addresses).map(&:strip).reject(&:empty?).uniq
      raise ArgumentError, 'no address is given' if found.empty?
      raise ArgumentError, 'tls needs ca, and cert and key together' unless tls.nil? || whole?(tls)
      unless KnownSchedulers::USES.include?(directory)
        raise ArgumentError, "the directory's use is #{directory.inspect}, not :off, :safe or :any"
      end

      @failover_timeout = failover_timeout
      @connections = Connections.new(found, token: token.to_s, tls: tls, directory: directory,
                                            load_wait: failover_timeout)
    end

    # Of the schedulers that are used now: the given ones, then those learned from a directory.
    def addresses
      @connections.addresses
    end

    # Closes the connections; calls under way end.
    def close
      @connections.close
    end

    # The Stream of a request, which is a GenerateRequest, or its fields as GenerateRequest.new takes them. With a block,
    # yields its events. Of several schedulers, requests with the same `affinity_key` go to the same one; without a key,
    # those whose prompts begin alike.
    def generate(request = nil, timeout: nil, affinity_key: nil, **fields, &block)
      request = identified(request, fields)
      attempts = @connections.attempts(request, timeout, @failover_timeout, @connections.affinity(request, affinity_key))
      stream = Stream.new(@connections, attempts, ResumableStream.new(request))
      block ? stream.each(&block) : stream
    end

    # Generates, and waits until all completions have finished: an array of Completions, by index. Arguments as those of
    # `generate`.
    def complete(request = nil, timeout: nil, affinity_key: nil, **fields)
      request = identified(request, fields)
      wrapped = Scheduler::V1::GenerateUnaryRequest.new(request: request)
      key = @connections.affinity(request, affinity_key)
      found = @connections.call(:generate_unary, wrapped, timeout, @failover_timeout, key).completions.to_a
      whole = found.map(&:index) == [*0...[request.n, 1].max] && found.all?(&:finished)
      raise Errors.incomplete('the reply has not all completions') unless whole

      found
    end

    # Logprobs of given texts, or of what follows prompts: a ScoreResponse. Nothing is generated. `request` is a
    # ScoreRequest, or its fields; likewise below. It is sent again when its scheduler dies, as `complete`, `embed` and
    # `rerank` are.
    def score(request = nil, timeout: nil, **fields)
      request, reply = evaluate(:score, Scheduler::V1::ScoreRequest, request, fields, timeout)
      check('scores', reply.scores.size, request.inputs.size)
      broken = reply.scores.find_index { |one| one.logprobs.size != one.token_ids.size }
      raise Errors.incomplete("score #{broken} has not one logprob per token") if broken

      reply
    end

    # A vector for each text: an EmbedResponse.
    def embed(request = nil, timeout: nil, **fields)
      request, reply = evaluate(:embed, Scheduler::V1::EmbedRequest, request, fields, timeout)
      check('vectors', reply.embeddings.size, request.inputs.size)
      sizes = reply.embeddings.map { |one| one.values.size }.uniq
      raise Errors.incomplete("the reply has vectors of #{sizes} values") if sizes.include?(0) || sizes.size > 1

      reply
    end

    # Documents by how well they answer a query, best first: a RerankResponse.
    def rerank(request = nil, timeout: nil, **fields)
      request, reply = evaluate(:rerank, Scheduler::V1::RerankRequest, request, fields, timeout)
      count = request.documents.size
      check('results', reply.results.size, request.top_n.zero? ? count : [request.top_n, count].min)
      indexes = reply.results.map(&:index)
      if indexes.uniq! || indexes.any? { |index| index >= count }
        raise Errors.incomplete("the reply ranks documents twice, or beyond the #{count} that were given")
      end

      reply
    end

    # Token ids of a text, or of a Messages as `messages`, as `generate` would use them.
    def tokenize(text = nil, messages: nil, timeout: nil)
      input = text ? { text: text } : { messages: messages }
      @connections.call(:tokenize, Scheduler::V1::TokenizeRequest.new(**input), timeout).token_ids.to_a
    end

    # The text of token ids.
    def detokenize(token_ids, timeout: nil)
      @connections.call(:detokenize, Scheduler::V1::DetokenizeRequest.new(token_ids: token_ids), timeout).text
    end

    # Ends live requests of this identity, on all schedulers; the ids of those that it ended. Unknown ids are no error.
    def abort(*request_ids, timeout: nil)
      request = Scheduler::V1::AbortRequest.new(request_ids: request_ids)
      @connections.call_all(:abort, request, timeout).flat_map { |reply| reply.aborted.to_a }
    end

    # The model and the limits of a request: a GetModelInfoResponse.
    def model_info(timeout: nil)
      @connections.call(:get_model_info, Scheduler::V1::GetModelInfoRequest.new, timeout)
    end

    # The live counters of one scheduler that answers: a GetStatusResponse.
    def status(timeout: nil)
      @connections.call(:get_status, Scheduler::V1::GetStatusRequest.new, timeout)
    end

    private

    def identified(request, fields)
      ResumableStream.identified(made(Scheduler::V1::GenerateRequest, request, fields))
    end

    def made(kind, request, fields)
      raise ArgumentError, 'give a request, or its fields' unless request.nil? || fields.empty?

      request || kind.new(**fields)
    end

    # The request as it was sent, and the reply.
    def evaluate(method, kind, request, fields, timeout)
      request = Google::Protobuf.deep_copy(made(kind, request, fields))
      request.request_id = ResumableStream.drawn_id if request.request_id.empty?
      [request, @connections.call(method, request, timeout, @failover_timeout)]
    end

    def check(what, found, wanted)
      raise Errors.incomplete("the reply has #{found} #{what}, not #{wanted}") unless found == wanted
    end

    def whole?(tls)
      tls[:ca] && tls[:cert].nil? == tls[:key].nil?
    end
  end
end
