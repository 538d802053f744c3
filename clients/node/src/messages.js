// Between plain JavaScript objects and the messages of scheduler.proto.

import { chat, CHAT_OPTIONS } from './chat.js';
import { incomplete } from './errors.js';
import { isUint32 } from './fields.js';
import { grammar, GRAMMARS } from './grammars.js';
import { tokenLogprobs } from './logprobs.js';
import { speculation } from './speculation.js';

/**
 * What `generate` takes: exactly one of prompt, messages and tokenIds. What is left out is the
 * model's own default; scheduler.proto lists ranges.
 *
 * @typedef {object} GenerateOptions
 * @property {string} [prompt] Text as it is, without a template.
 * @property {import('./chat.js').Message[]} [messages] Through the model's chat template.
 * @property {number[]} [tokenIds]
 * @property {number} [temperature] 0 is greedy.
 * @property {number} [topK]
 * @property {number} [topP]
 * @property {number} [minP]
 * @property {number} [repetitionPenalty]
 * @property {number} [presencePenalty]
 * @property {number} [frequencyPenalty]
 * @property {Record<number, number>} [logitBias]
 * @property {number | bigint} [seed] uint64; the same seed gives the same tokens.
 * @property {number} [logprobs] Of each token, and of so many most likely ones.
 * @property {number} [maxTokens] Default: what fits.
 * @property {number} [minTokens]
 * @property {string | string[]} [stop] Not part of the text returned.
 * @property {number[]} [stopTokenIds]
 * @property {boolean} [ignoreEos]
 * @property {boolean} [includeStopString] The text ends with the stop string that ended it.
 * @property {number} [n] Completions; default 1.
 * @property {number} [priority] Higher goes first.
 * @property {string} [cacheSalt]
 * @property {string} [requestId]
 * @property {string} [model] The one that is served, which is the default, or an adapter.
 * @property {number} [promptLogprobs] Of `generate`: logprobs of the prompt's tokens but the first, and of so many most
 *   likely ones; see Delta.
 * @property {import('./speculation.js').Speculation | import('./speculation.js').Speculation['mode']} [speculation] How far ahead tokens are guessed; plain: its mode.
 * @property {object | string} [schema] What the output must match, as a JSON schema: an object, or JSON. Of this and
 *   the next four there may be one.
 * @property {string} [regex] For all of the text.
 * @property {string[]} [choices] One of these texts.
 * @property {string} [grammar] Context-free, in Lark's syntax.
 * @property {object | string} [structuralTag] Free text with tagged parts that must match.
 * @property {import('./chat.js').ToolLike[]} [tools] What the model may call; with messages, as the next three.
 * @property {import('./chat.js').ToolChoice | { type?: 'function', function: { name: string } }} [toolChoice]
 * @property {Record<string, any>} [templateArguments] What the template calls them: enable_thinking, ...
 * @property {boolean} [continueFinalMessage] The last message goes on, rather than a new turn beginning.
 * @property {string} [affinityKey] Of several schedulers, requests with the same key go to the same one; default: those
 *   whose prompts begin alike.
 * @property {number} [timeoutMs] The call's deadline, which the scheduler honours too.
 * @property {AbortSignal} [signal] Aborting cancels the request.
 */

/** @typedef {{ logprob: number, top: { id: number, logprob: number }[] }} TokenLogprobs */

/**
 * What is new in completion `index`; never cumulative, never retracted.
 *
 * @typedef {object} Delta
 * @property {'delta'} type
 * @property {number} index
 * @property {number[]} tokenIds
 * @property {string} text
 * @property {TokenLogprobs[]} logprobs
 * @property {string} reasoning What the model writes before its answer.
 * @property {(import('./chat.js').ToolCall & { index: number })[]} toolCalls Parts of tool calls, each with the
 *   index of its call; id and name are those of the first part, and '' in the others.
 * @property {TokenLogprobs[]} [promptLogprobs] If asked for, in the stream's first delta alone: item i is that of the
 *   prompt's token i + 1.
 */

/**
 * What a completion took; times since the request's arrival.
 *
 * @typedef {object} Usage
 * @property {number} promptTokens
 * @property {number} cachedTokens
 * @property {number} completionTokens
 * @property {number} draftedTokens Sent to be verified.
 * @property {number} acceptedTokens Of these.
 * @property {number} preemptions
 * @property {number} queueMs
 * @property {number} firstTokenMs
 * @property {number} totalMs
 * @property {number} verifications Steps that had drafts.
 * @property {number[]} draftedByPosition The first draft of each verification, the second, ...
 * @property {number[]} acceptedByPosition
 * @property {number} reasoningTokens Of completionTokens: before the answer, markers included.
 * @property {number} grammarDraftedTokens Of draftedTokens: forced by the grammar.
 * @property {number} grammarAcceptedTokens Of acceptedTokens: forced by the grammar.
 */

/**
 * The end of completion `index`, exactly once; at most one of the three matches is set.
 *
 * @typedef {object} Finished
 * @property {'finished'} type
 * @property {number} index
 * @property {'stop' | 'length'} reason
 * @property {number} [eosTokenId]
 * @property {number} [stopTokenId]
 * @property {string} [stopString]
 * @property {Usage} usage
 */

/** @typedef {Delta | Finished} Event */

/**
 * @typedef {object} Completion
 * @property {number} index
 * @property {string} text
 * @property {number[]} tokenIds
 * @property {TokenLogprobs[]} logprobs
 * @property {string} reasoning What the model wrote before its answer.
 * @property {import('./chat.js').ToolCall[]} toolCalls
 * @property {Finished} finished
 * @property {TokenLogprobs[]} [promptLogprobs] As its deltas had them; of `collect` alone.
 */

const SAMPLING = [
  'temperature', 'topK', 'topP', 'minP', 'repetitionPenalty', 'presencePenalty',
  'frequencyPenalty', 'logitBias', 'seed', 'logprobs',
];
const STOP = { maxTokens: 'maxTokens', minTokens: 'minTokens', stop: 'strings', stopTokenIds: 'tokenIds', ignoreEos: 'ignoreEos', includeStopString: 'includeStopString' };
const REQUEST = ['n', 'priority', 'cacheSalt', 'requestId', 'model', 'promptLogprobs'];
const PROMPTS = ['prompt', 'messages', 'tokenIds'];
const CALL = ['timeoutMs', 'signal', 'affinityKey'];
const KNOWN = new Set([
  ...SAMPLING, ...Object.keys(STOP), ...REQUEST, ...GRAMMARS, ...CHAT_OPTIONS, 'speculation', ...PROMPTS, ...CALL,
]);

const TYPES = {
  string: ['prompt', 'cacheSalt', 'requestId', 'model', 'regex', 'grammar', 'affinityKey'],
  number: ['temperature', 'topP', 'minP', 'repetitionPenalty', 'presencePenalty', 'frequencyPenalty', 'timeoutMs'],
  boolean: ['ignoreEos', 'includeStopString', 'continueFinalMessage'],
};
/** @type {Map<string, string>} Types of options, by name; protobufjs would convert other types in silence. */
const TYPE_OF = new Map(Object.entries(TYPES).flatMap(([type, names]) => names.map((name) => [name, type])));
const UINT32 = new Set(['topK', 'logprobs', 'promptLogprobs', 'maxTokens', 'minTokens', 'n']);

/**
 * @param {GenerateOptions} options
 * @returns {object} A GenerateRequest.
 */
export function generateRequest(options) {
  for (const name of Object.keys(options)) {
    if (!KNOWN.has(name)) throw new TypeError(`unknown option ${name}`);
  }
  /** @type {Record<string, any>} */
  const given = Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));
  if (PROMPTS.filter((name) => name in given).length !== 1) {
    throw new TypeError('give exactly one of prompt, messages and tokenIds');
  }
  if (typeof given.stop === 'string') given.stop = [given.stop];
  for (const [name, value] of Object.entries(given)) check(name, value);
  for (const name of CHAT_OPTIONS) {
    if (name in given && !('messages' in given)) throw new TypeError(`${name}: only with messages`);
  }
  /** @type {Record<string, any>} */
  const request = pick(given, REQUEST);
  if ('prompt' in given) request.text = given.prompt;
  else if ('messages' in given) request.messages = chat(given.messages, given);
  else request.tokenIds = { ids: given.tokenIds };
  const sampling = pick(given, SAMPLING);
  if ('seed' in sampling) sampling.seed = String(sampling.seed);
  if (Object.keys(sampling).length > 0) request.sampling = sampling;
  const stop = Object.entries(STOP).filter(([name]) => name in given).map(([name, field]) => [field, given[name]]);
  if (stop.length > 0) request.stop = Object.fromEntries(stop);
  const constraint = grammar(given);
  if (constraint) request.grammar = constraint;
  if ('speculation' in given) request.speculation = speculation(given.speculation);
  return request;
}

/**
 * What protobufjs would wrap around or cut off in silence is refused here, by its name.
 *
 * @param {string} name
 * @param {any} value
 */
function check(name, value) {
  const type = TYPE_OF.get(name);
  if (type && typeof value !== type) throw new TypeError(`${name} must be a ${type}, not ${shown(value)}`);
  if (name === 'stop' && !(Array.isArray(value) && value.every((one) => typeof one === 'string'))) {
    throw new TypeError('stop must be a string or an array of strings');
  }
  if (UINT32.has(name) && !isUint32(value)) throw new RangeError(`${name} must be an integer from 0 to 2^32 - 1`);
  if (name === 'n' && value === 0) throw new RangeError('n must be at least 1');
  if ((name === 'tokenIds' || name === 'stopTokenIds') && !(Array.isArray(value) && value.every(isUint32))) {
    throw new RangeError(`${name} must be an array of integers from 0 to 2^32 - 1`);
  }
  if (name === 'logitBias' && !Object.keys(value).every((id) => isUint32(Number(id)))) {
    throw new RangeError('logitBias must have token ids as keys');
  }
  if (name === 'seed' && !isUint64(value)) throw new RangeError('seed must be an integer from 0 to 2^64 - 1');
  if (name === 'priority' && (value | 0) !== value) throw new RangeError('priority must be an int32');
}

/** @param {unknown} value */
function shown(value) {
  return value === null ? 'null' : Array.isArray(value) ? 'an array' : `a ${typeof value}`;
}

/** @param {unknown} value */
function isUint64(value) {
  if (typeof value === 'bigint') return value >= 0n && value < 1n << 64n;
  return Number.isSafeInteger(value) && Number(value) >= 0;
}

/**
 * @param {Record<string, any>} from
 * @param {string[]} names
 */
function pick(from, names) {
  return Object.fromEntries(names.filter((name) => name in from).map((name) => [name, from[name]]));
}

/**
 * @param {any} message A GenerateResponse.
 * @returns {Event | undefined} None for an event that is not for the caller, or of a later revision.
 */
export function event(message) {
  if (message.event === 'finished') return finished(message.index, message.finished);
  if (message.event !== 'delta') return undefined;
  const { tokenIds, text, logprobs, reasoning, toolCalls } = message.delta;
  return { type: 'delta', index: message.index, tokenIds, text, logprobs: logprobs.map(tokenLogprobs), reasoning, toolCalls };
}

/** Which of a stream's completions have finished: a stream that ends OK must have finished all. */
export class Progress {
  #unfinished;

  /** @param {number} n Completions. */
  constructor(n) {
    this.#unfinished = new Set(Array.from({ length: n }, (_, index) => index));
  }

  /**
   * Takes the next event, and gives it back.
   *
   * @param {Event} event
   */
  see(event) {
    const { index, type } = event;
    if (!this.#unfinished.has(index)) {
      throw incomplete(`an event of completion ${index}, which has finished or was not asked for`);
    }
    if (type === 'finished') this.#unfinished.delete(index);
    return event;
  }

  /** The stream has ended OK. */
  checkEnd() {
    for (const index of this.#unfinished) throw incomplete(`the stream ended before completion ${index} finished`);
  }
}

/**
 * @param {any} reply A GenerateUnaryResponse.
 * @param {number} n How many completions were asked for.
 * @returns {Completion[]} By index.
 */
export function completions(reply, n) {
  const indexes = reply.completions.map((/** @type {any} */ one) => one.index);
  if (indexes.length !== n || indexes.some((/** @type {number} */ index, /** @type {number} */ i) => index !== i)) {
    throw incomplete(`the reply has the completions ${indexes.slice(0, n + 1)}, not 0 to ${n - 1}`);
  }
  return reply.completions.map(completion);
}

/**
 * @param {any} message A Completion.
 * @returns {Completion}
 */
function completion(message) {
  if (!message.finished) throw incomplete(`the reply has completion ${message.index} unfinished`);
  return {
    index: message.index,
    text: message.text,
    tokenIds: message.tokenIds,
    logprobs: message.logprobs.map(tokenLogprobs),
    reasoning: message.reasoning,
    toolCalls: message.toolCalls,
    finished: finished(message.index, message.finished),
  };
}

/** @type {Record<string, 'stop' | 'length'>} */
const REASONS = { FINISH_REASON_STOP: 'stop', FINISH_REASON_LENGTH: 'length' };

/**
 * @param {number} index
 * @param {any} message A Finished.
 * @returns {Finished}
 */
function finished(index, message) {
  const reason = REASONS[message.reason];
  if (!reason) throw incomplete(`completion ${index} ended with the unknown reason ${message.reason}`);
  const matched = message.matched ? { [message.matched]: message[message.matched] } : {};
  return { type: 'finished', index, reason, ...matched, usage: { ...message.usage } };
}
