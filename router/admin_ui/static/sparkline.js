// A small line over time without axes. Screen readers skip it: the figure beside it says the value.

import { h } from "./vendor/preact.mjs";

const [WIDTH, HEIGHT] = [120, 36];

/** `points`: [unix seconds, value or null], oldest first; the right end is the newest. */
export function sparkline(points, windowS) {
  const known = points.filter(([, value]) => typeof value === "number");
  const end = points.at(-1)?.[0] ?? 0;
  const top = Math.max(...known.map(([, value]) => value), 1e-9);
  const place = ([at, value]) => {
    const x = WIDTH * (1 - (end - at) / windowS);
    return `${x.toFixed(2)} ${(HEIGHT - 1.5 - (HEIGHT - 4) * (value / top)).toFixed(2)}`;
  };
  const path = known.length > 1 ? `M${known.map(place).join("L")}` : "";
  const first = known.length > 1 ? place(known[0]).split(" ")[0] : 0;
  const last = known.length > 1 ? place(known.at(-1)).split(" ")[0] : 0;
  return h("svg", {
    class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true",
  },
    path && h("path", { class: "area", d: `${path}L${last} ${HEIGHT}L${first} ${HEIGHT}Z` }),
    path && h("path", { class: "line", d: path }),
  );
}
