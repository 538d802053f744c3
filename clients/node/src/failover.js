// Which scheduler a call goes to, and where next when one refuses it or dies. No I/O: time is passed in, in ms.

import { choice, preference } from './affinity.js';
import { PacelineError } from './errors.js';

/** How long a call that lost its scheduler looks for another, by default. */
export const FAILOVER_TIMEOUT_MS = 30_000;

/** How long an address that could not be reached is tried last; doubles with each further failure. */
const MIN_DOWN_MS = 1_000;
const MAX_DOWN_MS = 8_000;
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

const NEVER_REACHED = /No connection established|Name resolution failed/;

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
 * A client's addresses, by number. A call with a key begins where that key's prompts are cached, unless the client has
 * too many live calls there (AFFINITY in scheduler.proto); one without begins at the next address in turn. Those that are
 * down are tried last.
 */
export class Rotation {
  #addresses;
  #next = 0;
  /** @type {number[]} */
  #live; // calls, by address
  /** @type {Map<number, { until: number, forMs: number }>} */
  #down = new Map();

  /** @param {string[]} addresses */
  constructor(addresses) {
    this.#addresses = addresses;
    this.#live = addresses.map(() => 0);
  }

  /** @param {number} address A call begins there. */
  began(address) {
    this.#live[address] += 1;
  }

  /** @param {number} address It has ended. */
  ended(address) {
    this.#live[address] -= 1;
  }

  /** @param {Buffer} [key] */
  #turn(key) {
    const count = this.#addresses.length;
    if (key) {
      const order = preference(key, this.#addresses);
      const first = choice(order, this.#live);
      return [first, ...order.filter((one) => one !== first)];
    }
    const first = this.#next;
    this.#next = (first + 1) % count;
    return Array.from({ length: count }, (_, i) => (first + i) % count);
  }

  /**
   * @param {number} now
   * @param {Buffer} [key] Of `affinityKey`.
   * @returns {number[]} All addresses, in the order in which a call should try them.
   */
  order(now, key) {
    const turn = this.#turn(key);
    return [...turn.filter((one) => !this.#isDown(one, now)), ...turn.filter((one) => this.#isDown(one, now))];
  }

  /** @param {number} address It has answered. */
  up(address) {
    this.#down.delete(address);
  }

  /**
   * It could not be reached, or takes no requests. Of several calls that find out, the first counts.
   *
   * @param {number} address
   * @param {number} now
   */
  down(address, now) {
    if (this.#isDown(address, now)) return;
    const forMs = Math.min(Math.max(2 * (this.#down.get(address)?.forMs ?? 0), MIN_DOWN_MS), MAX_DOWN_MS);
    this.#down.set(address, { until: now + forMs, forMs });
  }

  /**
   * @param {number} address
   * @param {number} now
   */
  #isDown(address, now) {
    return (this.#down.get(address)?.until ?? now) > now;
  }
}

/**
 * One call's way through the addresses: `address` is where it is sent now.
 *
 * A refusal, by a scheduler or because it can't be reached, is the caller's once all addresses have
 * refused. But if one of them has no executor yet, because a model is loading, the call is sent there once more and
 * waits there for up to `loadWaitMs`: `metadata` says so. A call that was lost, because the connection broke under it or its scheduler ended it UNAVAILABLE in
 * mid-stream, is sent again for up to `failoverTimeoutMs`.
 */
export class Attempts {
  #rotation;
  #key;
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
  /** @type {number | undefined} */
  #loads; // address of a scheduler that had no executor yet
  /** @type {Record<string, string>} */
  metadata = {}; // of this attempt

  /**
   * @param {Rotation} rotation
   * @param {number} now
   * @param {{ timeoutMs?: number, failoverTimeoutMs: number, loadWaitMs?: number }} limits
   * @param {Buffer} [key] Of `affinityKey`.
   */
  constructor(rotation, now, { timeoutMs, failoverTimeoutMs, loadWaitMs = 0 }, key) {
    this.#rotation = rotation;
    this.#key = key;
    this.#loadWaitMs = loadWaitMs;
    this.#deadline = timeoutMs === undefined ? Infinity : now + timeoutMs;
    this.#failoverTimeoutMs = failoverTimeoutMs;
    this.#untried = rotation.order(now, key);
    this.address = /** @type {number} */ (this.#untried.shift());
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

  /** The current attempt is sent. Returns what its end calls. */
  begin() {
    const { address } = this;
    this.#rotation.began(address);
    return () => this.#rotation.ended(address);
  }

  /** A message has come from `address`. */
  answered() {
    if (this.#answered) return;
    this.#answered = true;
    this.#rotation.up(this.address);
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
    if (this.#isRefusal(error) && this.#refusalsHere + 1 < tries(error, schedulers)) {
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
    } else throw error;
    this.#answered = false;
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
    this.#untried = this.#rotation.order(now, this.#key).filter((other) => other !== this.address);
  }

  /**
   * @param {PacelineError} error
   * @param {number} now
   */
  #nextRound(error, now) {
    const soonest = Math.min(...this.#refusals.map((one) => one.retryAfterMs ?? Infinity));
    const worst = this.#refusals.find((one) => (one.retryAfterMs ?? Infinity) === soonest) ?? error;
    if (this.#lostAt === undefined) {
      if (this.#loads === undefined || WAIT_KEY in this.metadata || this.#loadWaitMs <= 0) throw worst;
      this.address = this.#loads;
      this.#refusals = [];
      this.metadata = { [WAIT_KEY]: String(Math.round(this.#loadWaitMs)) };
      return 0;
    }
    const left = this.#lostAt + this.#failoverTimeoutMs - now;
    if (left <= 0) throw worst;
    this.#untried = this.#rotation.order(now, this.#key);
    this.address = /** @type {number} */ (this.#untried.shift());
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
