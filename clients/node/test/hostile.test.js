// Directories and entries that lead astray: nobody gets a token or a stream by a lie.

import assert from 'node:assert/strict';
import { EventEmitter, once } from 'node:events';
import net from 'node:net';
import { test } from 'node:test';

import { Client } from '../src/index.js';
import { authority } from './certificates.js';
import { entry, Knowing, knowing, learned, SEED, stream, STREAMS, streams } from './directories.js';
import { idsOf } from './fakes.js';

const TOKEN = 'a-token-of-many-bytes';

test('a poisoned entry gets no byte of a token', async () => {
  const ours = authority('127.0.0.1', 'fleet.test', 'attacker.test');
  const [foreign] = authority('fleet.test').credentials;
  const received = /** @type {Buffer[]} */ ([]);
  const bare = net.createServer((socket) => {
    socket.on('error', () => {});
    socket.once('data', (bytes) => socket.destroy(received.push(bytes) && undefined));
  });
  await once(bare.listen(0, '127.0.0.1'), 'listening');
  const all = Array.from({ length: 5 }, () => new Knowing());
  const [given, honest, ofOtherName, stranger, plain] = all;
  await knowing(all, async () => {
    const port = /** @type {net.AddressInfo} */ (bare.address()).port;
    const addresses = [honest, ofOtherName, stranger, plain].map(({ address }) => address);
    given.others = [
      ...[...addresses, `127.0.0.1:${port}`].map((address) => entry(address, { tlsName: 'fleet.test' })),
      entry(plain.address.replace('127.0.0.1', 'localhost')), // would be sent in the clear
    ];
    const client = new Client(given.address, { token: TOKEN, tls: { ca: ours.ca } });
    await learned(client, 6);
    await streams(client);
    for (let i = 0; i < STREAMS; i++) await client.complete({ prompt: 'x', seed: SEED, affinityKey: `${i}` });
    for (const one of [given, honest]) assert.deepEqual(new Set(one.callers), new Set([`Bearer ${TOKEN}`]));
    for (const one of [ofOtherName, stranger, plain]) assert.deepEqual([one.callers, one.looks], [[], 0]);
    assert.equal(received[0][0], 0x16); // a TLS handshake, which nobody answers
    assert.ok(received.every((bytes) => !bytes.includes(TOKEN)));
    client.close();
  }, [...ours.credentials, foreign]);
  bare.close();
});

test('without TLS a token stays on this machine, unless its user says otherwise', async () => {
  const given = new Knowing();
  await knowing([given], async () => {
    given.others = [entry('192.0.2.1:1'), entry('127.0.0.1:2', { tlsName: 'fleet.test' })];
    const safe = new Client(given.address);
    await safe.abort([]); // which looks first
    assert.deepEqual(safe.addresses, [given.address]);
    safe.close();
    const any = new Client(given.address, { directory: 'any' });
    await learned(any, 2);
    assert.deepEqual(any.addresses, [given.address, '192.0.2.1:1']);
    any.close();
  });
});

for (const unary of [false, true]) {
  test(`an entry that lies about its model serves nobody: ${unary ? 'unary calls' : 'streams'}`, async () => {
    const [given, liar] = [new Knowing(), new Knowing({ model: 'another model' })];
    await knowing([given, liar], async () => {
      given.others = [entry(liar.address)];
      const client = new Client(given.address);
      await client.abort([]);
      liar.callers.length = 0;
      assert.equal(client.addresses.length, 2);
      for (let i = 0; i < STREAMS; i++) {
        const options = { prompt: 'x', seed: SEED, affinityKey: `${i}` };
        assert.deepEqual(unary ? (await client.complete(options)).tokenIds : await stream(client, options), idsOf(SEED, 0));
      }
      assert.deepEqual(client.addresses, [given.address]);
      assert.equal(liar.callers.length, 1);
      assert.equal(liar.requests.length, unary ? 0 : 1);
      client.close();
    });
  });
}

const EMPTY = Buffer.from('0a00'.repeat((2 << 20) - 100), 'hex'); // entries without anything
const ENDLESS = /** @type {[string, (call: any) => void][]} */ ([
  ['empty messages', (call) => pour(call, {})],
  ['ten thousand entries at a time', (call) => pour(call, EMPTY.subarray(0, 20_000))],
  ['a message of two million entries', (call) => pour(call, EMPTY)],
  ['what is no message', (call) => pour(call, Buffer.from([0xff, 0xff]))],
]);

/**
 * Write a message as often as it is taken.
 *
 * @param {any} call
 * @param {any} message
 */
function pour(call, message) {
  const more = () => {
    while (!call.cancelled && call.write(message));
    if (!call.cancelled) call.once('drain', more);
  };
  more();
}

for (const [what, watch] of ENDLESS) {
  test(`a directory that never ends takes no call along, and the look ends: ${what}`, async () => {
    const looks = new EventEmitter();
    const given = new Knowing({ watch: (call) => watch(call.once('cancelled', () => looks.emit('end'))) });
    await knowing([given], async () => {
      const client = new Client(given.address);
      const began = performance.now();
      await Promise.all([once(looks, 'end'), stream(client)]);
      await streams(client);
      assert.ok(performance.now() - began < 4_000, `${performance.now() - began} ms`);
      assert.equal(client.addresses.length, 1);
      client.close();
    });
  });
}

test('dead, senseless and its own addresses of a directory harm nobody', async () => {
  const [given, other] = [new Knowing(), new Knowing()];
  await knowing([given, other], async () => {
    const dead = Array.from({ length: 20 }, (_, i) => `127.0.0.${i + 2}:1`);
    const senseless = [...Array.from({ length: 12 }, (_, i) => `[${i}]:1`), '[:::]:1', '..:1'];
    for (const [directory, others] of /** @type {['safe' | 'any', string[]][]} */ ([
      ['safe', [...dead, '127.0.0.1:99999', '127.0.0.1:0', other.address]],
      ['any', senseless],
    ])) {
      given.others = [entry(given.address, { instance: 'of own:1' }), ...others.map((one) => entry(one))];
      const client = new Client(given.address, { directory });
      await client.abort([]);
      assert.equal(client.addresses.length, 1 + others.length);
      await streams(client);
      for (let i = 0; i < STREAMS; i++) await client.complete({ prompt: 'x', seed: SEED, affinityKey: `${i}` });
      client.close();
    }
  });
});
