// Turns of a conversation, on the page. Text of users and models becomes text nodes only, never HTML.

const TITLES = { user: "You", assistant: "Model" };
const SHOWN = 200_000; // characters of one text that a browser lays out in no time

/** An element with a class and children; a string is a text. */
export function element(name, className, ...children) {
  const found = document.createElement(name);
  if (className) found.className = className;
  found.append(...children);
  return found;
}

/** A text that grows. What is beyond SHOWN is there on demand. */
class Text {
  #node = document.createTextNode("");
  #more = null;
  #text = "";

  constructor(parent) {
    this.parent = parent;
    parent.append(this.#node);
  }

  update(text) {
    this.#text = text;
    const end = Math.min(text.length, SHOWN);
    if (end > this.#node.length) this.#node.appendData(text.slice(this.#node.length, end));
    if (text.length <= SHOWN) return;
    if (this.#more === null) {
      this.#more = element("button", "more");
      this.#more.type = "button";
      this.#more.onclick = () => {
        this.#node.data = this.#text;
        this.#more.remove();
      };
      this.parent.append(this.#more);
    }
    this.#more.textContent = `Show all ${text.length.toLocaleString()} characters`;
  }
}

/** One turn. `update` shows what a turn has become; `turn` is changed by nobody but its owner. */
export class TurnView {
  #reasoning = null;
  #content = null;
  #calls = [];
  #facts = element("p", "facts");

  constructor(turn) {
    this.turn = turn;
    this.root = element("article", turn.role, element("h2", "", TITLES[turn.role]));
    this.root.append(this.#facts);
    this.update();
    if (turn.ended) this.finish();
  }

  update() {
    const { reasoning, content, calls, facts } = this.turn;
    if (reasoning) (this.#reasoning ??= this.#folded("Reasoning")).update(reasoning);
    if (content) {
      if (this.#content === null) {
        this.box = element("div", "content");
        this.#facts.before(this.box);
        this.#content = new Text(this.box);
      }
      this.#content.update(content);
    }
    (calls ?? []).forEach((call, index) => {
      this.#calls[index] ??= this.#call(call);
      this.#calls[index].update(call.arguments);
    });
    this.#facts.textContent = facts ?? "";
  }

  /** The text is complete: parts between lines of ``` are code. */
  finish() {
    this.update();
    const text = this.turn.content ?? "";
    if (!text.includes("```") || text.length > SHOWN) return;
    const parts = text.split(/^```.*\n?/m);
    this.box.replaceChildren(...parts.map((part, index) => (index % 2 ? element("pre", "", part) : part)));
  }

  #folded(title) {
    const inner = element("pre", "text");
    const details = element("details", "", element("summary", "", title), inner);
    (this.box ?? this.#facts).before(details);
    return new Text(inner);
  }

  #call(call) {
    const inner = element("pre", "text");
    const result = element("textarea", "result");
    result.rows = 2;
    result.placeholder = "Its result, to be sent with the next message";
    result.value = call.result ?? "";
    result.oninput = () => (call.result = result.value);
    const title = element("summary", "", `Call of ${call.name}`);
    this.#facts.before(element("details", "call", title, inner, element("label", "", "Result", result)));
    return new Text(inner);
  }
}
