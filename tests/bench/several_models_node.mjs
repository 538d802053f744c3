// Part of tests.bench.several_models: completions from Node. Reads one JSON list of [model, prompt] from standard input
// and writes one JSON object for each: {model, prompt, tokens} or {model, prompt, error}.
import { readFileSync } from 'node:fs';
import { Client } from '../../clients/node/src/index.js';

const [address, streams, maxTokens] = process.argv.slice(2);
const client = new Client(address, { failoverTimeoutMs: 600_000 });
const asked = JSON.parse(readFileSync(0, 'utf8'));

async function work() {
  for (let one = asked.pop(); one; one = asked.pop()) {
    const [model, prompt] = one;
    const said = { model, prompt };
    try {
      const options = { prompt, model, maxTokens: Number(maxTokens), temperature: 0, ignoreEos: true };
      said.text = (await client.complete(options)).text;
    } catch (error) {
      said.error = String(error);
    }
    console.log(JSON.stringify(said));
  }
}
await Promise.all(Array.from({ length: Number(streams) }, work));
client.close();
