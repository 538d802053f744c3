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
 * @returns {string[]} That of the scheduler with the highest weight first.
 */
export function preference(key, addresses) {
  const weighed = addresses.map((address) => {
    const [name, hash] = [Buffer.from(address), createHash('sha256').update(key).update(address).digest()];
    return { address, name, weight: hash.subarray(0, 8) };
  });
  weighed.sort((a, b) => Buffer.compare(b.weight, a.weight) || Buffer.compare(a.name, b.name));
  return weighed.map(({ address }) => address);
}

/**
 * @param {string[]} order Of `preference`.
 * @param {(address: string) => number} live The client's live calls there.
 * @param {(address: string) => number} reported Sequences of all clients there, as the directory has them.
 * @returns {string} The first whose loads are both within its share, else the first whose live calls are.
 */
export function choice(order, live, reported) {
  const [least, most] = [bound(order.map(live)), bound(order.map(reported))];
  const fewer = order.filter((one) => live(one) < least);
  return fewer.find((one) => reported(one) < most) ?? fewer[0];
}

/**
 * Sequences at which a scheduler passes on: 1.25 of the mean with the new one, rounded up.
 *
 * @param {number[]} loads
 */
function bound(loads) {
  const sum = loads.reduce((all, one) => all + one, 1);
  return Math.ceil((5 * sum) / (4 * loads.length));
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
