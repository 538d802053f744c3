// A conversation: what is kept of it, the request that goes on with it, and what an answer's chunks add.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/** A new one. `settings`: texts of the form, by name. */
export function begun(settings = {}) {
  const id = `${Date.now()}-${Math.random().toString(36).slice(2)}`; // randomUUID is not there over plain HTTP
  return { id, changed: Date.now(), title: "New conversation", settings: { ...settings }, turns: [] };
}

/** The further fields that a user has written. Raises SyntaxError, TypeError. */
export function further(text) {
  const found = text?.trim() ? JSON.parse(text) : {};
  if (found === null || typeof found !== "object" || Array.isArray(found)) throw new TypeError("no JSON object");
  return found;
}

/** The body of the request that asks for the next answer. */
export function request(conversation, model) {
  const { settings, turns } = conversation;
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns) messages.push(...messagesOf(turn));
  const body = { model, messages };
  for (const name of NUMBERS) if (settings[name]) body[name] = Number(settings[name]);
  return { ...body, ...further(settings.more) };
}

function messagesOf({ role, content, calls }) {
  if (!calls?.length) return [{ role, content: content ?? "" }];
  const called = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }));
  return [{ role, content: content || null, tool_calls: called }, ...results];
}

/** An answer that grows by its chunks. Clocks are in milliseconds. */
export class Answer {
  #began = performance.now();
  #first = 0;
  #last = 0;

  constructor() {
    this.turn = { role: "assistant", content: "", reasoning: "", calls: [], facts: "", ended: false };
  }

  /** Add a chunk of the stream. */
  take(chunk) {
    const [choice] = chunk.choices;
    const delta = choice?.delta ?? {};
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      this.#last = performance.now();
      this.#first ||= this.#last;
    }
    this.turn.content += delta.content ?? "";
    this.turn.reasoning += delta.reasoning_content ?? "";
    for (const one of delta.tool_calls ?? []) {
      this.turn.calls[one.index] ??= { id: one.id, name: one.function.name, arguments: "" };
      this.turn.calls[one.index].arguments += one.function.arguments ?? "";
    }
    if (choice?.finish_reason === "length") this.reason = "cut off at the most tokens";
    if (chunk.usage) this.usage = chunk.usage;
  }

  /** There is no more. `reason`: why, where it is not the model's own end. */
  end(reason) {
    this.turn.ended = true;
    const facts = [];
    if (this.usage) facts.push(`${this.usage.completion_tokens} tokens`);
    if (this.usage && this.#last > this.#first) {
      const speed = (1000 * (this.usage.completion_tokens - 1)) / (this.#last - this.#first);
      facts.push(`${speed.toFixed(1)} tokens/s`);
    }
    if (this.#first) facts.push(`first token after ${Math.round(this.#first - this.#began)} ms`);
    if (reason ?? this.reason) facts.push(reason ?? this.reason);
    this.turn.facts = facts.join(" · ");
  }
}
