// A distribution with its percentiles. All bars have the same width, whatever the buckets' widths.

import { count, ms, plural } from "./format.js";
import { h } from "./vendor/preact.mjs";

const MIN_BARS = 14;
const LABEL_WIDTH = 0.06; // of the plot
const BUCKET_RATIO = 10 ** 0.1; // the router has ten buckets for each decade
const QUANTILES = ["p50", "p90", "p99"];

/** `figures`: {p50, p90, p99, histogram: [[upper_ms or null, count]]}, in milliseconds. */
export function histogram(title, short, tint, figures, windowS) {
  const buckets = padded(figures.histogram);
  const total = buckets.reduce((sum, bucket) => sum + bucket.number, 0);
  const saying = QUANTILES.map((name) => `${name} ${ms(figures[name])}`).join(", ");
  return h("figure", { class: `card histogram ${tint}` },
    h("figcaption", null,
      h("h2", null, title, h("abbr", { class: "quiet", title }, short)),
      h("dl", { class: "quantiles" },
        QUANTILES.map((name) => h("div", { key: name }, h("dt", null, name), h("dd", null, ms(figures[name])))),
      ),
    ),
    total === 0
      ? h("p", { class: "empty" }, `No tokens in the last ${windowS} s.`)
      : h("div", { class: "plot", role: "img", "aria-label": `${short} of ${plural(total, "sample")}: ${saying}` },
          bars(buckets, total),
          markers(buckets, figures),
          ticks(buckets),
        ),
  );
}

function bars(buckets, total) {
  const most = Math.max(...buckets.map((bucket) => bucket.number));
  return h("div", { class: "bars" }, buckets.map(({ lower, upper, number }) =>
    h("div", {
      class: "bar",
      style: { "--height": number / most },
      title: `${rangeText(lower, upper)}: ${count(number)} (${Math.round((100 * number) / total)} %)`,
    })));
}

const rangeText = (lower, upper) => (upper === null ? `above ${ms(lower)}` : `${ms(lower)} to ${ms(upper)}`);

/** A line at each percentile. Lines that are too close for two labels share a label. */
function markers(buckets, figures) {
  const marks = [];
  for (const name of QUANTILES) {
    const at = placeOf(buckets, figures[name]);
    if (at === null) continue;
    const last = marks.at(-1);
    const isClose = last !== undefined && at - last.at < LABEL_WIDTH;
    marks.push({ at, label: isClose ? `${last.label} ${name}` : name });
    if (isClose) last.label = "";
  }
  return h("div", { class: "markers" }, marks.map(({ at, label }, i) =>
    h("span", { class: "marker", key: i, style: { "--at": at } }, h("span", null, label))));
}

/** Where a value lies on the axis, 0 to 1: linear within its bucket. */
function placeOf(buckets, value) {
  if (typeof value !== "number") return null;
  const index = buckets.findIndex(({ upper }) => upper === null || value <= upper);
  if (index < 0) return 1;
  const { lower, upper } = buckets[index];
  const within = upper === null ? 0.5 : Math.max(0, (value - lower) / (upper - lower));
  return (index + within) / buckets.length;
}

/** At most seven labels. Every second label is minor: a narrow picture leaves it out. */
function ticks(buckets) {
  const every = Math.ceil(buckets.length / 7);
  return h("div", { class: "ticks" }, buckets.map(({ upper }, i) => {
    const nth = (i + 1) / every;
    const isShown = upper !== null && Number.isInteger(nth);
    return h("span", { class: "tick" }, isShown && h("span", { class: nth % 2 ? "" : "is-minor" }, ms(upper)));
  }));
}

/** Buckets as `{lower, upper, number}`, with empty ones added at both ends: at least one, and enough for `MIN_BARS`. */
function padded(histogram) {
  if (histogram.length === 0) return [];
  const [[first], last] = [histogram[0], histogram.at(-1)];
  const lowerOf = (upper) => upper / BUCKET_RATIO;
  const buckets = histogram.map(([upper, number], i) => (
    { lower: i ? histogram[i - 1][0] : lowerOf(first), upper, number }
  ));
  const missing = Math.max(2, MIN_BARS - buckets.length);
  for (let i = 0; i < missing; i += 1) {
    const [low, high] = [buckets[0].lower, buckets.at(-1).upper];
    if (i % 2 === 0 || last[0] === null) buckets.unshift({ lower: lowerOf(low), upper: low, number: 0 });
    else buckets.push({ lower: high, upper: high * BUCKET_RATIO, number: 0 });
  }
  return buckets;
}
