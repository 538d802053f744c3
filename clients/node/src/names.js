// DNS names as addresses: one name may stand for several schedulers, over which its channel spreads calls.

import { promises as dns } from 'node:dns';
import { BlockList, isIP } from 'node:net';

/** Channel options that connect to all addresses of a name, and send each call to the next one. */
export const ROUND_ROBIN = {
  // gRPC's default is one connection, to the first address that answers, for all calls.
  'grpc.service_config': JSON.stringify({ loadBalancingConfig: [{ round_robin: {} }] }),
  // The name is resolved again when a connection ends, at most this often. Default: 30 s.
  'grpc.dns_min_time_between_resolutions_ms': 5_000,
};

const LOOPBACK = new BlockList();
LOOPBACK.addSubnet('127.0.0.0', 8);
LOOPBACK.addAddress('::1', 'ipv6');

/**
 * Whether an address (`host:port` or `unix:path`) can't be reached from another machine.
 *
 * @param {string} address
 */
export function isLoopback(address) {
  if (/^unix(-abstract)?:/.test(address)) return true;
  const host = address.replace(/:[^:]*$/, '').replace(/^\[|\]$/g, '');
  if (isIP(host) === 6) return LOOPBACK.check(host, 'ipv6');
  return host === 'localhost' || (isIP(host) === 4 && host.startsWith('127.'));
}

/**
 * The DNS name in an address (`name:port`, `dns:///name:port`); undefined if it has none. IP addresses, Unix sockets
 * and `localhost`, whose addresses lead to one process, have none.
 *
 * @param {string} address
 * @returns {string | undefined}
 */
export function dnsName(address) {
  if (/^(unix|ipv4|ipv6|xds):/.test(address)) return undefined;
  const place = address.replace(/^dns:(\/\/[^/]*\/)?/, '');
  const host = isIP(place) ? place : place.replace(/:[^:]*$/, '');
  return host === 'localhost' || isIP(host.replace(/^\[|\]$/g, '')) ? undefined : host || undefined;
}

/**
 * How many schedulers an address may stand for, at least 1: the addresses of its name. Those of both IP versions belong
 * to the same hosts, so those of one version are counted.
 *
 * @param {string} address
 * @returns {Promise<number>}
 */
export async function schedulersBehind(address) {
  const name = dnsName(address);
  if (name === undefined) return 1;
  try {
    const found = await dns.lookup(name, { all: true });
    const ofVersion = (/** @type {number} */ version) => new Set(found.filter((one) => one.family === version).map((one) => one.address)).size;
    return Math.max(ofVersion(4), ofVersion(6), 1);
  } catch {
    return 1;
  }
}
