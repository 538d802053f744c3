// score, embed and rerank: what goes out, and what an oracle-backed service answers.

import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';

import { SchedulerService } from '../src/contract.js';
import { embedReply, embedRequest, rerankReply, rerankRequest, scoreReply, scoreRequest } from '../src/evaluations.js';
import { Client, collect } from '../src/index.js';
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

const near = (/** @type {number} */ a, /** @type {number} */ b) => assert.ok(Math.abs(a - b) < 1e-4, `${a} ${b}`);

test('a continuation has the logprobs that it has in the whole text', async () => {
  const { texts, usage } = await client.score(['to be or not', { prompt: 'to be', text: ' or not' }], { topLogprobs: 2 });
  const [whole, rest] = texts;
  assert.deepEqual(whole.tokenIds.slice(-7), rest.tokenIds);
  whole.logprobs.slice(-7).forEach(({ logprob }, i) => near(logprob, rest.logprobs[i].logprob));
  near(rest.logprob, rest.logprobs.reduce((sum, { logprob }) => sum + logprob, 0));
  near(rest.perplexity, Math.exp(-rest.logprob / 7));
  assert.equal(rest.logprobs[0].top.length, 2);
  assert.equal(usage.promptTokens, 24);
});

test("logprobs of a generation's prompt are those of its score", async () => {
  const [{ promptLogprobs }] = await collect(client.generate({ prompt: 'to be or not', maxTokens: 3, promptLogprobs: 1 }));
  const [{ logprobs }] = (await client.score(['to be or not'], { topLogprobs: 1 })).texts;
  assert.equal(promptLogprobs?.length, logprobs.length);
  logprobs.forEach(({ logprob }, i) => near(logprob, /** @type {any} */ (promptLogprobs)[i].logprob));
});

test('a vector has its dimensions, and length 1 unless it is left as it is', async () => {
  const length = (/** @type {number[]} */ vector) => Math.hypot(...vector);
  const { embeddingSize } = await client.modelInfo();
  const all = await client.embed(['a', [1, 2, 3]], { normalize: false, pooling: 'mean' });
  assert.deepEqual(all.tokens, [1, 3]);
  assert.ok(all.vectors.every((vector) => vector.length === embeddingSize));
  const [cut] = (await client.embed(['a'], { dimensions: 4, pooling: 'mean' })).vectors;
  near(length(cut), 1);
  const scale = length(all.vectors[0].slice(0, 4));
  cut.forEach((value, i) => near(value * scale, all.vectors[0][i]));
});

for (const method of /** @type {const} */ (['yesNo', 'likelihood'])) {
  test(`documents are ranked best first: ${method}`, async () => {
    const documents = ['riders', 'rain', 'wind and weather'];
    const { results } = await client.rerank('wind?', documents, { method });
    assert.deepEqual(results.map(({ index }) => index).sort(), [0, 1, 2]);
    const scores = results.map(({ score }) => score);
    assert.deepEqual(scores, scores.toSorted((a, b) => b - a));
    const best = await client.rerank('wind?', documents, { method, topN: 1 });
    assert.deepEqual(best.results.map(({ index }) => index), [results[0].index]);
  });
}

test('a bad input is INVALID_ARGUMENT and named', async () => {
  await assert.rejects(client.score(['x', '']), { code: 'INVALID_ARGUMENT', message: /inputs\[1\]\.text/ });
  await assert.rejects(client.embed([]), { code: 'INVALID_ARGUMENT', message: /inputs/ });
  await assert.rejects(client.embed(['x'], { dimensions: 1e6 }), { code: 'INVALID_ARGUMENT', message: /dimensions/ });
  await assert.rejects(client.embed(['x'], { model: 'nobody' }), { code: 'NOT_FOUND', message: /nobody/ });
  await assert.rejects(client.rerank('q', []), { code: 'INVALID_ARGUMENT', message: /documents/ });
});

/** @type {[() => unknown, RegExp][]} */
const WRONG = [
  [() => scoreRequest(/** @type {any} */ ('text'), {}), /^inputs must be an array/],
  [() => scoreRequest([{}], {}), /^inputs\[0\]: give exactly one of text and tokenIds/],
  [() => scoreRequest([{ text: 'a', prompt: 'b', promptTokenIds: [1] }], {}), /^inputs\[0\]: give at most one/],
  [() => scoreRequest([/** @type {any} */ ({ text: 'a', before: 'b' })], {}), /^inputs\[0\] has an unknown field before/],
  [() => scoreRequest([[-1]], {}), /^inputs\[0\] must be an array of integers/],
  [() => scoreRequest(['a'], { topLogprobs: -1 }), /^topLogprobs must be/],
  [() => scoreRequest(['a'], /** @type {any} */ ({ temperature: 1 })), /^unknown option temperature/],
  [() => embedRequest([/** @type {any} */ (3)], {}), /^inputs\[0\] must be a string/],
  [() => embedRequest(['a'], { pooling: /** @type {any} */ ('max') }), /^pooling must be one of last, mean/],
  [() => embedRequest(['a'], { dimensions: 0.5 }), /^dimensions must be/],
  [() => embedRequest(['a'], { normalize: /** @type {any} */ (0) }), /^normalize must be/],
  [() => rerankRequest('q', [/** @type {any} */ (1)], {}), /^documents\[0\] must be a string/],
  [() => rerankRequest('q', ['a'], { method: /** @type {any} */ ('yes') }), /^method must be one of yesNo/],
  [() => rerankRequest('q', ['a'], { priority: 2 ** 31 }), /^priority must be/],
];

for (const [make, message] of WRONG) {
  test(`what the wire can't carry is refused by name: ${message}`, () => assert.throws(make, { message }));
}

test('options have their places on the wire', () => {
  const { Score, Embed, Rerank } = SchedulerService.service;
  const sent = (/** @type {any} */ method, /** @type {object} */ request) => method.requestDeserialize(method.requestSerialize(request));
  const common = { model: 'a', priority: -2, cacheSalt: 'salt', requestId: 'mine' };
  const score = sent(Score, scoreRequest([{ tokenIds: [7], messages: [{ role: 'user', content: 'x' }] }], { ...common, topLogprobs: 0 }));
  assert.deepEqual([score.inputs[0].prompt, score.inputs[0].scored, score.topLogprobs], ['promptMessages', 'tokenIds', 0]);
  const embed = sent(Embed, embedRequest(['a'], { ...common, normalize: false, dimensions: 3, pooling: 'mean' }));
  assert.deepEqual([embed.normalize, embed.dimensions, embed.pooling], [false, 3, 'POOLING_MEAN']);
  const rerank = sent(Rerank, rerankRequest('q', ['a'], { ...common, instruction: 'i', topN: 2, method: 'likelihood' }));
  assert.deepEqual([rerank.instruction, rerank.topN, rerank.method], ['i', 2, 'RERANK_METHOD_LIKELIHOOD']);
  for (const { model, priority, cacheSalt, requestId } of [score, embed, rerank]) {
    assert.deepEqual({ model, priority, cacheSalt, requestId }, common);
  }
});

/** @type {[string, () => unknown][]} */
const HALF = [
  ['a score', () => scoreReply({ scores: [] }, { inputs: ['x'] })],
  ['logprobs', () => scoreReply({ scores: [{ tokenIds: [1], logprobs: [] }] }, { inputs: ['x'] })],
  ['a vector', () => embedReply({ embeddings: [] }, { inputs: ['x'] })],
  ['values', () => embedReply({ embeddings: [{ values: [1] }] }, { inputs: ['x'], dimensions: 2 })],
  ['a document', () => rerankReply({ results: [] }, { documents: ['x'] })],
  ['a known document', () => rerankReply({ results: [{ index: 1 }] }, { documents: ['x'] })],
  ['another document', () => rerankReply({ results: [{ index: 0 }, { index: 0 }] }, { documents: ['x', 'y'] })],
];

for (const [what, read] of HALF) {
  test(`a reply without ${what} throws`, () => assert.throws(read, { code: 'DATA_LOSS' }));
}
