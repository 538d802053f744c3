// Which scheduler a call goes to, and where next when one refuses it or dies. No I/O: time is passed in, in ms.

import { PacelineError } from './errors.js';

/** How long a call that lost its scheduler looks for another, by default. */
export const FAILOVER_TIMEOUT_MS = 30_000;

/** Metadata of a call: milliseconds for which it waits at the scheduler while a model is loading. */
const WAIT_KEY = 'paceline-wait-ms';
/** Between two rounds through all addresses; doubles each time, unless a scheduler says how long. */
const MIN_WAIT_MS = 100;
const MAX_WAIT_MS = 1_000;
/** Attempts of a call that may be lost in a row with nothing received: it may itself be the cause. */
export const MAX_LOSSES = 4;
/**
 * Tries of a call at a name of several schedulers some of which take no requests, for example while they drain. The
 * channel chooses the scheduler of each try, in turn among all calls; so a call may meet the same one again.
 */
export const MAX_TRIES_OF_A_NAME = 8;

const NEVER_REACHED = /No connection established|Name resolution failed|Failed to parse DNS address/;
/** What a learned scheduler does not know or let in, a given one decides. */
const NO_LAST_WORDS = ['NOT_FOUND', 'UNIMPLEMENTED', 'UNAUTHENTICATED', 'PERMISSION_DENIED'];

/**
 * One address, or several, in an array or in a string with commas; each once.
 *
 * @param {string | string[]} given
 * @returns {string[]}
 */
export function addressesOf(given) {
  const parts = typeof given === 'string' ? given.split(',') : given;
  const found = [...new Set(parts.map((part) => part.trim()).filter(Boolean))];
  if (found.length === 0) throw new TypeError('no address is given');
  return found;
}

/**
 * One call's way through the addresses: `address` is where it is sent now.
 *
 * A refusal, by a scheduler or because it can't be reached, is the caller's once all addresses have
 * refused. But if one of them has no executor yet, because a model is loading, the call is sent there once more and
 * waits there for up to `loadWaitMs`: `metadata` says so. A call that was lost, because the connection broke under it or
 * its scheduler ended it UNAVAILABLE in mid-stream, is sent again for up to `failoverTimeoutMs`.
 */
export class Attempts {
  #rotation;
  #key;
  #model;
  #begunWith = ''; // the fingerprint of the model that has sent something
  #goneOver = false; // whether foreign addresses were tried
  #deadline;
  #failoverTimeoutMs;
  #untried;
  #answered = false; // this attempt
  /** @type {PacelineError[]} */
  #refusals = []; // of this round
  #refusalsHere = 0; // in a row, by schedulers of the current address
  /** @type {number | undefined} */
  #lostAt;
  #losses = 0; // since something was received
  #waitMs = MIN_WAIT_MS;
  #loadWaitMs;
  /** @type {string | undefined} */
  #loads; // address of a scheduler that had no executor yet
  /** @type {Record<string, string>} */
  metadata = {}; // of this attempt

  /**
   * @param {import('./rotation.js').Rotation} rotation
   * @param {number} now
   * @param {{ timeoutMs?: number, failoverTimeoutMs: number, loadWaitMs?: number }} limits
   * @param {Buffer} [key] Of `affinityKey`.
   * @param {string} [model] What the request names.
   */
  constructor(rotation, now, { timeoutMs, failoverTimeoutMs, loadWaitMs = 0 }, key, model) {
    this.#rotation = rotation;
    this.#key = key;
    this.#model = model;
    this.#loadWaitMs = loadWaitMs;
    this.#deadline = timeoutMs === undefined ? Infinity : now + timeoutMs;
    this.#failoverTimeoutMs = failoverTimeoutMs;
    this.#untried = this.#order(now);
    this.address = /** @type {string} */ (this.#untried.shift());
  }

  /**
   * What is left of the caller's `timeoutMs`; Infinity without one.
   *
   * @param {number} now
   */
  timeoutMs(now) {
    if (now >= this.#deadline) throw new PacelineError('timeoutMs went by', { code: 'DEADLINE_EXCEEDED' });
    return this.#deadline - now;
  }

  /**
   * The directory has `address` no more: set it to another one.
   *
   * @param {number} now
   */
  skip(now) {
    const known = this.#stillKnown();
    this.#untried = known.length > 0 ? known : this.#order(now);
    this.address = /** @type {string} */ (this.#untried.shift());
  }

  /** @param {number} now */
  #order(now) {
    return this.#rotation.order(now, this.#key, this.#model, this.#begunWith);
  }

  #stillKnown() {
    return this.#untried.filter((one) => this.#rotation.has(one));
  }

  /**
   * A message has come from `address`.
   *
   * @param {Buffer} [modelFingerprint] What it says of its model: no other one can continue the call.
   */
  answered(modelFingerprint) {
    if (this.#answered) return;
    this.#answered = true;
    this.#rotation.up(this.address);
    this.#begunWith = modelFingerprint?.toString('hex') || this.#begunWith;
  }

  /**
   * The attempt has failed. Throws the error for the caller if the call is not to be sent again.
   *
   * @param {unknown} error
   * @param {number} now
   * @param {number} [schedulers] How many the current address stands for.
   * @returns {number} Milliseconds to wait before the call is sent to the new `address`.
   */
  failed(error, now, schedulers = 1) {
    if (!(error instanceof PacelineError)) throw error;
    const known = this.#rotation.has(this.address);
    if (known && this.#isRefusal(error) && this.#refusalsHere + 1 < tries(error, schedulers)) {
      this.#refusalsHere += 1;
      this.#refusals.push(error);
      return 0;
    }
    this.#refusalsHere = 0;
    if (error.code === 'UNAVAILABLE') this.#rotation.down(this.address, now);
    if (this.#isLost(error)) this.#lose(error, now);
    else if (this.#lostAt !== undefined && error.code === 'ALREADY_EXISTS') {
      // The attempt before this one: its scheduler has not noticed yet that we are gone.
    } else if (this.#isRefusal(error)) {
      this.#refusals.push(error);
      if (error.reason === 'NOT_READY') this.#loads ??= this.address;
    } else if (this.#isNoLastWord(error)) {
      const isLearned = (/** @type {string} */ one) => Number(!this.#rotation.given.has(one));
      this.#untried.sort((a, b) => isLearned(a) - isLearned(b));
    } else throw error;
    this.#answered = false;
    this.#untried = this.#stillKnown();
    if (this.#untried.length === 0 && !this.#goneOver) {
      this.#goneOver = true; // all others are down or drain
      this.#untried = this.#order(now).filter((one) => this.#rotation.isForeign(one));
    }
    const next = this.#untried.shift();
    if (next === undefined) return this.#nextRound(error, now);
    this.address = next;
    return 0;
  }

  /**
   * Whether the call was certainly not taken, and may be by another scheduler.
   *
   * @param {PacelineError} error
   */
  #isRefusal(error) {
    return error.retryable && !this.#answered && !this.#isLost(error);
  }

  /**
   * Whether a learned scheduler refused what a given one may take.
   *
   * @param {PacelineError} error
   */
  #isNoLastWord({ code }) {
    return !this.#answered && !this.#rotation.given.has(this.address) && NO_LAST_WORDS.includes(code);
  }

  /**
   * Whether the call had been taken, as far as one can tell, when it ended.
   *
   * @param {PacelineError} error
   */
  #isLost({ code, reason, retryAfterMs, message }) {
    if (code !== 'UNAVAILABLE') return false;
    return this.#answered || (!reason && retryAfterMs === undefined && !NEVER_REACHED.test(message));
  }

  /**
   * @param {PacelineError} error
   * @param {number} now
   */
  #lose(error, now) {
    this.#losses = this.#answered ? 1 : this.#losses + 1;
    if (this.#losses >= MAX_LOSSES) throw error;
    if (!this.#answered && this.#lostAt !== undefined) return;
    this.#lostAt = now;
    this.#waitMs = MIN_WAIT_MS;
    this.#refusals = [];
    this.#untried = this.#order(now).filter((other) => other !== this.address);
  }

  /**
   * @param {PacelineError} error
   * @param {number} now
   */
  #nextRound(error, now) {
    const soonest = Math.min(...this.#refusals.map((one) => one.retryAfterMs ?? Infinity));
    const worst = this.#refusals.find((one) => (one.retryAfterMs ?? Infinity) === soonest) ?? error;
    if (this.#lostAt === undefined) {
      const waited = WAIT_KEY in this.metadata || this.#loadWaitMs <= 0;
      if (waited || this.#loads === undefined || !this.#rotation.has(this.#loads)) throw worst;
      this.address = this.#loads;
      this.#refusals = [];
      this.metadata = { [WAIT_KEY]: String(Math.round(this.#loadWaitMs)) };
      return 0;
    }
    const left = this.#lostAt + this.#failoverTimeoutMs - now;
    if (left <= 0) throw worst;
    this.#untried = this.#order(now);
    this.address = /** @type {string} */ (this.#untried.shift());
    const wait = Math.min(soonest === Infinity ? this.#waitMs : Math.max(soonest, MIN_WAIT_MS), left);
    this.#waitMs = Math.min(2 * this.#waitMs, MAX_WAIT_MS);
    this.#refusals = [];
    return Math.min(wait, Math.max(0, this.#deadline - now));
  }
}

/**
 * Tries of a call at an address that stands for several schedulers. A full queue is tried once for each: more tries
 * would only add to the load.
 *
 * @param {PacelineError} refusal
 * @param {number} schedulers
 */
function tries({ code }, schedulers) {
  return schedulers === 1 || code !== 'UNAVAILABLE' ? schedulers : Math.max(schedulers, MAX_TRIES_OF_A_NAME);
}
