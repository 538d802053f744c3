// CLIENT spans of calls, by OpenTelemetry's API, which the caller hands over: the package does not depend on it. Names
// are those of the GenAI convention (semantic-conventions-genai, "Development"). No span has prompts, outputs or stop
// strings.

import { PacelineError } from './errors.js';

/** @typedef {typeof import('@opentelemetry/api')} OpenTelemetry */

/** @type {Record<string, string>} Operations by method; of those that generate, see `operation`. */
const OPERATIONS = { score: 'score', embed: 'embeddings', rerank: 'rerank' };
const GENERATING = ['generate', 'generateUnary'];
const SAMPLING = {
  temperature: 'temperature', topP: 'top_p', topK: 'top_k', seed: 'seed',
  presencePenalty: 'presence_penalty', frequencyPenalty: 'frequency_penalty',
};

/** @type {((method: string, request: any) => CallSpan) | undefined} */
let begin;

/**
 * From now on calls that generate or evaluate have CLIENT spans, in all clients of this process: one for all attempts of
 * a call, whose context each of them sends to its scheduler as `traceparent`.
 *
 * ```js
 * import * as otel from '@opentelemetry/api';
 * traceCalls(otel);
 * ```
 *
 * @param {OpenTelemetry} otel
 * @param {import('@opentelemetry/api').TracerProvider} [provider] Default: the global one, which the program has set.
 */
export function traceCalls(otel, provider = otel.trace) {
  const tracer = provider.getTracer('paceline');
  begin = (method, request) => new RecordedSpan(otel, tracer, method, request);
}

/** Calls that begin from now on have no spans. */
export function stopTracingCalls() {
  begin = undefined;
}

/**
 * The span of a call that begins now.
 *
 * @param {string} method
 * @param {any} request Its message.
 * @returns {CallSpan}
 */
export function callSpan(method, request) {
  const traced = method in OPERATIONS || GENERATING.includes(method);
  return begin && traced ? begin(method, request) : NO_SPAN;
}

/** The span of one call, of all its attempts together. This one records nothing. */
export class CallSpan {
  /**
   * Metadata of an attempt.
   *
   * @param {string} _address
   * @returns {Record<string, string>}
   */
  carried(_address) {
    return {};
  }

  /** @param {any} _found An event of the stream, or the reply. */
  saw(_found) {}

  /** @param {any} [_error] What the call failed with. Only the first end counts. */
  end(_error) {}
}

const NO_SPAN = new CallSpan();

class RecordedSpan extends CallSpan {
  #span;
  #errorStatus;
  #beganAt = performance.now();
  #hasChunk = false;
  #hasEnded = false;
  /** @type {string[]} */
  #reasons = [];
  #outputTokens = 0;
  #reasoningTokens = 0;

  /**
   * @param {OpenTelemetry} otel
   * @param {import('@opentelemetry/api').Tracer} tracer
   * @param {string} method
   * @param {any} message
   */
  constructor(otel, tracer, method, message) {
    super();
    const attributes = attributesOf(method, method === 'generateUnary' ? message.request : message);
    const name = `${attributes['gen_ai.operation.name']} ${attributes['gen_ai.request.model'] ?? ''}`.trimEnd();
    this.#errorStatus = { code: otel.SpanStatusCode.ERROR };
    this.#span = tracer.startSpan(name, { kind: otel.SpanKind.CLIENT, attributes }, otel.context.active());
  }

  /**
   * @param {string} address
   * @returns {Record<string, string>}
   */
  carried(address) {
    const [, host, port] = /^(.*):(\d+)$/.exec(address) ?? [undefined, address, undefined];
    this.#span.setAttribute('server.address', (host ?? '').replace(/^\[|\]$/g, ''));
    if (port) this.#span.setAttribute('server.port', Number(port));
    const { traceId, spanId, traceFlags, traceState } = this.#span.spanContext();
    if (/^0+$/.test(traceId)) return {}; // no provider is set
    // W3C Trace Context, version 00.
    const traceparent = `00-${traceId}-${spanId}-${traceFlags.toString(16).padStart(2, '0')}`;
    const tracestate = traceState?.serialize();
    return tracestate ? { traceparent, tracestate } : { traceparent };
  }

  /** @param {any} found */
  saw(found) {
    if (found.type === 'finished') return this.#finished(found.reason, found.usage);
    if (found.type === 'delta') return this.#chunk();
    if (found.requestId) this.#span.setAttribute('gen_ai.response.id', found.requestId);
    for (const { finished } of found.completions ?? []) {
      if (finished) this.#finished(String(finished.reason).replace('FINISH_REASON_', '').toLowerCase(), finished.usage);
    }
    if (found.usage) this.#input(found.usage);
  }

  #chunk() {
    if (this.#hasChunk) return;
    this.#hasChunk = true;
    this.#span.setAttribute('gen_ai.response.time_to_first_chunk', (performance.now() - this.#beganAt) / 1000);
  }

  /**
   * @param {string} reason
   * @param {any} usage
   */
  #finished(reason, usage) {
    this.#reasons.push(reason);
    if (!usage) return; // of a server that does not count
    this.#outputTokens += usage.completionTokens;
    this.#reasoningTokens += usage.reasoningTokens ?? 0;
    this.#input(usage);
  }

  /** @param {any} usage */
  #input(usage) {
    this.#span.setAttribute('gen_ai.usage.input_tokens', usage.promptTokens);
    this.#span.setAttribute('gen_ai.usage.cache_read.input_tokens', usage.cachedTokens ?? 0);
  }

  /** @param {any} [error] */
  end(error) {
    if (this.#hasEnded) return;
    this.#hasEnded = true;
    if (this.#reasons.length > 0) {
      this.#span.setAttributes({
        'gen_ai.response.finish_reasons': this.#reasons,
        'gen_ai.usage.output_tokens': this.#outputTokens,
        'gen_ai.usage.reasoning.output_tokens': this.#reasoningTokens,
      });
    }
    if (error !== undefined) {
      const reason = error instanceof PacelineError && error.reason;
      this.#span.setAttribute('error.type', reason || error?.name || 'Error');
      this.#span.setStatus(this.#errorStatus);
    }
    this.#span.end();
  }
}

/**
 * @param {string} method
 * @param {any} request
 */
function attributesOf(method, request) {
  /** @type {Record<string, string | number | boolean>} */
  const found = { 'gen_ai.provider.name': 'paceline' };
  if (request.model) found['gen_ai.request.model'] = request.model;
  if (!GENERATING.includes(method)) return { ...found, 'gen_ai.operation.name': OPERATIONS[method] };
  found['gen_ai.operation.name'] = request.messages ? 'chat' : 'text_completion';
  found['gen_ai.request.stream'] = method === 'generate';
  found['gen_ai.request.choice.count'] = request.n || 1;
  if (request.stop?.maxTokens !== undefined) found['gen_ai.request.max_tokens'] = request.stop.maxTokens;
  for (const [name, attribute] of Object.entries(SAMPLING)) {
    const value = name === 'seed' ? Number(request.sampling?.seed) : request.sampling?.[name];
    if (name === 'seed' ? Number.isSafeInteger(value) : value !== undefined) found[`gen_ai.request.${attribute}`] = value;
  }
  return found;
}
