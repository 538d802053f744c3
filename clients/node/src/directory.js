// The schedulers that a client uses: those its user gave, and those that they know. No I/O: time is passed in, in ms.
// DIRECTORY in scheduler.proto. Entries are claims of whoever wrote them: here is decided which get a token.

import { learned, mayGetAToken } from './entries.js';

/** @typedef {import('./entries.js').DirectoryUse} DirectoryUse */
/** @typedef {import('./entries.js').Learned} Learned */

/** @type {DirectoryUse[]} */
const USES = ['off', 'safe', 'any'];
/** Between two looks into a directory, while calls begin. */
const LOOK_EVERY_MS = 10_000;
/** From a look that failed to the next one, at another scheduler. */
const LOOK_AGAIN_MS = 1_000;
/** For which a scheduler that has said that it has no directory is not asked again. */
const NO_DIRECTORY_MS = 300_000;
/** Rounds of looks, one at each given scheduler, after which older words are dropped for newer ones. */
const VIEW_ROUNDS = 3;
const MAX_LEARNED = 1024; // schedulers
/** Entries of one look that are read: as many as a directory has at most. */
export const MAX_ENTRIES = 10_000;
const MAX_REMEMBERED = 1024; // liars; callers whose looks were refused

/**
 * The addresses given by the user, which stay, and those learned from the directories of schedulers.
 *
 * A learned address is used only for a model of the same name as that of the scheduler which listed it, and for another
 * fingerprint only once none of the present one takes calls (`foreign`). With 'safe' it is used over TLS, by the authority
 * that the client trusts already and under the name that the entry gives; or without TLS on loopback, if the scheduler
 * which listed it is on this machine too. With 'any' also without TLS elsewhere, if the client has no authority. A
 * scheduler is known once, however many addresses it has.
 */
export class KnownSchedulers {
  #hasAuthority;
  #use;
  /** @type {Map<string, { at: number, entries: Learned[] }>} */
  #views = new Map(); // by address: what the scheduler there listed of others
  /** @type {Map<string, Learned>} */
  #own = new Map(); // by given address: what it says of itself
  /** @type {Set<string>} */
  #liars = new Set(); // starts of schedulers
  /** @type {Set<string>} */
  #checked = new Set(); // starts that serve the model of their entry
  /** @type {Map<string, Learned>} */
  #learned = new Map();
  #nextLook;
  /** @type {Map<string, number>} */
  #without = new Map(); // address: until when it is not asked for a directory
  /** @type {Map<string, number>} */
  #refused = new Map(); // caller: until when it does not look
  #turn = 0;
  #model = ''; // the fingerprint that new calls get
  /** @type {Set<string>} */
  #silent = new Set(); // those at which looks failed since the last one that did not

  /**
   * @param {string[]} given
   * @param {boolean} hasAuthority Connections are encrypted, and certificates checked.
   * @param {DirectoryUse} use
   */
  constructor(given, hasAuthority, use) {
    if (!USES.includes(use)) throw new RangeError(`directory must be one of ${USES.join(', ')}`);
    this.given = given;
    this.#hasAuthority = hasAuthority;
    this.#use = use;
    this.#nextLook = use === 'off' ? Infinity : 0;
    /** Whether a look has ended, well or not. */
    this.hasLooked = use === 'off';
  }

  /**
   * Whether it is time for a look into a directory; if so, the time of the next one is set.
   *
   * @param {number} now
   * @param {string} caller
   */
  isTimeToLook(now, caller) {
    if (now < Math.max(this.#nextLook, this.#refused.get(caller) ?? 0)) return false;
    this.#nextLook = now + LOOK_EVERY_MS;
    return true;
  }

  /**
   * Whom to ask: a given one that is up, in turn; else a learned one; else one that is down. One at which a look has just
   * failed comes last, though it may count as up again by now.
   *
   * @param {number} now
   * @param {(address: string) => boolean} isDown
   */
  teller(now, isDown) {
    this.#turn += 1;
    const { addresses, given, foreign } = this;
    const may = addresses.filter((one) => (this.#without.get(one) ?? 0) <= now);
    const asked = may.length > 0 ? may : given;
    const begin = this.#turn % asked.length;
    const rank = (/** @type {string} */ one) =>
      8 * Number(this.#silent.has(one)) + 4 * Number(isDown(one)) + 2 * Number(foreign.has(one)) + Number(!given.includes(one));
    return [...asked.slice(begin), ...asked.slice(0, begin)].reduce((best, one) => (rank(one) < rank(best) ? one : best));
  }

  /**
   * The scheduler at `teller` has listed these entries.
   *
   * @param {string} teller
   * @param {any[]} entries SchedulerEntries.
   * @param {number} now
   */
  saw(teller, entries, now) {
    const listed = entries.slice(0, MAX_ENTRIES);
    const own = listed.find(({ writtenBy }) => !writtenBy);
    this.hasLooked = true;
    this.#silent.clear();
    if (!own) return;
    const itself = learned(own);
    if (this.given.includes(teller)) this.#own.set(teller, itself);
    else if (itself.model && !this.isWhatItSays(teller, own.modelFingerprint)) return this.distrust(teller);
    if (!itself.model) return; // it is loading: what it listed before stays
    this.#model = itself.model;
    const others = listed.filter((entry) => {
      const isWhole = entry.instance && entry.modelFingerprint.length > 0;
      const isOther = entry.instance !== own.instance || entry.address === teller;
      return isWhole && isOther && entry.model === own.model && mayGetAToken(entry, teller, this.#hasAuthority, this.#use);
    });
    this.#views.set(teller, { at: now, entries: others.map(learned) });
    this.#join(now);
  }

  /**
   * The directory of `teller` could not be had: what it listed is kept if it is all.
   *
   * @param {string} teller
   * @param {number} now
   */
  lost(teller, now) {
    this.hasLooked = true;
    this.#silent.add(teller);
    const areAll = this.addresses.every((one) => this.#silent.has(one));
    if (areAll) this.#silent.clear();
    this.#nextLook = now + (areAll ? LOOK_EVERY_MS : LOOK_AGAIN_MS);
    if (this.#views.size > 1) {
      this.#views.delete(teller);
      this.#join(now);
    }
  }

  /**
   * A scheduler did not let this caller look: others may look at once.
   *
   * @param {string} caller
   * @param {number} now
   */
  refused(caller, now) {
    this.hasLooked = true;
    this.#nextLook = Math.min(this.#nextLook, now);
    this.#refused.set(caller, now + LOOK_EVERY_MS);
    bound(this.#refused);
  }

  /**
   * The scheduler at `teller` has no directory.
   *
   * @param {string} teller
   * @param {number} now
   */
  hasNone(teller, now) {
    this.hasLooked = true;
    this.#views.delete(teller);
    this.#join(now);
    const known = this.addresses;
    this.#without = new Map([...this.#without].filter(([one]) => known.includes(one)));
    this.#without.set(teller, now + NO_DIRECTORY_MS);
    this.#nextLook = this.#without.size < known.length ? now : Math.min(...this.#without.values());
  }

  /**
   * What is at a learned address is not what its entry says: it is used no more, until it is another start of a
   * scheduler: an instance of the same address.
   *
   * @param {string} address
   */
  distrust(address) {
    const one = this.#learned.get(address);
    if (!one) return;
    this.#liars.add(one.start);
    bound(this.#liars);
    this.#join();
  }

  /** All that are used: the given ones, then the learned ones. */
  get addresses() {
    return [...this.given, ...this.#learned.keys()];
  }

  /** Running and waiting sequences of those that a directory has. */
  get loads() {
    return this.#each(({ load }) => load);
  }

  /** Those that take no new requests. */
  get draining() {
    return new Set([...this.#each(({ drains }) => drains)].filter(([, drains]) => drains).map(([address]) => address));
  }

  /** Names that those have which a directory has. */
  get adapters() {
    return this.#each(({ adapters }) => adapters);
  }

  /** Fingerprints, in hex, of the models of those that a directory has. */
  get models() {
    return this.#each(({ model }) => model);
  }

  /** Learned ones with another model of the same name, as in the middle of a fleet's update. */
  get foreign() {
    return new Set([...this.#learned].filter(([, { model }]) => model !== this.#model).map(([address]) => address));
  }

  /**
   * The name of the certificate there, '' without TLS or for a given one; undefined: it is not known, or no more.
   *
   * @param {string} address
   */
  tlsName(address) {
    return this.given.includes(address) ? '' : this.#learned.get(address)?.tlsName;
  }

  /**
   * Whether a scheduler that reports this model may be the one of the entry; given ones always are.
   *
   * @param {string} address
   * @param {Buffer} modelFingerprint
   */
  isWhatItSays(address, modelFingerprint) {
    if (this.given.includes(address)) return true;
    const one = this.#learned.get(address);
    if (one?.model !== modelFingerprint.toString('hex')) return false;
    this.#checked.add(one.start);
    return true;
  }

  /**
   * Whether it has reported the model of its entry since its start, or is a given one.
   *
   * @param {string} address
   */
  isChecked(address) {
    const one = this.#learned.get(address);
    return this.given.includes(address) || (one !== undefined && this.#checked.has(one.start));
  }

  /**
   * Of all that is known, by address; of the given ones, what they say of themselves.
   *
   * @template T
   * @param {(one: Learned) => T} what
   */
  #each(what) {
    return new Map([...this.#own, ...this.#learned].map(([address, one]) => [address, what(one)]));
  }

  /**
   * Join what all have listed: a scheduler is known while one of them lists it. The word of a given scheduler counts more
   * than that of a learned one, and a newer more than an older.
   *
   * @param {number} [now]
   */
  #join(now) {
    if (now !== undefined && this.#views.size > 0) {
      const newest = Math.max(...[...this.#views.values()].map(({ at }) => at));
      const oldest = Math.min(newest, now - VIEW_ROUNDS * LOOK_EVERY_MS * this.given.length);
      this.#views = new Map([...this.#views].filter(([, { at }]) => at >= oldest));
    }
    const isGiven = (/** @type {string} */ teller) => Number(this.given.includes(teller));
    const views = [...this.#views].sort(([a, one], [b, other]) => isGiven(a) - isGiven(b) || one.at - other.at);
    const listed = new Map(views.flatMap(([, { entries }]) => entries.map((one) => [one.address, one])));
    const isForeign = (/** @type {Learned} */ { model }) => Number(model !== this.#model);
    const known = new Set([...this.#own.values()].map(({ instance }) => instance));
    this.#learned = new Map();
    for (const one of [...listed.values()].sort((a, b) => isForeign(a) - isForeign(b) || (a.address < b.address ? -1 : 1))) {
      if (this.given.includes(one.address) || this.#liars.has(one.start) || known.has(one.instance)) continue;
      if (this.#learned.size === MAX_LEARNED) break;
      this.#learned.set(one.address, one);
      known.add(one.instance);
    }
    const starts = new Set([...this.#learned.values()].map(({ start }) => start));
    this.#checked = new Set([...this.#checked].filter((one) => starts.has(one)));
  }
}

/**
 * Forget the oldest above MAX_REMEMBERED.
 *
 * @param {Set<string> | Map<string, unknown>} remembered
 */
function bound(remembered) {
  for (const oldest of remembered.keys()) {
    if (remembered.size <= MAX_REMEMBERED) return;
    remembered.delete(oldest);
  }
}
