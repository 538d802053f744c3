// Grammars, tools and reasoning: what goes out, and what comes back.

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { after, before, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

import { SchedulerService } from '../src/contract.js';
import { assistantMessage, Client, collect, InvalidOutput, PacelineError, parsed, toolMessage } from '../src/index.js';
import { event, generateRequest } from '../src/messages.js';
import { serve } from './serve.js';

const { requestSerialize, requestDeserialize, responseSerialize, responseDeserialize } = SchedulerService.service.Generate;
const HELLO = [{ role: 'user', content: 'hello' }];
const SCHEMA = { type: 'object', properties: { city: { type: 'string', maxLength: 4 } }, required: ['city'], additionalProperties: false };

/** @param {object} options */
const sent = (options) => requestDeserialize(requestSerialize(generateRequest(options)));

for (const [options, field, value] of /** @type {[any, string, any][]} */ ([
  [{ schema: SCHEMA }, 'jsonSchema', JSON.stringify(SCHEMA)],
  [{ schema: '{"type":  "null"}' }, 'jsonSchema', '{"type":  "null"}'],
  [{ regex: 'a+' }, 'regex', 'a+'],
  [{ regex: '' }, 'regex', ''],
  [{ choices: ['a', 'b'] }, 'choices', { choices: ['a', 'b'] }],
  [{ choices: [] }, 'choices', { choices: [] }],
  [{ grammar: 'start: X' }, 'lark', 'start: X'],
  [{ structuralTag: { triggers: [] } }, 'structuralTag', '{"triggers":[]}'],
])) {
  test(`${JSON.stringify(options)} is the grammar's ${field}`, () => {
    const { grammar } = sent({ prompt: 'x', ...options });
    assert.equal(grammar.grammar, field);
    assert.deepEqual(grammar[field], value);
  });
}

for (const [options, message] of /** @type {[any, RegExp][]} */ ([
  [{ regex: 'a', choices: ['a'] }, /^choices: only one of/],
  [{ schema: 3 }, /^schema must be/],
  [{ schema: null }, /^schema must be/],
  [{ choices: 'ab' }, /^choices must be/],
  [{ choices: [1] }, /^choices\[0\] must be/],
  [{ regex: /a/ }, /^regex must be/],
  [{ regex: '\ud800' }, /^regex has half/],
  [{ tools: [] }, /^tools: only with messages/],
  [{ toolChoice: 'auto' }, /^toolChoice: only with messages/],
])) {
  test(`a grammar that is none is refused by its name: ${message}`, () => {
    assert.throws(() => generateRequest({ prompt: 'x', ...options }), { name: 'TypeError', message });
  });
}

const TOOL = { name: 'weather', description: 'of today', parameters: SCHEMA };

for (const tool of [TOOL, { type: 'function', function: TOOL }, { ...TOOL, parameters: JSON.stringify(SCHEMA) }]) {
  test(`a tool in any form is the same: ${Object.keys(tool)}`, () => {
    assert.deepEqual(sent({ messages: HELLO, tools: [tool] }).messages.tools, [{ ...TOOL, parameters: JSON.stringify(SCHEMA), strict: false }]);
  });
}

test('a tool without parameters takes no arguments', () => {
  const [{ parameters }] = sent({ messages: HELLO, tools: [{ name: 'now' }] }).messages.tools;
  assert.deepEqual(JSON.parse(parameters), { type: 'object', properties: {}, additionalProperties: false });
});

test('a choice is a mode or a name', () => {
  const choice = (/** @type {any} */ toolChoice) => sent({ messages: HELLO, tools: [TOOL], toolChoice }).messages.toolChoice;
  const unset = { names: [], maxCalls: 0 };
  assert.deepEqual(choice('auto'), { ...unset, mode: 'TOOL_CHOICE_MODE_AUTO', name: '' });
  assert.deepEqual(choice('required'), { ...unset, mode: 'TOOL_CHOICE_MODE_REQUIRED', name: '' });
  assert.deepEqual(choice('weather'), { ...unset, mode: 'TOOL_CHOICE_MODE_REQUIRED', name: 'weather' });
  assert.deepEqual(choice({ type: 'function', function: { name: 'weather' } }), choice('weather'));
});

test('arguments of the template keep their kinds', () => {
  const { templateArguments } = sent({ messages: HELLO, templateArguments: { a: false, b: [1, null], c: { d: 'e' } } }).messages;
  const { a, b, c } = templateArguments.fields;
  assert.equal(a.boolValue, false);
  assert.deepEqual(b.listValue.values.map((/** @type {any} */ { kind }) => kind), ['numberValue', 'nullValue']);
  assert.equal(c.structValue.fields.d.stringValue, 'e');
});

for (const [options, message] of /** @type {[any, RegExp][]} */ ([
  [{ messages: 'hello' }, /^messages must be an array/],
  [{ messages: [{ role: 'user' }] }, /^messages\[0\] has no content/],
  [{ messages: [{ role: 'user', content: 3 }] }, /^messages\[0\]\.content must be a string/],
  [{ messages: [{ role: 'assistant', content: 'x', tool_calls: [] }] }, /^messages\[0\] has an unknown field tool_calls/],
  [{ messages: [{ role: 'assistant', toolCalls: [{ id: '1', args: {} }] }] }, /^messages\[0\]\.toolCalls\[0\] .*args/],
  [{ tools: TOOL }, /^tools must be an array/],
  [{ tools: [{}] }, /^tools\[0\] has no name/],
  [{ tools: [{ ...TOOL, strict: true }] }, /^tools\[0\] has an unknown field strict/],
  [{ tools: [{ name: 'x', parameters: 3 }] }, /^tools\[0\]\.parameters must be/],
  [{ toolChoice: 3 }, /^toolChoice must be/],
  [{ templateArguments: [1] }, /^templateArguments must be an object/],
])) {
  test(`a chat that is none is refused by its place: ${message}`, () => {
    assert.throws(() => generateRequest({ messages: HELLO, ...options }), { name: 'TypeError', message });
  });
}

const CALLS = [
  { id: '1', name: 'weather', arguments: '{"city": "Ürzig"}' },
  { id: '2', name: 'now', arguments: '' },
];

test('the answer and the results go back as turns', () => {
  const answer = assistantMessage({ text: 'Well.', toolCalls: CALLS });
  const { messages } = sent({ messages: [answer, toolMessage(CALLS[0], { '°C': 20 }), toolMessage(CALLS[1], 'noon')] }).messages;
  assert.deepEqual(messages[0].toolCalls, CALLS);
  assert.equal(messages[0].content, 'Well.');
  assert.deepEqual(
    messages.slice(1).map((/** @type {any} */ { role, content, toolCallId }) => [role, content, toolCallId]),
    [['tool', '{"°C":20}', '1'], ['tool', 'noon', '2']],
  );
  const nested = { role: 'assistant', content: null, toolCalls: CALLS.map(({ id, ...rest }) => ({ id, type: 'function', function: rest })) };
  assert.deepEqual(sent({ messages: [nested] }).messages.messages[0].toolCalls, CALLS);
});

/** @param {any[]} messages */
async function* received(messages) {
  for (const message of messages) {
    const seen = event(responseDeserialize(responseSerialize(message)));
    if (seen) yield seen;
  }
}

const END = { reason: 'FINISH_REASON_STOP', eosTokenId: 2, usage: { reasoningTokens: 2 } };

test('reasoning and calls are collected beside the text, by index', async () => {
  const [first, second] = await collect(received([
    { index: 1, delta: { text: 'other' } },
    { delta: { reasoning: 'Hm' } },
    { delta: { reasoning: 'm', text: 'Let ' } },
    { delta: { text: 'me see.', toolCalls: [{ id: '1', name: 'weather', arguments: '{"city": ' }, { arguments: '"Ürzig"}' }] } },
    { delta: { toolCalls: [{ index: 1, id: '2', name: 'now' }] } },
    { finished: END },
    { index: 1, finished: END },
  ]));
  assert.deepEqual([first.text, first.reasoning, first.toolCalls], ['Let me see.', 'Hmm', CALLS]);
  assert.equal(first.finished.usage.reasoningTokens, 2);
  assert.equal(second.text, 'other');
});

test('what was left before its end is not collected as a whole', async () => {
  await assert.rejects(collect(received([{ delta: { text: 'half' } }])), { code: 'DATA_LOSS' });
});

test('a value is parsed, and what was cut off is never taken for one', async () => {
  const value = async (/** @type {object} */ finished) => parsed((await collect(received([{ delta: { text: '12' } }, { finished }])))[0]);
  assert.equal(await value(END), 12);
  for (const [finished, message] of /** @type {[object, RegExp][]} */ ([
    [{ reason: 'FINISH_REASON_LENGTH' }, /maxTokens/],
    [{ reason: 'FINISH_REASON_STOP', stopString: '!' }, /stop string "!"/],
    [{ reason: 'FINISH_REASON_STOP', stopTokenId: 7 }, /stop token 7/],
  ])) {
    await assert.rejects(value(finished), (error) => error instanceof InvalidOutput && message.test(error.message));
  }
  const [junk] = await collect(received([{ delta: { text: '{' } }, { finished: END }]));
  assert.throws(() => parsed(junk), (error) => error instanceof InvalidOutput && error instanceof PacelineError && error.code === 'OK');
});

/** @type {Awaited<ReturnType<typeof serve>>} */
let service;
/** @type {Client} */
let client;

before(async () => {
  service = await serve();
  client = new Client(service.address);
});

after(async () => {
  client?.close();
  await service?.stop();
});

test('what ends by itself matches, streamed or not', async () => {
  const options = { prompt: 'x', maxTokens: 200, temperature: 1, seed: 4 };
  const [whole] = await client.completions({ ...options, schema: SCHEMA });
  assert.deepEqual(Object.keys(parsed(whole)), ['city']);
  const [streamed] = await collect(client.generate({ ...options, schema: SCHEMA }));
  assert.equal(streamed.text, whole.text);
  const [date] = await client.completions({ ...options, regex: '[0-9]{4}-[0-9]{2}' });
  assert.match(date.text, /^[0-9]{4}-[0-9]{2}$/);
  const [choice] = await client.completions({ ...options, choices: ['yes', 'no'] });
  assert.ok(['yes', 'no'].includes(choice.text));
});

test('a grammar that is none is refused, and the error names the field', async () => {
  await assert.rejects(client.completions({ prompt: 'x', regex: '(a|' }), (error) => {
    assert.ok(error instanceof PacelineError);
    assert.equal(error.code, 'INVALID_ARGUMENT');
    assert.equal(error.metadata.field, 'grammar.regex');
    return true;
  });
});

/**
 * Runs each block of JavaScript in a page, as a reader would, and returns what each prints.
 *
 * @param {string} page
 * @param {string} address
 */
async function printed(page, address) {
  const blocks = readFileSync(new URL(`../../../${page}`, import.meta.url), 'utf8').matchAll(/^```js\n(.*?)^```$/gms);
  const outputs = [];
  for (const [, block] of blocks) {
    const code = block.replaceAll('127.0.0.1:50051', address);
    const cwd = fileURLToPath(new URL('..', import.meta.url)); // the package, which can import itself
    const { stdout } = await promisify(execFile)(process.execPath, ['--input-type=module', '-e', code], { cwd });
    outputs.push(stdout.trim());
  }
  return outputs;
}

for (const page of ['README.md', 'docs/structured-output.md', 'clients/node/README.md']) {
  test(`the JavaScript of ${page} runs`, async () => {
    for (const output of await printed(page, service.address)) assert.notEqual(output, '');
  });
}

test('the example with tools says so where the model has none, as the default model', async () => {
  const plain = await serve('-S', 'tool-format=none');
  try {
    const outputs = await printed('clients/node/README.md', plain.address);
    assert.equal(outputs.at(-1), 'This model has no tool calls.');
  } finally {
    await plain.stop();
  }
});
