// Server-sent events over fetch: EventSource can't send an Authorization header.

import { Unreachable } from "./api.js";

const SILENCE_MS = 6_000; // the router says something every second

/** Yields `{name, data}` of a response, with `data` parsed. Raises `Unreachable` when the response ends or falls silent. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await orSilence(reader.read());
      if (done) throw new Unreachable("the router ended the stream");
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parseEvent(block);
        if (event !== null) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the reader may be broken already
  }
}

/** Returns the fields of one block; null for a comment. */
export function parseEvent(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    const [field, value] = line.split(/: ?(.*)/s, 2);
    if (field === "event") name = value;
    if (field === "data") data.push(value);
  }
  return data.length ? { name, data: JSON.parse(data.join("\n")) } : null;
}

async function orSilence(read) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Unreachable("the router has fallen silent")), SILENCE_MS);
  });
  try {
    return await Promise.race([read, silence]);
  } catch (error) {
    throw error instanceof Unreachable ? error : new Unreachable("the connection broke");
  } finally {
    clearTimeout(timer);
  }
}
