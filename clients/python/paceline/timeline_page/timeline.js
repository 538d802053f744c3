// The page: loads the log, follows it, and answers clicks. Whatever comes from a request is text.

import { ask } from "./ask.js";
import { Log } from "./log.js";
import { colors, Picture, ROW } from "./draw.js";
import { showRequest, showStep } from "./why.js";

const POLL_MS = 500;
const MIN_US = 1000;
const find = (id) => document.getElementById(id);
const scroller = find("scroller"), picture = new Picture(find("rows"), find("lanes"));
let log, seen = [], chosen = null, about = {}, of = "", next = 0, waiting = false, broken = false;

async function load() {
  about = await ask("about");
  find("source").textContent = about.source;
  const options = about.choices.map(([value, name]) => new Option(name, value, false, name === about.source));
  find("of").replaceChildren(...options);
  find("of").hidden = !options.length;
  of = find("of").value;
  find("follow-label").hidden = !about.live;
  find("follow").checked = about.live;
  log = new Log(about.kinds, about.reasons);
  await read();
  if (!about.live || log.steps) showAll();
  if (about.live) setInterval(() => read().catch(fail), POLL_MS);
  document.body.dataset.loadedMs = Math.round(performance.now());
}

async function read() {
  if (waiting) return; // one at a time
  waiting = true;
  try {
    const after = next, asked = log, found = await ask(`steps?${new URLSearchParams({ after, of })}`);
    if (asked !== log) return; // a source was chosen meanwhile, this one again or another
    next = found.next;
    if (!after && found.parts.length) log = new Log(about.kinds, about.reasons);
    for (const part of found.parts) log.add(part);
    if (found.error) fail(found.error);
    else if (broken) find("error").hidden = true;
    broken = Boolean(found.error);
    if (found.parts.length && find("follow").checked) follow();
    if (found.parts.length) draw();
  } finally {
    waiting = false;
  }
}

function chooseSource() {
  of = find("of").value;
  find("source").textContent = find("of").selectedOptions[0].text;
  find("why").replaceChildren();
  find("error").hidden = true;
  [next, chosen, log] = [0, null, new Log(about.kinds, about.reasons)];
  draw();
}

function fail(error) {
  find("error").textContent = String(error.message ?? error);
  find("error").hidden = false;
}

function follow() {
  const span = Math.max(picture.to - picture.from, 1e7);
  picture.to = log.ended;
  picture.from = log.ended - span;
}

function showAll() {
  picture.from = log.began;
  picture.to = Math.max(log.ended, log.began + MIN_US);
  draw();
}

function zoom(factor, at = (picture.from + picture.to) / 2) {
  const from = at - (at - picture.from) * factor, to = at + (picture.to - at) * factor;
  if (to - from < MIN_US) return;
  [picture.from, picture.to] = [from, to];
  draw();
}

function move(share) {
  const by = share * (picture.to - picture.from);
  picture.from += by;
  picture.to += by;
  find("follow").checked = false;
  draw();
}

let due = false;
function draw() {
  if (due || !log) return;
  due = true;
  requestAnimationFrame(drawNow);
}

function drawNow() {
  due = false;
  if (picture.to <= picture.from) return;
  seen = picture.seen(log);
  find("spacer").style.height = `${Math.max(seen.length * ROW, scroller.clientHeight)}px`;
  picture.rows.style.height = `${scroller.clientHeight}px`;
  picture.draw(log, seen, Math.floor(scroller.scrollTop / ROW), chosen);
  const lost = log.lost ? `, ${log.lost} steps lost: this reader was too slow` : "";
  find("summary").textContent = `${new Date(picture.from / 1000).toLocaleTimeString()} and `
    + `${((picture.to - picture.from) / 1e6).toPrecision(3)} s after: ${seen.length} of ${log.rows.length} streams, `
    + `${log.stepAt(picture.to) - log.stepAt(picture.from)} of ${log.steps} steps${lost}`;
  drawLegend();
}

function drawLegend() {
  const present = new Set(log.reasons.slice(log.stepAt(picture.from), log.stepAt(picture.to)));
  for (const row of seen) {
    for (let i = 0; row.doing[i] !== "waits" && i < row.doing.length; i++) {
      const reason = log.reasonNames.indexOf(row.doing[i]);
      if (reason > 0) present.add(reason); // it waited for this before it was queued
    }
  }
  const entries = [["runs", colors.runs], ["waits for the next plan", colors.reason(0)], ...[...present].filter(Boolean).sort((a, b) => a - b)
    .map((reason) => [`waits: ${log.reasonNames[reason]}`, colors.reason(reason)])];
  find("legend").replaceChildren(...entries.map(([text, color]) => {
    const item = document.createElement("li"), mark = document.createElement("canvas");
    mark.width = mark.height = 12;
    const pen = mark.getContext("2d");
    pen.fillStyle = color;
    pen.fillRect(0, 0, mark.width, mark.height);
    item.append(mark, text);
    return item;
  }));
}

function choose(row) {
  const began = performance.now();
  chosen = row;
  showRequest(find("why"), log, row, about.live, of);
  find("why").dataset.answeredMs = performance.now() - began;
  draw();
}

picture.rows.addEventListener("click", (event) => {
  const row = seen[Math.floor(scroller.scrollTop / ROW) + Math.floor(event.offsetY / ROW)];
  if (row) choose(row);
});
picture.lanes.addEventListener("click", (event) => {
  const step = log.stepAt(picture.timeAt(event.offsetX)) - 1;
  if (step >= 0) showStep(find("why"), log, step);
});
for (const canvas of [picture.rows, picture.lanes]) {
  let grabbed = null;
  canvas.addEventListener("pointerdown", (event) => { grabbed = event.offsetX; });
  canvas.addEventListener("pointermove", (event) => {
    if (grabbed === null || !event.buttons || Math.abs(event.offsetX - grabbed) < 4) return;
    move((grabbed - event.offsetX) / picture.width);
    grabbed = event.offsetX;
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && canvas === picture.rows) return; // the rows scroll
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, picture.timeAt(event.offsetX));
  }, { passive: false });
}
find("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const row = log.rows.findLast((one) => one.id === find("id").value);
  if (!row) return fail(`no request ${find("id").value} in what is loaded`);
  find("error").hidden = true;
  const life = Math.max(Math.min(row.end, log.ended) - row.at[0], MIN_US);
  [picture.from, picture.to] = [row.at[0] - life, row.at[0] + 2 * life];
  find("follow").checked = false;
  draw();
  const place = picture.seen(log).indexOf(row) * ROW - scroller.clientHeight / 2;
  choose(row);
  requestAnimationFrame(() => { scroller.scrollTop = Math.max(0, place); }); // when the list has its length
});
find("of").addEventListener("change", chooseSource);
find("all").addEventListener("click", () => showAll());
find("in").addEventListener("click", () => zoom(0.5));
find("out").addEventListener("click", () => zoom(2));
find("earlier").addEventListener("click", () => move(-0.5));
find("later").addEventListener("click", () => move(0.5));
scroller.addEventListener("scroll", draw);
window.addEventListener("resize", draw);

load().catch(fail);
