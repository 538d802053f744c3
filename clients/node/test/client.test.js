import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { Client, PacelineError } from '../src/index.js';
import { generateRequest } from '../src/messages.js';
import { serve } from './serve.js';

/** @type {Awaited<ReturnType<typeof serve>>} */
let service;
/** @type {Client} */
let client;

before(async () => {
  service = await serve();
  client = new Client(service.address);
});

after(async () => {
  client?.close();
  await service?.stop();
});

/** Waits for the scheduler to have nothing left to do; its counters are what it says to everyone. */
async function idle() {
  for (;;) {
    const { running, waiting, availablePages, totalPages } = await client.status();
    if (running === 0 && waiting === 0 && availablePages === totalPages) return;
    await sleep(10);
  }
}

test('a stream is deltas in order and one finish, and says what it took', async () => {
  const events = [];
  for await (const event of client.generate({ prompt: 'Once upon a time', maxTokens: 24, temperature: 0, ignoreEos: true })) {
    events.push(event);
  }
  const finished = events.pop();
  assert.equal(finished.type, 'finished');
  assert.equal(finished.reason, 'length');
  assert.equal(finished.usage.completionTokens, 24);
  assert.ok(events.every(({ type }) => type === 'delta'));
  assert.equal(events.flatMap(({ tokenIds }) => tokenIds).length, 24);
});

test('the same seed gives the same tokens, streamed or not, from a 64-bit seed too', async () => {
  const options = { prompt: 'dice', maxTokens: 16, temperature: 1, seed: (1n << 64n) - 1n, ignoreEos: true };
  const streamed = [];
  for await (const event of client.generate(options)) {
    if (event.type === 'delta') streamed.push(...event.tokenIds);
  }
  const [whole] = await client.completions(options);
  assert.deepEqual(whole.tokenIds, streamed);
  const [other] = await client.completions({ ...options, seed: 7 });
  assert.notDeepEqual(other.tokenIds, streamed);
});

test('a seed keeps all of its 64 bits on the wire', () => {
  assert.equal(generateRequest({ prompt: 'x', seed: (1n << 64n) - 1n }).sampling.seed, '18446744073709551615');
});

test('eight streams at once each end once', async () => {
  const one = async (/** @type {number} */ i) => {
    let ends = 0;
    for await (const event of client.generate({ prompt: `stream ${i}`, maxTokens: 32, temperature: 0, ignoreEos: true })) {
      if (event.type === 'finished') ends += 1;
    }
    return ends;
  };
  assert.deepEqual(await Promise.all(Array.from({ length: 8 }, (_, i) => one(i))), Array(8).fill(1));
});

test('n completions come with their index', async () => {
  const completions = await client.completions({ prompt: 'x', n: 3, maxTokens: 4, temperature: 1, seed: 1, ignoreEos: true });
  assert.deepEqual(completions.map(({ index }) => index), [0, 1, 2]);
});

test('guessing ahead changes no token, and usage says how it went', async () => {
  // Few tokens are left, so that the oracle repeats itself and its n-grams find something.
  const logitBias = Object.fromEntries(Array.from({ length: 251 }, (_, i) => [i + 6, -1000]));
  const options = { prompt: 'again and again', maxTokens: 120, temperature: 0, logitBias, ignoreEos: true };
  const [plain] = await client.completions({ ...options, speculation: 'off' });
  assert.equal(plain.finished.usage.verifications, 0);
  for (const speculation of ['auto', 4, { mode: 4, drafter: 'ngram' }]) {
    const [guessed] = await client.completions({ ...options, speculation });
    assert.deepEqual(guessed.tokenIds, plain.tokenIds);
    const { usage } = guessed.finished;
    const sum = (/** @type {number[]} */ counts) => counts.reduce((a, b) => a + b, 0);
    assert.equal(sum(usage.draftedByPosition), usage.draftedTokens);
    assert.equal(sum(usage.acceptedByPosition), usage.acceptedTokens);
    assert.equal(usage.draftedByPosition[0] ?? 0, usage.verifications);
    if (speculation !== 'auto') assert.ok(usage.verifications > 0);
  }
  await assert.rejects(client.completions({ ...options, speculation: 0 }), /speculation\.draft_tokens/);
  await assert.rejects(client.completions({ ...options, speculation: { drafter: 'draft-executor' } }), /speculation\.drafter/);
});

test('logprobs are there when asked for', async () => {
  const [{ logprobs, tokenIds }] = await client.completions({ prompt: 'x', maxTokens: 3, temperature: 0, logprobs: 2, ignoreEos: true });
  assert.equal(logprobs.length, 3);
  assert.equal(logprobs[0].top.length, 2);
  assert.equal(logprobs[0].top[0].id, tokenIds[0]);
});

test('leaving the loop cancels the request and frees its cache', async () => {
  const before = await client.status();
  for await (const event of client.generate({ prompt: 'endless', maxTokens: 20000, ignoreEos: true })) {
    if (event.type === 'delta') break;
  }
  await idle();
  assert.equal((await client.status()).cancelled, before.cancelled + 1);
});

test('an abort signal ends the stream with its reason', async () => {
  const controller = new AbortController();
  const reason = new Error('enough');
  await assert.rejects(async () => {
    for await (const _ of client.generate({ prompt: 'endless', maxTokens: 20000, ignoreEos: true, signal: controller.signal })) {
      controller.abort(reason);
    }
  }, reason);
  await idle();
});

test('an aborted signal sends nothing', async () => {
  const before = (await client.status()).requests;
  await assert.rejects(client.completions({ prompt: 'x', signal: AbortSignal.abort() }), { name: 'AbortError' });
  await assert.rejects(client.generate({ prompt: 'x', signal: AbortSignal.abort() }).next(), { name: 'AbortError' });
  assert.equal((await client.status()).requests, before);
});

test('abort by id ends the stream ABORTED', async () => {
  await assert.rejects(
    async () => {
      for await (const _ of client.generate({ prompt: 'endless', maxTokens: 20000, ignoreEos: true, requestId: 'mine' })) {
        await client.abort(['mine']);
      }
    },
    (error) => error instanceof PacelineError && error.code === 'ABORTED' && !error.retryable,
  );
});

test('a bad parameter is INVALID_ARGUMENT, names its field and says why', async () => {
  await assert.rejects(client.completions({ prompt: 'x', topP: 2 }), (error) => {
    assert.ok(error instanceof PacelineError);
    assert.equal(error.code, 'INVALID_ARGUMENT');
    assert.match(error.message, /top_p/);
    assert.notEqual(error.reason, '');
    return true;
  });
});

test('a deadline is DEADLINE_EXCEEDED', async () => {
  await assert.rejects(client.completions({ prompt: 'x', maxTokens: 20000, ignoreEos: true, timeoutMs: 50 }), {
    code: 'DEADLINE_EXCEEDED',
  });
});

test('nobody there is UNAVAILABLE, and retryable', async () => {
  const nobody = new Client('127.0.0.1:1');
  await assert.rejects(nobody.status({ timeoutMs: 5000 }), (error) => error.code === 'UNAVAILABLE' && error.retryable);
  nobody.close();
});

test('text to ids and back', async () => {
  const ids = await client.tokenize({ text: 'Grüße' });
  assert.equal(await client.detokenize(ids), 'Grüße');
});

test('the model says its limits', async () => {
  const info = await client.modelInfo();
  assert.ok(info.vocabSize > 0);
  assert.ok(info.limits.maxN > 0);
});

for (const [options, message] of [
  [{}, /exactly one/],
  [{ prompt: 'x', tokenIds: [1] }, /exactly one/],
  [{ prompt: 'x', max_tokens: 1 }, /unknown option max_tokens/],
  [{ prompt: 'x', maxTokens: -1 }, /maxTokens/],
  [{ prompt: 'x', n: 0 }, /n must be at least 1/],
  [{ prompt: 'x', seed: -1 }, /seed/],
  [{ prompt: 'x', seed: 2 ** 60 }, /seed/],
  [{ tokenIds: [2 ** 32] }, /tokenIds/],
  [{ prompt: 'x', logitBias: { a: 1 } }, /logitBias/],
  [{ prompt: 'x', speculation: 'on' }, /speculation\.mode/],
  [{ prompt: 'x', speculation: -1 }, /speculation\.mode/],
  [{ prompt: 'x', speculation: { drafter: 'me' } }, /speculation\.drafter/],
  [{ prompt: 'x', speculation: { length: 1 } }, /speculation\.length/],
]) {
  test(`what the wire can't carry is refused by name: ${message}`, () => {
    assert.throws(() => generateRequest(options), message);
  });
}

test("the package's contract is the repository's", () => {
  const file = 'protos/paceline/scheduler/v1/scheduler.proto';
  const read = (/** @type {string} */ path) => readFileSync(new URL(path, import.meta.url), 'utf8');
  assert.equal(read(`../${file}`), read(`../../../${file}`));
});

test('one completion comes alone, several as a list; a stop string and a message may be plain strings', async () => {
  const options = { prompt: 'x', maxTokens: 6, temperature: 0, ignoreEos: true };
  const whole = await client.complete(options);
  assert.deepEqual([whole.tokenIds], (await client.completions(options)).map(({ tokenIds }) => tokenIds));
  await assert.rejects(client.complete({ ...options, n: 2 }), /completions\(\)/);
  assert.deepEqual(
    generateRequest({ prompt: 'x', stop: 'end' }),
    generateRequest({ prompt: 'x', stop: ['end'] }),
  );
  const chatting = { maxTokens: 4, temperature: 0 };
  const answer = await client.chat('hi', chatting);
  assert.deepEqual(answer.tokenIds, (await client.chat([{ role: 'user', content: 'hi' }], chatting)).tokenIds);
});

test('an option of a wrong type is named before anything is sent', () => {
  assert.throws(() => generateRequest(/** @type {any} */ ({ prompt: ['x'] })), /prompt must be a string, not an array/);
  assert.throws(() => generateRequest(/** @type {any} */ ({ prompt: 'x', temperature: 'hot' })), /temperature must be a number/);
  assert.throws(() => generateRequest(/** @type {any} */ ({ prompt: 'x', ignoreEos: 1 })), /ignoreEos must be a boolean/);
  assert.throws(() => generateRequest(/** @type {any} */ ({ prompt: 'x', stop: [1] })), /stop must be a string or/);
});

test('the address comes from the environment where none is given', () => {
  process.env.PACELINE_ADDRESS = service.address;
  try {
    const found = new Client();
    assert.deepEqual(found.addresses, [service.address]);
    found.close();
    const named = new Client('127.0.0.1:1');
    assert.deepEqual(named.addresses, ['127.0.0.1:1']);
    named.close();
  } finally {
    delete process.env.PACELINE_ADDRESS;
  }
});
