// Logprobs of tokens, as callers get them.

/**
 * @param {any} message A TokenLogprobs.
 * @returns {import('./messages.js').TokenLogprobs}
 */
export function tokenLogprobs({ logprob, topIds, topLogprobs }) {
  return { logprob, top: topIds.map((/** @type {number} */ id, /** @type {number} */ i) => ({ id, logprob: topLogprobs[i] })) };
}
