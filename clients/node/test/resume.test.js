// A stream cut anywhere and continued is the stream that was never cut.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import grpc from '@grpc/grpc-js';

import { addressesOf, Attempts, MAX_LOSSES } from '../src/failover.js';
import { Client, PacelineError, StreamLost } from '../src/index.js';
import { generateRequest } from '../src/messages.js';
import { identified, ResumableStream } from '../src/resume.js';
import { Rotation } from '../src/rotation.js';
import { BROKEN, idsOf, outputOf, PROMPT_LOGPROBS, replies, serving } from './fakes.js';

const SEED = (1n << 64n) - 7n; // beyond 53 bits

/** @param {object} [options] */
const streamOf = (options = {}) => new ResumableStream(identified(generateRequest({ prompt: 'x', seed: SEED, ...options })));

/** @param {any[]} events */
function whole(events) {
  /** @type {Record<number, any>} */
  const completions = {};
  for (const { index, ...event } of events) {
    const one = (completions[index] ??= { tokenIds: [], text: '', reasoning: '', calls: [], ends: 0 });
    if (event.type === 'finished') {
      one.ends += 1;
      one.completionTokens = event.usage.completionTokens;
    } else {
      one.tokenIds.push(...event.tokenIds);
      one.text += event.text;
      one.reasoning += event.reasoning;
      for (const { index: place, arguments: text } of event.toolCalls) one.calls[place] = (one.calls[place] ?? '') + text;
    }
  }
  return completions;
}

/**
 * @param {ResumableStream} stream
 * @param {number[]} cuts After how many messages each attempt is cut.
 */
function read(stream, cuts) {
  const events = [];
  for (const [attempt, cut] of [...cuts, Infinity].entries()) {
    const request = stream.attempt(1000 * attempt);
    const messages = replies(JSON.parse(JSON.stringify(request), revive), attempt);
    for (const message of messages.slice(0, cut)) {
      const event = stream.see(message);
      if (event) events.push(event);
    }
    if (stream.isComplete) break;
  }
  stream.checkEnd();
  return events;
}

const revive = (/** @type {string} */ _, /** @type {any} */ value) => (value?.type === 'Buffer' ? Buffer.from(value.data) : value);

const CHAT = { prompt: undefined, messages: [{ role: 'user', content: 'x' }] };

for (const [what, n, kind] of /** @type {[string, number, object][]} */ ([['1', 1, {}], ['3', 3, {}], ['3 of a chat', 3, CHAT]])) {
  test(`every two cuts of a stream of ${what} continue it exactly`, () => {
    const options = { n, ...kind };
    const undisturbed = whole(read(streamOf(options), []));
    const { tokenIds, reasoning, text, calls } = undisturbed[n - 1];
    assert.deepEqual(tokenIds, idsOf(SEED, n - 1));
    assert.deepEqual([reasoning, text, ...calls], outputOf(tokenIds, kind === CHAT));
    for (let first = 0; first < 12; first++) {
      for (let second = 0; second < 8; second++) {
        assert.deepEqual(whole(read(streamOf(options), [first, second])), undisturbed, `${first} ${second}`);
      }
    }
  });
}

test('a cut stream of an adapter names it when it goes on, and the logprobs of its prompt come once', () => {
  const options = { model: 'an adapter', promptLogprobs: 0 };
  const expected = whole(read(streamOf(), []));
  for (let cut = 0; cut < 8; cut++) {
    const events = read(streamOf(options), [cut]);
    assert.deepEqual(whole(events), expected, `${cut}`);
    const prompts = events.map((/** @type {any} */ event) => event.promptLogprobs).filter(Boolean);
    assert.deepEqual(prompts.map((one) => one.map((/** @type {any} */ { logprob }) => logprob)), [PROMPT_LOGPROBS]);
    assert.ok(/** @type {any} */ (events[0]).promptLogprobs);
  }
});

for (const [what, firsts] of /** @type {[string, number[]][]} */ ([['none', []], ['a gap', [1, 3]], ['too few', [1]], ['one twice', [1, 1]]])) {
  test(`logprobs of a prompt that are not whole (${what}) throw`, () => {
    const stream = streamOf({ promptLogprobs: 0 });
    stream.attempt(0);
    stream.see({ event: 'started', started: { promptTokens: 3 } });
    const delta = { tokenIds: [1], text: '', reasoning: '', logprobs: [], elapsedUs: 0, toolCalls: [] };
    const logprobs = [{ logprob: -1, topIds: [], topLogprobs: [] }];
    const parts = firsts.map((first) => ({ event: 'promptLogprobs', index: 0, promptLogprobs: { first, logprobs } }));
    assert.throws(() => [...parts, { event: 'delta', index: 0, delta }].forEach((one) => stream.see(one)), { code: 'DATA_LOSS' });
  });
}

test('times count from the first attempt and cached tokens are its', () => {
  const { usage } = /** @type {any} */ (read(streamOf(), [2]).at(-1));
  assert.equal(usage.cachedTokens, 0);
  assert.equal(usage.totalMs, 1000 + idsOf(SEED, 0).length);
  assert.equal(usage.firstTokenMs, 2);
});

test('until something was received the very same request is sent again', () => {
  const stream = new ResumableStream(identified(generateRequest({ prompt: 'x' })));
  const first = stream.attempt(0);
  assert.match(first.requestId, /^[0-9a-f]{32}$/);
  assert.ok(BigInt(first.sampling.seed) >= 0n);
  stream.see({ event: 'started', started: {} });
  assert.deepEqual(stream.attempt(1), first);
});

test('a seed keeps all of its 64 bits in a continuation', () => {
  const stream = streamOf();
  for (const message of replies(stream.attempt(0)).slice(0, 3)) stream.see(message);
  assert.equal(stream.attempt(1).sampling.seed, String(SEED));
});

for (const [what, toolCalls] of Object.entries({
  'no first': [{ index: 1, id: 'b', name: 'f', arguments: '' }],
  'no name': [{ index: 0, id: '', name: '', arguments: '{' }],
  'two beginnings': Array(2).fill({ index: 0, id: 'a', name: 'f', arguments: '' }),
})) {
  test(`a tool call with ${what} throws`, () => {
    const stream = streamOf();
    stream.attempt(0);
    const delta = { tokenIds: [], text: '', reasoning: '', logprobs: [], elapsedUs: 0, toolCalls };
    assert.throws(() => stream.see({ event: 'delta', index: 0, delta }), { code: 'DATA_LOSS' });
  });
}

for (const continuedTokens of [0, 1]) {
  test(`a scheduler that takes over ${continuedTokens} tokens of more ends the stream`, () => {
    const stream = streamOf();
    for (const message of replies(stream.attempt(0)).slice(0, 3)) stream.see(message);
    stream.attempt(1);
    assert.throws(() => stream.see({ event: 'started', started: { continuedTokens } }), StreamLost);
  });
}

/** @param {Client} client @param {object} [options] */
async function collect(client, options = {}) {
  const events = [];
  for await (const event of client.generate({ prompt: 'x', seed: SEED, ...options })) events.push(event);
  return whole(events);
}

/**
 * @param {[number, object][][]} scripts
 * @param {(client: Client, requests: any[][]) => Promise<unknown>} use
 * @param {object} [options]
 */
function using(scripts, use, options) {
  return serving(scripts, async (addresses, requests) => {
    const client = new Client(addresses, options);
    try {
      await use(client, requests);
    } finally {
      client.close();
    }
  });
}

const UNDISTURBED = whole(read(streamOf({ n: 2 }), []));

for (let after = 0; after < 7; after++) {
  test(`a stream whose scheduler dies after ${after} messages goes on on another`, async () => {
    await using([[[after, BROKEN]], [[after, BROKEN]]], async (client, requests) => {
      assert.deepEqual(await collect(client, { n: 2 }), UNDISTURBED);
      const all = requests.flat();
      assert.ok(all.length > 1);
      assert.ok(all.every(({ requestId }) => requestId === all[0].requestId));
      assert.equal(all.some(({ continuation }) => continuation), after > 1);
    });
  });
}

test('a stream goes on on the same scheduler if there is no other', async () => {
  await using([[[3, BROKEN], [3, BROKEN]]], async (client) => assert.deepEqual(await collect(client, { n: 2 }), UNDISTURBED));
});

test('a stream that a server cancels as it stops goes on elsewhere', async () => {
  const bare = { code: grpc.status.CANCELLED, details: 'CANCELLED' };
  await using([[[3, bare]], [[3, bare]]], async (client) => assert.deepEqual(await collect(client, { n: 2 }), UNDISTURBED));
});

test('a connection that breaks after the last end has lost nothing', async () => {
  await using([[[99, BROKEN]]], async (client, requests) => {
    assert.deepEqual(await collect(client, { n: 2 }), UNDISTURBED);
    assert.equal(requests[0].length, 1);
  });
});

for (const code of /** @type {const} */ (['ABORTED', 'INTERNAL', 'DATA_LOSS', 'DEADLINE_EXCEEDED', 'RESOURCE_EXHAUSTED'])) {
  test(`a stream that ended ${code} is not continued`, async () => {
    const end = /** @type {[number, object]} */ ([2, { code: grpc.status[code], details: 'why' }]);
    await using([[end], [end]], async (client, requests) => {
      await assert.rejects(collect(client), (error) => error instanceof PacelineError && !error.retryable);
      assert.equal(requests.flat().length, 1);
    });
  });
}

test('a continuation of something else is an error that says so', async () => {
  const mismatch = { code: grpc.status.FAILED_PRECONDITION, details: 'continuation.sampler: is another one here' };
  await using([[[2, BROKEN], [0, mismatch]]], (client) =>
    assert.rejects(collect(client), { code: 'FAILED_PRECONDITION', message: /could not be continued.*sampler/ }),
  );
});

test('a scheduler without the adapter is named as the one that could not continue', async () => {
  const unknown = { code: grpc.status.NOT_FOUND, details: "model: 'a' is not served" };
  await using([[[2, BROKEN], [0, unknown]]], (client) =>
    assert.rejects(collect(client), { code: 'NOT_FOUND', message: /could not be continued: model: 'a' is not served/ }),
  );
});

test('a stream that nobody continues is lost, and not to be sent again', async () => {
  const refusal = { code: grpc.status.UNAVAILABLE, details: 'No connection established' };
  const script = /** @type {[number, object][]} */ ([[2, BROKEN], ...Array(20).fill([0, refusal])]);
  await using(
    [script],
    (client) => assert.rejects(collect(client), (error) => error instanceof StreamLost && !error.retryable),
    { failoverTimeoutMs: 50 },
  );
});

test('a unary call that was lost is sent again as it was', async () => {
  await using([[[0, BROKEN]], [[0, BROKEN]]], async (client, requests) => {
    const [{ tokenIds }] = await client.completions({ prompt: 'x' });
    assert.ok(tokenIds.length > 0);
    const [first, ...others] = requests.flat();
    assert.equal(others.length, 2);
    for (const other of others) assert.deepEqual(other, first);
  });
});

test('an evaluation that was lost is sent again as it was', async () => {
  await using([[[0, BROKEN]], [[0, BROKEN]]], async (client, requests) => {
    const { vectors, tokens } = await client.embed(['x', [1]]);
    assert.deepEqual([vectors.map((one) => one[1]), tokens], [[1, 1], [1, 1]]);
    const [first, ...others] = requests.flat();
    assert.match(first.requestId, /^[0-9a-f]{32}$/);
    assert.equal(others.length, 2);
    for (const other of others) assert.deepEqual(other, first);
  });
});

test('calls that begin alike go to the same scheduler, and what one refuses is taken by another', async () => {
  const full = /** @type {[number, object]} */ ([0, { code: grpc.status.RESOURCE_EXHAUSTED, details: 'full' }]);
  await using([[], []], async (client, requests) => {
    for (let i = 0; i < 4; i++) await client.completions({ prompt: 'x' });
    assert.deepEqual(requests.map(({ length }) => length).sort(), [0, 4]);
  });
  for (const affinityKey of ['0', '1', '2', '3']) {
    await using([[full], []], async (client) => assert.ok(await client.completions({ prompt: 'x', affinityKey })));
  }
  await using([[full], [full]], (client) => assert.rejects(client.completions({ prompt: 'x' }), { code: 'RESOURCE_EXHAUSTED' }));
  await serving([[]], async ([address]) => {
    const client = new Client(`127.0.0.1:1,${address}`);
    for (let i = 0; i < 4; i++) assert.deepEqual(await collect(client, { n: 2 }), UNDISTURBED);
    assert.equal((await client.status()).running, 0);
    client.close();
  });
});

test('abort reaches a request wherever it runs', async () => {
  await using([[], []], async (client) => {
    assert.deepEqual(await client.abort(['?', 'of 1', 'of 0']), { aborted: ['of 1', 'of 0'], unknown: ['?'] });
  });
});

test('aborting the signal ends a stream that waits for a scheduler', async () => {
  const controller = new AbortController();
  const refusal = { code: grpc.status.UNAVAILABLE, details: 'No connection established' };
  const script = /** @type {[number, object][]} */ ([[2, BROKEN], ...Array(1000).fill([0, refusal])]);
  await using([script], async (client, requests) => {
    const reader = collect(client, { signal: controller.signal });
    while (requests[0].length < 2) await new Promise(setImmediate);
    controller.abort(new Error('enough'));
    await assert.rejects(reader, /enough/);
  });
});

test('addresses are one or several, and each once', () => {
  assert.deepEqual(addressesOf(' a:1, b:2,a:1,'), ['a:1', 'b:2']);
  assert.deepEqual(addressesOf(['a:1', 'b:2']), ['a:1', 'b:2']);
  assert.throws(() => addressesOf([]), /no address/);
});

test('a lost call waits for its scheduler, but neither for ever nor beyond the deadline', () => {
  const lost = new PacelineError('Connection dropped', { code: 'UNAVAILABLE' });
  const refused = new PacelineError('No connection established', { code: 'UNAVAILABLE' });
  for (const [limits, code, end] of /** @type {[any, string, number][]} */ ([
    [{ failoverTimeoutMs: 10_000 }, 'UNAVAILABLE', 10_000],
    [{ failoverTimeoutMs: 10_000, timeoutMs: 2_000 }, 'DEADLINE_EXCEEDED', 2_000],
  ])) {
    const call = new Attempts(new Rotation(['a:1']), 0, limits);
    let now = call.failed(lost, 0);
    assert.throws(() => {
      for (;;) {
        call.timeoutMs(now);
        now += call.failed(refused, now);
      }
    }, { code });
    assert.equal(now, end);
  }
  const poison = new Attempts(new Rotation(['a:1']), 0, { failoverTimeoutMs: 10_000 });
  for (let i = 1; i < MAX_LOSSES; i++) poison.failed(lost, 0);
  assert.throws(() => poison.failed(lost, 0), { code: 'UNAVAILABLE' });
});
