// Logprobs of tokens, as callers get them.

import { incomplete } from './errors.js';

/**
 * @param {any} message A TokenLogprobs.
 * @returns {import('./messages.js').TokenLogprobs}
 */
export function tokenLogprobs({ logprob, topIds, topLogprobs }) {
  if (topIds.length !== topLogprobs.length) throw incomplete("a token's topIds and topLogprobs differ in length");
  if (Number.isNaN(logprob) || topLogprobs.some(Number.isNaN)) throw incomplete("a token's logprob is not a number");
  return { logprob, top: topIds.map((/** @type {number} */ id, /** @type {number} */ i) => ({ id, logprob: topLogprobs[i] })) };
}
