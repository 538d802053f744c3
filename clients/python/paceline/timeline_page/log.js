// The step log: columns of steps, and what each completion did. Times are microseconds since 1970.

const FIGURES = ["planned_us", "taken_us", "prompt_rows", "decode_rows", "verify_rows", "tokens",
  "drafted_tokens", "accepted_tokens", "free_pages", "running", "waiting", "reasons"];
const BEGINS = { queued: "waits", preempted: "again", admitted: "runs", resumed: "runs" };
const ARRIVES = new Set(["callers_turn", "tokenizing", "grammar_compiling"]); // waits before it is queued
const MAX_STEPS = 250_000; // then the oldest ones go
const KEPT_STEPS = 200_000;

export class Log {
  constructor(kinds, reasons) {
    this.kinds = kinds;
    this.reasonNames = reasons;
    this.started = []; // of each step
    this.number = [];
    for (const name of FIGURES) this[name] = [];
    this.rows = []; // of completions, by arrival
    this.lost = 0;
    this.byKey = new Map(); // "request/completion" to its row
    this.arriving = new Map(); // request to its waits before the queue: [reason, microseconds]
    this.ofRequest = new Map(); // number to rows
    this.names = new Map();
  }

  get steps() { return this.started.length; }
  get began() { return this.steps ? this.started[0] : 0; }
  get ended() { return this.steps ? this.endOf(this.steps - 1) : 0; }
  endOf(step) { return this.started[step] + this.taken_us[step]; }

  // A StepLog of the contract, with its columns as arrays.
  add(part) {
    for (const [number, id, identity] of part.names) this.names.set(number, [id, identity]);
    this.lost += part.lost_steps;
    let at = part.started_at_us, event = 0;
    for (let i = 0; i < part.started_us.length; i++) {
      at += part.started_us[i];
      this.started.push(at);
      this.number.push(part.first_step + i);
      for (const name of FIGURES) this[name].push(part[name][i]);
      const end = at + part.taken_us[i];
      this.arriving.clear(); // all events of an arrival are of one step
      for (let n = part.event_counts[i]; n > 0; n--, event++) {
        this.#note(this.kinds[part.event_kinds[event]], part.event_requests[event],
          part.event_indexes[event], part.event_values[event], end);
      }
    }
    if (this.steps > MAX_STEPS) this.#forget();
  }

  #note(kind, request, index, value, at) {
    if (kind === "refused") {
      for (const row of this.ofRequest.get(request) ?? []) this.#end(row, at, `refused with status ${value}`);
      return;
    }
    if (ARRIVES.has(kind)) {
      this.arriving.set(request, [...this.arriving.get(request) ?? [], [kind, value]]);
      return;
    }
    const key = `${request}/${index}`;
    let row = this.byKey.get(key);
    if (!row) {
      if (!BEGINS[kind]) return;
      const [id, identity] = this.names.get(request) ?? [`#${request}`, ""];
      row = { request, index, id, identity, at: [], doing: [], facts: {}, end: Infinity };
      this.byKey.set(key, row);
      this.rows.push(row);
      if (!this.ofRequest.has(request)) this.ofRequest.set(request, []);
      this.ofRequest.get(request).push(row);
    }
    if (kind === "ended") {
      row.facts.output = value;
      this.#end(row, at, "ended");
    } else if (BEGINS[kind]) {
      const before = this.arriving.get(request) ?? [];
      this.arriving.delete(request);
      let came = at - before.reduce((sum, [, us]) => sum + us, 0);
      for (const [reason, us] of before) {
        row.at.push(came);
        row.doing.push(reason);
        came += us;
      }
      row.at.push(at);
      row.doing.push(BEGINS[kind]);
      if (kind === "queued") row.facts.prompt = value;
      if (kind === "admitted") row.facts.cached = value;
    }
  }

  #end(row, at, how) {
    if (row.end !== Infinity) return;
    row.end = at;
    row.facts.how = how;
  }

  #forget() {
    const gone = this.steps - KEPT_STEPS;
    for (const name of ["started", "number", ...FIGURES]) this[name].splice(0, gone);
    const kept = (row) => row.end >= this.began;
    for (const row of this.rows.filter((one) => !kept(one))) {
      this.byKey.delete(`${row.request}/${row.index}`);
      this.ofRequest.delete(row.request);
      this.names.delete(row.request);
    }
    this.rows = this.rows.filter(kept);
  }

  // The first step that starts at this time or later.
  stepAt(time) {
    let low = 0, high = this.steps;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.started[middle] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  // What the first in turn waited for between two times: microseconds by reason, the longest first.
  blockedBy(from, to) {
    const times = new Map();
    for (let i = Math.max(0, this.stepAt(from) - 1); i < this.steps && this.started[i] < to; i++) {
      const next = i + 1 < this.steps ? this.started[i + 1] : this.endOf(i);
      const us = Math.min(to, next) - Math.max(from, this.started[i]);
      if (us > 0 && this.reasons[i]) times.set(this.reasons[i], (times.get(this.reasons[i]) ?? 0) + us);
    }
    return [...times].sort((a, b) => b[1] - a[1]);
  }

  // The stages of a row: [what it does, from, to].
  stages(row) {
    const end = Math.min(row.end, this.ended);
    return row.doing.map((doing, i) => [doing, row.at[i], row.at[i + 1] ?? Math.max(end, row.at[i])]);
  }
}
