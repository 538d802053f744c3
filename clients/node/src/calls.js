// Single calls of a scheduler's stub, and waiting beside them.

import { setTimeout as sleep } from 'node:timers/promises';

import grpc from '@grpc/grpc-js';

import { fromRpc, PacelineError } from './errors.js';

/** How long connecting may take; a frozen scheduler takes connections, and says nothing. */
const CONNECT_TIMEOUT_MS = 3_000;

/**
 * Make a unary call; its reply.
 *
 * @param {any} stub
 * @param {string} method
 * @param {object} request
 * @param {grpc.Metadata} metadata
 * @param {number} timeoutMs
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export function send(stub, method, request, metadata, timeoutMs, signal) {
  return new Promise((resolve, reject) => {
    const answer = (/** @type {unknown} */ error, /** @type {any} */ reply) => {
      signal?.removeEventListener('abort', abort);
      const failure = connecting.explain(error);
      if (!error) resolve(reply);
      else reject(signal?.aborted ? signal.reason : failure);
    };
    const call = stub[method](request, metadata, deadline(timeoutMs), answer);
    const connecting = unlessConnected(stub, call);
    const abort = () => call.cancel();
    signal?.addEventListener('abort', abort, { once: true });
  });
}

/**
 * Cancels a call whose channel still connects after a while: a frozen scheduler takes connections.
 *
 * @param {any} stub
 * @param {any} call
 */
export function unlessConnected(stub, call) {
  let gaveUp = false;
  const timer = setTimeout(() => {
    gaveUp = stub.getChannel().getConnectivityState(false) === grpc.connectivityState.CONNECTING;
    if (gaveUp) call.cancel();
  }, CONNECT_TIMEOUT_MS);
  const end = () => clearTimeout(timer);
  return {
    end,
    /** @param {any} error What the call ended with, as the caller is to know it. */
    explain(error) {
      end();
      if (!gaveUp) return fromRpc(error);
      const text = `No connection established in ${CONNECT_TIMEOUT_MS} ms`;
      return new PacelineError(text, { code: 'UNAVAILABLE', cause: error });
    },
  };
}

/**
 * Wait until work that throws nothing has ended, for so long at most, and not once the signal is aborted.
 *
 * @param {Promise<void>} work
 * @param {number} limitMs
 * @param {AbortSignal} [signal]
 */
export async function ended(work, limitMs, signal) {
  const enough = new AbortController();
  const end = () => enough.abort();
  signal?.addEventListener('abort', end, { once: true });
  await Promise.race([work, sleep(limitMs, undefined, { signal: enough.signal }).catch(() => {})]);
  signal?.removeEventListener('abort', end);
  end();
}

/** @param {number} timeoutMs */
export function deadline(timeoutMs) {
  return timeoutMs === Infinity ? {} : { deadline: Date.now() + timeoutMs };
}
