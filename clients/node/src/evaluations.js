// score, embed and rerank: from plain JavaScript objects to messages of scheduler.proto, and back.

import { randomBytes } from 'node:crypto';

import { chat } from './chat.js';
import { incomplete } from './errors.js';
import { array, fields, isUint32, string } from './fields.js';
import { tokenLogprobs } from './logprobs.js';

/**
 * What `score`, `embed` and `rerank` have in common.
 *
 * @typedef {object} EvaluationOptions
 * @property {string} [model] The model that is served, which is the default, or an adapter.
 * @property {number} [priority] Higher goes first.
 * @property {string} [cacheSalt]
 * @property {string} [requestId]
 * @property {number} [timeoutMs] The call's deadline, which the scheduler honours too.
 * @property {AbortSignal} [signal] Aborting cancels the call.
 */

/**
 * A text or token ids are scored as a whole, but for the first token. Of an object exactly one of `text` and
 * `tokenIds` is scored, behind at most one of the other three; prompt and text are tokenized apart.
 *
 * @typedef {string | number[] | {
 *   text?: string, tokenIds?: number[], prompt?: string, promptTokenIds?: number[],
 *   messages?: import('./chat.js').Message[] }} ScoreInput
 */

/** @typedef {EvaluationOptions & { topLogprobs?: number }} ScoreOptions Of so many most likely ids at each token. */

/**
 * @typedef {EvaluationOptions & { pooling?: 'last' | 'mean' | 'cls', normalize?: boolean, dimensions?: number,
 *   prompt?: string, promptName?: string }} EmbedOptions
 *   `dimensions` keeps the first so many values, before vectors are scaled to length 1. `prompt` is a text that precedes
 *   each input that is text, `promptName` the name of one of the model's own. Defaults are the model's own.
 */

/**
 * @typedef {EvaluationOptions & { method?: 'yesNo' | 'likelihood', instruction?: string, topN?: number }} RerankOptions
 *   yesNo, the default: the probability that the model says that the document answers the query. likelihood: the
 *   mean logprob of the query's tokens behind the document.
 */

/**
 * Of all inputs of a call together; times since its arrival.
 *
 * @typedef {{ promptTokens: number, cachedTokens: number, queueMs: number, totalMs: number }} EvaluationUsage
 */

/**
 * One input's score: natural logarithms, by the raw logits. `logprob` is the sum, `perplexity`
 * exp(-logprob / tokens).
 *
 * @typedef {{ tokenIds: number[], logprobs: import('./messages.js').TokenLogprobs[], logprob: number,
 *   perplexity: number }} ScoredText
 */

/** @typedef {{ requestId: string, texts: ScoredText[], usage: EvaluationUsage }} ScoreReply One text per input. */

/**
 * `vectors` and `tokens` have one item per input.
 *
 * @typedef {{ requestId: string, vectors: number[][], tokens: number[], usage: EvaluationUsage }} EmbedReply
 */

/**
 * Best first; `index` is the document's place among those given. `empty` documents come last, and their score means
 * nothing.
 *
 * @typedef {{ requestId: string, results: { index: number, score: number, empty: boolean }[],
 *   usage: EvaluationUsage }} RerankReply
 */

const COMMON = ['model', 'priority', 'cacheSalt', 'requestId'];
const CALL = ['timeoutMs', 'signal'];
const POOLINGS = { last: 'POOLING_LAST', mean: 'POOLING_MEAN', cls: 'POOLING_CLS' };
const METHODS = { yesNo: 'RERANK_METHOD_YES_NO', likelihood: 'RERANK_METHOD_LIKELIHOOD' };

/**
 * @param {ScoreInput[]} inputs
 * @param {ScoreOptions} options
 * @returns {Record<string, any>} A ScoreRequest.
 */
export function scoreRequest(inputs, options) {
  const { request, given } = common(options, ['topLogprobs']);
  request.inputs = array('inputs', inputs).map((one, i) => scoreInput(`inputs[${i}]`, one));
  if ('topLogprobs' in given) request.topLogprobs = uint32('topLogprobs', given.topLogprobs);
  return request;
}

/**
 * @param {(string | number[])[]} inputs
 * @param {EmbedOptions} options
 * @returns {Record<string, any>} An EmbedRequest.
 */
export function embedRequest(inputs, options) {
  const { request, given } = common(options, ['pooling', 'normalize', 'dimensions', 'prompt', 'promptName']);
  request.inputs = array('inputs', inputs).map((one, i) => textOrIds(`inputs[${i}]`, one));
  if ('pooling' in given) request.pooling = named(POOLINGS, 'pooling', given.pooling);
  if ('normalize' in given) {
    if (typeof given.normalize !== 'boolean') throw new TypeError('normalize must be a boolean');
    request.normalize = given.normalize;
  }
  if ('dimensions' in given) request.dimensions = uint32('dimensions', given.dimensions);
  if ('prompt' in given && 'promptName' in given) throw new TypeError('give at most one of prompt and promptName');
  if ('prompt' in given) request.promptText = string('prompt', given.prompt);
  if ('promptName' in given) request.promptName = string('promptName', given.promptName);
  return request;
}

/**
 * @param {string} query
 * @param {string[]} documents
 * @param {RerankOptions} options
 * @returns {Record<string, any>} A RerankRequest.
 */
export function rerankRequest(query, documents, options) {
  const { request, given } = common(options, ['method', 'instruction', 'topN']);
  request.query = string('query', query);
  request.documents = array('documents', documents).map((one, i) => string(`documents[${i}]`, one));
  if ('method' in given) request.method = named(METHODS, 'method', given.method);
  if ('instruction' in given) request.instruction = string('instruction', given.instruction);
  if ('topN' in given) request.topN = uint32('topN', given.topN);
  return request;
}

/**
 * @param {any} reply A ScoreResponse.
 * @param {Record<string, any>} request
 * @returns {ScoreReply}
 */
export function scoreReply({ requestId, scores, usage }, request) {
  checkCount('scores', scores.length, request.inputs.length);
  const texts = scores.map((/** @type {any} */ { tokenIds, logprobs, logprob, perplexity }, /** @type {number} */ i) => {
    if (tokenIds.length !== logprobs.length) {
      throw incomplete(`score ${i} has ${logprobs.length} logprobs of ${tokenIds.length} tokens`);
    }
    checkNumbers(`score ${i}`, [logprob, perplexity]);
    return { tokenIds, logprobs: logprobs.map(tokenLogprobs), logprob, perplexity };
  });
  return { requestId, texts, usage };
}

/**
 * @param {any} reply An EmbedResponse.
 * @param {Record<string, any>} request
 * @returns {EmbedReply}
 */
export function embedReply({ requestId, embeddings, usage }, request) {
  checkCount('vectors', embeddings.length, request.inputs.length);
  const size = request.dimensions || embeddings[0].values.length;
  for (const { values } of embeddings) {
    if (values.length !== size || size === 0) throw incomplete(`the reply has a vector of ${values.length} values`);
    checkNumbers('a vector', values);
  }
  return {
    requestId,
    vectors: embeddings.map((/** @type {any} */ one) => one.values),
    tokens: embeddings.map((/** @type {any} */ one) => one.tokens),
    usage,
  };
}

/**
 * @param {any} reply A RerankResponse.
 * @param {Record<string, any>} request
 * @returns {RerankReply}
 */
export function rerankReply({ requestId, results, usage }, request) {
  const count = request.documents.length;
  checkCount('results', results.length, Math.min(request.topN || count, count));
  const indexes = results.map((/** @type {any} */ one) => one.index);
  if (new Set(indexes).size !== indexes.length || indexes.some((/** @type {number} */ index) => index >= count)) {
    throw incomplete(`the reply ranks the documents ${indexes.slice(0, 8)} of ${count}`);
  }
  checkNumbers("a document's score", results.map((/** @type {any} */ one) => one.score));
  return { requestId, results, usage };
}

/**
 * @param {string} what
 * @param {number[]} found
 */
function checkNumbers(what, found) {
  if (found.some(Number.isNaN)) throw incomplete(`${what} is not a number`);
}

/**
 * The request with the options that all have, and an id, drawn if there is none: sent again, it is the same
 * request. And the options that were given.
 *
 * @param {Record<string, any>} options
 * @param {string[]} own
 */
function common(options, own) {
  const known = [...COMMON, ...CALL, ...own];
  const given = Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));
  for (const name of Object.keys(given)) {
    if (!known.includes(name)) throw new TypeError(`unknown option ${name}`);
  }
  /** @type {Record<string, any>} */
  const request = {};
  for (const name of ['model', 'cacheSalt', 'requestId']) {
    if (name in given) request[name] = string(name, given[name]);
  }
  if ('priority' in given) {
    if ((given.priority | 0) !== given.priority) throw new RangeError('priority must be an int32');
    request.priority = given.priority;
  }
  request.requestId ||= randomBytes(16).toString('hex');
  return { request, given };
}

/**
 * @param {string} name
 * @param {any} given
 */
function scoreInput(name, given) {
  if (typeof given === 'string' || Array.isArray(given)) return textOrIds(name, given);
  const { text, tokenIds: scored, prompt, promptTokenIds, messages } = fields(name, given, [
    'text', 'tokenIds', 'prompt', 'promptTokenIds', 'messages',
  ]);
  if ((text === undefined) === (scored === undefined)) throw new TypeError(`${name}: give exactly one of text and tokenIds`);
  if ([prompt, promptTokenIds, messages].filter((one) => one !== undefined).length > 1) {
    throw new TypeError(`${name}: give at most one of prompt, promptTokenIds and messages`);
  }
  /** @type {Record<string, any>} */
  const input = text === undefined ? { tokenIds: tokenIds(`${name}.tokenIds`, scored) } : { text: string(`${name}.text`, text) };
  if (prompt !== undefined) input.promptText = string(`${name}.prompt`, prompt);
  if (promptTokenIds !== undefined) input.promptTokenIds = tokenIds(`${name}.promptTokenIds`, promptTokenIds);
  if (messages !== undefined) input.promptMessages = chat(messages);
  return input;
}

/**
 * @param {string} name
 * @param {any} given
 */
function textOrIds(name, given) {
  return Array.isArray(given) ? { tokenIds: tokenIds(name, given) } : { text: string(name, given) };
}

/**
 * @param {string} name
 * @param {any} given
 */
function tokenIds(name, given) {
  if (!array(name, given).every(isUint32)) throw new RangeError(`${name} must be an array of integers from 0 to 2^32 - 1`);
  return { ids: given };
}

/**
 * @param {string} name
 * @param {any} value
 */
function uint32(name, value) {
  if (!isUint32(value)) throw new RangeError(`${name} must be an integer from 0 to 2^32 - 1`);
  return value;
}

/**
 * @param {Record<string, string>} names
 * @param {string} what
 * @param {any} value
 */
function named(names, what, value) {
  if (!Object.hasOwn(names, value)) throw new TypeError(`${what} must be one of ${Object.keys(names).join(', ')}`);
  return names[value];
}

/**
 * @param {string} what
 * @param {number} found
 * @param {number} wanted
 */
function checkCount(what, found, wanted) {
  if (found !== wanted) throw incomplete(`the reply has ${found} ${what}, not ${wanted}`);
}
