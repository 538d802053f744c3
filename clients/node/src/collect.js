// Events of a stream joined into completions, and the values that completions are.

import { incomplete, InvalidOutput } from './errors.js';

/** @typedef {import('./messages.js').Completion} Completion */

/**
 * Reads a stream to its end.
 *
 * @param {AsyncIterable<import('./messages.js').Event>} events Of `generate`.
 * @returns {Promise<Completion[]>} One per index.
 */
export async function collect(events) {
  /** @type {Map<number, Omit<Completion, 'finished'> & { finished?: Completion['finished'] }>} */
  const found = new Map();
  for await (const event of events) {
    const { index } = event;
    const one = found.get(index) ?? { index, text: '', tokenIds: [], logprobs: [], reasoning: '', toolCalls: [] };
    found.set(index, one);
    if (event.type === 'finished') {
      one.finished = event;
      continue;
    }
    if (event.promptLogprobs) one.promptLogprobs = event.promptLogprobs;
    one.text += event.text;
    one.reasoning += event.reasoning;
    for (const id of event.tokenIds) one.tokenIds.push(id);
    for (const logprob of event.logprobs) one.logprobs.push(logprob);
    for (const { index: place, ...call } of event.toolCalls) {
      if (place === one.toolCalls.length) one.toolCalls.push(call);
      else one.toolCalls[place].arguments += call.arguments;
    }
  }
  return [...found.values()]
    .sort((a, b) => a.index - b.index)
    .map(({ finished, ...one }) => {
      if (!finished) throw incomplete(`the stream was left before completion ${one.index} finished`);
      return { ...one, finished };
    });
}

/**
 * The value of a completion that has a `schema`: what JSON.parse makes of its text. Throws InvalidOutput unless
 * the completion ended by itself and is valid: the beginning of a value is never taken for one.
 *
 * @param {Completion} completion
 * @returns {any}
 */
export function parsed({ index, text, finished }) {
  const cut =
    finished.reason === 'length' ? 'it reached maxTokens or the end of the context'
    : finished.stopString !== undefined ? `the stop string ${JSON.stringify(finished.stopString)} ended it`
    : finished.stopTokenId !== undefined ? `the stop token ${finished.stopTokenId} ended it`
    : undefined;
  if (cut) throw new InvalidOutput(`completion ${index} is not a whole value: ${cut}`);
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new InvalidOutput(`completion ${index}: ${/** @type {Error} */ (error).message}`, error);
  }
}
