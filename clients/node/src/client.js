// The client: one method per RPC; streams are async iterators.

import { setTimeout as sleep } from 'node:timers/promises';

import grpc from '@grpc/grpc-js';

import { affinityKey } from './affinity.js';
import { chat } from './chat.js';
import { SchedulerService } from './contract.js';
import { fromRpc, PacelineError } from './errors.js';
import * as evaluations from './evaluations.js';
import { addressesOf, Attempts, FAILOVER_TIMEOUT_MS, Rotation } from './failover.js';
import * as messages from './messages.js';
import { dnsName, ROUND_ROBIN, schedulersBehind } from './names.js';
import { identified, ResumableStream } from './resume.js';
import { callSpan } from './spans.js';

/** @typedef {import('./messages.js').GenerateOptions} GenerateOptions */
/** @typedef {Pick<GenerateOptions, 'timeoutMs' | 'signal'>} CallOptions */

const CHANNEL_OPTIONS = {
  'grpc.max_receive_message_length': 4 << 20,
  'grpc.max_send_message_length': 4 << 20,
  // A frozen scheduler is noticed within four seconds; one that computes answers pings all the while.
  'grpc.keepalive_time_ms': 2_000,
  'grpc.keepalive_timeout_ms': 1_500,
  'grpc.initial_reconnect_backoff_ms': 100,
  'grpc.max_reconnect_backoff_ms': 500,
};

/** How long connecting may take; a frozen scheduler takes connections, and says nothing. */
const CONNECT_TIMEOUT_MS = 3_000;

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
 */
export class Client {
  #schedulers;
  #rotation;
  #failoverTimeoutMs;
  #token;
  #closed = false;

  /**
   * @param {string | string[]} [addresses] host:port, or unix:/path; several as an array, or with commas. Default:
   *   PACELINE_ADDRESS, else 127.0.0.1:50051.
   * @param {{ token?: string, tls?: { ca: Buffer, cert?: Buffer, key?: Buffer }, failoverTimeoutMs?: number }} [options]
   *   Without `tls` the channel is plaintext, which a scheduler accepts on loopback only. `token`
   *   is sent as `authorization: Bearer ...`; default: PACELINE_TOKEN. '': none.
   */
  constructor(
    addresses = process.env.PACELINE_ADDRESS || '127.0.0.1:50051',
    { token = process.env.PACELINE_TOKEN || '', tls, failoverTimeoutMs = FAILOVER_TIMEOUT_MS } = {},
  ) {
    const credentials = tls
      ? grpc.credentials.createSsl(tls.ca, tls.key ?? null, tls.cert ?? null)
      : grpc.credentials.createInsecure();
    this.addresses = addressesOf(addresses);
    this.#token = token;
    this.#failoverTimeoutMs = failoverTimeoutMs;
    this.#schedulers = this.addresses.map((address) => {
      const options = dnsName(address) === undefined ? CHANNEL_OPTIONS : { ...CHANNEL_OPTIONS, ...ROUND_ROBIN };
      return new SchedulerService(address, credentials, options);
    });
    this.#rotation = new Rotation(this.addresses);
  }

  /** Close the channels. Calls under way go on, but not on another scheduler. */
  close() {
    this.#closed = true;
    for (const stub of this.#schedulers) stub.close();
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
    const attempts = this.#attempts(options, this.#failoverTimeoutMs, this.#affinity(request, options));
    const span = callSpan('generate', request);
    /** @type {any} */
    let call;
    const abort = () => call?.cancel();
    signal?.addEventListener('abort', abort, { once: true });
    try {
      for (;;) {
        const stub = this.#schedulers[attempts.address];
        const now = performance.now();
        call = stub.generate(stream.attempt(now), this.#metadata(attempts, span), deadline(attempts.timeoutMs(now)));
        call.on('error', () => {}); // the loop below reports errors; after it nobody listens
        call.once('status', attempts.begin());
        const connecting = unlessConnected(stub, call);
        const incoming = call[Symbol.asyncIterator]();
        let failure;
        for (;;) {
          let next;
          const limit = stream.isComplete ? setTimeout(abort, END_TIMEOUT_MS) : undefined; // nothing is missing but the end
          try {
            next = await incoming.next();
          } catch (error) {
            failure = connecting.explain(error);
            break;
          } finally {
            clearTimeout(limit);
          }
          if (next.done) break;
          connecting.end();
          attempts.answered();
          const event = stream.see(next.value);
          if (!event) continue;
          span.saw(event);
          yield event;
        }
        if (!failure) return stream.checkEnd();
        if (stream.isComplete) return undefined;
        await this.#again(attempts, failure, signal, stream);
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
    const key = this.#affinity(request, options);
    const reply = await this.#call('generateUnary', { request }, options, this.#failoverTimeoutMs, key);
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
    return evaluations.scoreReply(await this.#call('score', request, options, this.#failoverTimeoutMs), request);
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
    return evaluations.embedReply(await this.#call('embed', request, options, this.#failoverTimeoutMs), request);
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
    return evaluations.rerankReply(await this.#call('rerank', request, options, this.#failoverTimeoutMs), request);
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
    return (await this.#call('tokenize', request, options)).tokenIds;
  }

  /**
   * @param {number[]} tokenIds
   * @param {CallOptions} [options]
   * @returns {Promise<string>}
   */
  async detokenize(tokenIds, options) {
    return (await this.#call('detokenize', { tokenIds }, options)).text;
  }

  /**
   * End live requests, wherever they run; unknown ids are no error.
   *
   * @param {string[]} requestIds
   * @param {CallOptions} [options]
   * @returns {Promise<{ aborted: string[], unknown: string[] }>}
   */
  async abort(requestIds, options) {
    options?.signal?.throwIfAborted();
    const left = deadline(options?.timeoutMs);
    const outcomes = await Promise.allSettled(
      this.#schedulers.map((stub) => this.#send(stub, 'abort', { requestIds }, left, options?.signal)),
    );
    const replies = outcomes.flatMap((outcome) => (outcome.status === 'fulfilled' ? [outcome.value] : []));
    if (replies.length === 0) throw /** @type {PromiseRejectedResult} */ (outcomes[0]).reason;
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
    return this.#call('getModelInfo', {}, options);
  }

  /**
   * Live counters (GetStatusResponse, in camelCase).
   *
   * @param {CallOptions} [options]
   * @returns {Promise<Record<string, any>>}
   */
  async status(options) {
    return this.#call('getStatus', {}, options);
  }

  /**
   * @param {Attempts} [attempts]
   * @param {import('./spans.js').CallSpan} [span]
   */
  #metadata(attempts, span) {
    const metadata = new grpc.Metadata();
    const carried = attempts && span?.carried(this.addresses[attempts.address]);
    for (const [key, value] of Object.entries({ ...attempts?.metadata, ...carried })) metadata.set(key, value);
    if (this.#token) metadata.set('authorization', `Bearer ${this.#token}`);
    return metadata;
  }

  /**
   * @param {CallOptions} options
   * @param {number} failoverTimeoutMs
   * @param {Buffer} [key] Of `affinityKey`.
   */
  #attempts({ timeoutMs }, failoverTimeoutMs, key) {
    const loadWaitMs = this.#failoverTimeoutMs;
    return new Attempts(this.#rotation, performance.now(), { timeoutMs, failoverTimeoutMs, loadWaitMs }, key);
  }

  /**
   * The request's key among several schedulers.
   *
   * @param {object} request
   * @param {GenerateOptions} options
   */
  #affinity(request, options) {
    return this.addresses.length > 1 ? affinityKey(request, options.affinityKey) : undefined;
  }

  /**
   * An attempt has failed: waits until the next, or throws what the caller is to know.
   *
   * @param {Attempts} attempts
   * @param {unknown} failure
   * @param {AbortSignal} [signal]
   * @param {ResumableStream} [stream]
   */
  async #again(attempts, failure, signal, stream) {
    const address = this.addresses[attempts.address];
    try {
      const refused = failure instanceof PacelineError && failure.retryable && failure.reason;
      const schedulers = refused ? await schedulersBehind(address) : 1;
      signal?.throwIfAborted();
      const wait = attempts.failed(failure, performance.now(), schedulers);
      if (wait > 0) await sleep(wait, undefined, { signal });
      if (this.#closed) throw failure;
    } catch (error) {
      throw stream ? stream.lostForGood(error, address) : error;
    }
  }

  /**
   * @param {string} method
   * @param {object} request
   * @param {CallOptions} [options]
   * @param {number} [failoverTimeoutMs]
   * @param {Buffer} [key] Of `affinityKey`.
   * @returns {Promise<any>}
   */
  async #call(method, request, options = {}, failoverTimeoutMs = 0, key = undefined) {
    const { signal } = options;
    signal?.throwIfAborted();
    const attempts = this.#attempts(options, failoverTimeoutMs, key);
    const span = callSpan(method, request);
    try {
      for (;;) {
        const left = deadline(attempts.timeoutMs(performance.now()));
        try {
          const stub = this.#schedulers[attempts.address];
          const reply = await this.#send(stub, method, request, left, signal, attempts, span);
          attempts.answered();
          span.saw(reply);
          return reply;
        } catch (error) {
          if (signal?.aborted) throw error;
          await this.#again(attempts, error, signal);
        }
      }
    } catch (error) {
      span.end(error);
      throw error;
    } finally {
      span.end();
    }
  }

  /**
   * @param {any} stub
   * @param {string} method
   * @param {object} request
   * @param {grpc.CallOptions} left
   * @param {AbortSignal} [signal]
   * @param {Attempts} [attempts]
   * @param {import('./spans.js').CallSpan} [span]
   * @returns {Promise<any>}
   */
  #send(stub, method, request, left, signal, attempts, span) {
    return new Promise((resolve, reject) => {
      const answer = (/** @type {unknown} */ error, /** @type {any} */ reply) => {
        signal?.removeEventListener('abort', abort);
        const failure = connecting.explain(error);
        if (!error) resolve(reply);
        else reject(signal?.aborted ? signal.reason : failure);
      };
      const call = stub[method](request, this.#metadata(attempts, span), left, answer);
      if (attempts) call.once('status', attempts.begin());
      const connecting = unlessConnected(stub, call);
      const abort = () => call.cancel();
      signal?.addEventListener('abort', abort, { once: true });
    });
  }
}

/**
 * Cancels a call whose channel still connects after a while: a frozen scheduler takes connections.
 *
 * @param {any} stub
 * @param {any} call
 */
function unlessConnected(stub, call) {
  let gaveUp = false;
  const timer = setTimeout(() => {
    gaveUp = stub.getChannel().getConnectivityState(false) === grpc.connectivityState.CONNECTING;
    if (gaveUp) call.cancel();
  }, CONNECT_TIMEOUT_MS);
  const end = () => clearTimeout(timer);
  return {
    end,
    /** @param {any} error What the call ended with, as the caller is to know it. */
    explain(error) {
      end();
      if (!gaveUp) return fromRpc(error);
      const text = `No connection established in ${CONNECT_TIMEOUT_MS} ms`;
      return new PacelineError(text, { code: 'UNAVAILABLE', cause: error });
    },
  };
}

/** @param {number} [timeoutMs] */
function deadline(timeoutMs = Infinity) {
  return timeoutMs === Infinity ? {} : { deadline: Date.now() + timeoutMs };
}
