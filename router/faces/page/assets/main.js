// Starts the page: the stream of the router, the keys, and what shows what.

import { about, useKey, watch } from "./api.js";
import { count } from "./format.js";
import { figures, Growing, LifeChart } from "./life.js";
import { WorkerMap } from "./map.js";
import { Playground } from "./play.js";
import { RequestTable } from "./table.js";
import { toggle } from "./theme.js";

const AGAIN_MS = [500, 1000, 2000, 5000];
const at = (id) => document.getElementById(id);

const chart = new LifeChart(at("life"), false);
const map = new WorkerMap(at("map"));
const table = new RequestTable(at("rows"), at("none"), (life) => follow(new Growing(life)));
const playground = new Playground((growing) => {
  table.release();
  follow(growing);
});

function follow(growing) {
  const { id, prefill_worker: prefill, decode_worker: decode } = growing.life;
  at("subject").textContent = [id, prefill && decode && prefill !== decode ? `${prefill} → ${decode}` : prefill].filter(Boolean).join(" · ");
  if (chart.shown !== growing) chart.show(growing);
  else if (growing.life.outcome !== null) chart.draw();
  figures(at("figures"), growing);
}

function state(text, kind) {
  at("state").textContent = text;
  at("state").className = `state ${kind}`;
}

async function introduce() {
  const known = await about();
  at("model").textContent = known.model || "no worker yet";
  at("router").textContent = `${known.router} · kvrelay ${known.version}`;
  document.title = known.model ? `${known.model} · kvrelay` : "kvrelay";
  if (known.max_context) limitTokens(known.max_context);
  playground.offerChat(known.has_chat_template);
  return known.model !== "";
}

/** The prompt needs its part of the context. */
function limitTokens(context) {
  const field = at("max_tokens");
  field.max = context;
  field.value = Math.min(field.value, Math.floor(context / 2));
}

function put(life) {
  table.put(life);
  playground.see(life);
}

const SHOWN = {
  recent: (lives) => lives.forEach(put),
  ended: put,
  fleet: (fleet) => {
    state(fleet.ready ? "serving" : "no worker can take a request", fleet.ready ? "up" : "down");
    at("load").textContent = fleet.running ? `${count(fleet.running, "call", "calls")} in the router` : "";
    map.show(fleet);
    fleet.lives.forEach(put);
  },
  over: () => state("the router is shutting down", "down"),
};

/** Follows the router for as long as the page is open. */
async function followRouter() {
  for (let failures = 0; ; failures += 1) {
    try {
      let introduced = await introduce();
      for await (const [name, value] of watch()) {
        failures = 0;
        SHOWN[name](value);
        if (!introduced && name === "fleet" && value.ready) introduced = await introduce();
      }
      state("the router has ended the connection", "down");
    } catch (error) {
      state(error.status ? error.message : "the router can't be reached", "down");
      if (error.status === 401) await login(error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)]));
  }
}

function login(message) {
  at("login-note").textContent = `${message}. This tab forgets the key when it is closed.`;
  at("login").showModal();
  return new Promise((resolve) => {
    at("login-form").addEventListener("submit", (event) => {
      event.preventDefault();
      useKey(at("key").value.trim());
      at("key").value = "";
      at("login").close();
      resolve();
    }, { once: true });
  });
}

function even() {
  chart.even = !chart.even;
  at("axis").setAttribute("aria-pressed", String(chart.even));
  chart.draw();
}

const KEYS = {
  "/": () => at("prompt").focus(),
  z: even,
  t: toggle,
  "?": () => at("keys").showModal(),
  ArrowDown: () => table.step(1),
  ArrowUp: () => table.step(-1),
};

document.addEventListener("keydown", (event) => {
  const writing = event.target.closest("input, textarea, dialog[open]");
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    at("ask").requestSubmit();
  } else if (event.key === "Escape") {
    if (playground.running) playground.stop();
    else document.activeElement?.blur();
  } else if (!writing && !event.ctrlKey && !event.metaKey && !event.altKey && KEYS[event.key]) {
    event.preventDefault();
    KEYS[event.key]();
  }
});
at("theme").addEventListener("click", toggle);
at("axis").addEventListener("click", even);
at("help").addEventListener("click", () => at("keys").showModal());

followRouter();
