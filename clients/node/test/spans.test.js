// Spans of calls: one for all attempts, without texts, whose context goes to each scheduler.

import assert from 'node:assert/strict';
import { afterEach, test } from 'node:test';

import * as otel from '@opentelemetry/api';
import { BasicTracerProvider, InMemorySpanExporter, SimpleSpanProcessor } from '@opentelemetry/sdk-trace-base';

import { Client, PacelineError, stopTracingCalls, traceCalls } from '../src/index.js';
import { BROKEN, serving } from './fakes.js';

afterEach(stopTracingCalls);

function recorded() {
  const exporter = new InMemorySpanExporter();
  traceCalls(otel, new BasicTracerProvider({ spanProcessors: [new SimpleSpanProcessor(exporter)] }));
  return exporter;
}

test('a stream that is continued on another scheduler has one span, whose context both get', async () => {
  const exporter = recorded();
  await serving([[[4, BROKEN]], [[4, BROKEN]]], async (addresses, requests, traceparents) => {
    const client = new Client(addresses);
    const options = { prompt: 'secret words', stop: ['secret stop'], maxTokens: 64, seed: 7, temperature: 0.5, affinityKey: '' };
    let tokens = 0;
    for await (const event of client.generate(options)) if (event.type === 'delta') tokens += event.tokenIds.length;
    client.close();
    assert.ok(requests.every((ofOne) => ofOne.length > 0));
    const [span, ...others] = exporter.getFinishedSpans();
    assert.deepEqual(others, []);
    const { traceId, spanId } = span.spanContext();
    assert.deepEqual([...new Set(traceparents.flat())], [`00-${traceId}-${spanId}-01`]);
    assert.equal(span.kind, otel.SpanKind.CLIENT);
    assert.equal(span.name, 'text_completion');
    const { attributes } = span;
    assert.equal(attributes['gen_ai.usage.output_tokens'], tokens);
    assert.deepEqual(attributes['gen_ai.response.finish_reasons'], ['stop']);
    assert.equal(attributes['gen_ai.request.seed'], 7);
    assert.equal(attributes['gen_ai.request.max_tokens'], 64);
    assert.ok(attributes['gen_ai.response.time_to_first_chunk'] >= 0);
    assert.equal(attributes['server.address'], '127.0.0.1');
    assert.ok(!JSON.stringify(attributes).includes('secret'));
    assert.equal(span.status.code, otel.SpanStatusCode.UNSET);
  });
});

test('calls that fail, are left, or evaluate have spans that say so, and others none', async () => {
  const exporter = recorded();
  const refusal = { code: 3, details: 'max_tokens: is too large' };
  await serving([[[0, refusal], [Infinity, undefined]]], async ([address]) => {
    const client = new Client(address);
    await assert.rejects(client.complete({ prompt: 'x', model: 'poet' }), PacelineError);
    for await (const _ of client.generate({ messages: [{ role: 'user', content: 'x' }] })) break;
    await client.embed(['x']);
    await client.status();
    client.close();
  });
  const [failed, left, embedded, ...others] = exporter.getFinishedSpans();
  assert.deepEqual(others, []);
  assert.equal(failed.name, 'text_completion poet');
  assert.equal(failed.status.code, otel.SpanStatusCode.ERROR);
  assert.equal(failed.attributes['error.type'], 'PacelineError');
  assert.equal(left.name, 'chat');
  assert.equal(left.status.code, otel.SpanStatusCode.UNSET);
  assert.equal(embedded.attributes['gen_ai.operation.name'], 'embeddings');
});

test('a span is a child of the current one, and without a provider nothing is sent', async () => {
  const exporter = recorded();
  await serving([[]], async ([address], requests, traceparents) => {
    const client = new Client(address);
    const parent = new BasicTracerProvider().getTracer('test').startSpan('mine');
    const manager = { active: () => otel.trace.setSpan(otel.ROOT_CONTEXT, parent) };
    traceCalls({ ...otel, context: /** @type {any} */ (manager) }, /** @type {any} */ ({
      getTracer: () => new BasicTracerProvider({ spanProcessors: [new SimpleSpanProcessor(exporter)] }).getTracer('x'),
    }));
    await client.complete({ prompt: 'x' });
    const [span] = exporter.getFinishedSpans();
    assert.equal(span.spanContext().traceId, parent.spanContext().traceId);
    traceCalls(otel);
    await client.complete({ prompt: 'x' });
    assert.equal(traceparents.flat()[1], undefined);
    assert.equal(requests.flat().length, 2);
    client.close();
  });
});
