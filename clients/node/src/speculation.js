// How far ahead tokens are guessed, from plain options.

import { isUint32 } from './fields.js';

/**
 * How far ahead tokens are guessed, and by whom; it never changes the tokens. What is left out is the
 * server's default: for `mode` its own, for `drafter` all that it has.
 *
 * @typedef {object} Speculation
 * @property {'off' | 'auto' | number} [mode] auto: a controller chooses for each step; a number: so many drafts.
 * @property {'ngram' | 'draft-executor' | 'grammar'} [drafter]
 */

const MODES = { off: 'SPECULATION_MODE_OFF', auto: 'SPECULATION_MODE_AUTO' };
const DRAFTERS = { ngram: 'DRAFTER_NGRAM', 'draft-executor': 'DRAFTER_DRAFT_EXECUTOR', grammar: 'DRAFTER_GRAMMAR' };

/**
 * @param {Speculation | Speculation['mode']} given
 * @returns {object} A Speculation message.
 */
export function speculation(given) {
  const { mode, drafter, ...unknown } = typeof given === 'object' ? given : { mode: given, drafter: undefined };
  for (const name of Object.keys(unknown)) throw new TypeError(`unknown option speculation.${name}`);
  /** @type {Record<string, any>} */
  const message = {};
  if (drafter !== undefined) message.drafter = named(DRAFTERS, drafter, 'speculation.drafter');
  if (typeof mode === 'number') {
    if (!isUint32(mode)) throw new RangeError('speculation.mode must be an integer from 0 to 2^32 - 1');
    message.mode = 'SPECULATION_MODE_FIXED';
    message.draftTokens = mode;
  } else if (mode !== undefined) message.mode = named(MODES, mode, 'speculation.mode');
  return message;
}

/**
 * @param {Record<string, string>} names
 * @param {string} value
 * @param {string} what
 */
function named(names, value, what) {
  if (!Object.hasOwn(names, value)) throw new TypeError(`${what} must be one of ${Object.keys(names).join(', ')}`);
  return names[value];
}
