// The OpenAI API, asked for with OpenAI's own Node SDK: node check.mjs URL [KEY]. Exit status 1 if a check failed.
import assert from 'node:assert/strict';
import OpenAI, { APIUserAbortError, BadRequestError } from 'openai';

const [url, key] = process.argv.slice(2);
const api = new OpenAI({ baseURL: url, apiKey: key || 'none', maxRetries: 0, timeout: 120_000 });
const model = (await api.models.list()).data[0].id;
const messages = [{ role: 'user', content: 'Why is the sky blue? Answer in one sentence.' }];
const chat = (options = {}, request = {}) =>
  api.chat.completions.create({ model, messages, max_tokens: 24, temperature: 0, ...options }, request);
const schema = {
  type: 'object',
  properties: { city: { type: 'string', maxLength: 8 } },
  required: ['city'],
  additionalProperties: false,
};

const checks = {
  async 'a chat, whole and streamed'() {
    const whole = await chat();
    let text = '';
    let usage;
    for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta.content ?? '';
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },
  async 'a response, whole and streamed'() {
    const options = { model, input: messages, max_output_tokens: 24, temperature: 0, store: false };
    const whole = await api.responses.create(options);
    assert.ok(whole.output_text);
    let text = '';
    let last;
    for await (const event of await api.responses.create({ ...options, stream: true })) {
      if (event.type === 'response.output_text.delta') text += event.delta;
      last = event;
    }
    assert.equal(text, whole.output_text);
    assert.deepEqual(last.response.usage, { ...whole.usage, input_tokens_details: last.response.usage.input_tokens_details });
    const parsed = await api.responses.create({
      ...options,
      max_output_tokens: 120,
      text: { format: { type: 'json_schema', name: 'city', schema, strict: true } },
    });
    assert.deepEqual(Object.keys(JSON.parse(parsed.output_text)), ['city']);
    const more = await api.responses.create({ ...options, input: [...messages, ...whole.output, messages[0]] });
    assert.ok(more.usage.input_tokens > whole.usage.input_tokens);
    await assert.rejects(
      api.responses.create({ ...options, max_output_tokens: 10_000_000 }),
      (error) => error instanceof BadRequestError && error.param === 'max_output_tokens',
    );
  },
  async 'a completion'() {
    const options = { model, prompt: 'Once upon a time', max_tokens: 16, temperature: 0 };
    const whole = await api.completions.create(options);
    let text = '';
    for await (const chunk of await api.completions.create({ ...options, stream: true })) {
      text += chunk.choices[0]?.text ?? '';
    }
    assert.ok(text);
    assert.equal(text, whole.choices[0].text);
  },
  async 'vectors of a list, which the SDK asks for as base64'() {
    const answer = await api.embeddings.create({ model, input: ['The sky', 'is blue.'], dimensions: 4 });
    assert.deepEqual(answer.data.map((one) => one.embedding.length), [4, 4]);
    assert.ok(answer.data.every((one) => one.embedding.some((value) => value !== 0)));
  },
  async 'several completions, and their logprobs'() {
    const answer = await chat({ n: 2, seed: 1, temperature: 1, logprobs: true, top_logprobs: 2 });
    assert.equal(answer.choices.length, 2);
    for (const choice of answer.choices) {
      assert.ok(choice.logprobs.content.every((token) => token.top_logprobs.length === 2 && token.logprob <= 0));
    }
  },
  async 'output of a schema'() {
    const answer = await chat({
      response_format: { type: 'json_schema', json_schema: { name: 'city', schema, strict: true } },
      max_tokens: 120,
    });
    assert.deepEqual(Object.keys(JSON.parse(answer.choices[0].message.content)), ['city']);
  },
  async 'wrong parameters are 400 and name the field'() {
    for (const [field, options] of Object.entries({
      temperature: { temperature: -1 },
      max_tokens: { max_tokens: 10_000_000 },
      n: { n: 17 },
    })) {
      await assert.rejects(chat(options), (error) => {
        assert.ok(error instanceof BadRequestError, String(error));
        return `${error.param} ${error.message}`.includes(field);
      });
    }
  },
  async 'sixteen at once answer as alone'() {
    const one = async (seed) => (await chat({ seed, temperature: 1 })).choices[0].message.content;
    const seeds = [...Array(16).keys()];
    const alone = [];
    for (const seed of seeds) alone.push(await one(seed));
    assert.deepEqual(await Promise.all(seeds.map(one)), alone);
  },
  async 'a stream that its client aborts ends'() {
    const controller = new AbortController();
    const stream = await chat({ stream: true, max_tokens: 2000 }, { signal: controller.signal });
    let chunks = 0;
    try {
      for await (const _ of stream) if (++chunks === 3) controller.abort();
    } catch (error) {
      assert.ok(error instanceof APIUserAbortError, String(error));
    }
    assert.ok(chunks >= 3 && chunks < 2000);
    assert.ok((await chat()).choices[0].message.content);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  const began = performance.now();
  let verdict = 'passed';
  try {
    await check();
  } catch (error) {
    failed += 1;
    verdict = `FAILED\n${error.stack}`;
  }
  console.log(`${name.padEnd(50)} ${((performance.now() - began) / 1000).toFixed(2).padStart(6)} s  ${verdict}`);
}
process.exitCode = failed ? 1 : 0;
