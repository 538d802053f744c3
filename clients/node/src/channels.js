// A client's channels to schedulers, each with the stub of its calls.

import grpc from '@grpc/grpc-js';

import { SchedulerService } from './contract.js';
import { dnsName, ROUND_ROBIN } from './names.js';

const CHANNEL_OPTIONS = {
  'grpc.max_receive_message_length': 4 << 20,
  'grpc.max_send_message_length': 4 << 20,
  // A frozen scheduler is noticed within four seconds; one that computes answers pings all the while.
  'grpc.keepalive_time_ms': 2_000,
  'grpc.keepalive_timeout_ms': 1_500,
  'grpc.initial_reconnect_backoff_ms': 100,
  'grpc.max_reconnect_backoff_ms': 500,
};

/** To given schedulers from the beginning, to learned ones from their first use on. */
export class Channels {
  #known;
  #credentials;
  /** @type {Map<string, any>} */
  #stubs = new Map();
  isClosed = false;

  /**
   * @param {import('./directory.js').KnownSchedulers} known
   * @param {{ ca: Buffer, cert?: Buffer, key?: Buffer }} [tls]
   */
  constructor(known, tls) {
    this.#known = known;
    this.#credentials = tls
      ? grpc.credentials.createSsl(tls.ca, tls.key ?? null, tls.cert ?? null)
      : grpc.credentials.createInsecure();
    for (const address of known.given) this.stub(address);
  }

  /**
   * The stub of an address; undefined: it is known no more.
   *
   * @param {string} address
   */
  stub(address) {
    const tlsName = this.#known.tlsName(address);
    if (tlsName === undefined) return undefined;
    const opened = this.#stubs.get(address);
    if (opened) return opened;
    const byName = dnsName(address) === undefined ? {} : ROUND_ROBIN;
    const named = tlsName ? { 'grpc.ssl_target_name_override': tlsName, 'grpc.default_authority': tlsName } : {};
    const stub = new SchedulerService(address, this.#credentials, { ...CHANNEL_OPTIONS, ...byName, ...named });
    if (this.isClosed) stub.close();
    this.#stubs.set(address, stub);
    return stub;
  }

  /** @param {(address: string) => boolean} isUsed Others are closed. */
  keep(isUsed) {
    for (const [address, stub] of this.#stubs) {
      if (isUsed(address)) continue;
      this.#stubs.delete(address);
      stub.close();
    }
  }

  /** Calls under way go on. */
  close() {
    this.isClosed = true;
    for (const stub of this.#stubs.values()) stub.close();
  }
}
