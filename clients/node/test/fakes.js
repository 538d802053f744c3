// Schedulers in this process, which answer as an ideal one would and die at chosen points.

import grpc from '@grpc/grpc-js';

import { SchedulerService } from '../src/contract.js';

const PIECES = ['a', 'bc ', 'é', '日本', '🙂', ''];
const KEYS = { promptDigest: Buffer.from('digest'), modelFingerprint: Buffer.from('model'), sampler: 'sampler-1' };
const ADAPTER = Buffer.from('adapter');
export const PROMPT_LOGPROBS = [-1, -2, -3, -4];

/**
 * @param {bigint} seed A server of this contract reads 53 bits of it.
 * @param {number} index
 */
export function idsOf(seed, index) {
  let state = BigInt(Number(seed)) * 2862933555777941757n + BigInt(index) + 3037000493n;
  const next = () => {
    state = BigInt.asUintN(64, state * 6364136223846793005n + 1442695040888963407n);
    return Number(state >> 40n);
  };
  return Array.from({ length: 4 + (next() % 6) }, () => next() % 1000);
}

/**
 * A whole stream, continuations included: two ids a delta, the text lags one token behind.
 *
 * @param {any} request
 * @param {number} [cachedTokens]
 * @returns {any[]} GenerateResponses.
 */
export function replies(request, cachedTokens = 0) {
  const { seed, temperature } = request.sampling;
  const had = new Map((request.continuation?.completions ?? []).map((/** @type {any} */ one) => [one.index, one]));
  if (request.continuation) {
    const { promptDigest, modelFingerprint, sampler, adapterFingerprint } = request.continuation;
    if (String(adapterFingerprint) !== (request.model ? 'adapter' : '')) throw new Error('not the adapter that Started said');
    if (String(promptDigest) !== 'digest' || String(modelFingerprint) !== 'model' || sampler !== KEYS.sampler || temperature !== 0.5) {
      throw new Error('not what Started said');
    }
  }
  const continuedTokens = [...had.values()].reduce((sum, { tokenIds }) => sum + tokenIds.length, 0);
  const sampling = { temperature: 0.5, seed: String(seed) };
  const started = { ...KEYS, requestId: request.requestId, cachedTokens, sampling, maxTokens: 64, continuedTokens, promptTokens: 5, adapterFingerprint: request.model ? ADAPTER : Buffer.alloc(0) };
  const streams = Array.from({ length: request.n || 1 }, (_, index) => completion(BigInt(seed), index, had.get(index), Boolean(request.messages)));
  const messages = [];
  for (let i = 0; streams.some((stream) => i < stream.length); i++) {
    for (const stream of streams) if (i < stream.length) messages.push(stream[i]);
  }
  const scores = PROMPT_LOGPROBS.map((logprob) => ({ logprob, topIds: [], topLogprobs: [] }));
  const parts = [[1, scores.slice(0, 3)], [4, scores.slice(3)]].map(([first, logprobs]) => ({
    event: 'promptLogprobs', index: 0, promptLogprobs: { first, logprobs },
  }));
  const prompt = request.promptLogprobs !== undefined && continuedTokens === 0 ? parts : [];
  return [{ event: 'started', index: 0, started }, ...prompt, ...messages];
}

/**
 * The text of some first tokens: [reasoning, text, arguments of each tool call ...]. That of a chat is two tokens
 * of reasoning, one of text, and calls of two tokens each.
 *
 * @param {number[]} ids
 * @param {boolean} chat
 */
export function outputOf(ids, chat) {
  const pieces = ids.map((id) => PIECES[id % PIECES.length]);
  if (!chat) return ['', pieces.join('')];
  const parts = [pieces.slice(0, 2), pieces.slice(2, 3)];
  for (let at = 3; at < pieces.length; at += 2) parts.push(pieces.slice(at, at + 2));
  return parts.map((part) => part.join(''));
}

/**
 * @param {bigint} seed
 * @param {number} index
 * @param {any} had
 * @param {boolean} chat
 */
function completion(seed, index, had, chat) {
  if (had?.finished) return [];
  const ids = idsOf(seed, index);
  let at = had?.tokenIds.length ?? 0;
  let sizes = had ? [had.reasoningBytes, had.textBytes, ...had.argumentBytes] : [0, 0];
  const whole = outputOf(ids, chat).map((part) => Buffer.byteLength(part));
  const messages = [];
  while (at < ids.length || String(sizes) !== String(whole)) {
    const to = Math.min(ids.length, at + 2);
    const parts = outputOf(ids.slice(0, to === ids.length ? to : to - 1), chat).map((part) => Buffer.from(part));
    const [reasoning, text, ...calls] = parts.map((part, i) => part.subarray(sizes[i] ?? 0).toString());
    const begun = sizes.length - 2;
    const toolCalls = calls
      .map((text, i) => ({ index: i, id: i < begun ? '' : `call-${i}`, name: i < begun ? '' : 'tool', arguments: text }))
      .filter((call) => call.name || call.arguments);
    messages.push({
      event: 'delta',
      index,
      delta: { tokenIds: ids.slice(at, to), text, reasoning, toolCalls, logprobs: [], elapsedUs: 1000 * to },
    });
    [at, sizes] = [to, parts.map(({ length }) => length)];
  }
  const usage = { promptTokens: 5, cachedTokens: 9, completionTokens: ids.length, firstTokenMs: 1, totalMs: ids.length };
  messages.push({ event: 'finished', index, finished: { reason: 'FINISH_REASON_STOP', usage } });
  return messages;
}

/** What gRPC makes of a connection that breaks. */
export const BROKEN = { code: grpc.status.UNAVAILABLE, details: 'Connection dropped' };

/**
 * An ideal scheduler's methods.
 *
 * @param {number} which
 * @param {[number, object][]} script Each call takes the next ending [messages before it, status].
 * @param {any[]} requests Gets those that come.
 * @param {any[]} [traceparents] Theirs.
 * @returns {Record<string, any>}
 */
export function ideal(which, script, requests, traceparents = []) {
  const took = (/** @type {any} */ request, /** @type {any} */ call) => {
    requests.push(request);
    traceparents.push(call.metadata.get('traceparent')[0]);
  };
  return {
    generate(/** @type {any} */ call) {
      took(call.request, call);
      const [after, status] = script.shift() ?? [Infinity, undefined];
      const messages = replies(call.request);
      for (const message of messages.slice(0, after)) call.write(message);
      if (status) call.emit('error', status);
      else call.end();
    },
    generateUnary(/** @type {any} */ call, /** @type {any} */ answer) {
      const { request } = call.request;
      took(request, call);
      const ending = script.shift();
      if (ending) answer(ending[1]);
      else answer(null, { completions: [{ tokenIds: idsOf(BigInt(request.sampling.seed), 0), finished: { reason: 'FINISH_REASON_STOP' } }] });
    },
    embed(/** @type {any} */ { request }, /** @type {any} */ answer) {
      requests.push(request);
      const ending = script.shift();
      if (ending) answer(ending[1]);
      else answer(null, { requestId: request.requestId, embeddings: request.inputs.map(() => ({ values: [which, 1], tokens: 1 })) });
    },
    abort(/** @type {any} */ call, /** @type {any} */ answer) {
      answer(null, { aborted: call.request.requestIds.filter((/** @type {string} */ id) => id === `of ${which}`) });
    },
    getStatus(/** @type {any} */ _, /** @type {any} */ answer) {
      requests.push('status');
      answer(null, { running: which });
    },
  };
}

/** @type {(message: any) => Buffer} A look's answer may be any bytes. */
const written = (message) => (Buffer.isBuffer(message) ? message : SchedulerService.service.WatchSchedulers.responseSerialize(message));
const SERVICE = { ...SchedulerService.service, WatchSchedulers: { ...SchedulerService.service.WatchSchedulers, responseSerialize: written } };

/**
 * Serve these methods until `stop`.
 *
 * @param {Record<string, any>} methods
 * @param {string} [place]
 * @param {grpc.ServerCredentials} [credentials]
 * @returns {Promise<{ address: string, stop: () => void }>}
 */
export async function listen(methods, place = '127.0.0.1:0', credentials = grpc.ServerCredentials.createInsecure()) {
  const server = new grpc.Server();
  server.addService(SERVICE, methods);
  const port = await new Promise((resolve, reject) => {
    server.bindAsync(place, credentials, (error, number) => (error ? reject(error) : resolve(number)));
  });
  return { address: place.replace(/[^:]*$/, String(port)), stop: () => server.forceShutdown() };
}

/**
 * Ideal schedulers, each with a script.
 *
 * @param {[number, object][][]} scripts
 * @param {(addresses: string[], requests: any[][], traceparents: any[][]) => Promise<unknown>} use
 * @param {string[]} [hosts] On one port, each on its own address; without them, all on 127.0.0.1, each on its own port.
 */
export async function serving(scripts, use, hosts) {
  const requests = scripts.map(() => /** @type {any[]} */ ([]));
  const traceparents = scripts.map(() => /** @type {any[]} */ ([]));
  const servers = /** @type {Awaited<ReturnType<typeof listen>>[]} */ ([]);
  try {
    for (const [which, script] of scripts.entries()) {
      const port = hosts && which > 0 ? servers[0].address.replace(/.*:/, '') : 0;
      servers.push(await listen(ideal(which, script, requests[which], traceparents[which]), `${hosts?.[which] ?? '127.0.0.1'}:${port}`));
    }
    await use(servers.map(({ address }) => address), requests, traceparents);
  } finally {
    for (const server of servers) server.stop();
  }
}
