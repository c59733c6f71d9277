// The page to try a prompt: a form, and the answer as it comes.

import { NOTHING, count, quantity, seconds } from "./format.js";
import { h } from "./vendor/preact.mjs";

const IS_BUSY = new Set(["waiting", "streaming"]);
const SAYING = {
  idle: "", waiting: "Waiting for the first token …", streaming: "The answer is coming …",
  done: "Done.", stopped: "Stopped.", failed: "Failed.",
};
const PARAMETERS = [
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["temperature", "Temperature", { min: 0, max: 2, step: "any", placeholder: "default" }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any", placeholder: "default" }],
  ["seed", "Seed", { step: 1, placeholder: "random" }],
];

export function trialPage(store, actions) {
  return h("div", { class: "trial" }, form(store, actions), answer(store, actions));
}

function form(store, actions) {
  const { form: values, state } = store.trial;
  const isBusy = IS_BUSY.has(state);
  const edit = (name) => ({ name, value: values[name], onInput: (event) => actions.edit(name, event.currentTarget.value) });
  const submit = (event) => {
    event.preventDefault();
    if (!isBusy && values.prompt.trim()) actions.startTrial();
  };
  const hurry = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.currentTarget.form.requestSubmit();
  };
  return h("form", { class: "card panel trial-form", onSubmit: submit, "aria-labelledby": "trial-title", autocomplete: "off" },
    h("h2", { id: "trial-title" }, "Try a prompt"),
    kinds(values, actions),
    field("model", "Model", h("select", { id: "trial-model", ...edit("model") },
      store.models.map(({ name }, i) => h("option", { key: name, value: i === 0 && !values.model ? "" : name }, name)))),
    values.kind === "chat" && field("system", "System message", h("textarea", { id: "trial-system", rows: 2, placeholder: "none", ...edit("system") })),
    field("prompt", values.kind === "chat" ? "Message" : "Prompt",
      h("textarea", { id: "trial-prompt", rows: 7, required: true, onKeyDown: hurry, spellcheck: false, ...edit("prompt") })),
    h("div", { class: "trial-parameters" }, PARAMETERS.map(([name, title, settings]) =>
      field(name, title, h("input", { id: `trial-${name}`, type: "number", inputmode: "decimal", ...settings, ...edit(name) })))),
    field("key", "API key", h("input", {
      id: "trial-key", type: "password", autocomplete: "off", spellcheck: false, "aria-describedby": "trial-key-about",
      placeholder: "none", ...edit("key"),
    })),
    h("p", { class: "quiet small", id: "trial-key-about" }, "The key stays in this page's memory, and is gone when the page is closed."),
    h("div", { class: "trial-buttons" },
      isBusy
        ? h("button", { class: "button", type: "button", key: "stop", onClick: actions.stopTrial }, "Stop")
        : h("button", { class: "button is-primary", key: "send" }, "Send"),
      h("span", { class: "quiet small" }, "Ctrl+Enter sends"),
    ),
  );
}

const field = (name, title, input) =>
  h("div", { class: `field is-${name}`, key: name }, h("label", { for: `trial-${name}` }, title), input);

function kinds({ kind }, actions) {
  return h("div", { class: "segments", role: "group", "aria-label": "Kind of request" },
    [["chat", "Chat"], ["completion", "Completion"]].map(([name, title]) => h("button", {
      type: "button", key: name, "aria-pressed": String(kind === name), onClick: () => actions.edit("kind", name),
    }, title)));
}

function answer(store, actions) {
  const { state, thinking, answer: text, problem, id, isCode } = store.trial;
  const isBusy = IS_BUSY.has(state);
  return h("section", { class: "card panel trial-answer", "aria-labelledby": "answer-title", "aria-busy": String(isBusy) },
    h("div", { class: "trial-answer-head" },
      h("h2", { id: "answer-title" }, "Answer"),
      h("p", { class: "quiet small", role: "status" }, SAYING[state]),
      id && !isBusy && h("button", { class: "button is-small", onClick: () => actions.open({ id }) }, "Timeline"),
    ),
    figures(store.trial),
    problem && h("p", { class: "problem", role: "alert" }, problem),
    thinking && h("div", { class: "trial-thinking" }, h("h3", null, "Thinking"), h("p", { class: "trial-text" }, thinking)),
    text && h("p", { class: `trial-text ${isCode ? "mono" : ""} ${state === "streaming" ? "is-coming" : ""}` }, text),
    !text && !thinking && !problem && h("p", { class: "empty" },
      state === "waiting" ? "…" : state === "idle" ? "The answer appears here." : "The answer is empty."),
  );
}

function figures({ state, usage, times, finish }) {
  if (state === "idle") return null;
  const generated = usage?.completion_tokens;
  const decodeS = times?.total && times.first ? times.total - times.first : null;
  const shown = [
    ["TTFT", seconds(times?.first)],
    ["total", seconds(times?.total)],
    ["tokens/s", generated > 1 && decodeS ? quantity((generated - 1) / decodeS) : NOTHING],
    ["prompt", count(usage?.prompt_tokens)],
    ["cached", count(usage?.prompt_tokens_details?.cached_tokens)],
    ["generated", count(generated)],
    ["thinking", count(usage?.completion_tokens_details?.reasoning_tokens)],
    ["end", finish ?? NOTHING],
  ];
  return h("dl", { class: "trial-figures" }, shown.map(([name, value]) =>
    h("div", { key: name }, h("dt", null, name), h("dd", null, value))));
}
