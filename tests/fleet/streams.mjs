// Streams by the Node client for tests/fleet/streams.py. For each line on stdin, a number, so many streams run at once; a
// line each of stdout, as JSON: {"begun": number}, then {"number", "ids"} or {"number", "error"}.
//
// usage: node streams.mjs ADDRESS TOKENS

import readline from 'node:readline';

import { Client } from '../../clients/node/src/index.js';

const [address, tokens] = process.argv.slice(2);
const client = new Client(address);

async function stream(number) {
  const ids = [];
  const options = { tokenIds: [1, 2, number], maxTokens: Number(tokens), seed: 7, affinityKey: String(number) };
  for await (const event of client.generate(options)) {
    if (event.type !== 'delta') continue;
    if (ids.length === 0) say({ begun: number });
    ids.push(...event.tokenIds);
  }
  return ids;
}

function say(line) {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  for (let number = 0; number < Number(line); number += 1) {
    stream(number).then(
      (ids) => say({ number, ids }),
      (error) => say({ number, error: String(error) }),
    );
  }
}
client.close();
