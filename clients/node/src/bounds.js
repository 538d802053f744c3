// How much a stream may bring: a scheduler that sends more than it announced is wrong, or lies. No I/O.

import { incomplete } from './errors.js';

/** UTF-8 bytes of text, reasoning and tool calls for each token of a completion, on average: see Delta. */
const TEXT_BYTES_PER_TOKEN = 4096;

/** Tokens of a completion, where neither the request nor the scheduler says how many it may have. */
const UNANNOUNCED_TOKENS = 2 ** 20;

/** Likeliest tokens in each place, if the request asks for fewer. */
const UNASKED_TOP = 32;

/** What the completions of one stream may have, by its request and its Started. */
export class Bounds {
  #maxTokens;
  #top;

  /**
   * @param {Record<string, any>} request A GenerateRequest.
   * @param {Record<string, any>} [started]
   */
  constructor(request, started) {
    const told = [request.stop?.maxTokens, started?.maxTokens].filter(Boolean);
    this.#maxTokens = told.length > 0 ? Math.min(...told) : UNANNOUNCED_TOKENS;
    this.#top = Math.max(request.sampling?.logprobs ?? 0, UNASKED_TOP);
  }

  /**
   * Throws if a delta is more than may come.
   *
   * @param {import('./messages.js').Delta} delta
   * @param {number} tokens Of its completion, with it.
   * @param {number} textBytes Likewise.
   */
  check({ index, tokenIds, logprobs }, tokens, textBytes) {
    const name = `completion ${index}`;
    if (tokens > this.#maxTokens) {
      throw incomplete(`${name} has more than the ${this.#maxTokens} tokens that were announced`);
    }
    if (textBytes > TEXT_BYTES_PER_TOKEN * Math.max(tokens, 1)) {
      throw incomplete(`${name} has ${textBytes} bytes of text in ${tokens} tokens, more than ${TEXT_BYTES_PER_TOKEN} a token`);
    }
    if (logprobs.length > tokenIds.length) {
      throw incomplete(`${name} has ${logprobs.length} logprobs of ${tokenIds.length} tokens`);
    }
    const most = logprobs.reduce((found, { top }) => Math.max(found, top.length), 0);
    if (most > this.#top) {
      throw incomplete(`${name} has ${most} likeliest tokens in one place, more than ${this.#top}`);
    }
  }
}
