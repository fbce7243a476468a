// One request as bars on one time axis.

import { axisOf, label, ticks } from "./axis.js";
import { drawing, duration, element, size, words } from "./format.js";

const LEFT = 168;
const RIGHT = 76;
/** Below this width a stage's worker stands under its name, so that the bars keep their room. */
const NARROW = 560;
const LEAST = 60;
const GAP = 12;
const TOP = 40;
const ROW = 28;
const BAR = 16;
const PIXELS_PER_TICK = 90;
const MOST_TOKEN_MARKS = 600;
export const NAMES = {
  router: "router",
  queue: "queue",
  prefill: "prefill",
  transfer: "KV on the wire",
  decode_queue: "queue",
  decode: "decode",
};
const STAGES = Object.keys(NAMES);
const ruler = document.createElement("canvas").getContext("2d");
ruler.font = '600 11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
const wide = (text) => ruler.measureText(text).width;

/** A life that grows by itself between two messages of the router. */
export class Growing {
  constructor(life, tokens = []) {
    this.tokens = tokens;
    this.set(life);
  }

  set(life) {
    this.life = life;
    this.seen = performance.now();
  }

  get age() {
    return this.life.outcome === null ? this.life.age + (performance.now() - this.seen) / 1000 : this.life.age;
  }
}

export class LifeChart {
  constructor(place, even) {
    this.place = place;
    this.even = even;
    this.shown = null;
    new ResizeObserver(() => this.draw()).observe(place);
    this.drawEmpty();
  }

  show(growing) {
    this.shown = growing;
    this.draw();
  }

  /** Draws again on every frame while the request runs. */
  draw() {
    cancelAnimationFrame(this.frame);
    if (this.shown === null) return;
    this.place.replaceChildren(chart(this.shown, this.place.clientWidth, this.even));
    if (this.shown.life.outcome === null) this.frame = requestAnimationFrame(() => this.draw());
  }

  drawEmpty() {
    const rows = STAGES.map((stage) => ({ stage, worker: "", start: 0, end: 0 }));
    const life = { outcome: "stop", age: 1, spans: rows, chunks: [], placed: [], ttft: null };
    this.place.replaceChildren(chart(new Growing(life), this.place.clientWidth, true));
  }
}

function chart({ life, age, tokens }, width, even) {
  const rows = life.spans.length;
  const height = TOP + rows * ROW + 6;
  const axis = axisOf(life, age, even);
  const narrow = width < NARROW;
  const names = life.spans.map((span) => [wide(NAMES[span.stage]), wide(workerOf(span, life))]);
  const needed = GAP + Math.max(0, ...names.map(([name, worker]) => (narrow ? Math.max(name, worker) : name + GAP + worker)));
  const left = Math.min(narrow ? needed : Math.max(LEFT, needed), width - LEAST - RIGHT);
  const inner = Math.max(LEAST, width - left - RIGHT);
  const x = (seconds) => left + inner * axis.at(seconds);
  const made = drawing("svg", { viewBox: `0 0 ${width} ${height}`, height });
  grid(made, axis, x, inner, height);
  handoff(made, life, x, height, age);
  life.spans.forEach((span, row) => bar(made, span, TOP + row * ROW, { x, left, width, narrow }, life, age, tokens));
  for (const again of life.placed.slice(1)) {
    made.append(drawing("line", { class: "again", x1: x(again), x2: x(again), y1: TOP - 4, y2: height }));
  }
  if (life.ttft !== null) {
    const at = x(life.ttft);
    made.append(drawing("line", { class: "first", x1: at, x2: at, y1: TOP - 8, y2: height }));
    const text = `first token ${words(duration(life.ttft))}`;
    const fits = at + 4 + wide(text) <= width;
    const beside = fits ? { x: at + 4 } : { x: Math.max(wide(text), at - 4), "text-anchor": "end" };
    made.append(drawing("text", { class: "mark halo", y: TOP - 8, ...beside }, text));
  }
  return made;
}

function grid(made, axis, x, inner, height) {
  const parts = axis.knee === null ? [[0, axis.end, 1]] : [[0, axis.knee, axis.share], [axis.knee, axis.end, 1 - axis.share]];
  for (const [from, to, share] of parts) {
    const { step, found } = ticks(from, to, (inner * share) / PIXELS_PER_TICK);
    for (const seconds of found) {
      if (from > 0 && x(seconds) - x(from) < PIXELS_PER_TICK / 3) continue;
      made.append(drawing("line", { class: "grid", x1: x(seconds), x2: x(seconds), y1: 18, y2: height }));
      made.append(drawing("text", { x: x(seconds), y: 12, "text-anchor": seconds === 0 ? "start" : "middle" }, label(seconds, step, to)));
    }
  }
  if (axis.knee !== null) {
    made.append(drawing("line", { class: "break", x1: x(axis.knee), x2: x(axis.knee), y1: 4, y2: height }));
  }
}

/** The part of the transfer after prefill: what the hand-off costs. */
function handoff(made, life, x, height, age) {
  const prefill = life.spans.find((span) => span.stage === "prefill");
  const transfer = life.spans.find((span) => span.stage === "transfer");
  if (!prefill || prefill.end === null || !transfer) return;
  const end = transfer.end ?? age;
  const left = x(prefill.end);
  made.append(drawing("rect", { class: "handoff", x: left, y: TOP - 4, width: Math.max(0, x(end) - left), height: height - TOP + 4 }));
}

const workerOf = (span, life) => (span.stage === "transfer" && life.decode_worker ? `→ ${life.decode_worker}` : span.worker);

function bar(made, span, top, place, life, age, tokens) {
  const { x, left } = place;
  const end = span.end ?? age;
  const middle = top + BAR / 2 + 4;
  const worker = workerOf(span, life);
  const [above, below] = place.narrow && worker ? [middle - 6, middle + 6] : [middle, middle];
  made.append(drawing("text", { class: "name halo", x: 0, y: above }, NAMES[span.stage]));
  const beside = place.narrow ? { x: 0 } : { x: left - GAP, "text-anchor": "end" };
  made.append(drawing("text", { class: "halo", y: below, ...beside }, worker));
  const width = Math.max(end > span.start ? 1.5 : 0, x(end) - x(span.start));
  const kind = `${span.stage}${span.end === null ? " open" : ""}`;
  const seconds = end - span.start;
  const title = `${NAMES[span.stage]} ${worker}: ${words(duration(seconds))}`;
  made.append(drawing("rect", { class: kind, x: x(span.start), y: top, width, height: BAR, rx: 1.5 }, drawing("title", {}, title)));
  const cuts = span.stage === "prefill" ? life.chunks.map(([at]) => at) : span.stage === "decode" ? tokens.slice(0, MOST_TOKEN_MARKS) : [];
  for (const at of cuts) {
    if (at > span.start && at < end) made.append(drawing("line", { class: "cut", x1: x(at), x2: x(at), y1: top + 1, y2: top + BAR - 1 }));
  }
  if (seconds <= 0) return;
  const extra = span.stage === "transfer" && life.transfer_bytes ? `, ${words(size(life.transfer_bytes))}` : "";
  const text = `${words(duration(seconds))}${extra}`;
  const [right, start, length] = [x(span.start) + width, x(span.start), wide(text)];
  let at = { x: place.width, "text-anchor": "end" };
  if (right + 6 + length <= place.width) at = { x: right + 6 };
  else if (start - 6 - length >= left) at = { x: start - 6, "text-anchor": "end" };
  made.append(drawing("text", { class: "halo", y: middle, ...at }, text));
}

/** The figures below the chart. */
export function figures(place, { life, age }) {
  const speed = life.tpot ? 1 / life.tpot : null;
  const shown = {
    TTFT: duration(life.ttft),
    TPOT: duration(life.tpot),
    speed: speed === null ? ["–", ""] : [speed >= 100 ? Math.round(speed) : speed.toFixed(1), "tokens/s"],
    "hand-off": duration(life.handoff),
    total: duration(age),
    prompt: [life.prompt_tokens.toLocaleString("en"), "tokens"],
    cached: [life.cached_tokens.toLocaleString("en"), "tokens"],
    completion: [life.completion_tokens.toLocaleString("en"), "tokens"],
    "KV sent": life.transfer_bytes ? size(life.transfer_bytes) : ["–", ""],
    "placed again": [life.retries + life.migrations, life.migrations ? `${life.migrations} moves` : ""],
  };
  place.replaceChildren(
    ...Object.entries(shown).map(([name, [value, unit]]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, String(value), element("small", {}, unit))),
    ),
  );
}
