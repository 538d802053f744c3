// What an entry of a directory says of a scheduler, and whether a client's token may go there.

import { isLoopback } from './names.js';

/** @typedef {'off' | 'safe' | 'any'} DirectoryUse Which schedulers of a directory a client uses: see KnownSchedulers. */

/**
 * @typedef {object} Learned What an entry says of a scheduler.
 * @property {string} address
 * @property {string} instance
 * @property {string} start One start of what is at the address: both of them.
 * @property {string} tlsName
 * @property {string} model The model's fingerprint, in hex.
 * @property {number} load Running and waiting sequences.
 * @property {boolean} drains
 * @property {Set<string>} adapters
 */

const HOST_PORT = /^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}$/;
/** What gRPC takes for a scheme, though a port follows. */
const NO_HOST = /^(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds|passthrough|google-c2p):/i;

/**
 * @param {any} entry A SchedulerEntry.
 * @returns {Learned}
 */
export function learned({ address, instance, tlsName, modelFingerprint, load, state, adapters }) {
  return {
    address,
    instance,
    start: `${address} ${instance}`,
    tlsName,
    model: modelFingerprint.toString('hex'),
    load: (load?.running ?? 0) + (load?.waiting ?? 0),
    drains: state === 'SCHEDULER_STATE_DRAINING',
    adapters: new Set(adapters),
  };
}

/**
 * Whether a token is as safe at an entry's address as at given ones.
 *
 * @param {any} entry
 * @param {string} teller The address of the scheduler that listed it.
 * @param {boolean} hasAuthority
 * @param {DirectoryUse} use
 */
export function mayGetAToken({ address, tlsName }, teller, hasAuthority, use) {
  // Else it may be a socket, a list of addresses, or another target of gRPC.
  if (!HOST_PORT.test(address) || NO_HOST.test(address)) return false;
  if (hasAuthority) return Boolean(tlsName);
  if (tlsName) return false; // it speaks TLS, and the client knows no authority
  return isLoopback(address) ? isLoopback(teller) : use === 'any';
}
