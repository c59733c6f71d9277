// A request's attempts: on which servers each ran, how it ended, and where the answer went on.

import { count, plural, seconds } from "./format.js";
import { hasEnded } from "./store.js";
import { h } from "./vendor/preact.mjs";

const MAX_ATTEMPTS = 40;
const MOMENTS = new Set(["received", "queued", "done", "retry", "moved"]);

/** The list of attempts; null if every choice had only one. */
export function attempts(detail, spans) {
  if (!spans.some((span) => span.attempt)) return null;
  const all = attemptsOf(detail, spans);
  return h("section", { class: "attempts", "aria-labelledby": "attempts-title" },
    h("h3", { id: "attempts-title" }, plural(all.length, "attempt")),
    h("ol", null, all.slice(0, MAX_ATTEMPTS).map((one) =>
      h("li", { key: `${one.choice}.${one.attempt}`, class: one.tint },
        h("p", { class: "attempt-head" },
          detail.choices > 1 && h("span", { class: "quiet" }, `choice ${one.choice + 1}`),
          h("strong", null, `Try ${one.attempt + 1}`),
          h("span", { class: "mono break" }, one.servers.join(" → ") || "no server"),
          h("span", { class: "quiet attempt-time" }, `${seconds(one.from)} to ${seconds(one.to)}`),
        ),
        h("p", { class: "attempt-end" }, one.end),
      ))),
    all.length > MAX_ATTEMPTS && h("p", { class: "quiet small" }, `The first ${MAX_ATTEMPTS} of ${count(all.length)}.`),
  );
}

/** Attempts as `{choice, attempt, servers, from, to, end, tint}`, in order. */
export function attemptsOf(detail, spans) {
  const groups = new Map();
  for (const span of spans.filter((one) => one.name !== "received" && one.name !== "queued")) {
    const [choice, attempt] = [span.choice ?? 0, span.attempt ?? 0];
    const name = `${choice}.${attempt}`;
    groups.set(name, [...(groups.get(name) ?? []), { ...span, choice, attempt }]);
  }
  const found = [...groups.values()].map((group) => ({
    choice: group[0].choice,
    attempt: group[0].attempt,
    servers: [...new Set(group.filter((span) => !MOMENTS.has(span.name)).map((span) => span.worker))].filter(Boolean),
    from: Math.min(...group.map((span) => span.at_s)),
    to: Math.max(...group.map((span) => span.end)),
    last: group.find((span) => span.name === "retry" || span.name === "moved"),
  }));
  found.sort((one, other) => one.choice - other.choice || one.attempt - other.attempt);
  return found.map((one) => {
    const next = found.find((other) => other.choice === one.choice && other.attempt === one.attempt + 1);
    return { ...one, ...endOf(one, next, detail) };
  });
}

function endOf({ last, to }, next, detail) {
  const where = next ? `It went on ${next.servers.length ? `on ${next.servers.join(" → ")}` : "nowhere yet"}` : "It did not go on";
  const after = next ? `, ${seconds(Math.max(0, next.from - to))} later.` : ".";
  if (last?.name === "moved") return { tint: "is-warn", end: `Moved away from ${last.worker} at ${seconds(last.at_s)}. ${where}${after}` };
  if (last) {
    const server = last.worker ? `${last.worker} failed` : "It failed";
    return { tint: "is-bad", end: `${server} at ${seconds(last.at_s)}${last.detail ? `: ${last.detail}` : ""}. ${where}${after}` };
  }
  if (!hasEnded(detail)) return { tint: "is-decode", end: "Under way." };
  const isGood = detail.state === "finished";
  return { tint: isGood ? "is-good" : "is-bad", end: isGood ? "Finished." : `Ended: ${detail.error ?? detail.state}.` };
}
