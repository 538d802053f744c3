// Which of several schedulers gets a request: AFFINITY in scheduler.proto. Requests with the same beginning go to the
// same scheduler, whose prefix cache then has it.

import { createHash } from 'node:crypto';

const VERSION = 'paceline-affinity-1';
const MAX_TEXT_BYTES = 1024;
const MAX_TOKEN_IDS = 256;

/**
 * @param {Record<string, any>} request A GenerateRequest.
 * @param {string} [own] The caller's key, in place of the prompt's beginning.
 * @returns {Buffer} 32 bytes that requests with the same beginning share.
 */
export function affinityKey(request, own) {
  const hash = createHash('sha256');
  if (own) return hash.update(own).digest();
  for (const part of [VERSION, request.model, request.cacheSalt]) hash.update(string(part));
  if (request.messages) {
    hash.update('m');
    for (const { role, name, content, parts } of request.messages.messages) {
      const whole = content || (parts ?? []).map((/** @type {any} */ part) => part.text).join('');
      for (const part of [role, name, whole]) hash.update(string(part));
      if (role === 'user') break;
    }
  } else if (request.tokenIds) {
    hash.update('i');
    for (const id of request.tokenIds.ids.slice(0, MAX_TOKEN_IDS)) hash.update(uint32(id));
  } else {
    hash.update('t').update(string(beginning(request.text ?? '')));
  }
  return hash.digest();
}

/**
 * @param {Buffer} key
 * @param {string[]} addresses
 * @returns {number[]} Their indexes, that of the scheduler with the highest weight first.
 */
export function preference(key, addresses) {
  const weights = addresses.map((address) => createHash('sha256').update(key).update(address).digest().subarray(0, 8));
  const rank = (/** @type {number} */ a, /** @type {number} */ b) =>
    Buffer.compare(weights[b], weights[a]) || Buffer.compare(Buffer.from(addresses[a]), Buffer.from(addresses[b]));
  return addresses.map((_, index) => index).sort(rank);
}

/**
 * @param {number[]} order Of `preference`.
 * @param {number[]} loads The client's live calls, by address.
 * @returns {number} The first whose load is within its share.
 */
export function choice(order, loads) {
  const sum = loads.reduce((all, one) => all + one, 1);
  const bound = Math.ceil((5 * sum) / (4 * loads.length));
  return /** @type {number} */ (order.find((index) => loads[index] < bound));
}

/** @param {string} text */
function beginning(text) {
  const bytes = Buffer.from(text.slice(0, MAX_TEXT_BYTES));
  let end = Math.min(bytes.length, MAX_TEXT_BYTES);
  while (end < bytes.length && (bytes[end] & 0xc0) === 0x80) end -= 1; // in the middle of a character
  return bytes.subarray(0, end);
}

/** @param {string | Buffer | undefined} text */
function string(text) {
  const bytes = Buffer.from(text ?? '');
  return Buffer.concat([uint32(bytes.length), bytes]);
}

/** @param {number} value */
function uint32(value) {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(value);
  return bytes;
}
