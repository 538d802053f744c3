// gRPC's errors as PacelineError: one place, with the details that the service attached.

import grpc from '@grpc/grpc-js';
import protobuf from 'protobufjs';

/** The three messages of google.rpc and google.protobuf that a status' details are made of. */
const details = protobuf.Root.fromJSON({
  nested: /** @type {any} */ ({
    Any: { fields: { typeUrl: { id: 1, type: 'string' }, value: { id: 2, type: 'bytes' } } },
    Status: {
      fields: {
        code: { id: 1, type: 'int32' },
        message: { id: 2, type: 'string' },
        details: { id: 3, type: 'Any', rule: 'repeated' },
      },
    },
    ErrorInfo: {
      fields: {
        reason: { id: 1, type: 'string' },
        domain: { id: 2, type: 'string' },
        metadata: { id: 3, type: 'string', keyType: 'string' },
      },
    },
    Duration: { fields: { seconds: { id: 1, type: 'int64' }, nanos: { id: 2, type: 'int32' } } },
    RetryInfo: { fields: { retryDelay: { id: 1, type: 'Duration' } } },
  }),
});

/**
 * A call that failed.
 *
 * `code` is the gRPC status by name. RESOURCE_EXHAUSTED and UNAVAILABLE mean, but for StreamLost, that
 * nothing was emitted: the same request may be sent again, after `retryAfterMs` where the service gave one.
 * DATA_LOSS: the answer is not whole, though the service says that it is.
 */
export class PacelineError extends Error {
  /**
   * @param {string} message
   * @param {{ code: string, reason?: string, metadata?: Record<string, string>, retryAfterMs?: number, cause?: unknown }} what
   */
  constructor(message, { code, reason = '', metadata = {}, retryAfterMs, cause }) {
    super(message, { cause });
    this.name = 'PacelineError';
    /** The gRPC status' name, such as INVALID_ARGUMENT. */
    this.code = code;
    /** The service's own name for the cause; '' if it gave none. */
    this.reason = reason;
    /** What the service added to the reason. */
    this.metadata = metadata;
    /** When to try again, in milliseconds; undefined without a hint. */
    this.retryAfterMs = retryAfterMs;
  }

  /** Whether the same request may succeed later. */
  get retryable() {
    return this.code === 'RESOURCE_EXHAUSTED' || this.code === 'UNAVAILABLE';
  }
}

/**
 * A stream that was interrupted after events had been received, and could not be continued, here or on
 * another scheduler. What was received is valid, but not all.
 */
export class StreamLost extends PacelineError {
  /**
   * @param {string} message
   * @param {{ reason?: string, metadata?: Record<string, string>, cause?: unknown }} [what]
   */
  constructor(message, what = {}) {
    super(message, { code: 'UNAVAILABLE', ...what });
    this.name = 'StreamLost';
  }

  /** Something was emitted: the request must not be sent again blindly. */
  get retryable() {
    return false;
  }
}

/** The call went well, but its output is not the whole value that was asked for. `code` is OK. */
export class InvalidOutput extends PacelineError {
  /**
   * @param {string} message
   * @param {unknown} [cause]
   */
  constructor(message, cause) {
    super(message, { code: 'OK', cause });
    this.name = 'InvalidOutput';
  }
}

/**
 * The error for an answer that is not whole, or makes no sense, though its status is OK.
 *
 * @param {string} message
 */
export function incomplete(message) {
  return new PacelineError(message, { code: 'DATA_LOSS' });
}

/**
 * @param {any} error What grpc-js raised.
 * @returns {Error}
 */
export function fromRpc(error) {
  if (typeof error?.code !== 'number') return error;
  const found = decode(error.metadata);
  // No service of ours says CANCELLED: a server that stops cancels what it has not begun.
  const bare = error.code === grpc.status.CANCELLED && !found.reason;
  // grpc-js itself refuses such a message: waiting doesn't help.
  const tooLarge = error.code === grpc.status.RESOURCE_EXHAUSTED && /larger than max/.test(error.details);
  const code = bare ? 'UNAVAILABLE' : tooLarge ? 'INVALID_ARGUMENT' : grpc.status[error.code] ?? 'UNKNOWN';
  return new PacelineError(error.details || error.message, { code, cause: error, ...found });
}

/** @param {grpc.Metadata | undefined} trailers */
function decode(trailers) {
  /** @type {{ reason?: string, metadata?: Record<string, string>, retryAfterMs?: number }} */
  const found = {};
  const [bytes] = trailers?.get('grpc-status-details-bin') ?? [];
  if (!(bytes instanceof Buffer)) return found;
  try {
    const status = /** @type {any} */ (details.lookupType('Status').decode(bytes));
    for (const { typeUrl, value } of status.details) {
      const name = typeUrl.split('.').at(-1);
      if (name === 'ErrorInfo') {
        const info = /** @type {any} */ (details.lookupType('ErrorInfo').decode(value));
        found.reason = info.reason;
        found.metadata = { ...info.metadata };
      } else if (name === 'RetryInfo') {
        const { retryDelay } = /** @type {any} */ (details.lookupType('RetryInfo').decode(value));
        const delayMs = Number(retryDelay?.seconds ?? 0) * 1000 + (retryDelay?.nanos ?? 0) / 1e6;
        if (delayMs >= 0) found.retryAfterMs = delayMs;
      }
    }
  } catch {
    // A peer that writes nonsense there still gave a code and a message.
  }
  return found;
}
