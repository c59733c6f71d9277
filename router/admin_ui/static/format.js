// Numbers as people read them. An unknown number is a dash, never a zero.

export const NOTHING = "–";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 1,204 or, from 100,000 on, 120.4K. */
export function count(value) {
  if (!isNumber(value)) return NOTHING;
  return Math.abs(value) < 100_000 ? WHOLE.format(value) : COMPACT.format(value);
}

/** A quantity with about three significant digits: 0.42, 7.1, 312, 4,210. */
export function quantity(value) {
  if (!isNumber(value)) return NOTHING;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1) return value.toFixed(2);
  if (size < 100) return value.toFixed(1);
  return count(value);
}

/** [number, unit] of bytes, in powers of 1000. */
export function bytes(value) {
  if (!isNumber(value)) return [NOTHING, ""];
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (Math.abs(value) >= 1000 && power < units.length - 1) {
    value /= 1000;
    power += 1;
  }
  return [power === 0 ? WHOLE.format(value) : quantity(value), units[power]];
}

/** A duration given in milliseconds: 0.42 ms, 12.3 ms, 840 ms, 2.4 s. */
export function ms(value) {
  if (!isNumber(value)) return NOTHING;
  if (value >= 1000) return seconds(value / 1000);
  return `${quantity(value)} ms`;
}

/** A duration given in seconds: 38 ms, 4.2 s, 3 min 5 s. */
export function seconds(value) {
  if (!isNumber(value)) return NOTHING;
  if (value < 0.9995) return `${quantity(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

/** An age: as a duration, but no finer than tenths of seconds. */
export function age(value) {
  return isNumber(value) && value < 1 ? `${Math.max(0, value).toFixed(1)} s` : seconds(value);
}

/** 0.834 is 83 %, with a no-break space. */
export function percent(value) {
  return isNumber(value) ? `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)}\u00a0%` : NOTHING;
}

/** The beginning and end of a long id; all of a short one. */
export function shortId(id) {
  const text = String(id);
  return text.length <= 20 ? text : `${text.slice(0, 11)}…${text.slice(-6)}`;
}

/** Which router processes do not answer, and why: "router process 2 did not answer within 2 s". */
export const missingInWords = (missing) =>
  missing.map(({ process, problem }) => `router process ${process} ${problem}`).join("; ");

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
