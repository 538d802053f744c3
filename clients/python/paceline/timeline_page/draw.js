// Draws the rows and the lanes of a log between two times. Whatever its length, it costs a pass over what is seen.

export const ROW = 16; // px
const LANES = [
  ["step, ms", (log, i) => log.taken_us[i] / 1000],
  ["tokens", (log, i) => log.tokens[i]],
  ["run", (log, i) => log.running[i]],
  ["wait", (log, i) => log.waiting[i]],
  ["free pages", (log, i) => log.free_pages[i]],
];

export const colors = {
  runs: "#3f9a56",
  reason: (number) => number ? `hsl(${(number * 137) % 360} 70% 55%)` : "#9aa0a8",
};

export class Picture {
  constructor(rows, lanes) {
    this.rows = rows;
    this.lanes = lanes;
    this.from = this.to = 0;
    this.names = this.width = 1; // px, of the names and of what is right of them
  }

  timeAt(x) { return this.from + Math.max(0, x - this.names) / this.width * (this.to - this.from); }
  xOf(time) { return this.names + (time - this.from) / (this.to - this.from) * this.width; }

  // The rows that live within the picture's time.
  seen(log) { return log.rows.filter((row) => row.at[0] <= this.to && row.end >= this.from); }

  draw(log, seen, first, chosen) {
    this.text = getComputedStyle(document.body).color;
    const whole = this.rows.clientWidth; // asked for once: it may need a layout
    this.names = Math.min(150, Math.round(whole * 0.28));
    this.width = Math.max(1, whole - this.names);
    this.#drawRows(log, seen, first, chosen, this.#reasons(log));
    this.#drawLanes(log);
  }

  // For each pixel the reason of the longest step there.
  #reasons(log) {
    const found = new Uint8Array(this.width + 1), longest = new Float64Array(this.width + 1);
    const scale = this.width / (this.to - this.from);
    for (let i = Math.max(0, log.stepAt(this.from) - 1); i < log.steps && log.started[i] < this.to; i++) {
      const next = i + 1 < log.steps ? log.started[i + 1] : log.endOf(i);
      const begin = Math.max(0, Math.floor((log.started[i] - this.from) * scale));
      const end = Math.min(this.width, Math.floor((next - this.from) * scale));
      for (let x = begin; x <= end; x++) {
        const us = next - log.started[i];
        if (us > longest[x]) [longest[x], found[x]] = [us, log.reasons[i]];
      }
    }
    return found;
  }

  #drawRows(log, seen, first, chosen, reasons) {
    const pen = sized(this.rows), left = this.names;
    const count = Math.ceil(this.rows.clientHeight / ROW) + 1;
    pen.font = "11px system-ui, sans-serif";
    for (let line = 0; line < count && first + line < seen.length; line++) {
      const row = seen[first + line], y = line * ROW;
      if (row === chosen) {
        pen.fillStyle = "rgb(127 127 127 / 25%)";
        pen.fillRect(0, y, this.rows.clientWidth, ROW);
      }
      for (const [doing, from, to] of log.stages(row)) {
        const x = Math.max(left, this.xOf(from)), end = Math.min(left + this.width, this.xOf(to));
        if (end < left || x > left + this.width) continue;
        if (doing === "waits" || doing === "again") {
          this.#drawWait(pen, reasons, x, Math.max(x + 1, end), y, doing === "again");
        } else { // it runs, or what it does before it is queued has its own color
          const tall = doing === "runs" ? ROW - 4 : 3;
          pen.fillStyle = doing === "runs" ? colors.runs : colors.reason(log.reasonNames.indexOf(doing));
          pen.fillRect(x, y + (ROW - tall) / 2, Math.max(1, end - x), tall);
        }
      }
      pen.fillStyle = this.text;
      pen.fillText(label(row, Math.floor(left / 6)), 2, y + 12);
    }
  }

  #drawWait(pen, reasons, from, to, y, again) {
    const left = this.names;
    for (let x = from; x < to;) {
      const reason = reasons[Math.floor(x - left)];
      let end = Math.floor(x) + 1;
      while (end < to && reasons[end - left] === reason) end++;
      pen.fillStyle = colors.reason(reason);
      pen.fillRect(x, y + 5, Math.min(end, to) - x, ROW - 10);
      x = end;
    }
    if (again) {
      pen.fillStyle = "#d33";
      pen.fillRect(from, y + 3, to - from, 2);
    }
  }

  #drawLanes(log) {
    const pen = sized(this.lanes), left = this.names, height = this.lanes.clientHeight / LANES.length;
    const scale = this.width / (this.to - this.from);
    const begin = Math.max(0, log.stepAt(this.from) - 1), end = log.stepAt(this.to);
    pen.font = "11px system-ui, sans-serif";
    LANES.forEach(([name, of], lane) => {
      const most = new Float64Array(this.width + 1);
      let largest = 0;
      for (let i = begin; i < end; i++) {
        const value = of(log, i);
        const first = Math.max(0, Math.floor((log.started[i] - this.from) * scale));
        const last = Math.min(this.width, Math.floor((log.endOf(i) - this.from) * scale));
        for (let x = first; x <= last; x++) if (value > most[x]) most[x] = value;
        largest = Math.max(largest, value);
      }
      const bottom = (lane + 1) * height;
      pen.fillStyle = "#5b8bd0";
      for (let x = 0; x < this.width && largest; x++) {
        const tall = most[x] / largest * (height - 6);
        if (tall) pen.fillRect(left + x, bottom - tall, 1, tall);
      }
      pen.fillStyle = this.text;
      pen.fillText(`${name} ≤ ${Number(largest.toPrecision(3))}`, 2, bottom - 4, left - 4);
    });
  }
}

function label(row, most) {
  const name = `${row.identity} ${row.id}${row.index ? `[${row.index}]` : ""}`.trim();
  return name.length > most ? `…${name.slice(1 - most)}` : name;
}

// The canvas's context, cleared, in CSS pixels.
function sized(canvas) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}
