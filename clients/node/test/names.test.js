// A DNS name of several addresses is several schedulers. A server of names in this process tells them.

import assert from 'node:assert/strict';
import dgram from 'node:dgram';
import dns from 'node:dns';
import { once } from 'node:events';
import { mock, test } from 'node:test';

// Read when grpc-js is loaded: it then asks the server that stands in an address, and not the system.
process.env.GRPC_NODE_USE_ALTERNATIVE_RESOLVER = 'true';
const { default: grpc } = await import('@grpc/grpc-js');
const { Client } = await import('../src/index.js');
const { dnsName, schedulersBehind } = await import('../src/names.js');
const { BROKEN, idsOf, serving } = await import('./fakes.js');

const HOSTS = ['127.0.0.2', '127.0.0.3'];
const SEED = 3n;

/** A length-delimited field of a protobuf message. */
const field = (/** @type {number} */ number, /** @type {Buffer | string} */ value) =>
  Buffer.concat([Buffer.from([(number << 3) | 2, value.length]), Buffer.from(value)]);

/** What a draining scheduler answers. */
function draining() {
  const metadata = new grpc.Metadata();
  const info = Buffer.concat([field(1, 'type.googleapis.com/google.rpc.ErrorInfo'), field(2, field(1, 'DRAINING'))]);
  metadata.set('grpc-status-details-bin', field(3, info));
  return { code: grpc.status.UNAVAILABLE, details: 'draining', metadata };
}

/** Answers questions for A records with HOSTS, and others with nothing. */
async function nameServer() {
  const socket = dgram.createSocket('udp4');
  socket.on('message', (question, { port, address }) => {
    const type = question.indexOf(0, 12) + 1;
    const hosts = question.readUInt16BE(type) === 1 ? HOSTS : [];
    const header = Buffer.from([question[0], question[1], 0x81, 0x80, 0, 1, 0, hosts.length, 0, 0, 0, 0]);
    const records = hosts.map((host) => Buffer.from([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4, ...host.split('.').map(Number)]));
    socket.send(Buffer.concat([header, question.subarray(12, type + 4), ...records]), port, address);
  });
  socket.bind(0, '127.0.0.1');
  await once(socket, 'listening');
  return socket;
}

/**
 * Two schedulers behind one name, and a client of the name that is connected to both.
 *
 * @param {(client: InstanceType<typeof Client>, requests: any[][], scripts: [number, object][][]) => Promise<unknown>} use
 */
async function behindOneName(use) {
  const names = await nameServer();
  const lookup = mock.method(dns.promises, 'lookup', async () => HOSTS.map((address) => ({ address, family: 4 })));
  const scripts = HOSTS.map(() => /** @type {[number, object][]} */ ([]));
  try {
    await serving(
      scripts,
      async (addresses, requests) => {
        const port = addresses[0].replace(/.*:/, '');
        const client = new Client(`dns://127.0.0.1:${names.address().port}/schedulers.test:${port}`);
        while (requests.some((some) => some.length === 0)) await client.complete({ prompt: 'x', seed: SEED });
        for (const some of requests) some.length = 0;
        await use(client, requests, scripts);
        client.close();
      },
      HOSTS,
    );
  } finally {
    lookup.mock.restore();
    names.close();
  }
}

test('calls are spread over all addresses of a name', () =>
  behindOneName(async (client, requests) => {
    for (let i = 0; i < 6; i++) await client.complete({ prompt: 'x', seed: SEED });
    assert.ok(requests.every((some) => some.length > 0), String(requests.map((some) => some.length)));
  }));

test('a call that one scheduler of a name refuses is tried on the others', () =>
  behindOneName(async (client, requests, scripts) => {
    scripts[0].push(...Array.from({ length: 20 }, () => /** @type {[number, object]} */ ([0, draining()])));
    for (let i = 0; i < 6; i++) {
      const completion = await client.complete({ prompt: 'x', seed: SEED });
      assert.deepEqual(completion.tokenIds, idsOf(SEED, 0));
    }
    assert.ok(requests[0].length > 0);
    assert.ok(requests[1].length >= 6);
  }));

test('a call that all schedulers of a name refuse is refused, after a bounded number of tries', () =>
  behindOneName(async (client, requests, scripts) => {
    for (const script of scripts) script.push(...Array.from({ length: 20 }, () => /** @type {[number, object]} */ ([0, draining()])));
    await assert.rejects(client.complete({ prompt: 'x', seed: SEED }), { code: 'UNAVAILABLE', reason: 'DRAINING' });
    assert.equal(requests.flat().length, 8);
  }));

test('a stream whose scheduler dies goes on at another address of its name', () =>
  behindOneName(async (client, requests, scripts) => {
    for (const script of scripts) script.push([2, BROKEN]);
    /** @type {number[]} */
    const ids = [];
    for await (const event of client.generate({ prompt: 'x', seed: SEED })) if (event.type === 'delta') ids.push(...event.tokenIds);
    assert.deepEqual(ids, idsOf(SEED, 0));
    assert.ok(requests.every((some) => some.length > 0));
  }));

test('IP addresses, sockets and localhost are no names of several schedulers', async () => {
  for (const address of ['127.0.0.1:50051', '[::1]:50051', '::1', 'localhost:50051', 'unix:/a/b', 'dns:///10.0.0.1:1']) {
    assert.equal(dnsName(address), undefined, address);
    assert.equal(await schedulersBehind(address), 1);
  }
  for (const address of ['llm.example:50051', 'dns:llm.example:1', 'dns:///llm.example:1', 'dns://10.0.0.1/llm.example:1', 'llm.example']) {
    assert.equal(dnsName(address), 'llm.example', address);
  }
});

test('addresses of both IP versions are those of the same schedulers', async () => {
  const found = [['10.0.0.1', 4], ['10.0.0.2', 4], ['10.0.0.2', 4], ['fd00::1', 6]].map(([address, family]) => ({ address, family }));
  const lookup = mock.method(dns.promises, 'lookup', async () => found);
  assert.equal(await schedulersBehind('llm.example:50051'), 2);
  lookup.mock.mockImplementation(async () => { throw new Error('ENOTFOUND'); });
  assert.equal(await schedulersBehind('llm.example:50051'), 1);
  lookup.mock.restore();
});
