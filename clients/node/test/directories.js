// Schedulers in this process that have directories, whatever these say, and calls of a client that learns from them.

import assert from 'node:assert/strict';

import { ideal, idsOf, listen } from './fakes.js';

export const SEED = 3n;
export const STREAMS = 24;
const MODEL = Buffer.from('model'); // of the ideal ones

/**
 * An entry of a directory.
 *
 * @param {string} address
 * @param {object} [fields]
 */
export function entry(address, fields) {
  return { address, model: 'm', modelFingerprint: MODEL, instance: `of ${address}`, writtenBy: 'somebody', ...fields };
}

/** A scheduler that lists `others`, and knows who calls it. */
export class Knowing {
  /** @type {any[]} */
  requests = []; // that generate
  /** @type {any[]} */
  callers = []; // what all calls but looks have as `authorization`
  looks = 0;
  address = '';
  stop = () => {};
  /** @type {Record<string, any>} */
  methods;

  /**
   * @param {{ which?: number, model?: string, script?: [number, object][], others?: any[], watch?: (call: any) => void }} [kind]
   *   `model`: what it serves. `watch`: answers looks, in place of the entries of `others`.
   */
  constructor({ which = 0, model = 'model', script = [], others = [], watch } = {}) {
    this.others = others;
    const modelFingerprint = Buffer.from(model);
    this.methods = {
      ...ideal(which, script, this.requests),
      getModelInfo: (/** @type {any} */ _, /** @type {any} */ answer) => answer(null, { modelFingerprint }),
    };
    for (const [name, method] of Object.entries(this.methods)) {
      this.methods[name] = (/** @type {any} */ call, /** @type {any} */ answer) => {
        this.callers.push(call.metadata.get('authorization')[0]);
        method(call, answer);
      };
    }
    const { generate } = this.methods;
    this.methods.generate = (/** @type {any} */ call) => {
      const write = call.write.bind(call);
      call.write = (/** @type {any} */ { started, ...others }) =>
        write(started ? { ...others, started: { ...started, modelFingerprint } } : others);
      generate(call);
    };
    this.methods.watchSchedulers = (/** @type {any} */ call) => {
      this.looks += 1;
      if (watch) return watch(call);
      call.write({ entries: [entry('own:1', { writtenBy: '' })] });
      call.write({ entries: this.others, complete: true }); // and changes later: the stream stays open
    };
  }
}

/**
 * Serve schedulers while `use` runs.
 *
 * @param {Knowing[]} schedulers
 * @param {() => Promise<unknown>} use
 * @param {import('@grpc/grpc-js').ServerCredentials[]} [credentials]
 */
export async function knowing(schedulers, use, credentials = []) {
  const started = [];
  try {
    for (const [which, one] of schedulers.entries()) {
      const { address, stop } = await listen(one.methods, '127.0.0.1:0', credentials[which]);
      started.push(stop);
      Object.assign(one, { address, stop });
    }
    await use();
  } finally {
    for (const stop of started) stop();
  }
}

/** @typedef {import('../src/index.js').Client} Client */

/**
 * The tokens of a stream.
 *
 * @param {Client} client
 * @param {object} [options]
 */
export async function stream(client, options) {
  const ids = [];
  for await (const event of client.generate({ prompt: 'x', seed: SEED, ...options })) {
    if (event.type === 'delta') ids.push(...event.tokenIds);
  }
  return ids;
}

/** @param {Client} client Streams of many keys, each whole. */
export async function streams(client) {
  for (let i = 0; i < STREAMS; i++) assert.deepEqual(await stream(client, { affinityKey: `${i}` }), idsOf(SEED, 0));
}

/**
 * Call until the client uses so many.
 *
 * @param {Client} client
 * @param {number} count
 */
export async function learned(client, count) {
  while (client.addresses.length !== count) await client.complete({ prompt: 'x', seed: SEED });
}
