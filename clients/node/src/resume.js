// A stream that outlives its scheduler: what was received, and the request that continues it. No I/O.
// See RETRIES and Continuation in scheduler.proto.

import { randomBytes } from 'node:crypto';

import { Bounds } from './bounds.js';
import { incomplete, PacelineError, StreamLost } from './errors.js';
import { tokenLogprobs } from './logprobs.js';
import { event, Progress } from './messages.js';

/** Attempts in a row that were begun and brought no token, after which the request is not sent again. */
const MAX_FRUITLESS = 8;

/**
 * The request, with an id and a seed drawn if it has none: sent again, it is the same request.
 *
 * @param {Record<string, any>} request A GenerateRequest.
 * @returns {Record<string, any>}
 */
export function identified(request) {
  const seed = request.sampling?.seed ?? randomBytes(8).readBigUInt64BE().toString();
  const requestId = request.requestId || randomBytes(16).toString('hex');
  return { ...request, requestId, sampling: { ...request.sampling, seed } };
}

/**
 * One Generate call as its caller sees it, over as many attempts as it takes.
 *
 * Per attempt: send `attempt()`, then give each message to `see()`; when the attempt was lost, begin
 * another. The events of all attempts together are those of a stream that was never interrupted. Times in
 * usage count from the first attempt on, and `cachedTokens` is its; preemptions, drafts and queueMs are the
 * last attempt's, for a scheduler tells them only with the end.
 */
export class ResumableStream {
  #request;
  #progress;
  #received;
  /** @type {number | undefined} */
  #beganAt; // when the attempt was sent that brought the first event
  #sentAt = 0;
  #offsetMs = 0; // from the first attempt to this one
  /** @type {any} */
  #first; // Started, of the first attempt
  /** @type {import('./messages.js').TokenLogprobs[]} */
  #promptLogprobs = []; // of the first attempt
  #attemptStarted = false;
  /** @type {number | undefined} */
  #continued; // tokens sent in this attempt's continuation
  #fruitless = 0; // attempts in a row that began and brought no token
  #bounds;

  /** @param {Record<string, any>} request With an id and a seed. */
  constructor(request) {
    const n = request.n || 1;
    this.#request = request;
    this.#bounds = new Bounds(request);
    this.#progress = new Progress(n);
    this.#received = Array.from({ length: n }, () => ({
      tokenIds: /** @type {number[]} */ ([]),
      textBytes: 0, // UTF-8, as the next two
      reasoningBytes: 0,
      argumentBytes: /** @type {number[]} */ ([]), // of each tool call that has begun
      namedBytes: 0, // of ids and names of tool calls
      firstMs: /** @type {number | undefined} */ (undefined), // when the first tokens came
      finished: false,
    }));
  }

  /** Events have been received: from now on the stream can be continued, not sent again. */
  get hasBegun() {
    return this.#beganAt !== undefined;
  }

  /** All completions have finished: whatever the call's status is, nothing is missing. */
  get isComplete() {
    return this.#received.every(({ finished }) => finished);
  }

  /**
   * The request to send now: the caller's, or its continuation.
   *
   * @param {number} now In milliseconds.
   * @returns {Record<string, any>}
   */
  attempt(now) {
    const tokens = this.#received.reduce((sum, { tokenIds }) => sum + tokenIds.length, 0);
    this.#fruitless = tokens === (this.#continued ?? 0) ? this.#fruitless + Number(this.#attemptStarted) : 0;
    if (this.#fruitless >= MAX_FRUITLESS) {
      throw new StreamLost(`the stream was interrupted ${MAX_FRUITLESS} times without a token between`);
    }
    this.#attemptStarted = false;
    this.#sentAt = now;
    if (this.#beganAt === undefined) {
      this.#first = undefined;
      this.#promptLogprobs = [];
      return this.#request;
    }
    if (!this.#first) throw new StreamLost('the stream was lost, and its scheduler is too old to say how to continue it');
    this.#offsetMs = Math.round(now - this.#beganAt);
    this.#continued = tokens;
    return this.#continuation();
  }

  /**
   * Takes the next message of the attempt.
   *
   * @param {any} message A GenerateResponse.
   * @returns {import('./messages.js').Event | undefined} The event for the caller, if there is one.
   */
  see(message) {
    if (message.event === 'started') {
      this.#seeStarted(message.started);
      return undefined;
    }
    if (message.event === 'promptLogprobs') {
      this.#seePromptLogprobs(message.promptLogprobs);
      return undefined;
    }
    const seen = event(message);
    if (!seen) return undefined;
    if (this.#continued !== undefined && !this.#attemptStarted) throw this.#ignored(0);
    this.#progress.see(seen);
    if (this.#beganAt === undefined) this.#givePromptLogprobs(seen);
    this.#beganAt ??= this.#sentAt;
    const received = this.#received[seen.index];
    if (seen.type === 'finished') {
      received.finished = true;
      if (this.#continued !== undefined) this.#complete(seen.usage, received.firstMs);
    } else {
      for (const id of seen.tokenIds) received.tokenIds.push(id);
      received.textBytes += Buffer.byteLength(seen.text);
      received.reasoningBytes += Buffer.byteLength(seen.reasoning);
      received.namedBytes += countArguments(received.argumentBytes, seen.toolCalls);
      this.#bounds.check(seen, received.tokenIds.length, sentBytes(received));
      received.firstMs ??= Math.floor(message.delta.elapsedUs / 1000) + this.#offsetMs;
    }
    return seen;
  }

  /** The call has ended OK. */
  checkEnd() {
    this.#progress.checkEnd();
  }

  /**
   * The error for the caller when `error`, which came from `address`, ends the last attempt.
   *
   * @param {unknown} error
   * @param {string} address
   */
  lostForGood(error, address) {
    if (!this.hasBegun || !(error instanceof PacelineError)) return error;
    const text = `the stream was interrupted, and could not be continued: ${error.message} (${address})`;
    const { code, reason, metadata } = error;
    if (error.retryable || code === 'ALREADY_EXISTS') return new StreamLost(text, { reason, metadata, cause: error });
    const mismatch = ['FAILED_PRECONDITION', 'NOT_FOUND'].includes(code) && this.#continued !== undefined;
    return mismatch ? new PacelineError(text, { code, reason, metadata, cause: error }) : error;
  }

  /** @param {any} started */
  #seeStarted(started) {
    if (this.#attemptStarted) throw incomplete('the scheduler began the stream twice');
    this.#attemptStarted = true;
    if (!this.#first) {
      this.#first = started;
      this.#bounds = new Bounds(this.#request, started);
    }
    if (this.#continued !== undefined && started.continuedTokens !== this.#continued) {
      throw this.#ignored(started.continuedTokens);
    }
  }

  /** @param {any} part A PromptLogprobs. */
  #seePromptLogprobs({ first, logprobs }) {
    if (this.hasBegun || this.#request.promptLogprobs === undefined) return; // a continuation repeats them
    if (first !== 1 + this.#promptLogprobs.length) {
      throw incomplete(`logprobs of the prompt from token ${first} on, behind ${this.#promptLogprobs.length}`);
    }
    for (const one of logprobs) this.#promptLogprobs.push(tokenLogprobs(one));
    if (this.#promptLogprobs.length >= Math.max(this.#first?.promptTokens ?? 0, 1)) {
      throw incomplete('more logprobs of the prompt came than it has tokens');
    }
  }

  /**
   * Adds the prompt's logprobs to the first event, if they were asked for.
   *
   * @param {import('./messages.js').Event} seen
   */
  #givePromptLogprobs(seen) {
    if (this.#request.promptLogprobs === undefined || !this.#first || seen.type !== 'delta') return;
    const [found, wanted] = [this.#promptLogprobs.length, this.#first.promptTokens - 1];
    if (found !== wanted) throw incomplete(`${found} logprobs of the prompt came before the first token, not ${wanted}`);
    seen.promptLogprobs = this.#promptLogprobs;
    this.#promptLogprobs = [];
  }

  /** @param {number} continued */
  #ignored(continued) {
    return new StreamLost(
      'the stream was interrupted, and could not be continued: the scheduler took over ' +
        `${continued} of ${this.#continued} tokens received (0: it knows no continuations)`,
    );
  }

  /**
   * The usage of all attempts.
   *
   * @param {import('./messages.js').Usage} usage
   * @param {number | undefined} firstMs
   */
  #complete(usage, firstMs) {
    usage.cachedTokens = this.#first.cachedTokens;
    usage.firstTokenMs = Math.min(usage.firstTokenMs + this.#offsetMs, firstMs ?? Infinity);
    usage.totalMs += this.#offsetMs;
  }

  #continuation() {
    const { sampling, maxTokens, promptDigest, modelFingerprint, sampler, adapterFingerprint } = this.#first;
    const completions = this.#received
      .map(({ firstMs, namedBytes, ...one }, index) => ({ index, ...one }))
      .filter(({ tokenIds, finished }) => tokenIds.length > 0 || finished);
    return {
      ...this.#request,
      sampling: { ...sampling, seed: this.#request.sampling.seed }, // all of its 64 bits
      stop: { ...this.#request.stop, maxTokens },
      continuation: { completions, promptDigest, modelFingerprint, sampler, adapterFingerprint },
    };
  }
}

/**
 * All text of a completion so far, in bytes.
 *
 * @param {{ textBytes: number, reasoningBytes: number, namedBytes: number, argumentBytes: number[] }} received
 */
function sentBytes({ textBytes, reasoningBytes, namedBytes, argumentBytes }) {
  return argumentBytes.reduce((sum, size) => sum + size, textBytes + reasoningBytes + namedBytes);
}

/**
 * @param {number[]} sizes UTF-8 bytes of the arguments of each tool call that has begun; changed.
 * @param {import('./messages.js').Delta['toolCalls']} parts
 * @returns {number} Bytes of the parts' ids and names.
 */
function countArguments(sizes, parts) {
  let named = 0;
  for (const { index, id, name, arguments: text } of parts) {
    const begins = index === sizes.length;
    if (index > sizes.length || (name !== '') !== begins) {
      throw incomplete(`tool call ${index} does not begin with its name, and once`);
    }
    if (begins) sizes.push(0);
    sizes[index] += Buffer.byteLength(text);
    named += Buffer.byteLength(id) + Buffer.byteLength(name);
  }
  return named;
}
