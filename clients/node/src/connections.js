// A client's connections to schedulers, and calls that are tried on one after the other.

import { setTimeout as sleep } from 'node:timers/promises';

import grpc from '@grpc/grpc-js';

import { affinityKey } from './affinity.js';
import { deadline, ended, send, unlessConnected } from './calls.js';
import { Channels } from './channels.js';
import { KnownSchedulers } from './directory.js';
import { PacelineError } from './errors.js';
import { addressesOf, Attempts } from './failover.js';
import { Look, LOOK_TIMEOUT_MS } from './look.js';
import { schedulersBehind } from './names.js';
import { Rotation } from './rotation.js';
import { callSpan } from './spans.js';

/** @typedef {{ timeoutMs?: number, signal?: AbortSignal }} CallOptions */
/** @typedef {import('./spans.js').CallSpan} CallSpan */

/** The schedulers of a client: those given, and those learned from the directory of any. */
export class Connections {
  #known;
  #channels;
  #rotation;
  #token;
  /** @type {Look | undefined} */
  #look; // the last one
  /** @type {Promise<void> | undefined} */
  #learning; // from the look that is under way

  /**
   * @param {string | string[]} addresses
   * @param {{ token: string, tls?: { ca: Buffer, cert?: Buffer, key?: Buffer }, failoverTimeoutMs: number, directory: import('./directory.js').DirectoryUse }} options
   *   Of `Client`.
   */
  constructor(addresses, { token, tls, failoverTimeoutMs, directory }) {
    this.failoverTimeoutMs = failoverTimeoutMs;
    this.#token = token;
    this.#known = new KnownSchedulers(addressesOf(addresses), Boolean(tls), directory);
    this.#channels = new Channels(this.#known, tls);
    this.#rotation = new Rotation(this.#known.given);
  }

  /** Close the channels. Calls under way go on, but not on another scheduler. */
  close() {
    this.#channels.close();
    this.#look?.cancel();
  }

  /** All that are used now: the given ones, then those learned from directories. */
  get addresses() {
    return this.#known.addresses;
  }

  /**
   * The request's key among several schedulers.
   *
   * @param {object} request
   * @param {{ affinityKey?: string }} options
   */
  affinity(request, options) {
    return this.addresses.length > 1 ? affinityKey(request, options.affinityKey) : undefined;
  }

  /**
   * The attempts of a call that begins now.
   *
   * @param {CallOptions} options
   * @param {number} failoverTimeoutMs
   * @param {Buffer} [key] Of `affinity`.
   * @param {string} [model] What the request names.
   */
  attempts({ timeoutMs }, failoverTimeoutMs, key, model) {
    const now = performance.now();
    this.#lookInTime(now);
    const loadWaitMs = this.failoverTimeoutMs;
    return new Attempts(this.#rotation, now, { timeoutMs, failoverTimeoutMs, loadWaitMs }, key, model);
  }

  /**
   * Start the current attempt of a Generate call.
   *
   * @param {Attempts} attempts
   * @param {object} request
   * @param {number} timeoutMs
   * @param {CallSpan} span
   */
  generate(attempts, request, timeoutMs, span) {
    const stub = this.#stubOf(attempts);
    const call = stub.generate(request, this.#metadata(attempts, span), deadline(timeoutMs));
    call.on('error', () => {}); // its reader reports errors; after that nobody listens
    call.once('status', this.#begin(attempts.address));
    return { call, connecting: unlessConnected(stub, call) };
  }

  /**
   * Look at a message of a stream before it counts. Throws if it says that a learned scheduler serves another model than its
   * entry. A client that begins no calls meanwhile looks into a directory too.
   *
   * @param {string} address
   * @param {any} message A GenerateResponse.
   */
  check(address, message) {
    this.#lookInTime(performance.now());
    if (message.event === 'started') this.#checkModel(address, message.started.modelFingerprint);
  }

  /**
   * An attempt has failed: waits until the next, or throws what the caller is to know.
   *
   * @param {Attempts} attempts
   * @param {unknown} failure
   * @param {AbortSignal} [signal]
   */
  async again(attempts, failure, signal) {
    const refused = failure instanceof PacelineError && failure.retryable && failure.reason;
    const schedulers = refused ? await schedulersBehind(attempts.address) : 1;
    signal?.throwIfAborted();
    const wait = attempts.failed(failure, performance.now(), schedulers);
    if (wait > 0) await sleep(wait, undefined, { signal });
    if (this.#channels.isClosed) throw failure;
  }

  /**
   * Make a unary call, on one scheduler after the other until one takes it.
   *
   * @param {string} method
   * @param {any} request
   * @param {CallOptions} [options]
   * @param {number} [failoverTimeoutMs]
   * @param {Buffer} [key] Of `affinity`.
   * @returns {Promise<any>}
   */
  async call(method, request, options = {}, failoverTimeoutMs = 0, key = undefined) {
    const { signal } = options;
    signal?.throwIfAborted();
    const attempts = this.attempts(options, failoverTimeoutMs, key, (request.request ?? request).model);
    const span = callSpan(method, request);
    try {
      for (;;) {
        const stub = this.#stubOf(attempts);
        const end = this.#begin(attempts.address);
        let failure;
        try {
          await this.#checkBefore(stub, attempts, signal, span);
          const left = attempts.timeoutMs(performance.now());
          const reply = await send(stub, method, request, this.#metadata(attempts, span), left, signal);
          attempts.answered();
          span.saw(reply);
          return reply;
        } catch (error) {
          if (signal?.aborted) throw error;
          failure = error;
        } finally {
          end();
        }
        await this.again(attempts, failure, signal);
      }
    } catch (error) {
      span.end(error);
      throw error;
    } finally {
      span.end();
    }
  }

  /**
   * Make a unary call on all schedulers at once; the replies of those that answer. Throws if none does, and a given
   * scheduler's error sooner than a learned one's.
   *
   * @param {string} method
   * @param {object} request
   * @param {CallOptions} [options]
   * @returns {Promise<any[]>}
   */
  async callEach(method, request, { timeoutMs = Infinity, signal } = {}) {
    signal?.throwIfAborted();
    const left = await this.#lookFirst(timeoutMs, signal);
    const outcomes = await Promise.allSettled(
      this.addresses.map((address) => {
        const reply = send(this.#channels.stub(address), method, request, this.#metadata(), left, signal);
        return reply.finally(this.#begin(address));
      }),
    );
    const replies = outcomes.flatMap((outcome) => (outcome.status === 'fulfilled' ? [outcome.value] : []));
    if (replies.length === 0) throw /** @type {PromiseRejectedResult} */ (outcomes[0]).reason;
    return replies;
  }

  /**
   * The stub of the current attempt's scheduler, which is still known.
   *
   * @param {Attempts} attempts
   */
  #stubOf(attempts) {
    for (;;) {
      const stub = this.#channels.stub(attempts.address);
      if (stub) return stub;
      attempts.skip(performance.now());
    }
  }

  /**
   * A call begins. Returns what its end calls.
   *
   * @param {string} address
   */
  #begin(address) {
    this.#rotation.began(address);
    return () => {
      this.#rotation.ended(address);
      if (!this.#rotation.has(address)) this.#closeUnused();
    };
  }

  /**
   * @param {Attempts} [attempts]
   * @param {CallSpan} [span]
   */
  #metadata(attempts, span) {
    const metadata = new grpc.Metadata();
    const carried = attempts && span?.carried(attempts.address);
    for (const [key, value] of Object.entries({ ...attempts?.metadata, ...carried })) metadata.set(key, value);
    if (this.#token) metadata.set('authorization', `Bearer ${this.#token}`);
    return metadata;
  }

  /**
   * A learned scheduler that was not checked yet is asked for its model: replies do not say which one answered.
   *
   * @param {any} stub
   * @param {Attempts} attempts
   * @param {AbortSignal | undefined} signal
   * @param {CallSpan} span
   */
  async #checkBefore(stub, attempts, signal, span) {
    const { address } = attempts;
    if (this.#known.isChecked(address)) return;
    const left = attempts.timeoutMs(performance.now());
    const { modelFingerprint } = await send(stub, 'getModelInfo', {}, this.#metadata(attempts, span), left, signal);
    this.#checkModel(address, modelFingerprint);
  }

  /**
   * @param {string} address
   * @param {Buffer} modelFingerprint
   */
  #checkModel(address, modelFingerprint) {
    if (this.#known.isWhatItSays(address, modelFingerprint)) return;
    this.#known.distrust(address);
    this.#useKnown();
    const text = `${address} is not what a directory says of it`;
    throw new PacelineError(text, { code: 'UNAVAILABLE', reason: 'OTHER_MODEL' });
  }

  /** @param {number} now Look into a directory beside the calls, if it is time. */
  #lookInTime(now) {
    if (this.#channels.isClosed || this.#learning || !this.#known.isTimeToLook(now, this.#token)) return;
    this.#learning = this.#learn(now).finally(() => {
      this.#learning = undefined;
    });
  }

  /**
   * Look before a call to all, if no look has ended; what is left of `timeoutMs`, at least half of it.
   *
   * @param {number} timeoutMs
   * @param {AbortSignal} [signal]
   */
  async #lookFirst(timeoutMs, signal) {
    const began = performance.now();
    this.#lookInTime(began);
    if (this.#known.hasLooked || !this.#learning) return timeoutMs;
    await ended(this.#learning, Math.min(LOOK_TIMEOUT_MS, timeoutMs / 2), signal);
    signal?.throwIfAborted();
    return Math.max(timeoutMs / 2, timeoutMs - (performance.now() - began));
  }

  /** @param {number} now Look into the directory of one scheduler. Throws nothing. */
  async #learn(now) {
    const teller = this.#known.teller(now, (address) => this.#rotation.isDown(address, now));
    try {
      this.#look = new Look(this.#channels.stub(teller), this.#metadata());
      this.#known.saw(teller, await this.#look.entries(), now);
    } catch (error) {
      if (this.#channels.isClosed) return;
      const { code } = /** @type {PacelineError} */ (error);
      if (code === 'UNIMPLEMENTED') this.#known.hasNone(teller, now);
      else if (code === 'UNAVAILABLE' || code === 'DEADLINE_EXCEEDED') {
        this.#known.lost(teller, now);
        this.#rotation.down(teller, performance.now());
      } else this.#known.refused(this.#token, now);
    }
    this.#useKnown();
  }

  #useKnown() {
    this.#rotation.use(this.#known);
    this.#closeUnused();
  }

  /** Close the channels to schedulers that are known no more, when no call uses them. */
  #closeUnused() {
    this.#channels.keep((address) => this.#rotation.has(address) || !this.#rotation.isIdle(address));
  }
}
