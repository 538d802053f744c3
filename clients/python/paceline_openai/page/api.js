// Calls of the OpenAI API that serves this page.

/** An error's answer. `status`: of HTTP; 0: in the middle of a stream, or no answer at all. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The names of the model, first, and of its adapters. Raises Refused. */
export async function models(key) {
  const reply = await (await ask("v1/models", key)).json();
  return reply.data.map((one) => one.id);
}

/** The chunks of a chat's stream as they come. Ends early when `signal` is aborted. Raises Refused. */
export async function* chat(key, body, signal) {
  let reply;
  try {
    const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
    reply = await ask("v1/chat/completions", key, streamed, signal);
    yield* chunks(reply.body.pipeThrough(new TextDecoderStream()).getReader());
  } catch (error) {
    if (signal.aborted) return;
    throw error instanceof Refused ? error : new Refused(0, `The connection broke: ${error.message}`);
  }
}

async function ask(path, key, body, signal) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, credentials: "omit" };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["content-type"] = "application/json";
  }
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused(0, "The server does not answer.");
  }
  if (!reply.ok) {
    const found = await reply.json().catch(() => null);
    throw new Refused(reply.status, found?.error?.message ?? `status ${reply.status}`);
  }
  return reply;
}

async function* chunks(reader) {
  let pieces = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused(0, "The stream broke off.");
    const [first, ...more] = value.split("\n"); // a long line comes in many pieces: join them once
    pieces.push(first);
    for (const piece of more) {
      const line = pieces.join("");
      pieces = [piece];
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data: ")) continue;
      const chunk = JSON.parse(line.slice("data: ".length));
      if (chunk.error) throw new Refused(0, chunk.error.message);
      yield chunk;
    }
  }
}
