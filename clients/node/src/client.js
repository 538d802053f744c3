// The client: one method per RPC; streams are async iterators.

import grpc from '@grpc/grpc-js';

import { SchedulerService } from './contract.js';
import { fromRpc } from './errors.js';
import * as messages from './messages.js';

/** @typedef {import('./messages.js').GenerateOptions} GenerateOptions */
/** @typedef {Pick<GenerateOptions, 'timeoutMs' | 'signal'>} CallOptions */

const CHANNEL_OPTIONS = {
  'grpc.max_receive_message_length': 4 << 20,
  'grpc.max_send_message_length': 4 << 20,
  'grpc.keepalive_time_ms': 10_000,
  'grpc.keepalive_timeout_ms': 10_000,
  'grpc.initial_reconnect_backoff_ms': 100,
  'grpc.max_reconnect_backoff_ms': 2_000,
};

/** One scheduler. `close()` it when done. Every call rejects with a PacelineError. */
export class Client {
  #stub;
  #token;

  /**
   * @param {string} [address] host:port, or unix:/path
   * @param {{ token?: string, tls?: { ca: Buffer, cert?: Buffer, key?: Buffer } }} [security]
   *   Without `tls` the channel is plaintext, which a scheduler accepts on loopback only. `token`
   *   is sent as `authorization: Bearer ...`.
   */
  constructor(address = '127.0.0.1:50051', { token = '', tls } = {}) {
    const credentials = tls
      ? grpc.credentials.createSsl(tls.ca, tls.key ?? null, tls.cert ?? null)
      : grpc.credentials.createInsecure();
    this.address = address;
    this.#token = token;
    this.#stub = new SchedulerService(address, credentials, CHANNEL_OPTIONS);
  }

  /** Close the channel. Calls under way go on. */
  close() {
    this.#stub.close();
  }

  /**
   * Generate, as a stream of events. Leaving the loop, or aborting the signal, cancels the request:
   * the scheduler computes nothing for it from the next step on. A stream that ends before all
   * completions have finished throws DATA_LOSS.
   *
   * @param {GenerateOptions} options
   * @returns {AsyncGenerator<messages.Event, void, void>}
   */
  async *generate(options) {
    const { signal } = options;
    signal?.throwIfAborted();
    const request = messages.generateRequest(options);
    const progress = new messages.Progress(options.n || 1);
    const call = this.#stub.generate(request, this.#metadata(), deadline(options));
    call.on('error', () => {}); // the loop below reports errors; after it nobody listens
    const abort = () => call.cancel();
    signal?.addEventListener('abort', abort, { once: true });
    try {
      for await (const message of call) {
        const event = messages.event(message);
        if (event) yield progress.see(event);
      }
      progress.checkEnd();
    } catch (error) {
      signal?.throwIfAborted();
      throw fromRpc(error);
    } finally {
      signal?.removeEventListener('abort', abort);
      call.cancel();
    }
  }

  /**
   * Generate and wait.
   *
   * @param {GenerateOptions} options
   * @returns {Promise<messages.Completion[]>} One per index.
   */
  async complete(options) {
    const reply = await this.#call('generateUnary', { request: messages.generateRequest(options) }, options);
    return messages.completions(reply, options.n || 1);
  }

  /**
   * The model's answer to a conversation.
   *
   * @param {{ role: string, content: string }[]} conversation
   * @param {Omit<GenerateOptions, 'messages' | 'prompt' | 'tokenIds' | 'n'>} [options]
   */
  async chat(conversation, options = {}) {
    const [answer] = await this.complete({ ...options, messages: conversation });
    return answer;
  }

  /**
   * Token ids of text or messages, as `generate` would use them.
   *
   * @param {{ text: string } | { messages: { role: string, content: string }[] }} input
   * @param {CallOptions} [options]
   * @returns {Promise<number[]>}
   */
  async tokenize(input, options) {
    const request = 'text' in input ? input : { messages: { messages: input.messages } };
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
   * End live requests; unknown ids are no error.
   *
   * @param {string[]} requestIds
   * @param {CallOptions} [options]
   * @returns {Promise<{ aborted: string[], unknown: string[] }>}
   */
  async abort(requestIds, options) {
    return this.#call('abort', { requestIds }, options);
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

  #metadata() {
    const metadata = new grpc.Metadata();
    if (this.#token) metadata.set('authorization', `Bearer ${this.#token}`);
    return metadata;
  }

  /**
   * @param {string} method
   * @param {object} request
   * @param {CallOptions} [options]
   * @returns {Promise<any>}
   */
  #call(method, request, options = {}) {
    const { signal } = options;
    signal?.throwIfAborted();
    return new Promise((resolve, reject) => {
      const answer = (/** @type {unknown} */ error, /** @type {any} */ reply) => {
        signal?.removeEventListener('abort', abort);
        if (!error) resolve(reply);
        else reject(signal?.aborted ? signal.reason : fromRpc(error));
      };
      const call = this.#stub[method](request, this.#metadata(), deadline(options), answer);
      const abort = () => call.cancel();
      signal?.addEventListener('abort', abort, { once: true });
    });
  }
}

/** @param {CallOptions} options */
function deadline({ timeoutMs }) {
  return timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs };
}
