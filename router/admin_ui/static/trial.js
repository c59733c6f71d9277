// Sends one prompt as any client would, and keeps its answer in the store as it comes.

import { messageOf } from "./api.js";
import { blocksOf, parseEvent } from "./event_stream.js";
import { NO_TRIAL } from "./store.js";

const ROOT = new URL("../v1/", document.baseURI); // seen from /admin/ui, that is /v1/
const SILENCE_MS = 600_000; // a queue may be long
const MAX_CHARS = 400_000; // of thinking and answer; a browser draws no more with ease

export class Trial {
  #store;
  #abort = new AbortController();
  #started = performance.now();

  constructor(store) {
    this.#store = store;
  }

  stop() {
    this.#abort.abort();
  }

  async run() {
    const { form } = this.#store.trial;
    this.#show({ ...NO_TRIAL, state: "waiting", isCode: form.kind === "completion" });
    try {
      const response = await this.#send(form);
      if (!response.ok) throw new Error(await messageOf(response));
      await this.#read(response);
      this.#show({ state: "done" });
    } catch (error) {
      if (this.#abort.signal.aborted) this.#show({ state: "stopped" });
      else this.#show({ state: "failed", problem: error.message || "no connection" });
    } finally {
      const { times } = this.#store.trial;
      this.#show({ times: { ...times, total: this.#elapsed() } });
    }
  }

  #send(form) {
    const headers = { "Content-Type": "application/json" };
    if (form.key) headers.Authorization = `Bearer ${form.key}`;
    return fetch(new URL(form.kind === "chat" ? "chat/completions" : "completions", ROOT), {
      method: "POST", headers, body: JSON.stringify(bodyOf(form)), signal: this.#abort.signal,
      cache: "no-store", credentials: "omit", redirect: "error",
    });
  }

  async #read(response) {
    for await (const block of blocksOf(response, SILENCE_MS)) {
      const event = parseEvent(block);
      if (event === null) continue;
      if (event.data === "[DONE]") return;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new Error(String(chunk.error.message));
      this.#take(chunk);
      const { thinking, answer } = this.#store.trial;
      if (thinking.length + answer.length > MAX_CHARS) {
        this.stop();
        throw new Error("the answer is too long for this page");
      }
    }
  }

  #take(chunk) {
    const { trial } = this.#store;
    const [choice] = chunk.choices ?? [];
    const thought = choice?.delta?.reasoning_content ?? "";
    const text = choice?.delta?.content ?? choice?.text ?? "";
    const calls = (choice?.delta?.tool_calls ?? []).map((call) => call.function?.arguments ?? "").join("");
    const hasText = Boolean(thought || text || calls);
    this.#show({
      state: "streaming",
      id: chunk.id ?? trial.id,
      thinking: trial.thinking + thought,
      answer: trial.answer + text + calls,
      finish: choice?.finish_reason ?? trial.finish,
      usage: chunk.usage ?? trial.usage,
      times: trial.times ?? (hasText ? { first: this.#elapsed() } : null),
    }, { now: false });
  }

  /** Seconds since the prompt was sent. */
  #elapsed() {
    return (performance.now() - this.#started) / 1000;
  }

  #show(change, options) {
    this.#store.change((store) => (store.trial = { ...store.trial, ...change, form: store.trial.form }), options);
  }
}

/** The body of the request that a form stands for. Empty fields are left out. */
export function bodyOf(form) {
  const body = { model: form.model || undefined, stream: true, stream_options: { include_usage: true } };
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) {
    if (form[name] !== "") body[name] = Number(form[name]);
  }
  if (form.kind === "completion") return { ...body, prompt: form.prompt };
  const system = form.system.trim() ? [{ role: "system", content: form.system }] : [];
  return { ...body, messages: [...system, { role: "user", content: form.prompt }] };
}
