// The order in which the calls of a client try its addresses. No I/O: time is passed in, in ms.

import { choice, preference } from './affinity.js';

/** How long an address that could not be reached is tried last; doubles with each further failure. */
const MIN_DOWN_MS = 1_000;
const MAX_DOWN_MS = 8_000;
/**
 * Addresses that a call tries in one round, the first ones of its order. A call without a key begins each round with the
 * next address, so that others come in; one with a key stays with those that its key prefers.
 */
export const MAX_TRIED = 64;
/** Learned addresses that a call tries before a given one, at most: many dead entries hold nobody up. */
const TRIED_BEFORE_GIVEN = 8;

/**
 * @typedef {object} Known What is known of schedulers, by address: KnownSchedulers.
 * @property {string[]} addresses
 * @property {Map<string, number>} loads Sequences that run or wait there, of all clients.
 * @property {Set<string>} draining
 * @property {Map<string, Set<string>>} adapters
 * @property {Map<string, string>} models Fingerprints.
 * @property {Set<string>} foreign Those of another model than the present one, for new calls that none of the others takes.
 */

/**
 * A client's addresses. A call with a key begins where that key's prompts are cached, unless the client has too many live
 * calls there (AFFINITY in scheduler.proto); one without begins at the next address in turn. Those that drain or are down
 * are tried last.
 */
export class Rotation {
  #next = 0;
  /** @type {Map<string, number>} */
  #live = new Map(); // calls
  /** @type {Map<string, { until: number, forMs: number }>} */
  #down = new Map();
  /** @type {Known} */
  #known;

  /** @param {string[]} addresses */
  constructor(addresses) {
    this.given = new Set(addresses);
    this.#known = { addresses, loads: new Map(), draining: new Set(), adapters: new Map(), models: new Map(), foreign: new Set() };
  }

  /** @param {Known} known Calls that begin from now on try these. */
  use({ addresses, loads, draining, adapters, models, foreign }) {
    this.#known = { addresses, loads, draining, adapters, models, foreign };
    this.#down = new Map([...this.#down].filter(([address]) => addresses.includes(address)));
  }

  /** @param {string} address Whether it is still one of them. */
  has(address) {
    return this.#known.addresses.includes(address);
  }

  /** @param {string} address Whether it has another model than the present one. */
  isForeign(address) {
    return this.#known.foreign.has(address);
  }

  /** @param {string} address Whether no call is there. */
  isIdle(address) {
    return !this.#live.has(address);
  }

  /** @param {string} address A call begins there. */
  began(address) {
    this.#live.set(address, this.#liveAt(address) + 1);
  }

  /** @param {string} address It has ended. */
  ended(address) {
    const left = this.#liveAt(address) - 1;
    if (left > 0) this.#live.set(address, left);
    else this.#live.delete(address);
  }

  /**
   * The addresses that a call should try, in their order: all, up to MAX_TRIED.
   *
   * @param {number} now
   * @param {Buffer} [key] Of `affinityKey`.
   * @param {string} [model] What the request names: those that have an adapter of this name come before those that have not.
   * @param {string} [begunWith] The fingerprint of a stream's model, which alone can continue it. Other calls try foreign
   *   addresses where all others are down or drain.
   */
  order(now, key, model = '', begunWith = '') {
    const { draining, adapters } = this.#known;
    const addresses = this.#candidates(now, begunWith);
    const found = addresses.filter((one) => adapters.get(one)?.has(model));
    const holders = new Set(found.length > 0 ? found : addresses);
    const turn = key && addresses.length > 1 ? this.#preferred(key, addresses, holders) : this.#inTurn(addresses);
    const rank = (/** @type {string} */ one) =>
      4 * Number(this.isDown(one, now)) + 2 * Number(draining.has(one)) + Number(!holders.has(one));
    turn.sort((a, b) => rank(a) - rank(b));
    const given = Math.max(turn.findIndex((one) => this.given.has(one)), 0);
    turn.splice(Math.min(given, TRIED_BEFORE_GIVEN), 0, ...turn.splice(given, 1));
    return turn.slice(0, MAX_TRIED);
  }

  /**
   * @param {number} now
   * @param {string} begunWith
   */
  #candidates(now, begunWith) {
    const { addresses, models, foreign, draining } = this.#known;
    if (begunWith) {
      const same = addresses.filter((one) => (models.get(one) ?? begunWith) === begunWith);
      return same.length > 0 ? same : addresses;
    }
    const present = addresses.filter((one) => !foreign.has(one));
    return present.some((one) => !this.isDown(one, now) && !draining.has(one)) ? present : addresses;
  }

  /**
   * @param {Buffer} key
   * @param {string[]} addresses
   * @param {Set<string>} holders
   */
  #preferred(key, addresses, holders) {
    const { draining, loads } = this.#known;
    const order = preference(key, addresses);
    const takers = order.filter((one) => holders.has(one) && !draining.has(one));
    const first = choice(takers.length > 0 ? takers : order, (one) => this.#liveAt(one), (one) => loads.get(one) ?? 0);
    return [first, ...order.filter((one) => one !== first)];
  }

  /** @param {string[]} addresses */
  #inTurn(addresses) {
    const begin = this.#next % addresses.length;
    this.#next = begin + 1;
    return [...addresses.slice(begin), ...addresses.slice(0, begin)];
  }

  /** @param {string} address It has answered. */
  up(address) {
    this.#down.delete(address);
  }

  /**
   * It could not be reached, or takes no requests. Of several calls that find out, the first counts.
   *
   * @param {string} address
   * @param {number} now
   */
  down(address, now) {
    if (this.isDown(address, now)) return;
    const forMs = Math.min(Math.max(2 * (this.#down.get(address)?.forMs ?? 0), MIN_DOWN_MS), MAX_DOWN_MS);
    this.#down.set(address, { until: now + forMs, forMs });
  }

  /**
   * @param {string} address
   * @param {number} now
   */
  isDown(address, now) {
    return (this.#down.get(address)?.until ?? now) > now;
  }

  /** @param {string} address */
  #liveAt(address) {
    return this.#live.get(address) ?? 0;
  }
}
