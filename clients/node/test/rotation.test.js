// Where the calls of a client of several schedulers begin, and where they go next.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { affinityKey } from '../src/affinity.js';
import { KnownSchedulers } from '../src/directory.js';
import { PacelineError } from '../src/errors.js';
import { Attempts } from '../src/failover.js';
import { MAX_TRIED, Rotation } from '../src/rotation.js';
import { entry } from './directories.js';

const GIVEN = '127.0.0.1:1';
const KEYS = Array.from({ length: 20 }, (_, i) => affinityKey({}, `${i}`));
const REFUSED = new PacelineError('draining', { code: 'UNAVAILABLE', reason: 'DRAINING', retryAfterMs: 1000 });
const LOST = new PacelineError('connection reset', { code: 'UNAVAILABLE' });

/**
 * What a client knows when the given one has listed these.
 *
 * @param {any[]} others
 * @param {object} [own]
 */
function known(others, own) {
  const schedulers = new KnownSchedulers([GIVEN], false, 'safe');
  schedulers.saw(GIVEN, [{ ...entry(GIVEN), writtenBy: '', ...own }, ...others].map((one) => ({ tlsName: '', adapters: [], ...one })), 0);
  return schedulers;
}

/** @param {KnownSchedulers} schedulers */
function rotationOf(schedulers) {
  const rotation = new Rotation([GIVEN]);
  rotation.use(schedulers);
  return rotation;
}

/** @param {Rotation} rotation @param {string} [model] */
const call = (rotation, model) => new Attempts(rotation, 0, { failoverTimeoutMs: 9000 }, KEYS[0], model);

test('an address that is down comes last for a while, and longer each time', () => {
  const rotation = new Rotation(['a:1', 'b:1']);
  const firsts = (/** @type {number} */ now) => new Set(Array.from({ length: 4 }, () => rotation.order(now)[0]));
  rotation.down('a:1', 0);
  rotation.down('a:1', 500); // another call has found out too
  assert.deepEqual(firsts(999), new Set(['b:1']));
  assert.equal(firsts(1000).size, 2);
  rotation.down('a:1', 1000);
  assert.deepEqual(firsts(2999), new Set(['b:1']));
  rotation.up('a:1');
  assert.equal(firsts(2999).size, 2);
});

test('a key decides where a call begins, unless too many live calls are there', () => {
  const [one, two, three] = ['10.0.0.1:50051', '10.0.0.2:50051', '10.0.0.3:50051'];
  const rotation = new Rotation([one, two, three]);
  const key = affinityKey({ text: 'hello' }); // the order in the contract: 2 3 1
  assert.equal(key.subarray(0, 8).toString('hex'), '8c6440588f7e9b69');
  assert.deepEqual(rotation.order(0, key), [two, three, one]);
  rotation.began(two); // of 2 calls with the next one: at most 1 each
  assert.deepEqual(rotation.order(0, key), [three, two, one]);
  rotation.ended(two);
  rotation.down(two, 0);
  assert.deepEqual(rotation.order(0, key), [three, one, two]);
});

test('another fingerprint gets new calls once the present one takes none, and no stream that began', () => {
  const [old, other] = ['127.0.0.1:2', '127.0.0.1:3'];
  const modelFingerprint = Buffer.from('new');
  const rotation = rotationOf(known([entry(old), entry(other, { modelFingerprint })]));
  assert.deepEqual(new Set(KEYS.map((key) => rotation.order(0, key)[0])), new Set([GIVEN, old]));
  const [stream, unary] = [call(rotation), call(rotation)];
  stream.answered(entry(old).modelFingerprint);
  const tried = [unary.address];
  for (let i = 0; i < 2; i++) {
    assert.equal(unary.failed(REFUSED, 0), 0);
    tried.push(unary.address);
  }
  assert.deepEqual([new Set(tried.slice(0, 2)), tried[2]], [new Set([GIVEN, old]), other]);
  assert.equal(call(rotation).address, other); // at once, as long as the others take none
  const went = Array.from({ length: 3 }, () => {
    stream.failed(LOST, 0);
    return stream.address;
  });
  assert.deepEqual(new Set(went), new Set([GIVEN, old]));
});

test('calls go by the load that the directory tells, to those that have the adapter, and last to those that drain', () => {
  const [busy, last] = ['127.0.0.1:2', '127.0.0.1:3'];
  const rotation = rotationOf(known([entry(busy, { load: { running: 2, waiting: 1 } }), entry(last, { state: 'SCHEDULER_STATE_DRAINING' })]));
  assert.ok([1, 2, 3].every(() => rotation.order(0).at(-1) === last));
  // The bound is 1.25 of the mean, rounded up: `busy` has more than its share.
  for (const key of KEYS) assert.equal(rotation.order(0, key)[0], GIVEN);
  const poets = rotationOf(known([entry(busy, { adapters: ['poet'] })], { load: { running: 0, waiting: 0 } }));
  for (const key of [undefined, ...KEYS]) assert.equal(poets.order(0, key, 'poet')[0], busy);
  assert.equal(new Set([1, 2].map(() => poets.order(0, undefined, 'm')[0])).size, 2);
});

test('an address is idle when no call is there, whether it is known or not', () => {
  const rotation = rotationOf(known([entry('127.0.0.1:2')]));
  rotation.began('127.0.0.1:2');
  rotation.use(known([]));
  assert.ok(!rotation.has('127.0.0.1:2') && !rotation.isIdle('127.0.0.1:2'));
  rotation.ended('127.0.0.1:2');
  assert.ok(rotation.isIdle('127.0.0.1:2'));
});

test('many learned addresses do not keep a call from a given one', () => {
  const rotation = rotationOf(known(Array.from({ length: 200 }, (_, i) => entry(`127.0.0.1:${i + 2}`))));
  for (const key of [undefined, ...KEYS]) {
    const order = rotation.order(0, key);
    assert.equal(order.length, MAX_TRIED);
    assert.ok(order.indexOf(GIVEN) <= 8 && order.includes(GIVEN));
  }
});

test('what a learned scheduler does not know or let in, a given one decides', () => {
  for (const code of ['NOT_FOUND', 'UNIMPLEMENTED', 'UNAUTHENTICATED', 'PERMISSION_DENIED']) {
    const error = new PacelineError('why', { code });
    const poets = [2, 3].map((port) => entry(`127.0.0.1:${port}`, { adapters: ['poet'] }));
    const attempts = call(rotationOf(known(poets)), 'poet');
    assert.notEqual(attempts.address, GIVEN);
    assert.equal(attempts.failed(error, 0), 0);
    assert.equal(attempts.address, GIVEN);
    assert.throws(() => attempts.failed(error, 0), error);
    const begun = call(rotationOf(known(poets)), 'poet');
    begun.answered();
    assert.throws(() => begun.failed(error, 0), error);
  }
});

test('an address that the directory has no more is not tried', () => {
  const others = [2, 3, 4].map((port) => entry(`127.0.0.1:${port}`, { adapters: ['poet'] }));
  const rotation = rotationOf(known(others));
  for (const leave of /** @type {((one: Attempts) => unknown)[]} */ ([(one) => one.skip(0), (one) => one.failed(REFUSED, 0)])) {
    rotation.use(known(others));
    const attempts = call(rotation, 'poet');
    rotation.use(known(others.filter(({ address }) => address.endsWith('4') && address !== attempts.address)));
    const left = rotation.order(0).length;
    const tried = [];
    assert.throws(() => {
      for (leave(attempts); ; attempts.failed(REFUSED, 0)) tried.push(attempts.address);
    }, REFUSED);
    assert.ok(tried.every((one) => rotation.has(one)), `${tried}`);
    assert.equal(tried.length, left);
  }
});
