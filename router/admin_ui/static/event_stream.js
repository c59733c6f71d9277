// Server-sent events over fetch: EventSource can't send an Authorization header.

import { Unreachable } from "./api.js";

const SILENCE_MS = 6_000; // the router says something every second

/** Yields `{name, data}` of a response, with `data` parsed. Raises `Unreachable` when the response ends or falls silent. */
export async function* eventsOf(response) {
  for await (const block of blocksOf(response, SILENCE_MS)) {
    const event = parseEvent(block);
    if (event !== null) yield { ...event, data: JSON.parse(event.data) };
  }
}

/** Yields the texts of a response's events. Raises `Unreachable` when the response ends, or says nothing for so long. */
export async function* blocksOf(response, silenceMs) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await orSilence(reader.read(), silenceMs);
      if (done) throw new Unreachable("the router ended the stream");
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      yield* blocks;
    }
  } finally {
    reader.cancel().catch(() => {}); // the reader may be broken already
  }
}

/** Returns name and data of one block; null for a comment. */
export function parseEvent(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    const [field, value] = line.split(/: ?(.*)/s, 2);
    if (field === "event") name = value;
    if (field === "data") data.push(value);
  }
  return data.length ? { name, data: data.join("\n") } : null;
}

async function orSilence(read, silenceMs) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Unreachable("the router has fallen silent")), silenceMs);
  });
  try {
    return await Promise.race([read, silence]);
  } catch (error) {
    throw error instanceof Unreachable ? error : new Unreachable("the connection broke");
  } finally {
    clearTimeout(timer);
  }
}
