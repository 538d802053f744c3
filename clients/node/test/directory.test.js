// Which schedulers of a directory a client uses: the cases that the clients of all languages play.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { KnownSchedulers } from '../src/directory.js';
import { isLoopback } from '../src/names.js';

const LOOKS = 6; // as many as the schedulers that are asked in turn, and more
const CASES = JSON.parse(readFileSync(new URL('../../../tests/scenario/directory.json', import.meta.url), 'utf8'));

/** @param {any} told An entry, by the names and defaults of directory.json. */
function entry({ address, own, model = 'm', fingerprint = 'print', instance = `of ${address}`, tls_name: tlsName = '', state = 'SERVING', running = 0, waiting = 0, adapters = [] }) {
  return {
    address,
    model,
    modelFingerprint: Buffer.from(fingerprint),
    instance,
    writtenBy: own ? '' : 'somebody',
    tlsName,
    state: `SCHEDULER_STATE_${state}`,
    load: { running, waiting },
    adapters,
  };
}

/**
 * What a step finds; undefined for one that only tells something.
 *
 * @param {KnownSchedulers} known
 * @param {any} step
 * @returns {unknown}
 */
function outcome(known, step) {
  const at = 1000 * (step.at_s ?? 0);
  const [what] = Object.keys(step);
  switch (what) {
    case 'saw': {
      const [begin, end] = step.ports ?? [0, 0];
      const further = Array.from({ length: end - begin }, (_, i) => ({ address: `127.0.0.1:${begin + i}` }));
      return known.saw(step.saw, [...step.entries, ...further].map(entry), at);
    }
    case 'lost': return known.lost(step.lost, at);
    case 'has_none': return known.hasNone(step.has_none, at);
    case 'refused': return known.refused(step.refused, at);
    case 'distrust': return known.distrust(step.distrust);
    case 'addresses': return known.addresses.toSorted();
    case 'draining': return [...known.draining].sort();
    case 'foreign': return [...known.foreign].sort();
    case 'count': return known.addresses.length;
    case 'loads': return Object.fromEntries(known.loads);
    case 'adapters': return Object.fromEntries([...known.adapters].map(([address, names]) => [address, [...names].sort()]));
    case 'tls_name': return [step.tls_name[0], known.tlsName(step.tls_name[0]) ?? null];
    case 'reports': return known.isWhatItSays(step.reports, Buffer.from(step.fingerprint));
    case 'checked': return known.isChecked(step.checked);
    case 'asks': {
      const isDown = (/** @type {string} */ address) => (step.down ?? []).includes(address);
      return [...new Set(Array.from({ length: LOOKS }, () => known.teller(at, isDown)))].sort();
    }
    case 'time_to_look_s': return known.isTimeToLook(1000 * step.time_to_look_s, step.caller ?? 'good');
    default: throw new Error(`no such step: ${what}`);
  }
}

/** @param {any} step What it expects. */
function expected(step) {
  const [[what, value]] = Object.entries(step);
  if ('is' in step) return step.is;
  if (['addresses', 'draining', 'foreign', 'asks'].includes(what)) return value.toSorted();
  return ['count', 'loads', 'adapters', 'tls_name'].includes(what) ? value : undefined;
}

for (const { name, given, tls, use, steps } of CASES) {
  test(`a directory: ${name}`, () => {
    const known = new KnownSchedulers(given, tls, use);
    for (const step of steps) assert.deepEqual(outcome(known, step), expected(step), JSON.stringify(step).slice(0, 500));
  });
}

test('another use of directories than those that there are is refused', () => {
  for (const use of /** @type {any[]} */ (['on', true, null, ''])) {
    assert.throws(() => new KnownSchedulers(['127.0.0.1:1'], false, use), /directory must be one of off, safe, any/);
  }
});

test('loopback is what nobody elsewhere reaches', () => {
  for (const address of ['127.0.0.1:1', '127.9.9.9:1', '[::1]:1', '[0:0::1]:1', '[::ffff:127.0.0.1]:1', 'localhost:1', 'unix:/a', 'unix-abstract:a']) {
    assert.ok(isLoopback(address), address);
  }
  for (const address of ['10.0.0.1:1', '0.0.0.0:1', '[::]:1', '[::2]:1', '127.0.0.1.example:1', 'localhost.example:1', '[1]:1', '127.1:1']) {
    assert.ok(!isLoopback(address), address);
  }
});
