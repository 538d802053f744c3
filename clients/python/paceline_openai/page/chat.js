// The chat page: its controls, and the conversation that is shown.

import { chat, models, Refused } from "./api.js";
import { Answer, begun, further, request } from "./conversation.js";
import { key, Store } from "./store.js";
import { element, TurnView } from "./turns.js";

const PAINTED_MS = 60; // a stream has more events than a screen has pictures
const SAVED_MS = 500;
const TITLE = 60;

const find = (id) => document.getElementById(id);
const store = new Store();
let current = begun();
let running = null; // the AbortController of the answer that is streaming

function fail(error) {
  find("error").textContent = error ? error.message : "";
  find("error").hidden = !error;
}

/** What `action` returns, asking for the key when it is missing or wrong; undefined if it fails. */
async function tried(action) {
  fail(null);
  try {
    return await action();
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      const refused = key.get() !== "";
      if (await askForKey()) return tried(action);
      fail(refused ? error : new Error("A key is needed."));
    } else {
      fail(error);
    }
    return undefined;
  }
}

function askForKey() {
  const dialog = find("key");
  const form = dialog.querySelector("form");
  form.reset();
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    form.onsubmit = () => {
      key.set(form.elements.key.value.trim());
      dialog.returnValue = "given";
    };
    dialog.onclose = () => {
      const given = form.elements.key.value.trim() !== "" && key.get() === form.elements.key.value.trim();
      form.reset();
      resolve(given);
    };
  });
}

async function save() {
  current.changed = Date.now();
  try {
    await store.put(current);
  } catch (error) {
    fail(new Error(`This browser keeps nothing: ${error?.message}`));
  }
}

async function showList() {
  const all = await store.list().catch(() => []);
  find("list").replaceChildren(
    ...all.map(({ id, title }) => {
      const open = element("button", "", title);
      open.onclick = () => show(id);
      if (id === current.id) open.setAttribute("aria-current", "true");
      const remove = element("button", "", "×");
      remove.setAttribute("aria-label", `Delete ${title}`);
      remove.onclick = () => removed(id);
      return element("li", "", open, remove);
    }),
  );
}

async function removed(id) {
  await store.remove(id);
  await (id === current.id ? show("") : showList());
}

/** Show a kept conversation, or a new one. */
async function show(id) {
  stop();
  const kept = id ? await store.get(id).catch(() => undefined) : undefined;
  current = kept ?? begun(current.settings);
  for (const turn of current.turns) {
    if (!turn.ended) Object.assign(turn, { ended: true, facts: "the page was closed" });
  }
  draw();
  await showList();
}

function draw() {
  document.body.classList.remove("menu");
  find("turns").replaceChildren(...current.turns.map((turn) => new TurnView(turn).root));
  if (current.model && [...find("model").options].some((one) => one.value === current.model)) {
    find("model").value = current.model;
  }
  location.hash = current.turns.length ? current.id : "";
  find("turns").scrollTop = find("turns").scrollHeight;
  setControls();
}

function setControls() {
  find("send").hidden = running !== null;
  find("stop").hidden = running === null;
  find("again").disabled = running !== null || current.turns.length === 0;
}

function stop() {
  running?.abort();
}

/** Ask for the next answer, and show it as it comes. */
async function answer() {
  const conversation = current;
  const abort = (running = new AbortController());
  conversation.model = find("model").value;
  location.hash = conversation.id;
  setControls();
  await save();
  await showList();
  await tried(() => stream(conversation, abort.signal));
  if (running === abort) running = null;
  setControls();
}

async function stream(conversation, signal) {
  const body = request(conversation, conversation.model);
  const grown = new Answer();
  const view = new TurnView(grown.turn);
  const turns = find("turns");
  let painted = 0;
  let saved = performance.now();
  const keep = () => store.put(conversation).catch(() => undefined); // `save` has said why
  const paint = () => {
    const follows = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 80;
    if (signal.aborted || conversation === current) view.update();
    if (follows) turns.scrollTop = turns.scrollHeight;
    painted = performance.now();
  };
  let reason = "the connection broke";
  try {
    for await (const chunk of chat(key.get(), body, signal)) {
      if (!view.root.isConnected && conversation === current) {
        conversation.turns.push(grown.turn);
        turns.append(view.root);
      }
      grown.take(chunk);
      if (performance.now() - painted > PAINTED_MS) {
        paint();
        await new Promise((resolve) => setTimeout(resolve)); // so that "Stop" can be pressed
      }
      if (performance.now() - saved > SAVED_MS) {
        saved = performance.now();
        await keep();
      }
    }
    reason = signal.aborted ? "stopped" : undefined;
  } finally {
    grown.end(reason);
    paint();
    view.finish();
    await keep();
  }
}

function send() {
  const text = find("message").value;
  const results = current.turns.at(-1)?.calls?.some((call) => call.result);
  if (running !== null || (!text.trim() && !results)) return;
  if (text.trim()) {
    const turn = { role: "user", content: text, ended: true };
    if (current.turns.length === 0) current.title = text.trim().slice(0, TITLE);
    current.turns.push(turn);
    find("turns").append(new TurnView(turn).root);
  }
  find("message").value = "";
  find("turns").scrollTop = find("turns").scrollHeight;
  answer();
}

function again() {
  while (current.turns.at(-1)?.role === "assistant") {
    current.turns.pop();
    find("turns").lastElementChild.remove();
  }
  if (current.turns.length) answer();
}

function settings() {
  const form = find("settings").querySelector("form");
  for (const field of form.elements) if (field.name) field.value = current.settings[field.name] ?? "";
  find("wrong").hidden = true;
  find("settings").showModal();
  form.onsubmit = (event) => {
    try {
      further(form.elements.more.value);
    } catch (error) {
      event.preventDefault();
      find("wrong").textContent = `Other fields: ${error.message}`;
      find("wrong").hidden = false;
      return;
    }
    for (const field of form.elements) if (field.name) current.settings[field.name] = field.value;
    if (current.turns.length) save();
  };
}

async function begin() {
  find("menu").onclick = () => document.body.classList.toggle("menu");
  find("new").onclick = async () => {
    await show("");
    find("message").focus();
  };
  find("forget-key").onclick = () => key.forget();
  find("settings-button").onclick = settings;
  find("stop").onclick = stop;
  find("again").onclick = again;
  find("composer").onsubmit = (event) => {
    event.preventDefault();
    send();
  };
  find("message").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  const names = (await tried(() => models(key.get()))) ?? [];
  find("model").replaceChildren(...names.map((name) => new Option(name, name)));
  await show(location.hash.slice(1));
}

begin();
