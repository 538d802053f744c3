// A status of OK hides no loss: what can't be parsed, or is not all of the answer, is an error.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import grpc from '@grpc/grpc-js';

import { SchedulerService } from '../src/contract.js';
import { embedReply, rerankReply, scoreReply } from '../src/evaluations.js';
import { Client, PacelineError } from '../src/index.js';

const { Generate: generate, GenerateUnary: generateUnary } = SchedulerService.service;
const RAW = { requestDeserialize: (/** @type {Buffer} */ data) => data, responseSerialize: (/** @type {Buffer} */ data) => data };
const JUNK = Buffer.alloc(9, 0xff);
const END = { reason: 'FINISH_REASON_STOP' };
const DELTA = { delta: { tokenIds: [1], text: 'once' } };

/**
 * A scheduler that answers each call with these messages (or bytes), and then with OK.
 *
 * @param {(object | Buffer)[]} messages
 * @param {(client: Client) => Promise<unknown>} use
 */
async function answering(messages, use) {
  const bytes = (/** @type {any} */ method, /** @type {object | Buffer} */ message) =>
    Buffer.isBuffer(message) ? message : method.responseSerialize(message);
  const server = new grpc.Server();
  server.addService(
    /** @type {any} */ ({ generate: { ...generate, ...RAW }, generateUnary: { ...generateUnary, ...RAW } }),
    {
      generate(/** @type {any} */ call) {
        for (const message of messages) call.write(bytes(generate, message));
        call.end();
      },
      generateUnary(/** @type {any} */ _, /** @type {any} */ answer) {
        answer(null, bytes(generateUnary, messages[0]));
      },
    },
  );
  const port = await new Promise((resolve, reject) => {
    const bound = (/** @type {unknown} */ error, /** @type {number} */ to) => (error ? reject(error) : resolve(to));
    server.bindAsync('127.0.0.1:0', grpc.ServerCredentials.createInsecure(), bound);
  });
  const client = new Client(`127.0.0.1:${port}`);
  try {
    await use(client);
  } finally {
    client.close();
    server.forceShutdown();
  }
}

/**
 * @param {Client} client
 * @param {number} n
 */
async function read(client, n) {
  const events = [];
  for await (const event of client.generate({ prompt: 'x', n })) events.push(event);
  return events;
}

/** @type {[string, number, (object | Buffer)[]][]} */
const STREAMS = [
  ['no message at all', 1, []],
  ['no end', 1, [DELTA]],
  ['an end of one of two', 2, [DELTA, { index: 1, finished: END }]],
  ['bytes that are no message', 1, [DELTA, JUNK, { finished: END }]],
  ['an end without a reason', 1, [{ finished: {} }]],
  ['a completion that was not asked for', 1, [{ index: 1, finished: END }]],
  ['more after the end', 2, [{ finished: END }, DELTA]],
];

for (const [what, n, messages] of STREAMS) {
  test(`a stream with ${what} throws`, async () => {
    await answering(messages, async (client) => {
      const lost = (/** @type {unknown} */ error) =>
        error instanceof PacelineError && ['DATA_LOSS', 'INTERNAL'].includes(error.code) && !error.retryable;
      await assert.rejects(read(client, n), lost);
    });
  });
}

test('a stream that is whole does not', async () => {
  const messages = [DELTA, { index: 1, finished: END }, { finished: END }];
  await answering(messages, async (client) => assert.equal((await read(client, 2)).length, 3));
});

const end = (/** @type {number} */ index) => ({ index, finished: END });

/** @type {[string, object | Buffer][]} */
const REPLIES = [
  ['bytes that are no message', JUNK],
  ['nothing', {}],
  ['one of two', { completions: [end(0)] }],
  ['three of two', { completions: [end(0), end(1), end(2)] }],
  ['one twice', { completions: [end(0), end(0)] }],
  ['an unfinished one', { completions: [end(0), { index: 1, text: 'half' }] }],
];

for (const [what, reply] of REPLIES) {
  test(`a collected answer of ${what} throws`, async () => {
    await answering([reply], async (client) => {
      await assert.rejects(client.completions({ prompt: 'x', n: 2 }), (error) => error instanceof PacelineError);
    });
  });
}

test('a collected answer that is whole does not', async () => {
  await answering([{ completions: [end(0), end(1)] }], async (client) => {
    assert.equal((await client.completions({ prompt: 'x', n: 2 })).length, 2);
  });
});

test('a reply with what is not a number throws', () => {
  const score = { tokenIds: [], logprobs: [], logprob: 0, perplexity: NaN };
  assert.throws(() => scoreReply({ scores: [score] }, { inputs: [{}] }), /score 0 is not a number/);
  assert.throws(() => embedReply({ embeddings: [{ values: [1, NaN] }] }, { inputs: [{}] }), /a vector is not a number/);
  const results = [{ index: 0, score: NaN }];
  assert.throws(() => rerankReply({ results }, { documents: ['x'] }), /a document's score is not a number/);
});
