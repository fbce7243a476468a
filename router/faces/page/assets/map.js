// The workers, their KV, and the links between prefill and decode.

import { count, drawing, element, figure, share, size, words } from "./format.js";

const ROLES = ["prefill", "decode", "colocated"];
/** A transfer ends between two looks at the workers: its link goes on flowing for this long, to be seen. */
const FLOW_MS = 900;
const RATE_SECONDS = 2;
const LABELS = 2;
const [ABOVE, BELOW] = [-6, 15];

export class WorkerMap {
  constructor(place) {
    this.place = place;
    this.links = place.querySelector("#links");
    this.columns = Object.fromEntries(ROLES.map((role) => [role, place.querySelector(`#${role}`)]));
    this.cards = new Map();
    this.paths = new Map();
    this.history = new Map();
    this.shown = [];
    new ResizeObserver(() => this.drawLinks()).observe(place);
  }

  show({ workers, links }) {
    const roles = new Map(workers.map((worker) => [worker.name, worker.role]));
    for (const [name, card] of this.cards) {
      if (roles.get(name) === card.role) continue;
      card.root.remove();
      this.cards.delete(name);
      this.history.delete(name);
    }
    for (const worker of workers) this.showWorker(worker);
    this.shown = links;
    for (const [name, card] of this.cards) {
      const sent = links.filter((link) => link.prefill === name);
      card.sent.replaceChildren(...sent.map((link) => element("span", {}, `→ ${link.decode} ${words(size(link.nbytes))}`)));
    }
    this.drawLinks();
  }

  showWorker(worker) {
    let card = this.cards.get(worker.name);
    if (!card) {
      card = makeCard(worker);
      this.cards.set(worker.name, card);
      const column = this.columns[worker.role];
      const next = [...column.children].find((other) => other.dataset.name.localeCompare(worker.name, "en", { numeric: true }) > 0);
      column.insertBefore(card.root, next ?? null);
    }
    const word = worker.state !== "ready" ? worker.state : worker.avoided ? "avoided" : worker.ready ? "" : "not reached";
    card.root.classList.toggle("away", word !== "");
    card.state.textContent = word;
    card.what.textContent = `${worker.running} running${worker.waiting ? ` · ${worker.waiting} waiting` : ""}`;
    const part = (blocks) => (worker.total ? blocks / worker.total : 0);
    const [held, cached] = [part(worker.held), part(worker.cached)];
    card.held.style.width = `${100 * held}%`;
    card.cached.style.width = `${100 * cached}%`;
    const kv = `KV ${share(held)} in use, ${share(cached)} cached of ${count(worker.total * worker.block_size, "token", "tokens")}`;
    card.blocks.textContent = worker.total ? kv : "";
    const rate = this.rate(worker);
    card.rate.textContent = rate > 0 ? `${figure(rate)} tokens/s` : "idle";
  }

  /** Tokens per second that a worker computed lately. */
  rate(worker) {
    const now = performance.now() / 1000;
    const seen = this.history.get(worker.name) ?? [];
    seen.push([now, worker.computed_tokens]);
    while (seen.length > 2 && now - seen[0][0] > RATE_SECONDS) seen.shift();
    this.history.set(worker.name, seen);
    const [then, tokens] = seen[0];
    return now > then ? Math.max(0, worker.computed_tokens - tokens) / (now - then) : 0;
  }

  drawLinks() {
    const box = this.place.getBoundingClientRect();
    this.links.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    const names = new Set(this.shown.map((link) => `${link.prefill} ${link.decode}`));
    for (const [name, path] of this.paths) {
      if (!names.has(name)) {
        path.root.remove();
        this.paths.delete(name);
      }
    }
    for (const link of this.shown) this.drawLink(link, box);
  }

  drawLink(link, box) {
    const from = this.cards.get(link.prefill)?.root.getBoundingClientRect();
    const to = this.cards.get(link.decode)?.root.getBoundingClientRect();
    const name = `${link.prefill} ${link.decode}`;
    const path = this.paths.get(name) ?? makePath(this.links);
    this.paths.set(name, path);
    path.root.setAttribute("visibility", from && to ? "visible" : "hidden");
    if (!from || !to) return;
    const [x1, y1] = [from.right - box.left, from.top + from.height / 2 - box.top];
    const [x2, y2] = [to.left - box.left, to.top + to.height / 2 - box.top];
    const bend = (x2 - x1) / 2;
    const line = `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`;
    path.line.setAttribute("d", line);
    path.flow.setAttribute("d", line);
    const now = performance.now();
    if (link.sending || link.nbytes > path.nbytes) path.until = now + FLOW_MS;
    path.nbytes = link.nbytes;
    path.flow.classList.toggle("on", now < path.until);
    path.line.setAttribute("stroke-width", String(1 + Math.min(5, Math.log10(1 + link.nbytes / 1e6))));
    path.flow.setAttribute("stroke-width", String(2 + Math.min(3, link.sending)));
    const siblings = this.shown.filter((other) => other.prefill === link.prefill);
    path.label.textContent = siblings.length <= LABELS ? words(size(link.nbytes)) : "";
    path.title.textContent = `${link.prefill} → ${link.decode}: ${words(size(link.nbytes))} in ${count(link.transfers, "transfer", "transfers")}`;
    path.label.setAttribute("x", String(x1 + 8));
    path.label.setAttribute("y", String(y1 + (siblings.indexOf(link) ? BELOW : ABOVE)));
  }
}

function makeCard(worker) {
  const card = { role: worker.role, root: element("li", { class: `worker ${worker.role}`, "data-name": worker.name }) };
  for (const name of ["what", "rate", "blocks", "sent"]) card[name] = element("span", { class: name });
  card.state = element("span", { class: "away-word" });
  card.held = element("i", { class: "held" });
  card.cached = element("i", { class: "cached" });
  card.root.append(
    element("div", { class: "top" }, element("b", {}, worker.name), element("span", { class: "role" }, worker.role), card.state, card.what),
    element("div", { class: "kv" }, card.held, card.cached),
    element("div", { class: "foot" }, card.blocks, card.rate),
    card.sent,
  );
  return card;
}

function makePath(svg) {
  const made = {
    line: drawing("path"),
    flow: drawing("path", { class: "flow" }),
    label: drawing("text", { class: "halo" }),
    title: drawing("title"),
    nbytes: Infinity,
    until: 0,
  };
  made.root = drawing("g", {}, made.title, made.line, made.flow, made.label);
  svg.append(made.root);
  return made;
}
