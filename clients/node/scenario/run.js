// Runs the steps that tests/scenario gives to all clients: JSON lines in, outcomes out.

import { readFileSync } from 'node:fs';
import { createInterface } from 'node:readline';

import { Client, collect, PacelineError, StreamLost } from '../src/index.js';

/** @typedef {Record<string, any>} Step */

for await (const line of createInterface({ input: process.stdin })) {
  const step = JSON.parse(line);
  const client = clientOf(step);
  try {
    write(await run(client, step));
  } catch (error) {
    if (!(error instanceof PacelineError)) throw error;
    write({ error: describeError(error) });
  } finally {
    client.close();
  }
}

/** @param {Step} step */
function clientOf({ addresses, token, ca, failover_timeout_ms: failoverTimeoutMs }) {
  return new Client(addresses, { token, tls: ca && { ca: readFileSync(ca) }, failoverTimeoutMs });
}

/**
 * @param {Client} client
 * @param {Step} step
 * @returns {Promise<object>} The outcome.
 */
async function run(client, step) {
  switch (step.call) {
    case 'model_info': {
      const { name, hasChatTemplate } = await client.modelInfo();
      return { name, has_chat_template: hasChatTemplate };
    }
    case 'tokenize':
      return { token_ids: await client.tokenize({ text: step.text }) };
    case 'detokenize':
      return { text: await client.detokenize(step.token_ids) };
    case 'complete':
      return { completions: (await client.completions(options(step))).map(describe) };
    case 'generate':
      return step.parallel ? parallel(client, step) : generate(client, step);
    case 'score':
      return score(client, step.request);
    case 'embed': {
      const { inputs, dimensions } = step.request;
      const { vectors } = await client.embed(inputs.map((/** @type {any} */ one) => one.text), { dimensions });
      return { vectors };
    }
    case 'rerank': {
      const { query, documents, topN } = step.request;
      const { results } = await client.rerank(query, documents, { method: 'likelihood', topN });
      return { results };
    }
    default:
      throw new Error(`unknown call ${step.call}`);
  }
}

/**
 * As many streams at once; only the first one reports.
 *
 * @param {Client} client
 * @param {Step} step
 */
async function parallel(client, step) {
  const { report_after_tokens: _, ...others } = step;
  const runs = Array.from({ length: step.parallel }, (_, i) => generate(client, i ? others : step));
  const [first, ...rest] = await Promise.all(runs);
  const different = rest.filter((one) => JSON.stringify(one) !== JSON.stringify(first)).length;
  return { ...first, different };
}

/**
 * @param {Client} client
 * @param {Step} request
 */
async function score(client, request) {
  const inputs = request.inputs.map(({ text, promptText: prompt }) => ({ text, prompt }));
  const { texts } = await client.score(inputs);
  return { scores: texts.map(({ tokenIds, logprob }) => ({ token_ids: tokenIds, logprob })) };
}

/**
 * @param {Client} client
 * @param {Step} step
 */
async function generate(client, step) {
  const given = options(step);
  const events = [];
  let before = 0;
  for await (const event of client.generate(given)) {
    events.push(event);
    const tokens = before + (event.type === 'delta' ? event.tokenIds.length : 0);
    const reached = (/** @type {number} */ mark = 0) => before < mark && mark <= tokens;
    if (reached(step.leave_after_tokens)) return { left: true };
    if (reached(step.abort_after_tokens)) await client.abort([given.requestId]);
    if (reached(step.report_after_tokens)) write({ received: tokens });
    before = tokens;
  }
  const completions = await collect(iterate(events));
  const logprobs = completions[0].promptLogprobs ?? [];
  return { completions: completions.map(describe), prompt_logprobs: logprobs.map(({ logprob }) => logprob) };
}

/** @param {any[]} events */
async function* iterate(events) {
  yield* events;
}

/**
 * The step's request as the client's options.
 *
 * @param {Step} step
 * @returns {Record<string, any>}
 */
function options({ request, timeout_ms: timeoutMs, affinity_key: affinityKey }) {
  const { text, messages, tokenIds, sampling = {}, stop = {}, ...rest } = request;
  const { seed, ...otherSampling } = sampling;
  const { strings, ...otherStop } = stop;
  return {
    prompt: text,
    messages: messages?.messages,
    tokenIds: tokenIds?.ids,
    seed: seed === undefined ? undefined : BigInt(seed),
    stop: strings,
    timeoutMs,
    affinityKey,
    ...otherSampling,
    ...otherStop,
    ...rest,
  };
}

/** @param {import('../src/index.js').Completion} completion */
function describe({ text, tokenIds, finished }) {
  const { reason, stopString = '', usage } = finished;
  return {
    text,
    token_ids: tokenIds,
    reason,
    stop_string: stopString,
    prompt_tokens: usage.promptTokens,
    completion_tokens: usage.completionTokens,
  };
}

/** @param {PacelineError} error */
function describeError(error) {
  const { code, reason, message, retryable, retryAfterMs = null } = error;
  return { code, reason, message, retryable, retry_after_ms: retryAfterMs, lost: error instanceof StreamLost };
}

/** @param {object} outcome */
function write(outcome) {
  console.log(JSON.stringify(outcome));
}
