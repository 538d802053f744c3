// Clients that know one scheduler learn the others from its directory.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { EventEmitter, once } from 'node:events';
import net from 'node:net';
import { mock, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import grpc from '@grpc/grpc-js';

import { affinityKey, preference } from '../src/affinity.js';
import { Client } from '../src/index.js';
import { entry, Knowing, knowing, learned, SEED, stream, STREAMS, streams } from './directories.js';
import { BROKEN, idsOf } from './fakes.js';

/**
 * A key whose calls begin at the first.
 *
 * @param {string} first
 * @param {string[]} addresses
 */
function keyOf(first, addresses) {
  for (let i = 0; ; i++) if (preference(affinityKey({}, `${i}`), addresses)[0] === first) return `${i}`;
}

test('a client learns the other scheduler, and a stream goes on there when the given one dies', async () => {
  const [given, other] = [new Knowing(), new Knowing()];
  const { generate } = given.methods;
  given.methods.generate = (/** @type {any} */ call) => {
    const write = call.write.bind(call);
    let left = 3;
    call.write = (/** @type {any} */ message) => left-- > 0 && write(message);
    call.end = () => sleep(50).then(given.stop);
    generate(call);
  };
  await knowing([given, other], async () => {
    given.others = [entry(other.address)];
    const client = new Client(given.address);
    assert.deepEqual(client.addresses, [given.address]);
    await learned(client, 2);
    assert.deepEqual(client.addresses, [given.address, other.address]);
    const affinityKey = keyOf(given.address, client.addresses);
    assert.deepEqual(await stream(client, { affinityKey }), idsOf(SEED, 0));
    assert.ok(other.requests.at(-1).continuation.completions.length > 0);
    assert.deepEqual(await stream(client, { affinityKey }), idsOf(SEED, 0));
    client.close();
  });
});

test('a learned scheduler is asked for its model once, before the first unary call', async () => {
  const [given, other] = [new Knowing(), new Knowing()];
  let asked = 0;
  const { getModelInfo } = other.methods;
  other.methods.getModelInfo = (/** @type {any} */ call, /** @type {any} */ answer) => getModelInfo(call, answer, (asked += 1));
  await knowing([given, other], async () => {
    given.others = [entry(other.address)];
    const client = new Client(given.address);
    await learned(client, 2);
    for (let i = 0; i < STREAMS; i++) await client.complete({ prompt: 'x', affinityKey: `${i}` });
    assert.equal(asked, 1);
    assert.ok(other.requests.length > 1 && given.requests.length > 1);
    client.close();
  });
});

test('off learns nothing and asks nobody', async () => {
  const [given, other] = [new Knowing(), new Knowing()];
  await knowing([given, other], async () => {
    given.others = [entry(other.address)];
    const client = new Client(given.address, { directory: 'off' });
    await streams(client);
    await client.abort(['x']);
    assert.deepEqual([client.addresses, given.looks], [[given.address], 0]);
    client.close();
  });
  assert.throws(() => new Client('127.0.0.1:1', /** @type {any} */ ({ directory: 'on' })), RangeError);
});

test('schedulers without a directory are asked once, and used as before', async () => {
  const unknown = { code: grpc.status.UNIMPLEMENTED, details: 'no directory' };
  const given = new Knowing({ watch: (call) => call.emit('error', unknown) });
  await knowing([given], async () => {
    const client = new Client(given.address);
    await streams(client);
    assert.deepEqual([client.addresses, given.looks], [[given.address], 1]);
    client.close();
  });
});

test('what asks all schedulers asks learned ones too', async () => {
  const all = [0, 1].map((which) => new Knowing({ which }));
  await knowing(all, async () => {
    all[0].others = [entry(all[1].address)];
    const client = new Client(all[0].address);
    assert.deepEqual(await client.abort(['?', 'of 1', 'of 0']), { aborted: ['of 1', 'of 0'], unknown: ['?'] });
    client.close();
  });
});

test('a call to all schedulers waits for a silent directory for half of its time, and for its signal', async () => {
  const given = new Knowing({ watch: () => {} });
  await knowing([given], async () => {
    for (const options of [{ timeoutMs: 400 }, {}]) {
      const client = new Client(given.address);
      const controller = new AbortController();
      const reply = client.abort(['of 0'], { ...options, signal: controller.signal });
      if (options.timeoutMs) assert.deepEqual((await reply).aborted, ['of 0']);
      else {
        controller.abort(new Error('enough'));
        await assert.rejects(reply, /enough/);
      }
      client.close();
    }
  });
});

test('a client that reads a long stream looks meanwhile', async () => {
  const given = new Knowing();
  await knowing([given], async () => {
    const client = new Client(given.address);
    const now = performance.now.bind(performance);
    let later = 0;
    const clock = mock.method(performance, 'now', () => now() + later);
    for await (const _ of client.generate({ prompt: 'x', seed: SEED })) {
      later += 20_000;
      await sleep(20);
    }
    clock.mock.restore();
    assert.ok(given.looks > 1, `${given.looks}`);
    client.close();
  });
});

for (const isIdle of [true, false]) {
  test(`a scheduler that leaves the directory is used no more, and its channel is closed, ${isIdle ? 'at once' : 'after its stream'}`, async () => {
    const [given, other] = [new Knowing(), new Knowing()];
    const { generate } = other.methods;
    const finish = new EventEmitter();
    other.methods.generate = (/** @type {any} */ call) => {
      finish.once('now', call.end.bind(call));
      generate(Object.assign(call, { end() {} }));
    };
    await knowing([given, other], async () => {
      const closed = /** @type {Promise<unknown>[]} */ ([]);
      const proxy = net.createServer((socket) => {
        closed.push(once(socket, 'close'));
        socket.pipe(net.connect(Number(other.address.split(':')[1]))).on('error', () => {}).pipe(socket);
      });
      await once(proxy.listen(0, '127.0.0.1'), 'listening');
      given.others = [entry(`127.0.0.1:${/** @type {net.AddressInfo} */ (proxy.address()).port}`)];
      const client = new Client(given.address);
      await learned(client, 2);
      const [here, there] = [client.addresses, client.addresses.toReversed()].map((order) => ({ affinityKey: keyOf(order[0], order) }));
      const events = client.generate({ prompt: 'x', seed: SEED, ...there });
      await events.next();
      if (isIdle) await events.return();
      given.others = [];
      const now = performance.now.bind(performance);
      const clock = mock.method(performance, 'now', () => now() + 20_000);
      while (client.addresses.length > 1) await client.complete({ prompt: 'x', ...here });
      clock.mock.restore();
      if (!isIdle) assert.equal(await Promise.race([closed[0], sleep(100, 'open')]), 'open');
      finish.emit('now');
      for await (const _ of events);
      await closed[0];
      const count = other.requests.length;
      await streams(client);
      assert.deepEqual([other.requests.length, closed.length], [count, 1]);
      client.close();
      proxy.close();
    });
  });
}

test('closing a client ends its look', async () => {
  const looks = new EventEmitter();
  const given = new Knowing({ watch: (call) => call.once('cancelled', () => looks.emit('end')) });
  await knowing([given], async () => {
    const client = new Client(given.address);
    await streams(client);
    const began = performance.now();
    client.close();
    await once(looks, 'end');
    assert.ok(performance.now() - began < 1_000);
  });
});

for (const what of ['closed', 'left open']) {
  test(`a client that is ${what} keeps no process alive, nor does its look`, async () => {
    const [given, other] = [new Knowing(what === 'closed' ? { watch: () => {} } : {}), new Knowing()];
    await knowing([given, other], async () => {
      given.others = [entry(other.address)];
      const script = `
        const { Client } = await import(${JSON.stringify(new URL('../src/index.js', import.meta.url))});
        const client = new Client(${JSON.stringify(given.address)});
        await client.complete({ prompt: 'x' });
        console.log('called');
        ${what === 'closed' ? 'client.close();' : ''}`;
      const child = spawn(process.execPath, ['--input-type=module', '-e', script], { stdio: ['ignore', 'pipe', 'inherit'] });
      await once(child.stdout, 'data');
      const began = performance.now();
      assert.deepEqual(await once(child, 'exit'), [0, null]);
      assert.ok(performance.now() - began < 2_500, `${performance.now() - began} ms`);
      assert.equal(given.looks, 1);
    });
  });
}

test('a stream that breaks at a learned scheduler goes on at the given one', async () => {
  const [given, other] = [new Knowing(), new Knowing({ script: [[3, BROKEN]] })];
  await knowing([given, other], async () => {
    given.others = [entry(other.address)];
    const client = new Client(given.address);
    await client.abort([]);
    assert.deepEqual(await stream(client, { affinityKey: keyOf(other.address, client.addresses) }), idsOf(SEED, 0));
    assert.ok(given.requests.at(-1).continuation);
    client.close();
  });
});
