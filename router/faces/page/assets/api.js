// Calls of the router. Server-sent events come over fetch, since EventSource can't send an API key.

const KEY = "kvrelay-api-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const useKey = (key) => sessionStorage.setItem(KEY, key);

async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const text = await response.text();
  throw new ApiError(response.status, messageOf(text) ?? `the router answers ${response.status}`);
}

function messageOf(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return null;
  }
}

export const about = async () => (await request("page/about")).json();

/** Yields [name, value] of each event until the stream ends; the API's have no names. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const [data, name] = part.split("\n").reverse();
      if (data !== "data: [DONE]") yield [name?.slice("event: ".length), JSON.parse(data.slice("data: ".length))];
    }
  }
}

export async function* watch() {
  for await (const [name, value] of events(await request("page/events"))) {
    if (name === "error") throw new ApiError(429, value.error.message);
    yield [name, value];
  }
}

/** The chunks' choices of one generation; `ask` is JSON, and `signal` ends it, and with it the request on every worker. */
export async function* generate(path, ask, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: ask, signal };
  for await (const [, value] of events(await request(path, options))) {
    if (value.error) throw new ApiError(0, value.error.message);
    yield* value.choices;
  }
}
