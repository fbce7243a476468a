// The playground: one request at a time, with its text from the HTTP API and its life from the page's stream, as they come.

import { generate } from "./api.js";
import { Growing } from "./life.js";
import { element } from "./format.js";

const randomName = () => crypto.getRandomValues(new Uint32Array(4)).join("-");

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
    this.request = null; // the latest one
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
    this.session = randomName(); // keeps a conversation where its KV is
    this.answer.replaceChildren();
    this.fresh.hidden = true;
  }

  stop() {
    this.running?.abort();
  }

  /** The request as JSON. A seed has more digits than a number of JavaScript. */
  ask(text, id, seed) {
    const options = Object.fromEntries(this.fields.filter((field) => field.value !== "").map((field) => [field.id, Number(field.value)]));
    const messages = [...this.said, { role: "user", content: text }];
    const prompt = this.chat.checked ? { messages, prompt_cache_key: this.session } : { prompt: text };
    return `${JSON.stringify({ ...prompt, ...options, stream: true, request_id: id }).slice(0, -1)},"seed":${seed}}`;
  }

  async run() {
    if (this.running) return;
    const running = (this.running = new AbortController());
    const text = this.prompt.value;
    const seed = this.seed.value ? BigInt(this.seed.value) : crypto.getRandomValues(new BigUint64Array(1))[0];
    const request = (this.request = { id: randomName(), began: performance.now(), marks: [], growing: null });
    const [path, ask] = [this.chat.checked ? "v1/chat/completions" : "v1/completions", this.ask(text, request.id, seed)];
    const turn = this.begin(text, seed);
    let came = "";
    try {
      for await (const choice of generate(path, ask, running.signal)) {
        const said = choice.text ?? choice.delta.content ?? "";
        came += said;
        this.add(`${choice.delta?.reasoning_content ?? ""}${said}`, request);
        if (choice.finish_reason) this.say(choice.finish_reason === "stop" ? "ended by the model" : "max tokens reached");
      }
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.say(stopped ? "stopped; both workers are free" : error.message, !stopped);
      const growing = request.growing;
      if (growing?.life.outcome === null) this.show(request, { ...growing.life, outcome: "cancelled", age: growing.age });
    } finally {
      this.running = null;
      if (turn) this.keep(turn, text, came);
      this.answer.classList.remove("live");
      this.go.disabled = false;
      this.stopping.disabled = true;
      this.fresh.disabled = false;
    }
  }

  /** Takes the life of a request as it is now; that of the playground's latest one is followed. */
  see(life) {
    const request = this.request;
    if (!request || !life.id.startsWith(`${request.id}/`)) return;
    if (life.outcome !== null) this.request = null;
    this.show(request, life);
  }

  show(request, life) {
    request.growing ??= new Growing(life, request.marks);
    request.growing.set(life);
    this.follow(request.growing);
  }

  /** Shows what is asked, and returns its element if it is a message of a conversation. */
  begin(text, seed) {
    this.go.disabled = true;
    this.stopping.disabled = false;
    this.fresh.disabled = true;
    this.say(`seed ${seed}`);
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

  add(text, request) {
    if (!text) return;
    const below = this.answer.scrollHeight - this.answer.scrollTop - this.answer.clientHeight < 40;
    this.answer.append(text);
    if (below) this.answer.scrollTop = this.answer.scrollHeight;
    request.marks.push((performance.now() - request.began) / 1000);
  }

  say(text, bad = false) {
    this.note.textContent = text;
    this.note.classList.toggle("bad", bad);
  }
}
