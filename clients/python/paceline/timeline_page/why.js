// What a click shows: why a request waited, or what a step did. All of it is text.

import { ask } from "./ask.js";

const DOING = {
  waits: "waited", again: "waited again, preempted", runs: "ran", callers_turn: "waited for its caller's turn",
  tokenizing: "became tokens", grammar_compiling: "waited for its grammar",
};
const seconds = (us) => us < 1e6 ? `${(us / 1000).toPrecision(3)} ms` : `${(us / 1e6).toPrecision(3)} s`;
const clock = (us) => `${new Date(us / 1000).toLocaleTimeString([], { hour12: false })}.${
  String(Math.floor(us / 1000) % 1000).padStart(3, "0")}`;

export function showRequest(where, log, row, live, of) {
  const stages = log.stages(row).map(([doing, from, to]) => {
    const reasons = doing !== "waits" && doing !== "again" ? "" : log.blockedBy(from, to)
      .map(([reason, us]) => `${log.reasonNames[reason]} ${seconds(us)}`).join(", ");
    return [clock(from), DOING[doing], seconds(to - from), reasons];
  });
  const facts = row.facts;
  where.replaceChildren(
    element("h2", `${row.identity} ${row.id}`.trim()),
    element("p", [
      `Completion ${row.index}`,
      facts.prompt === undefined ? "" : `${facts.prompt} prompt tokens`,
      facts.cached ? `${facts.cached} of them found in the cache` : "",
      facts.output === undefined ? "" : `${facts.output} output tokens`,
      facts.how ?? "not ended",
    ].filter(Boolean).join(", ")),
    table(["at", "it", "for", "the first in turn lacked"], stages),
  );
  if (live && !row.id.startsWith("#")) explain(where, row, of);
}

// The scheduler's own answer, which knows the request's reasons, not only those of the first in turn.
async function explain(where, row, of) {
  const asked = new URLSearchParams({ id: row.id, identity: row.identity, of });
  const answer = element("p", "…");
  where.append(element("h2", "The scheduler says"), answer);
  try {
    answer.textContent = (await ask(`why?${asked}`)).text;
  } catch (error) {
    answer.textContent = String(error);
  }
}

export function showStep(where, log, i) {
  const reason = log.reasons[i];
  where.replaceChildren(element("h2", `Step ${log.number[i]}`), table([], [
    ["began", clock(log.started[i])],
    ["took", `${seconds(log.taken_us[i])}, predicted ${seconds(log.planned_us[i])}`],
    ["rows", `${log.prompt_rows[i]} of prompts, ${log.decode_rows[i]} decode, ${log.verify_rows[i]} verify`],
    ["tokens", `${log.tokens[i]}, drafts ${log.drafted_tokens[i]}, accepted ${log.accepted_tokens[i]}`],
    ["free pages", log.free_pages[i]],
    ["run, wait", `${log.running[i]}, ${log.waiting[i]}`],
    ["none admitted for", reason ? log.reasonNames[reason] : "none waited"],
  ]));
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function table(head, rows) {
  const made = document.createElement("table");
  for (const [cells, kind] of [[head, "th"], ...rows.map((row) => [row, "td"])]) {
    const line = document.createElement("tr");
    line.append(...cells.map((text) => element(kind, text)));
    made.append(line);
  }
  return made;
}
