// The playground: one request at a time, with its text and its life as they come. Chats are conversations.

import { generate } from "./api.js";
import { Growing } from "./life.js";
import { element } from "./format.js";

export class Playground {
  /** `follow` gets the growing life whenever it changes. */
  constructor(follow) {
    const at = (id) => document.getElementById(id);
    this.follow = follow;
    this.prompt = at("prompt");
    this.chat = at("chat");
    this.answer = at("answer");
    this.note = at("note");
    this.go = at("go");
    this.stopping = at("stop");
    this.fields = ["max_tokens", "temperature", "top_p"].map(at);
    this.seed = at("seed");
    this.fresh = at("fresh");
    this.running = null;
    this.forget();
    this.fresh.addEventListener("click", () => this.forget());
    at("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.stopping.addEventListener("click", () => this.stop());
  }

  /** Chats with a model that has a chat template, and completes with any other; the viewer's choice is kept. */
  offerChat(possible) {
    const option = document.getElementById("chat-option");
    if (possible === !option.hidden) return;
    option.hidden = !possible;
    this.chat.checked = possible;
    if (possible && this.prompt.value === this.prompt.defaultValue) this.prompt.value = "";
  }

  /** Begins a new conversation. */
  forget() {
    this.said = []; // messages and answers, by turns
    this.session = crypto.getRandomValues(new Uint32Array(4)).join("-"); // keeps a conversation where its KV is
    this.answer.replaceChildren();
    this.fresh.hidden = true;
  }

  stop() {
    this.running?.abort();
  }

  ask(text) {
    const options = Object.fromEntries(this.fields.filter((field) => field.value !== "").map((field) => [field.id, Number(field.value)]));
    const messages = [...this.said, { role: "user", content: text }];
    const prompt = this.chat.checked ? { messages, session: this.session } : { text };
    return JSON.stringify({ ...prompt, ...options }).slice(0, -1) + (this.seed.value ? `,"seed":${BigInt(this.seed.value)}}` : "}");
  }

  async run() {
    if (this.running) return;
    const running = (this.running = new AbortController());
    const text = this.prompt.value;
    const ask = this.ask(text);
    const turn = this.begin(text);
    let growing = null;
    let came = "";
    const tokens = [];
    try {
      for await (const [name, value] of generate(ask, running.signal)) {
        if (name === "life") {
          growing ??= new Growing(value, tokens);
          growing.set({ ...value, ttft: value.ttft ?? growing.life.ttft });
          this.follow(growing);
        } else if (name === "text") {
          came += value.text;
          this.add(value, growing, tokens);
        } else if (name === "end") {
          growing = new Growing(value.life, tokens);
          this.follow(growing);
          this.say(value.finish_reason === "stop" ? "ended by the model" : "max tokens reached");
        }
      }
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.say(stopped ? "stopped; both workers are free" : error.message, !stopped);
      if (growing) this.follow(new Growing({ ...growing.life, outcome: "cancelled", age: growing.age }, tokens));
    } finally {
      this.running = null;
      if (turn) this.keep(turn, text, came);
      this.answer.classList.remove("live");
      this.go.disabled = false;
      this.stopping.disabled = true;
      this.fresh.disabled = false;
    }
  }

  /** Shows what is asked, and returns its element if it is a message of a conversation. */
  begin(text) {
    this.go.disabled = true;
    this.stopping.disabled = false;
    this.fresh.disabled = true;
    this.say("");
    const chat = this.chat.checked;
    if (!chat || !this.said.length) this.forget();
    const given = element("span", { class: chat ? "given turn" : "given" }, text);
    this.answer.append(given);
    if (chat) this.prompt.value = "";
    this.answer.classList.add("live");
    this.answer.scrollTop = this.answer.scrollHeight;
    return chat ? given : null;
  }

  /** Keeps a message and its answer, as far as that came. A message without any goes back to where it was written. */
  keep(turn, text, came) {
    if (came) {
      this.said.push({ role: "user", content: text }, { role: "assistant", content: came });
    } else {
      turn.remove();
      this.prompt.value ||= text;
    }
    this.fresh.hidden = !this.said.length;
  }

  add(value, growing, tokens) {
    const below = this.answer.scrollHeight - this.answer.scrollTop - this.answer.clientHeight < 40;
    this.answer.append(value.text);
    if (below) this.answer.scrollTop = this.answer.scrollHeight;
    if (value.seed) this.say(`seed ${value.seed}`);
    tokens.push(value.at);
    if (!growing) return;
    growing.life.completion_tokens += value.tokens;
    growing.life.ttft ??= value.at;
    const first = tokens[0];
    if (growing.life.completion_tokens > 1) growing.life.tpot = (value.at - first) / (growing.life.completion_tokens - 1);
    this.follow(growing);
  }

  say(text, bad = false) {
    this.note.textContent = text;
    this.note.classList.toggle("bad", bad);
  }
}
