// One request's way through the servers: a bar up to the first token, a bar of the whole request, and a table of its spans.

import { age, count, seconds } from "./format.js";
import { abortButton, pathOf, stateTag } from "./request_table.js";
import { showModal } from "./confirmation.js";
import { attempts } from "./attempts.js";
import { ageOf, hasEnded, keyOf } from "./store.js";
import { h } from "./vendor/preact.mjs";

const STAGES = {
  received: ["received", "is-queued"],
  queued: ["queued at the router", "is-queued"],
  prefill_queue: ["queued for prefill", "is-prefill-queue"],
  prefill: ["prefill", "is-prefill"],
  transfer: ["transfer", "is-transfer"],
  decode_queue: ["queued for decode", "is-decode-queue"],
  first_token: ["first token", "is-first-token"],
  decode: ["decode", "is-decode"],
  done: ["done", "is-queued"],
  retry: ["retry", "is-bad"],
  moved: ["moved", "is-warn"],
};

const MAX_LANES = 12; // a request may have hundreds of choices
const MAX_ROWS = 100;

export function timelineDialog(store, actions) {
  if (!store.opened) return null;
  const { id, detail, problem } = store.opened;
  const request = detail ?? store.requests.get(keyOf(store.opened));
  const close = (event) => event.target.closest("dialog").close();
  return h("dialog", {
    class: "dialog is-large", ref: showModal, "aria-labelledby": "opened-title", onClose: actions.close,
    onClick: (event) => event.target === event.currentTarget && event.target.close(), // a click outside of the box
  },
    h("div", { class: "dialog-body" },
      h("div", { class: "dialog-head" },
        h("h2", { id: "opened-title" }, "Request ", h("span", { class: "mono break" }, id)),
        h("button", { class: "button is-small", onClick: close, autofocus: true }, "Close"),
      ),
      request && facts(request, store, actions),
      problem && h("p", { class: "problem", role: "alert" }, `No timeline: ${problem}.`),
      detail ? timeline(detail) : !problem && h("p", { class: "empty" }, "Loading …"),
    ),
  );
}

function facts(request, store, actions) {
  const fact = (name, value) => value !== undefined && value !== null && value !== ""
    && h("div", null, h("dt", null, name), h("dd", null, value));
  return h("div", { class: "facts" },
    h("dl", null,
      fact("state", stateTag(request.state)),
      fact("age", age(ageOf(request))),
      fact("prompt", count(request.prompt_tokens)),
      fact("generated", count(request.generated_tokens)),
      fact("model", h("span", { class: "mono" }, request.model)),
      fact("path", pathOf(request) && h("span", { class: "mono" }, pathOf(request))),
      fact("process", store.processes.processes.length > 1 ? count(request.process) : null),
      fact("priority", request.priority || null),
      fact("key", request.key_name),
      fact("choices", request.choices > 1 ? count(request.choices) : null),
      fact("error", request.error && [request.error, request.error_message].filter(Boolean).join(": ")),
    ),
    !hasEnded(request) && abortButton(request, store, actions),
  );
}

function timeline(detail) {
  const spans = spansOf(detail);
  if (spans.length === 0) return h("p", { class: "empty" }, "This request has no known stages.");
  const end = Math.max(...spans.map((span) => span.end), 1e-6);
  const first = firstTokenEnd(spans);
  return [
    first !== null && first < end * 0.8 && bar(detail.choices > 1 ? "To the first tokens" : "To the first token", spans, first),
    bar(hasEnded(detail) ? "Whole request" : "So far", spans, end),
    legend(spans),
    attempts(detail, spans),
    spanTable(spans),
  ];
}

/** Spans with their ends. A stage under way lasts until now. The first token's stage begins where the one before it ends. */
function spansOf(detail) {
  const ended = hasEnded(detail);
  const spans = detail.timeline.map((span) => {
    const lasts = span.duration_s ?? (ended ? 0 : Math.max(0, ageOf(detail) - span.at_s));
    return { ...span, lasts, end: span.at_s + lasts, isOpen: span.duration_s === null && !ended };
  });
  for (const span of spans.filter((one) => one.name === "first_token" && one.lasts === 0)) {
    const before = spans.filter((one) => (one.choice ?? 0) === (span.choice ?? 0) && one.end < span.end);
    const from = Math.max(0, ...before.map((one) => one.end));
    Object.assign(span, { at_s: from, lasts: span.end - from });
  }
  return spans.sort((one, other) => one.at_s - other.at_s || one.end - other.end);
}

function firstTokenEnd(spans) {
  const ends = spans.filter((span) => span.name === "first_token").map((span) => span.end);
  return ends.length ? Math.max(...ends) : null;
}

/** Lanes of segments from 0 to `end` seconds, one lane for each choice and attempt. */
function bar(title, spans, end) {
  const shown = spans.filter((span) => span.at_s < end);
  const lanes = new Map();
  for (const span of shown) {
    const lane = `${span.choice ?? 0}.${span.attempt ?? 0}`;
    lanes.set(lane, [...(lanes.get(lane) ?? []), span]);
  }
  const saying = shown.filter((span) => span.lasts > 0).map((span) => `${stageOf(span)[0]} ${seconds(span.lasts)}`);
  return h("figure", { class: "timeline", key: title },
    h("figcaption", null, title, h("strong", null, seconds(end))),
    h("div", { class: "lanes", role: "img", "aria-label": `${title}, ${seconds(end)}: ${saying.join(", ")}` },
      [...lanes].slice(0, MAX_LANES).map(([lane, own]) => h("div", { class: "lane", key: lane },
        lanes.size > 1 && h("span", { class: "lane-name" }, laneName(own[0], lanes)),
        h("div", { class: "lane-bar" }, own.map((span) => segment(span, end))),
      )),
      axis(end),
    ),
    lanes.size > MAX_LANES && h("p", { class: "quiet small" }, `The first ${MAX_LANES} of ${count(lanes.size)}.`),
  );
}

function laneName(span, lanes) {
  const hasChoices = [...lanes.keys()].some((lane) => !lane.startsWith("0."));
  const attempt = span.attempt ? `try ${span.attempt + 1}` : "";
  return [hasChoices && `choice ${(span.choice ?? 0) + 1}`, attempt].filter(Boolean).join(", ") || "try 1";
}

const stageOf = (span) => STAGES[span.name] ?? [String(span.name), "is-queued"];

function segment(span, end) {
  const [word, tint] = stageOf(span);
  const place = { "--from": span.at_s / end, "--part": Math.min(span.lasts, end - span.at_s) / end };
  const title = `${word}: ${span.lasts > 0 ? seconds(span.lasts) : `at ${seconds(span.at_s)}`}`
    + (span.worker ? ` on ${span.worker}` : "");
  return h("span", { class: `${span.lasts > 0 ? "segment" : "moment"} ${tint}`, style: place, title });
}

function axis(end) {
  const step = niceStep(end / 5);
  const marks = Array.from({ length: Math.floor((end * 0.97) / step) + 1 }, (_, i) => i * step);
  return h("div", { class: "axis", "aria-hidden": "true" }, marks.map((at) =>
    h("span", { key: at, style: { "--from": at / end } }, at === 0 ? "0" : seconds(at))));
}

/** The next of 1, 2, 5, 10, … that is not below `rough`. */
function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((one) => one * power).find((step) => step >= rough * 0.999);
}

function legend(spans) {
  const names = [...new Set(spans.filter((span) => span.lasts > 0).map((span) => span.name))];
  return h("ul", { class: "legend" }, names.map((name) => {
    const [word, tint] = stageOf({ name });
    return h("li", { key: name }, h("span", { class: `swatch ${tint}`, "aria-hidden": "true" }), word);
  }));
}

function noteOf({ choice, attempt, detail }) {
  const parts = [choice ? `choice ${choice + 1}` : "", attempt ? `try ${attempt + 1}` : "", detail ?? ""].filter(Boolean);
  return parts.length ? h("span", { class: "quiet" }, ` ${parts.join(", ")}`) : null;
}

function spanTable(spans) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Stages" }, h("table", { class: "spans" },
    h("thead", null, h("tr", null, 
      h("th", { scope: "col" }, "Stage"),
      h("th", { scope: "col" }, "Server"),
      h("th", { scope: "col", class: "is-number is-wide" }, "At"),
      h("th", { scope: "col", class: "is-number" }, "For"),
    )),
    h("tbody", null, spans.slice(0, MAX_ROWS).map((span, i) => h("tr", { key: i },
      h("td", null, stageOf(span)[0], noteOf(span)),
      h("td", { class: "mono" }, span.worker),
      h("td", { class: "is-number is-wide" }, seconds(span.at_s)),
      h("td", { class: "is-number" }, span.isOpen ? "…" : span.lasts > 0 ? seconds(span.lasts) : ""),
    ))),
  ));
}
