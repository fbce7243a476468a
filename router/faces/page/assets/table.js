// The running and the latest requests, each with its bars.

import { clock, drawing, duration, element, words } from "./format.js";
import { NAMES } from "./life.js";

const MOST_ROWS = 200;
const FAILED = ["invalid", "exhausted", "unavailable", "deadline", "internal"];

export class RequestTable {
  constructor(body, none, choose) {
    this.body = body;
    this.none = none;
    this.choose = choose;
    this.rows = new Map();
    this.chosen = null;
    body.addEventListener("click", (event) => this.select(event.target.closest("tr")));
    body.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Shows a request's life as it is now: the latest stand on top. */
  put(life) {
    const name = `${life.id} ${life.index}`;
    let row = this.rows.get(name);
    if (!row) {
      row = element("tr", { tabindex: "-1", "aria-selected": "false" });
      this.rows.set(name, row);
      this.body.prepend(row);
      if (this.body.children.length > MOST_ROWS) this.drop(this.body.lastElementChild);
    }
    row.life = life;
    row.name = name;
    row.classList.toggle("failed", FAILED.includes(life.outcome));
    row.replaceChildren(...cells(life));
    this.none.hidden = true;
    if (this.chosen === null) this.body.firstElementChild.tabIndex = 0;
    if (row === this.chosen) this.choose(life);
  }

  /** Running requests that are no longer among `names` have ended; `put` has their end. */
  drop(row) {
    this.rows.delete(row.name);
    row.remove();
  }

  select(row) {
    if (!row) return;
    for (const other of this.body.children) {
      other.setAttribute("aria-selected", String(other === row));
      other.tabIndex = other === row ? 0 : -1;
    }
    this.chosen = row;
    this.choose(row.life);
  }

  /** The chart follows something else than a row. */
  release() {
    this.chosen?.setAttribute("aria-selected", "false");
    this.chosen = null;
  }

  step(by) {
    const rows = [...this.body.children];
    const at = this.chosen ? rows.indexOf(this.chosen) + by : 0;
    const next = rows[Math.max(0, Math.min(rows.length - 1, at))];
    if (!next) return;
    this.select(next);
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  }

  onKey(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) this.step(by);
    else if (event.key === "Enter") this.select(event.target.closest("tr"));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

function cells(life) {
  const cell = (kind, ...content) => element("td", { class: kind }, ...content);
  const failed = FAILED.includes(life.outcome);
  return [
    cell("", clock(life.received)),
    cell("id", life.id),
    cell("n", String(life.prompt_tokens)),
    cell("n", String(life.completion_tokens)),
    cell("n", words(duration(life.ttft))),
    cell("n", words(duration(life.handoff))),
    cell("n", words(duration(life.tpot))),
    cell("time", bars(life)),
    cell("n total", failed || life.outcome === "cancelled" ? life.outcome : words(duration(life.age))),
  ];
}

function bars(life) {
  const total = Math.max(life.age, 1e-4);
  const made = drawing("svg", { viewBox: "0 0 1000 14", preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const span of life.spans) {
    const end = span.end ?? life.age;
    const [top, height] = span.stage === "transfer" ? [8, 4] : [2, 5];
    made.append(
      drawing(
        "rect",
        { class: span.stage, x: (1000 * span.start) / total, y: top, width: Math.max(2, (1000 * (end - span.start)) / total), height },
        drawing("title", {}, `${NAMES[span.stage]} ${words(duration(end - span.start))}`),
      ),
    );
  }
  return made;
}
