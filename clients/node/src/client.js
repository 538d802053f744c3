// The client: one method per RPC; streams are async iterators.

import { chat } from './chat.js';
import { Connections } from './connections.js';
import { fromRpc } from './errors.js';
import * as evaluations from './evaluations.js';
import { FAILOVER_TIMEOUT_MS } from './failover.js';
import * as messages from './messages.js';
import { identified, ResumableStream } from './resume.js';
import { callSpan } from './spans.js';

/** @typedef {import('./messages.js').GenerateOptions} GenerateOptions */
/** @typedef {import('./connections.js').CallOptions} CallOptions */

/** How long a stream of which nothing is missing waits for its end. */
const END_TIMEOUT_MS = 1_000;

/**
 * One scheduler, or several that serve the same model. `close()` it when done. Every call rejects with
 * a PacelineError.
 *
 * Calls are spread over several (addresses, or those of a DNS name): those with the same beginning of a prompt, or the
 * same `affinityKey`, go to the same of several addresses. Those that one refuses are tried on the others,
 * and a stream whose scheduler dies goes on exactly on another, or on the same one when it is back: that may take
 * `failoverTimeoutMs` before it throws StreamLost.
 *
 * Where the schedulers have a directory, the client learns of others with the same model, and spreads its calls over them
 * too. `directory` says of which: 'safe', over TLS by the authority of `tls`, or on loopback; 'any', also without TLS
 * elsewhere if there is no `tls`; 'off', of none. It looks beside its calls, every 10 s at most; an idle client does not.
 */
export class Client {
  #schedulers;

  /**
   * @param {string | string[]} [addresses] host:port, or unix:/path; several as an array, or with commas. Default:
   *   PACELINE_ADDRESS, else 127.0.0.1:50051.
   * @param {{ token?: string, tls?: { ca: Buffer, cert?: Buffer, key?: Buffer }, failoverTimeoutMs?: number, directory?: import('./directory.js').DirectoryUse }} [options]
   *   Without `tls` the channel is plaintext, which a scheduler accepts on loopback only. `token`
   *   is sent as `authorization: Bearer ...`; default: PACELINE_TOKEN. '': none. `directory`: default 'safe'.
   */
  constructor(
    addresses = process.env.PACELINE_ADDRESS || '127.0.0.1:50051',
    { token = process.env.PACELINE_TOKEN || '', tls, failoverTimeoutMs = FAILOVER_TIMEOUT_MS, directory = 'safe' } = {},
  ) {
    this.#schedulers = new Connections(addresses, { token, tls, failoverTimeoutMs, directory });
  }

  /** Of the schedulers that are used now: the given ones, then those learned from a directory. */
  get addresses() {
    return this.#schedulers.addresses;
  }

  /** Close the channels. Calls under way go on, but not on another scheduler. */
  close() {
    this.#schedulers.close();
  }

  /**
   * Generate, as a stream of events. Leaving the loop, or aborting the signal, cancels the request:
   * the scheduler computes nothing for it from the next step on. A stream that ends before all
   * completions have finished throws DATA_LOSS; one that was interrupted and can't be continued, StreamLost.
   *
   * @param {GenerateOptions} options
   * @returns {AsyncGenerator<messages.Event, void, void>}
   */
  async *generate(options) {
    const { signal } = options;
    signal?.throwIfAborted();
    const request = identified(messages.generateRequest(options));
    const stream = new ResumableStream(request);
    const { failoverTimeoutMs } = this.#schedulers;
    const attempts = this.#schedulers.attempts(options, failoverTimeoutMs, this.#schedulers.affinity(request, options), request.model);
    const span = callSpan('generate', request);
    /** @type {any} */
    let call;
    const abort = () => call?.cancel();
    signal?.addEventListener('abort', abort, { once: true });
    try {
      for (;;) {
        const now = performance.now();
        const sent = this.#schedulers.generate(attempts, stream.attempt(now), attempts.timeoutMs(now), span);
        const { connecting } = sent;
        call = sent.call;
        const incoming = call[Symbol.asyncIterator]();
        let failure;
        for (;;) {
          let next;
          const limit = stream.isComplete ? setTimeout(abort, END_TIMEOUT_MS) : undefined; // nothing is missing but the end
          try {
            next = await incoming.next();
            if (!next.done) this.#schedulers.check(attempts.address, next.value);
          } catch (error) {
            failure = connecting.explain(error);
            call.cancel();
            break;
          } finally {
            clearTimeout(limit);
          }
          if (next.done) break;
          connecting.end();
          attempts.answered(next.value.started?.modelFingerprint);
          const event = stream.see(next.value);
          if (!event) continue;
          span.saw(event);
          yield event;
        }
        if (!failure) return stream.checkEnd();
        if (stream.isComplete) return undefined;
        const { address } = attempts;
        try {
          await this.#schedulers.again(attempts, failure, signal);
        } catch (error) {
          throw stream.lostForGood(error, address);
        }
      }
    } catch (error) {
      span.end(signal?.aborted ? signal.reason : fromRpc(error));
      signal?.throwIfAborted();
      throw fromRpc(error);
    } finally {
      signal?.removeEventListener('abort', abort);
      call?.cancel();
      span.end();
    }
  }

  /**
   * Generate and wait.
   *
   * @param {GenerateOptions} options `n` is 1; `completions` returns several.
   * @returns {Promise<messages.Completion>}
   */
  async complete(options) {
    if ((options.n ?? 1) > 1) throw new RangeError(`n: ${options.n} completions are returned by completions(), and not here`);
    const [completion] = await this.completions(options);
    return completion;
  }

  /**
   * Generate `n` completions and wait for all.
   *
   * @param {GenerateOptions} options
   * @returns {Promise<messages.Completion[]>} One per index.
   */
  async completions(options) {
    const request = identified(messages.generateRequest(options));
    const key = this.#schedulers.affinity(request, options);
    const reply = await this.#repeat('generateUnary', { request }, options, key);
    return messages.completions(reply, options.n || 1);
  }

  /**
   * The model's answer to a conversation, or to one message of the user's.
   *
   * @param {string | import('./chat.js').Message[]} conversation
   * @param {Omit<GenerateOptions, 'messages' | 'prompt' | 'tokenIds' | 'n'>} [options]
   */
  async chat(conversation, options = {}) {
    const messages = typeof conversation === 'string' ? [{ role: 'user', content: conversation }] : conversation;
    return this.complete({ ...options, messages });
  }

  /**
   * Logprobs and perplexity of texts, or of what follows prompts; nothing is generated. A lost call is sent again,
   * as those of `embed`, `rerank` and `complete` are: it may be without harm.
   *
   * @param {evaluations.ScoreInput[]} inputs
   * @param {evaluations.ScoreOptions} [options]
   * @returns {Promise<evaluations.ScoreReply>}
   */
  async score(inputs, options = {}) {
    const request = evaluations.scoreRequest(inputs, options);
    return evaluations.scoreReply(await this.#repeat('score', request, options), request);
  }

  /**
   * A vector for each text.
   *
   * @param {(string | number[])[]} inputs Texts as they are, or token ids.
   * @param {evaluations.EmbedOptions} [options]
   * @returns {Promise<evaluations.EmbedReply>}
   */
  async embed(inputs, options = {}) {
    const request = evaluations.embedRequest(inputs, options);
    return evaluations.embedReply(await this.#repeat('embed', request, options), request);
  }

  /**
   * Documents in the order of how well they answer a query, best first.
   *
   * @param {string} query
   * @param {string[]} documents
   * @param {evaluations.RerankOptions} [options]
   * @returns {Promise<evaluations.RerankReply>}
   */
  async rerank(query, documents, options = {}) {
    const request = evaluations.rerankRequest(query, documents, options);
    return evaluations.rerankReply(await this.#repeat('rerank', request, options), request);
  }

  /**
   * Token ids of text or messages, as `generate` would use them.
   *
   * @param {{ text: string } | { messages: import('./chat.js').Message[] }} input
   * @param {CallOptions} [options]
   * @returns {Promise<number[]>}
   */
  async tokenize(input, options) {
    const request = 'text' in input ? input : { messages: chat(input.messages) };
    return (await this.#schedulers.call('tokenize', request, options)).tokenIds;
  }

  /**
   * @param {number[]} tokenIds
   * @param {CallOptions} [options]
   * @returns {Promise<string>}
   */
  async detokenize(tokenIds, options) {
    return (await this.#schedulers.call('detokenize', { tokenIds }, options)).text;
  }

  /**
   * End live requests, wherever they run; unknown ids are no error.
   *
   * @param {string[]} requestIds
   * @param {CallOptions} [options]
   * @returns {Promise<{ aborted: string[], unknown: string[] }>}
   */
  async abort(requestIds, options) {
    const replies = await this.#schedulers.callEach('abort', { requestIds }, options);
    const found = new Set(replies.flatMap(({ aborted }) => aborted));
    return {
      aborted: requestIds.filter((id) => found.has(id)),
      unknown: requestIds.filter((id) => !found.has(id)),
    };
  }

  /**
   * The model and the limits of a request (GetModelInfoResponse, in camelCase).
   *
   * @param {CallOptions} [options]
   * @returns {Promise<Record<string, any>>}
   */
  async modelInfo(options) {
    return this.#schedulers.call('getModelInfo', {}, options);
  }

  /**
   * Live counters (GetStatusResponse, in camelCase).
   *
   * @param {CallOptions} [options]
   * @returns {Promise<Record<string, any>>}
   */
  async status(options) {
    return this.#schedulers.call('getStatus', {}, options);
  }

  /**
   * Make a unary call that may be sent again without harm, and is, for `failoverTimeoutMs` after its scheduler was lost.
   *
   * @param {string} method
   * @param {object} request
   * @param {CallOptions} options
   * @param {Buffer} [key] Of the connections' `affinity`.
   */
  #repeat(method, request, options, key) {
    return this.#schedulers.call(method, request, options, this.#schedulers.failoverTimeoutMs, key);
  }
}
