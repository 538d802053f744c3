/**
 * Paceline's Node client.
 *
 * ```js
 * const client = new Client('127.0.0.1:50051');
 * for await (const event of client.generate({ prompt: 'Once upon a time', maxTokens: 64 })) {
 *   if (event.type === 'delta') process.stdout.write(event.text);
 * }
 * client.close();
 * ```
 */

export { assistantMessage, toolMessage } from './chat.js';
export { Client } from './client.js';
export { collect, parsed } from './collect.js';
export { InvalidOutput, PacelineError, StreamLost } from './errors.js';
export { stopTracingCalls, traceCalls } from './spans.js';

/** @typedef {import('./messages.js').GenerateOptions} GenerateOptions */
/** @typedef {import('./messages.js').Event} Event */
/** @typedef {import('./chat.js').Message} Message */
/** @typedef {import('./chat.js').Tool} Tool */
/** @typedef {import('./chat.js').ToolCall} ToolCall */
/** @typedef {import('./messages.js').Delta} Delta */
/** @typedef {import('./messages.js').Finished} Finished */
/** @typedef {import('./messages.js').Completion} Completion */
/** @typedef {import('./evaluations.js').ScoreInput} ScoreInput */
/** @typedef {import('./evaluations.js').ScoreReply} ScoreReply */
/** @typedef {import('./evaluations.js').EmbedReply} EmbedReply */
/** @typedef {import('./evaluations.js').RerankReply} RerankReply */
